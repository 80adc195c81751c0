"""ViT-base and GPT-2 as their configs define them, a few of the last layers Bayesian, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn

import propagauss as pg
from benchmarks.case import Case, Faster, Method, Predict, SkipMethod
from benchmarks.low_rank import TOLERANCE, described, sd_error

Name = Literal["vit", "gpt"]
TOKENS = 128
PATIENCE = 3.0
VARIANCE = 1e-4  # of every random parameter; no timing depends on it

VIT_HEAD = ["classifier*"]
VIT_VALUES = ["vit.layers.1[01].attention.v_proj*", *VIT_HEAD]
VIT_MLPS = ["vit.layers.1[01].mlp*"]
VIT_ALL = ["vit.layers*", *VIT_HEAD]
GPT_MLPS = ["transformer.h.[89].mlp*", "transformer.h.1[01].mlp*"]
GPT_ALL = ["transformer.h*", "score*"]
LOW_RANK_LIMIT = 1.4  # with low-rank variances, all blocks Bayesian
SAMPLES = 100
ALL = "all blocks and the head"


def vit() -> nn.Module:
    """85.8 million parameters, 12 blocks, 197 tokens of width 768; random weights."""
    transformers = _transformers()
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=10)).eval()


def gpt() -> nn.Module:
    """124 million parameters, 12 blocks of width 768; random weights."""
    transformers = _transformers()
    torch.manual_seed(0)
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(num_labels=2, pad_token_id=0)).eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SkipMethod("transformers is not installed") from error
    return transformers


def image(batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 50257, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


INPUTS: dict[Name, Callable[..., torch.Tensor]] = {"vit": image, "gpt": tokens}


@cache
def model(name: Name) -> nn.Module:
    return vit() if name == "vit" else gpt()


def plain(name: Name) -> Predict:
    network = model(name)
    return lambda x: network(x).logits


def posterior(name: Name, patterns: list[str]) -> pg.Posterior:
    variances = {n: torch.full_like(p, VARIANCE) for n, p in model(name).named_parameters()}
    return pg.DiagonalPosterior(variances).select(*patterns)


def streamlined(
    name: Name, patterns: list[str], attention: Literal["variance", "covariance"] = "variance", tolerance: float = 0.0
) -> pg.Streamlined:
    example = INPUTS[name](8, 2) if tolerance else INPUTS[name]()
    options: Any = {"attention": attention, "variance_tolerance": tolerance}
    return pg.streamline(model(name), posterior(name, patterns), example, **options)


@cache
def exact(name: Name) -> pg.Streamlined:
    """All blocks and the head Bayesian."""
    return streamlined(name, VIT_ALL if name == "vit" else GPT_ALL)


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    if batches is not None and 1 not in batches:
        return []
    ours = partial(_ours, "vit")
    values = "values of the last two blocks, head"
    by_vit = [
        ours("head", VIT_HEAD, 1.03),
        ours(values, VIT_VALUES, 1.2),
        ours("the same, with covariance of values", VIT_VALUES, 1.6, "covariance"),
        *_others(values),
        _exact("vit", "head", VIT_HEAD, 1.05),
        _exact("vit", values, VIT_VALUES, 2.5),
        ours("MLPs of the last two blocks", VIT_MLPS, 1.3),
        _exact("vit", "MLPs of the last two blocks", VIT_MLPS, None),
        Method(ALL, partial(exact, "vit")),
        _low_rank("vit", LOW_RANK_LIMIT),
    ]
    by_gpt = [
        _ours("gpt", "head", ["score*"], None),
        _ours("gpt", "MLPs of the last four blocks", GPT_MLPS, 1.6),
        _exact("gpt", "MLPs of the last four blocks", GPT_MLPS, 2.5),
        Method(ALL, partial(exact, "gpt")),
        _low_rank("gpt", None),
    ]
    vit_title = "Hugging Face ViT-base config, 224 px, batch 1; Bayesian:"
    gpt_title = f"Hugging Face GPT-2 base config with a classification head, {TOKENS} tokens, batch 1; Bayesian:"
    faster = [Faster(values, m.name) for m in _others(values)]
    return [
        Case("transformers/vit", vit_title, image, partial(plain, "vit"), by_vit, PATIENCE, faster),
        Case("transformers/gpt", gpt_title, tokens, partial(plain, "gpt"), by_gpt, PATIENCE),
    ]


def _ours(
    name: Name,
    title: str,
    patterns: list[str],
    limit: float | None,
    attention: Literal["variance", "covariance"] = "variance",
) -> Method:
    return Method(title, partial(streamlined, name, patterns, attention), limit=limit)


def _exact(name: Name, title: str, patterns: list[str], limit: float | None) -> Method:
    """The exact engine, with the whole covariance of the outputs."""
    make = lambda: pg.linearise(model(name), posterior(name, patterns), INPUTS[name]())  # noqa: E731
    return Method(f"{title}: linearised", make, limit=limit)


def _low_rank(name: Name, limit: float | None) -> Method:
    patterns = VIT_ALL if name == "vit" else GPT_ALL
    return Method(
        f"{ALL}, variance_tolerance={TOLERANCE}",
        lambda: described(lambda: streamlined(name, patterns, tolerance=TOLERANCE)),
        limit=limit,
        error=partial(sd_error, partial(exact, name), partial(INPUTS[name], 4, 3)),
        error_limit=TOLERANCE,
        heavy=True,
    )


def _others(title: str) -> list[Method]:
    """The baselines, with the posterior of the row so named."""
    own = lambda: (model("vit"), posterior("vit", VIT_VALUES))  # noqa: E731
    return [
        Method(f"{title}: our GLM baseline", lambda: pg.baselines.GLM(*own()), heavy=True),
        Method(f"{title}: our {SAMPLES} samples", lambda: pg.baselines.MonteCarlo(*own(), samples=SAMPLES), heavy=True),
    ]
