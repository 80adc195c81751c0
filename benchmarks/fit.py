"""Memory of `fit_laplace` on ViT-base and GPT-2 sized models, each in a process of its own.

    python -m benchmarks.fit            # prints a table
    python -m benchmarks.fit --docs     # and puts it into docs/benchmarks.md

The most memory the process held, as the system counts it; weights and PyTorch itself are part of it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import torch

import propagauss as pg
from benchmarks import transformers as models
from benchmarks.pages import PAGE, marked

BATCHES, BATCH = 2, 4
CASES = [
    ("vit", "values of the last two blocks, head", models.VIT_VALUES),
    ("vit", "MLPs of the last two blocks", models.VIT_MLPS),
    ("gpt", "MLPs of the last four blocks", models.GPT_MLPS),
]
TITLES = {"vit": "ViT-base, 224 px", "gpt": f"GPT-2, {models.TOKENS} tokens"}
HEADER = ("model", "Bayesian", "structure", "parameters", "memory before", "most memory")


def one(name: models.Name, patterns: list[str], structure: str) -> dict[str, float]:
    """Fit in this process."""
    torch.set_num_threads(1)
    model = models.model(name)
    x, classes = (models.image(), 10) if name == "vit" else (models.tokens(), 2)
    data = [(x.repeat(BATCH, *[1] * (x.dim() - 1)), torch.arange(BATCH) % classes) for _ in range(BATCHES)]
    before = _peak()
    posterior = pg.fit_laplace(model, data, structure=structure, parameters=patterns, progress=False)  # type: ignore[arg-type]
    parameters = sum(posterior.variance(n).numel() for n in posterior.names)
    return {"parameters": parameters, "before": before, "peak": _peak()}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB; Linux counts in KiB


def rows() -> list[tuple[str, ...]]:
    found = []
    for index, (name, title, _) in enumerate(CASES):
        for structure in ("diagonal", "kronecker"):
            command = [sys.executable, "-m", "benchmarks.fit", "--case", str(index), structure]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            n = json.loads(done.stdout.splitlines()[-1])
            memory = (f"{n['before']:.1f} GiB", f"{n['peak']:.1f} GiB")
            cells = (TITLES[name], title, structure, f"{n['parameters'] / 1e6:.1f} M", *memory)
            print(*cells, sep="  ", flush=True)
            found.append(cells)
    return found


def main() -> None:
    if "--case" in sys.argv:
        index, structure = sys.argv[-2:]
        name, _, patterns = CASES[int(index)]
        print(json.dumps(one(name, patterns, structure)))
        return
    lines = [HEADER, ("---",) * 3 + ("--:",) * 3, *rows()]
    if "--docs" in sys.argv:
        marked(PAGE, "fit", "\n".join(f"| {' | '.join(cells)} |" for cells in lines))


if __name__ == "__main__":
    main()
