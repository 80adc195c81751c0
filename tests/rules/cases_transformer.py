"""Cases of the contract for the parts of a transformer: normalisation of rows, attention, rotary embedding, gates."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rules.cases import Case

ROW = torch.linspace(0.5, 2, 4, dtype=torch.float64)
EPS = 0.05  # large enough to be seen
DIAGONAL, FULL = ("diagonal",), ("full",)


def constant(*shape: int) -> Tensor:
    """Numbers in (-1, 1) without a pattern."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).mul(1.7).sin().reshape(shape)


# -- layer and RMS norm: the full structure uses the whole Jacobian, the diagonal one the scale, unless it is told to


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), ROW, -ROW, EPS)


def layer_norm_plain(x: Tensor) -> Tensor:
    return F.layer_norm(x, (3,), eps=EPS)


def layer_norm_of_two(x: Tensor) -> Tensor:
    return F.layer_norm(x, (2, 2), constant(2, 2), constant(2, 2), EPS)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (4,), ROW, EPS)


def rms_norm_default(x: Tensor) -> Tensor:
    return F.rms_norm(x, (4,))


def rms_norm_in_pieces(x: Tensor) -> Tensor:
    """Llama's."""
    return ROW * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rms_norm_turned(x: Tensor) -> Tensor:
    """The same in another order, with a product for the square."""
    return (torch.rsqrt(EPS + (x * x).mean(dim=-1, keepdim=True)) * x) * ROW


def held(centred: bool, dims: tuple[int, ...] = (-1,), scale: Tensor | float = 1.0, shift: Tensor | float = 0.0):
    """What the diagonal structure propagates: `w (x - μ) / σ + b` with `μ`, `σ` worked out from the mean."""

    def at(means: list[Tensor]) -> Callable[[Tensor], Tensor]:
        (m,) = means
        centre = m.mean(dims, keepdim=True) if centred else torch.zeros_like(m)
        width = ((m - centre).square().mean(dims, keepdim=True) + EPS).sqrt()
        return lambda x: scale * (x - centre) / width + shift

    return at


def _row_norms() -> list[Case]:
    table = [
        ("layer_norm", layer_norm, ((4,),), held(True, scale=ROW, shift=-ROW)),
        ("layer_norm without affine", layer_norm_plain, ((2, 3),), held(True)),
        ("layer_norm of two dimensions", layer_norm_of_two, ((2, 2),), held(True, (-2, -1), *2 * [constant(2, 2)])),
        ("rms_norm", rms_norm, ((4,),), held(False, scale=ROW)),
        ("rms_norm in pieces", rms_norm_in_pieces, ((4,),), held(False, scale=ROW)),
        ("rms_norm in pieces, turned", rms_norm_turned, ((1, 4),), held(False, scale=ROW)),
    ]
    whole = {"normalisation": "jacobian"}
    cases = [Case(name, function, events, structures=FULL) for name, function, events, _ in table[:-1]]
    cases += [Case(f"{name}, scale", f, e, exact=True, held=h, structures=DIAGONAL) for name, f, e, h in table]
    cases += [Case(f"{name}, Jacobian", f, e, options=whole, structures=DIAGONAL) for name, f, e, _ in table[::2]]
    return [*cases, Case("rms_norm with default epsilon", rms_norm_default, structures=FULL)]


# -- attention: `[B, heads, positions, features]`; queries and keys fixed, or Gaussian and fixed at their means

Q, K = 2 * constant(1, 2, 3, 2), 2 * constant(1, 2, 2, 2)
VALUES = (2, 2, 1)  # small: the literal loops are slow
ALLOWED = torch.tensor([[True, False], [True, True], [False, True]])
PER_HEAD = torch.stack([ALLOWED, ~ALLOWED | torch.tensor([True, False])])
NONE_ALLOWED = torch.tensor([[True, False], [False, False], [False, True]])
BIAS = constant(3, 2)
NOWHERE = torch.zeros(3, 2, dtype=torch.float64).masked_fill(~NONE_ALLOWED, -math.inf)


def fixed(queries: Tensor = Q, keys: Tensor = K, **settings: object) -> Callable[[Tensor], Tensor]:
    """Attention as a function of its values."""

    def attend(v: Tensor) -> Tensor:
        q, k = (t.expand(v.shape[0], -1, -1, -1) for t in (queries, keys))
        return F.scaled_dot_product_attention(q, k, v, **settings)

    return attend


