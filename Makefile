# Everything happens in .venv: each target installs what it needs first, once.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Python keeps what it has compiled, but in .venv alone: the tests start dozens of processes, and half the time that torch
# takes to be imported would go into compiling it again.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip compiles nothing: Python does it for what is imported, a small part of what is installed.
INSTALL := $(PIP) install -q --no-compile -c constraints.txt
DEV := $(VENV)/.dev $(VENV)/.timm $(VENV)/.compiled

.PHONY: help demo reproduce test coverage referee families fidelity gallery lint format docs look bench setup clean distclean

help:
	@echo "make demo      train, fit posteriors and compare predictions on bundled data"
	@echo "make reproduce the paper's experiments: what is stored, what is missing; NAME=uci ARGS='--data DIR' runs one"
	@echo "make test      run the tests"
	@echo "make coverage  run them and say which lines and branches no test reaches (almost twice the time)"
	@echo "make referee   every op and many random models against an independent truth; writes docs/referee.md"
	@echo "make lint      ruff check, ruff format --check, pyright, import order of the rooms"
	@echo "make format    apply ruff's fixes and formatting"
	@echo "make docs      build the documentation into site/ (with npm: formulas and the page to play with need it)"
	@echo "make look      the same, and look at every page with Chromium, if there is one"
	@echo "make gallery   run the examples of docs/gallery and the tutorial; puts their outputs and figures into the pages"
	@echo "make bench     speed and memory against other libraries"
	@echo "make families  which model families streamline, and why the others do not (hours; it resumes)"
	@echo "make fidelity  trained networks against 10,000 samples of their weights; writes docs/fidelity.md (it resumes)"
	@echo "make setup     only install what the targets above need"
	@echo "make clean     remove what the targets above produced; distclean: .venv as well"

demo: $(VENV)/.demo
	$(BIN)/propagauss demo

# Only a NAME given to make counts: some systems have a variable of that name.
reproduce: $(DEV)
	$(BIN)/python -m experiments $(if $(filter command line,$(origin NAME)),$(NAME)) $(ARGS)

# One thread per worker: the tests are many small operations, and more threads than cores slow them down. Each worker gets
# files in a row ("worksteal"), so that what one test has streamlined serves the next. glibc keeps memory that was given
# back (up to 512 MB), instead of asking the system for it again for every tensor of some size.
KEPT := MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=536870912
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(KEPT) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
test: $(DEV)
	$(PYTEST) $(ARGS)

coverage: $(DEV)
	$(PYTEST) --cov --cov-report=term $(ARGS)

# The long run: all posteriors, more random models. EXAMPLES=1000 tries that many of them.
EXAMPLES ?= 300
referee: $(DEV)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m referee --every --examples $(EXAMPLES) --write docs/referee.md $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache --no-logo

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

look: docs
	PROPAGAUSS_SITE=site $(BIN)/python -m pytest -q -rs tests/website $(ARGS)

gallery: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python tests/documents.py --write docs/tutorial.md $(sort $(wildcard docs/gallery/*.md))

bench: $(DEV)
	$(BIN)/python -m benchmarks $(ARGS)

families: $(DEV)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m families run $(ARGS)

fidelity: $(DEV)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fidelity --write docs/fidelity.md $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fidelity --figure docs/images/fidelity.svg

setup: $(DEV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "propagauss needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip  # the one that comes with Python may take three times as long to find out what to install

DECLARED := pyproject.toml constraints.txt requirements/declared.py

# What propagauss needs itself comes first, since that takes longest to be compiled (below).
$(VENV)/.core: $(DECLARED) | $(BIN)/python
	$(BIN)/python requirements/declared.py > $(VENV)/core.txt
	$(INSTALL) -r $(VENV)/core.txt
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(BIN)/python requirements/declared.py demo > $(VENV)/demo.txt
	$(INSTALL) -r $(VENV)/demo.txt
	$(INSTALL) --no-deps -e .
	@touch $@

$(VENV)/.packages: $(VENV)/.core
	$(BIN)/python requirements/declared.py demo export predict ray ivon docs dev > $(VENV)/dev.txt
	$(INSTALL) -r $(VENV)/dev.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.packages requirements/peers.txt
	$(INSTALL) --no-deps -e . -r requirements/peers.txt
	@! $(PIP) show -q torchvision 2>/dev/null || { echo "torchvision is in $(VENV): see docs/gotchas.md"; exit 1; }
	@touch $(VENV)/.demo $@  # the demo needs a part of it

# What most tests import is compiled beside the rest of the set-up: workers that start together would each compile it.
$(VENV)/.core-compiled: $(VENV)/.core
	$(BIN)/python -c "import scipy.optimize, scipy.stats, torch._dynamo, torch.onnx"
	@touch $@

$(VENV)/.compiled: $(VENV)/.core-compiled $(VENV)/.packages
	$(BIN)/python -c "import hypothesis, matplotlib.pyplot, onnxruntime, onnxscript, sklearn.model_selection, torch.onnx, torchmetrics, transformers.modeling_utils"
	@touch $@

$(VENV)/.timm: constraints.txt | $(BIN)/python
	$(INSTALL) --no-deps --upgrade --target $(VENV)/timm timm torchvision
	@touch $@

clean:
	rm -rf site build dist htmlcov .coverage .coverage.* .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
