"""ViT-base and GPT-2 as their configs define them, a few of the last layers Bayesian, one sample at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn

import propagauss as pg
from benchmarks.case import Case, Method, Predict, SkipMethod

Name = Literal["vit", "gpt"]
TOKENS = 128
PATIENCE = 3.0
VARIANCE = 1e-4  # of every random parameter; no timing depends on it

VIT_HEAD = ["classifier*"]
VIT_VALUES = ["vit.layers.1[01].attention.v_proj*", *VIT_HEAD]
VIT_MLPS = ["vit.layers.1[01].mlp*"]
GPT_MLPS = ["transformer.h.[89].mlp*", "transformer.h.1[01].mlp*"]


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


def image() -> torch.Tensor:
    return torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def tokens() -> torch.Tensor:
    return torch.randint(1, 50257, (1, TOKENS), generator=torch.Generator().manual_seed(1))


@cache
def model(name: Name) -> nn.Module:
    return vit() if name == "vit" else gpt()


def plain(name: Name) -> Predict:
    network = model(name)
    return lambda x: network(x).logits


def streamlined(name: Name, patterns: list[str], attention: Literal["variance", "covariance"]) -> Any:
    network = model(name)
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, VARIANCE) for n, p in network.named_parameters()})
    example = image() if name == "vit" else tokens()
    return pg.streamline(network, posterior.select(*patterns), example, attention=attention)


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    if batches is not None and 1 not in batches:
        return []
    ours = partial(_ours, "vit")
    by_vit = [
        ours("head", VIT_HEAD, 1.03),
        ours("values of the last two blocks, head", VIT_VALUES, 1.2),
        ours("the same, with covariance of values", VIT_VALUES, 1.6, "covariance"),
        ours("MLPs of the last two blocks", VIT_MLPS, 1.3),
        ours("all blocks and the head", ["vit.layers*", *VIT_HEAD], None),
    ]
    by_gpt = [
        _ours("gpt", "head", ["score*"], None),
        _ours("gpt", "MLPs of the last four blocks", GPT_MLPS, 1.6),
        _ours("gpt", "all blocks and the head", ["transformer.h*", "score*"], None),
    ]
    vit_title = "Hugging Face ViT-base config, 224 px, batch 1; Bayesian:"
    gpt_title = f"Hugging Face GPT-2 base config with a classification head, {TOKENS} tokens, batch 1; Bayesian:"
    return [
        Case("transformers/vit", vit_title, image, partial(plain, "vit"), by_vit, PATIENCE),
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