def at_means(function: Callable[..., Tensor]) -> Callable[[list[Tensor]], Callable[..., Tensor]]:
    """The function with queries and keys, its first two arguments, fixed at their means."""

    def at(means: list[Tensor]) -> Callable[..., Tensor]:
        # added with a factor of zero, so that the reference finds a derivative (zero)
        q, k, *_ = means
        return lambda *x: function(q + 0 * x[0], k + 0 * x[1], *x[2:])

    return at


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in Hugging Face: product, scale, mask, softmax, dropout, product."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.7
    scores = scores.masked_fill(~ALLOWED, torch.finfo(scores.dtype).min)
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype), 0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def attend_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


ATTENTION = [
    Case("attention", fixed(), (VALUES,), exact=True),
    Case("attention, boolean mask", fixed(attn_mask=PER_HEAD), (VALUES,), exact=True),
    Case("attention, float mask", fixed(attn_mask=BIAS), (VALUES,), exact=True, structures=DIAGONAL),
    Case("attention, causal", fixed(is_causal=True), (VALUES,), exact=True),
    Case("attention, scale", fixed(scale=0.3), (VALUES,), exact=True, structures=DIAGONAL),
    Case("attention, grouped queries", fixed(constant(1, 4, 2, 2), enable_gqa=True), (VALUES,), exact=True),
    Case("attention, nothing to see", fixed(attn_mask=NONE_ALLOWED), (VALUES,), exact=True, structures=DIAGONAL),
    Case("attention, nothing to see, float mask", fixed(attn_mask=NOWHERE), (VALUES,), exact=True, structures=DIAGONAL),
    Case(
        "attention, everything Gaussian", attend, ((1, 2, 2), (1, 2, 2), (1, 2, 2)), exact=True, held=at_means(attend)
    ),
    Case(
        "attention, everything Gaussian, grouped",
        attend_grouped,
        ((2, 2, 1), (1, 2, 1), (1, 2, 2)),
        exact=True,
        held=at_means(attend_grouped),
    ),
    Case("attention in pieces", lambda v: eager(Q, K, v), (VALUES,), exact=True, structures=FULL),
    Case(
        "attention in pieces, everything Gaussian",
        eager,
        ((1, 3, 1), (1, 2, 1), (1, 2, 2)),
        exact=True,
        held=at_means(eager),
    ),
]

# -- positions and gates

ANGLE = constant(3, 2)
TABLE = constant(5, 4)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary(x: Tensor) -> Tensor:
    """Llama's: the two halves of a row are rotated."""
    angle = torch.cat((ANGLE, ANGLE), dim=-1)[: x.shape[-2]]
    return x * angle.cos() + rotate_half(x) * angle.sin()


def rotary_in_pairs(x: Tensor) -> Tensor:
    """GPT-J's: neighbours are rotated."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = ANGLE[: x.shape[-2]].cos(), ANGLE[: x.shape[-2]].sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def geglu(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def _gated(gate: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor], list[Tensor]], Tensor]:
    """Covariance of `gate(x) * y` beyond first order, with the gate linearised: `(D C_x D) ∘ C_y`."""

    def extra(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
        slope = torch.func.jvp(gate, (means[0],), (torch.ones_like(means[0]),))[1].flatten(1)
        return covariances[0] * slope.unsqueeze(-1) * slope.unsqueeze(-2) * covariances[1]

    return extra


def _geglu_extra(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    """In the diagonal structure the halves are strangers."""
    (m,), (c,) = means, covariances
    (_, gate), half = m.chunk(2, -1), m.shape[-1] // 2
    return _gated(F.gelu)([gate], [c[:, half:, half:], c[:, :half, :half]])


GATES = [
    Case("rotary embedding", rotary, ((1, 2, 4),), exact=True),
    Case("rotary embedding in pairs", rotary_in_pairs, ((1, 2, 4),), exact=True, structures=DIAGONAL),
    Case("SwiGLU", lambda x, y: F.silu(x) * y, ((4,), (4,)), second_order=_gated(F.silu)),
    Case("GEGLU of one layer", geglu, second_order=_geglu_extra, structures=DIAGONAL),
    Case("GEGLU of one layer, joint", geglu, structures=FULL),
    Case("positions from a table", lambda x: x + F.embedding(torch.tensor([3, 1]), TABLE), ((2, 4),), exact=True),
]

TRANSFORMER = [*_row_norms(), *ATTENTION, *GATES]
