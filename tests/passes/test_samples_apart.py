"""Samples that depend on each other are found on any example: all zeros, the same rows, outliers, large batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from engines.test_bad_input import Call, diagonal
from propagauss.inputs.samples import depend, halves, patterns

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A function of the rows of a layer and of a second input; token ids are embedded before."""

    def __init__(self, function: Callable[..., Tensor], tokens: bool = False):
        super().__init__()
        self.function, self.layer = function, nn.Linear(3, 3)
        self.embed = nn.Embedding(5, 3) if tokens else None

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.function(self.layer(x if self.embed is None else self.embed(x).mean(1)), *rest)


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


class Masked(nn.Module):
    """Without a number for the words that count, there is no mean over them."""

    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.embed, self.layer, self.mix = nn.Embedding(9, 4), nn.Linear(4, 3), mix

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = mask.unsqueeze(-1).to(self.layer.weight.dtype)
        return self.mix(self.layer((self.embed(ids) * kept).sum(1) / kept.sum(1)))


def texts(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(9, (batch, 5)), torch.ones(batch, 5, dtype=torch.long)


class Gated(nn.Module):
    """The gate is zero on the example, but its derivative is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(3, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h + self.gate * (h - h.mean(0))


def outlier() -> Tensor:
    x = torch.randn(6, 3)
    x[2] *= 1e6
    return x


def missing() -> Tensor:
    x = X.clone()
    x[1, 1] = torch.nan
    return x


def first_two(h: Tensor) -> Tensor:
    return torch.cat([(h[:1] + h[1:2]), h[1:]])


MIXED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "zeros": lambda: (Model(centred), torch.zeros(4, 3)),
    "the same rows": lambda: (Model(centred), X[:1].expand(4, 3)),
    "a missing value": lambda: (Model(centred), missing()),
    "an outlier": lambda: (Model(first_two), outlier()),
    "one text": lambda: (Model(centred, tokens=True), torch.tensor([[1, 2]])),
    "the same tokens": lambda: (Model(centred, tokens=True), torch.ones(4, 2, dtype=torch.long)),
    "outputs of several sizes": lambda: (Model(lambda h: torch.stack([h[:, 0] * 1e6, centred(h[:, 1])], 1)), X),
    "a support set": lambda: (Model(lambda h: torch.cat([h[:8], h[8:] - h[:8].mean(0)])), torch.randn(20, 3)),
    "their own numbers": lambda: (Model(lambda h, i: h + h[i]), (X, torch.arange(4))),
    "their own numbers, gathered": lambda: (
        Model(lambda h, i: h + h.gather(0, i)),
        (X, torch.arange(4)[:, None].expand(4, 3).contiguous()),
    ),
    "half precision": lambda: (Model(centred).bfloat16(), X.bfloat16()),
    "behind a gate of zero": lambda: (Gated(), X),
    "a mask of ones": lambda: (Masked(lambda h: (h @ h.T).softmax(-1) @ h), texts(7)),
    "a mask of ones, shifted": lambda: (Masked(lambda h: h.roll(1, 0)), texts(3)),
    "ones by their sum": lambda: (Model(lambda h: (h / h.sum(1, keepdim=True)).roll(1, 0)), torch.ones(7, 3)),
}


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_meet_are_found(name: str) -> None:
    model, example = MIXED[name]()
    model.eval()
    with pytest.raises(pg.UnsupportedOpError, match=r"depends on the others|takes the batch apart"):
        pg.linearise(model, diagonal(model), example)
    with pytest.raises(pg.UnsupportedOpError, match="the batch"):
        pg.streamline(model, diagonal(model), example, covariance="full")
    if name != "a support set":  # of which it looks at a few samples
        with pytest.warns(UserWarning, match="samples of a batch depend on each other"):
            pg.streamline(model, diagonal(model), example)
    if name not in ("a missing value", "one text"):  # which it refuses, or has nothing to compare with
        one = example[0] if isinstance(example, tuple) else example
        y = torch.zeros_like(model(*example) if isinstance(example, tuple) else model(one))
        with pytest.raises(pg.InputError, match="depend on the rest of its batch"):
            pg.fit_laplace(model, [(example, y)], likelihood="regression", progress=False)


APART: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "zeros": lambda: (Model(torch.tanh), torch.zeros(4, 3)),
    "an outlier": lambda: (Model(torch.tanh), outlier()),
    "one text": lambda: (Model(torch.tanh, tokens=True), torch.tensor([[1, 2]])),
    "the same tokens": lambda: (Model(torch.tanh, tokens=True), torch.ones(4, 2, dtype=torch.long)),
    "shifted by the largest of all": lambda: (Model(lambda h: (h - h.detach().max()).softmax(1)), X),
    "numbers of entries": lambda: (Model(lambda h, i: h.gather(1, i)), (X, torch.tensor([[0], [1], [2], [0]]))),
    "half precision": lambda: (Model(torch.tanh).bfloat16(), X.bfloat16()),
    "dead outputs": lambda: (Model(lambda h: (h - 100).relu()), X),
    "a mask of ones": lambda: (Masked(torch.tanh), texts(7)),
    "gradients that are rounding": lambda: (nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)), torch.randn(64, 4)),
    "saturated": lambda: (Model(lambda h: (100 * h).softmax(-1)), torch.randn(64, 3)),
    "a large batch": lambda: (Model(torch.tanh), torch.randn(300, 3)),
}


@pytest.mark.parametrize("name", APART)
def test_samples_apart_are_taken(name: str) -> None:
    model, example = APART[name]()
    model.eval()
    if name != "shifted by the largest of all":  # whose gradient is taken through the largest
        pg.linearise(model, diagonal(model), example)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name != "shifted by the largest of all":
            pg.streamline(model, diagonal(model), example)
    y = torch.zeros_like(model(*example) if isinstance(example, tuple) else model(example))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pg.fit_laplace(model, [(example, y)], likelihood="regression", progress=False)


def test_two_samples_in_the_middle_of_many() -> None:
    model = Call(lambda h: torch.cat([h[:149], h[149:150] + h[150:151], h[150:]]))
    x = torch.randn(300, 3)
    with pytest.raises(pg.InputError, match="depend on the rest of its batch"):
        pg.fit_laplace(model, [(x, torch.zeros(300, 3))], likelihood="regression", progress=False)
    with pytest.raises(pg.UnsupportedOpError):
        pg.linearise(model, diagonal(model), x)


@pytest.mark.parametrize("batch", [2, 3, 6, 17])
def test_any_two_samples_are_told_apart_by_some_set(batch: int) -> None:
    for i in range(batch):
        for j in range(batch):
            assert i == j or any(mask[i] and not mask[j] for mask in patterns(batch))
    first, second = halves(batch)
    assert torch.equal(first, ~second) and first.any() and second.any()


def test_what_depends() -> None:
    before = torch.randn(4, 2)
    mask = torch.tensor([True, False, True, False])
    after = torch.where(mask[:, None], before + 1, before)
    assert not depend(before, after, mask)
    assert not depend(before, after * (1 + 1e-6), mask)  # rounded otherwise
    after[1, 0] += 0.1
    assert depend(before, after, mask)
