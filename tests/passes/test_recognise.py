"""What models write in pieces: attention, and what only looks like it; root mean squares."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.nodes import AT_MEAN
from propagauss.passes.recognise import recognise
from propagauss.tracing.trace import trace
from small_models import BOTH, SEQUENCE, X, assert_mean, first_order, layer, model_of, small

# -- what is attention, and what is not


ROUTERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda s, x: (s.layer(x) @ s.weight).softmax(-1) @ s.table,
    "scaled and masked": lambda s, x: (
        (s.layer(x) @ s.weight * 0.5).masked_fill(torch.tensor([False, True, False, False, False]), -1e9).softmax(-1)
        @ s.table
    ),
    "bmm": lambda s, x: torch.bmm(
        torch.bmm(s.layer(x)[:, None], s.weight.expand(x.shape[0], -1, -1)).softmax(-1),
        s.table.expand(x.shape[0], -1, -1),
    )[:, 0],
    "baddbmm": lambda s, x: (
        torch.baddbmm(s.bias.expand(x.shape[0], 1, -1), s.layer(x)[:, None], s.weight.expand(x.shape[0], -1, -1))
        .softmax(-1)
        .matmul(s.table)[:, 0]
    ),
}


@pytest.mark.parametrize("name", ["matmul", "scaled and masked", "bmm"])
@BOTH
def test_a_softmax_of_a_linear_layer_is_not_attention(name: str, covariance: Any) -> None:
    table = {"weight": torch.randn(4, 5), "table": torch.randn(5, 2), "bias": torch.randn(5)}
    model = model_of(ROUTERS[name], layer=layer(), **table)
    g = assert_mean(model, X, covariance=covariance)
    assert (g.variance > 0).all()
    if covariance == "full":
        torch.testing.assert_close(g.variance.sqrt(), first_order(model, X), rtol=1e-6, atol=0)


def is_taken_for_attention(model: nn.Module, x: Tensor) -> bool:
    traced = trace(model, x)
    recognise(traced)
    return any(AT_MEAN in node.meta for node in traced.graph.nodes)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_not_marked_in_any_form(name: str) -> None:
    """Whether or not there is a rule for the product."""
    table = {"weight": torch.randn(4, 5), "table": torch.randn(5, 2), "bias": torch.randn(5)}
    assert not is_taken_for_attention(model_of(ROUTERS[name], layer=layer(), **table), X)


def test_attention_in_pieces_is_still_recognised() -> None:
    def attend(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.layer(x).chunk(3, -1)
        return (q @ k.mT / 2).softmax(-1) @ v

    assert is_taken_for_attention(model_of(attend, layer=layer(4, 12)), SEQUENCE)


# -- normalisation


def test_a_root_mean_square_without_its_dimension() -> None:
    model = model_of(lambda s, x: (h := s.layer(x)).sum(-1) * torch.rsqrt(h.pow(2).mean(-1) + 1e-5), layer=layer())
    assert_mean(model, X)


@pytest.mark.parametrize("keepdim", [{"keepdim": True}, {"dim": -1, "keepdim": True}], ids=["position", "keyword"])
def test_a_root_mean_square_by_keywords(keepdim: dict[str, Any]) -> None:
    args = () if "dim" in keepdim else (-1,)
    model = model_of(
        lambda s, x: (h := s.layer(x)) * torch.rsqrt(h.square().mean(*args, **keepdim) + 1e-5), layer=layer()
    )
    assert_mean(model, X)
    assert "aten.rms_norm" in str(pg.streamline(model, small(model), X).plan)


def test_a_mean_square_of_another_precision_is_left_alone() -> None:
    """`rms_norm` would compute in the precision of its input."""
    model = model_of(
        lambda s, x: (h := s.layer(x)) * torch.rsqrt(h.square().mean(-1, True, dtype=torch.float32) + 1e-5),
        layer=layer(),
    )
    assert_mean(model, X)
