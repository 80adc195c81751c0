"""`nn.MultiheadAttention` and what is built on it, with the batch in front."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg

pytestmark = pytest.mark.usefixtures("one_trace")  # of the same model, for both structures

F64 = torch.float64
TINY = 1e-8
B, T, E, HEADS = 3, 5, 8, 2
X = torch.randn(B, T, E, dtype=F64, generator=torch.Generator().manual_seed(0))
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.zeros(B, T, dtype=torch.bool)
PADDING[1, 3:] = True


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=F64).masked_fill(mask, float("-inf"))


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "boolean": {"attn_mask": CAUSAL},
    "additive": {"attn_mask": torch.randn(T, T, dtype=F64, generator=torch.Generator().manual_seed(2))},
    "hint": {"attn_mask": CAUSAL, "is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "additive padding": {"key_padding_mask": additive(PADDING)},
    "boolean and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "hint and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "is_causal": True},
}


class SelfAttention(nn.Module):
    """`masks` is given with the call, so that its batch follows."""

    def __init__(self, need_weights: bool, fixed: dict[str, Any], **settings: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, batch_first=True, **settings)
        self.need_weights, self.fixed = need_weights, fixed

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights, **self.fixed, **masks)[0]


def small(model: nn.Module, pattern: str = "*") -> Any:
    return pg.DiagonalPosterior({n: torch.full_like(p, TINY) for n, p in model.named_parameters()}).select(pattern)


def made(model: nn.Module) -> nn.Module:
    return model.to(F64).eval()


@cache
def masked(mask: str, need_weights: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model that holds the masks that are the same for all samples, and its inputs with the others."""
    torch.manual_seed(0)
    given = MASKS[mask]
    x = {"x": X} | {k: v for k, v in given.items() if k == "key_padding_mask"}
    return made(SelfAttention(need_weights, {k: v for k, v in given.items() if k not in x})), x


def first_order(model: nn.Module, x: dict[str, Tensor], pattern: str) -> Tensor:
    named = {n: p.detach() for n, p in model.named_parameters() if pattern.strip("*") in n}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (), x))(named)
    return sum((TINY * j.flatten(3).square().sum(-1) for j in jacobians.values()), torch.zeros(()))


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, need_weights: bool, covariance: Any) -> None:
    model, x = masked(mask, need_weights)
    with torch.no_grad():
        expected = model(**x)
    net = pg.streamline(model, small(model), x, covariance=covariance)
    torch.testing.assert_close(net(**x).mean, expected, rtol=1e-10, atol=1e-10)
    one = {k: v[1:2] for k, v in x.items()}
    torch.testing.assert_close(net(**one).mean, expected[1:2], rtol=1e-10, atol=1e-10)
    assert (net(**x).variance > 0).all()


@pytest.mark.parametrize("mask", ["none", "boolean and padding"])
def test_full_covariance_of_the_output_projection_is_exact(mask: str) -> None:
    model, x = masked(mask, False)
    g = pg.streamline(model, small(model, "*out_proj*"), x, covariance="full")(**x)
    torch.testing.assert_close(g.variance, first_order(model, x, "*out_proj*"), rtol=1e-6, atol=0)


def test_a_mask_for_every_head_and_sample() -> None:
    torch.manual_seed(0)
    mask = torch.randn(B * HEADS, T, T, dtype=F64)
    model = made(SelfAttention(False, {"attn_mask": mask}))
    torch.testing.assert_close(pg.streamline(model, small(model), X)(X).mean, model(X).detach())


@pytest.mark.parametrize("settings", [{"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_other_settings(settings: dict[str, Any]) -> None:
    """Those that are not plain are left to PyTorch's own code."""
    torch.manual_seed(0)
    model = made(SelfAttention(False, {}, **settings))
    posterior = small(model, "*out_proj*")
    torch.testing.assert_close(pg.streamline(model, posterior, X)(X).mean, model(X).detach())


class Cross(nn.Module):
    def __init__(self, **widths: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, batch_first=True, **widths)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, memory, memory, average_attn_weights=False)


@cache
def cross(width: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = made(Cross(**({} if width == E else {"kdim": width, "vdim": width})))
    return model, (X, torch.randn(B, 7, width, dtype=F64))


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("width", [E, 6])
def test_cross_attention_and_its_weights(width: int, covariance: Any) -> None:
    model, x = cross(width)
    found = pg.streamline(model, small(model, "*out_proj*"), x, covariance=covariance)(*x)
    for g, expected in zip(found, model(*x), strict=True):
        torch.testing.assert_close(g.mean, expected.detach())


def test_time_before_batch_is_left_alone() -> None:
    torch.manual_seed(0)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    model = made(Plain())
    torch.testing.assert_close(pg.streamline(model, small(model), X)(X).mean, model(X).detach())


@cache
def encoder(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True, norm_first=norm_first)
    return made(nn.TransformerEncoder(block, 2, enable_nested_tensor=False))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_encoder(covariance: Any, norm_first: bool) -> None:
    model = encoder(norm_first)
    net = pg.streamline(model, small(model), X, covariance=covariance)
    for x in (X, X[:1]):
        g = net(x)
        torch.testing.assert_close(g.mean, model(x).detach())
        assert (g.variance > 0).all()


def test_both_layouts_have_the_same_variance() -> None:
    """`movedim` hides from us where the batch was, so PyTorch's own code is traced."""

    class Hidden(nn.Module):
        def __init__(self, attention: nn.MultiheadAttention):
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            moved = x.movedim(0, 1)
            return self.attention(moved, moved, moved)[0].movedim(0, 1)

    torch.manual_seed(0)
    first = made(SelfAttention(True, {}))
    second = made(Hidden(nn.MultiheadAttention(E, HEADS)))
    second.load_state_dict(first.state_dict())
    one, other = (pg.streamline(m, small(m), X)(X) for m in (first, second))
    torch.testing.assert_close(one.variance, other.variance)
