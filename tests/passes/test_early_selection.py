"""Selections of positions move to the front, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.passes.check import OnTensors
from propagauss.passes.early_selection import select_early
from propagauss.tracing.trace import Traced, trace

aten = torch.ops.aten
TOKENS, WIDTH = 5, 6


class Block(nn.Module):
    """A pre-norm transformer block, with the choices that models differ in."""

    def __init__(self, causal: bool = False, masked: bool = False, fused: bool = False, eager: bool = False):
        super().__init__()
        self.causal, self.masked, self.eager = causal, masked, eager
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH) if fused else None
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n = self.norm(x)
        parts = self.fused(n).chunk(3, -1) if self.fused is not None else (self.q(n), self.k(n), self.v(n))
        q, k, v = (p.view(x.shape[0], TOKENS, 2, -1).transpose(1, 2) for p in parts)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if self.masked else mask
        if self.eager:
            mixed = (q @ k.mT / 2).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape[0], TOKENS, -1))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Reads(nn.Module):
    """A block, and a head on some of its positions."""

    def __init__(self, choose, **options):
        super().__init__()
        self.block, self.norm, self.head = Block(**options), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.choose(self.norm(self.block(x))))


class LastToken(nn.Module):
    """As the classifiers of language models read the last token that is no padding."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(9, WIDTH), Block(), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        at = ((ids != 0) * torch.arange(TOKENS)).argmax(1)
        mask = (ids != 0)[:, None, None, :] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        return self.head(self.block(self.table(ids), mask))[torch.arange(ids.shape[0]), at]


CASES = {
    "class token": (Reads(lambda h: h[:, 0]), True),
    "last token": (Reads(lambda h: h[:, -1], masked=True), True),
    "last token, causal": (Reads(lambda h: h[:, -1], causal=True), True),
    "another token, causal": (Reads(lambda h: h[:, 2], causal=True), False),
    "some tokens": (Reads(lambda h: h[:, 1:3].mean(1)), True),
    "fused projection": (Reads(lambda h: h[:, 0], fused=True), True),
    "attention in pieces": (Reads(lambda h: h[:, 0], eager=True), True),
    "one for each sample": (LastToken(), True),
    "all tokens": (Reads(lambda h: h.mean(1)), False),
    "one and all": (Reads(lambda h: h[:, 0] + h.mean(1)), False),
}


def example(model: nn.Module, batch: int = 3) -> Tensor:
    torch.manual_seed(1)
    if isinstance(model, LastToken):
        return torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 1, 4, 0, 0], [2, 2, 2, 2, 0]])[:batch]
    return torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64)


def run(traced: Traced, x: Tensor) -> Tensor:
    (place,) = (n.name for n in traced.inputs if n is not None)
    return OnTensors(traced.graph, traced.constants | {place: x}).run(enable_io_processing=False)[0]


def attended(traced: Traced) -> int:
    """How many positions the attention of the block is computed for."""
    ops = (aten.scaled_dot_product_attention.default, aten.softmax.int)
    (node,) = (n for n in traced.graph.nodes if n.target in ops)
    return int(node.meta["val"].shape[-2])


@pytest.mark.parametrize("name", CASES)
def test_the_model_stays_the_same(name: str) -> None:
    model, fewer = CASES[name]
    model = model.double().eval()
    x = example(model)
    traced = trace(model, x)
    select_early(traced)
    traced.graph.lint()
    torch.testing.assert_close(run(traced, x), model(x))
    torch.testing.assert_close(run(traced, example(model, 2)), model(example(model, 2)))
    assert (attended(traced) < TOKENS) == fewer


@pytest.mark.parametrize("name", CASES)
def test_linearised_as_the_jacobian_form(name: str) -> None:
    model = CASES[name][0].double().eval()
    x = example(model)
    posterior = pg.DiagonalPosterior({n: 0.1 + 0.1 * torch.rand_like(p) for n, p in model.named_parameters()})
    expected = pg.baselines.GLM(model, posterior)(x).covariance
    found = pg.linearise(model, posterior, x)(x)
    torch.testing.assert_close(found.mean, model(x))
    torch.testing.assert_close(found.covariance, expected, rtol=1e-9, atol=1e-12)


def test_what_is_returned_is_found_again() -> None:
    class Two(Reads):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.norm(self.block(x))
            return h[:, 0], self.head(h[:, 0])

    model = Two(lambda h: h).double().eval()
    x = example(model)
    posterior = pg.DiagonalPosterior({n: 0.1 * torch.ones_like(p) for n, p in model.named_parameters()})
    token, logits = pg.linearise(model, posterior, x)(x)
    torch.testing.assert_close(token.mean, model(x)[0])
    torch.testing.assert_close(logits.mean, model(x)[1])
