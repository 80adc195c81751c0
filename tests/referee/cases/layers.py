"""Convolutions, normalisation, embeddings and recurrent layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from referee.case import Case, Formula, case, integers, linear, module, normal, section
from referee.truth import held_if_diagonal, states_diagonal, unless_stating

TEN = torch.full((4,), 10.0)


def _conv(name: str, make: Any, *shape: int, **settings: Any) -> list[Case]:
    """With a fixed and with a random input."""
    first = nn.Conv1d if len(shape) == 2 else nn.Conv2d if len(shape) == 3 else nn.Conv3d
    return [
        module(name, make, shape, **settings),
        module(f"{name}, random input", lambda: nn.Sequential(first(shape[0], shape[0], 1), make()), shape, **settings),
    ]


CONVOLUTION = section(
    "Convolutions",
    *_conv("conv1d", lambda: nn.Conv1d(2, 3, 3, padding=1), 2, 4),
    *_conv("conv2d", lambda: nn.Conv2d(2, 3, 2, stride=2), 2, 4, 4),
    *_conv("conv2d, groups and dilation", lambda: nn.Conv2d(2, 4, 2, groups=2, dilation=2), 2, 3, 3),
    *_conv("conv2d, reflected padding", lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), 2, 3, 3),
    *_conv("conv3d", lambda: nn.Conv3d(1, 2, 2), 1, 2, 3, 2),
    *_conv("conv_transpose1d", lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), 2, 3),
    *_conv("conv_transpose2d", lambda: nn.ConvTranspose2d(2, 2, 2, stride=2), 2, 2, 2),
    *_conv("conv_transpose3d", lambda: nn.ConvTranspose3d(1, 2, 2), 1, 2, 2, 2),
    case("conv1d, computed weight", lambda m, x: F.conv1d(x, m.w.tanh(), m.b), w=(3, 2, 2), b=(3,), x=(2, 4)),
    case(
        "conv1d, computed weight, fixed bias",
        lambda m, x: F.conv1d(x, m.w.tanh(), m.b),
        w=(3, 2, 2),
        b=TEN[:3],
        x=(2, 4),
    ),
    case(
        "conv2d, computed weight, random input",
        lambda m, x: F.conv2d(m.c(x), m.w.exp()),
        w=(2, 2, 2, 2),
        c=lambda: nn.Conv2d(1, 2, 1),
        x=(1, 3, 3),
    ),
    case(
        "conv2d, standardised weight",
        lambda m, x: F.conv2d(x, F.batch_norm(m.w.reshape(1, 2, -1), None, None, training=True).reshape(2, 1, 2, 2)),
        w=(2, 1, 2, 2),
        x=(1, 3, 3),
    ),
    case(
        "conv1d, weight norm",
        lambda m, x: m.c(x),
        c=lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=2),
        x=(2, 4),
    ),
    case(
        "depthwise convolution",
        lambda m, x: m.c(m.l(x)),
        l=linear(4, 4),
        c=lambda: nn.Conv1d(3, 3, 3, padding=1, groups=3),
        x=(3, 4),
    ),
    case("unfold then product", lambda m, x: m.w @ F.unfold(x, 2), w=(3, 4), x=(1, 3, 3)),
)


class _RMS(nn.Module):
    """Written in pieces, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        return self.weight * (h * held_if_diagonal(torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)))


def _after(make: Any, width: int = 4) -> Any:
    return lambda: nn.Sequential(nn.Linear(5, width), make())


NORM = section(
    "Normalisation",
    module("layer norm", _after(lambda: nn.LayerNorm(4))),
    module("layer norm, no affine part", _after(lambda: nn.LayerNorm(4, elementwise_affine=False))),
    module("layer norm of a fixed value", lambda: nn.LayerNorm(5)),
    module("layer norm over two dimensions", _after(lambda: nn.LayerNorm((3, 4))), (3, 5)),
    module("RMS norm", _after(lambda: nn.RMSNorm(4))),
    module("RMS norm in pieces", _after(_RMS)),
    case(
        "RMS norm in pieces, no keepdim",
        lambda m, x: (lambda h: h.sum(-1) * torch.rsqrt(h.pow(2).mean(-1) + 1e-6))(m.l(x)),
        l=linear(),
    ),
    module("group norm", lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4)), (2, 3)),
    module("instance norm", lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, affine=True)), (2, 4)),
    module("batch norm", _after(lambda: nn.BatchNorm1d(4))),
    module("batch norm of a fixed value", lambda: nn.BatchNorm1d(5)),
    module("batch norm 2d", lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3)), (1, 3, 3)),
    module("local response norm", lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.LocalResponseNorm(2)), (2, 3)),
    case(
        "standardised in pieces",
        lambda m, x: (lambda h: (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.1))(m.l(x)),
        l=linear(),
    ),
    case(
        "global response norm",
        lambda m, x: (lambda h: m.g * (h * (h.norm(dim=1, keepdim=True) / 3)) + m.b + h)(m.l(x)),
        l=linear(),
        g=(4,),
        b=(4,),
        x=(3, 5),
    ),
    case("F.normalize", lambda m, x: F.normalize(m.l(x), dim=-1), l=linear()),
)


def _tokens(*shape: int) -> Any:
    return integers(6, shape)


def _recurrent(name: str, make: Any, x: tuple[int, ...], pick: Any) -> Case:
    return Case(name, lambda: Formula(lambda m, v: pick(m.r(v)), r=make), normal(x), shared=True)


def _last_of_gru(m: Formula, x: Tensor) -> Tensor:
    """In diagonal mode the last line of a step counts, of which there are several: `z h + (1 - z) n` is ours."""
    if not states_diagonal():
        return m.r(x)[0][:, -1]
    h = x.new_zeros(len(x), 2)
    given = F.linear(x, m.r.weight_ih_l0, m.r.bias_ih_l0)
    for t in range(x.shape[1]):
        (r, z, n), (hr, hz, hn) = given[:, t].chunk(3, -1), F.linear(h, m.r.weight_hh_l0, m.r.bias_hh_l0).chunk(3, -1)
        z = torch.sigmoid(z + hz)
        h = z * h + (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return h


EMBEDDING = section(
    "Embeddings and recurrent layers",
    module("embedding", lambda: nn.Embedding(6, 4), _tokens(3)),
    module("embedding, then a layer", lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)), _tokens(3)),
    case("embedding with padding", lambda m, x: F.embedding(x, m.w, unless_stating(0)), w=(6, 4), x=_tokens(3)),
    case("embedding by indexing", lambda m, x: m.w[x], w=(6, 4), x=_tokens(3)),
    case(
        "tied embedding",
        lambda m, x: F.linear(m.e(x), m.e.weight),
        e=lambda: nn.Embedding(6, 4),
        x=_tokens(2),
        shared=True,
    ),
    module("embedding bag, mean", lambda: nn.EmbeddingBag(6, 4), _tokens(3)),
    module("embedding bag, sum", lambda: nn.EmbeddingBag(6, 4, mode="sum"), _tokens(3)),
    module("embedding bag, max", lambda: nn.EmbeddingBag(6, 4, mode="max"), _tokens(3)),
    _recurrent("rnn", partial(nn.RNN, 3, 2, batch_first=True), (3, 3), lambda r: r[0]),
    _recurrent("lstm", partial(nn.LSTM, 3, 2, batch_first=True), (3, 3), lambda r: r[0]),
    Case("gru", lambda: Formula(_last_of_gru, r=partial(nn.GRU, 3, 2, batch_first=True)), normal((3, 3)), shared=True),
    _recurrent(
        "lstm, both directions", partial(nn.LSTM, 3, 2, batch_first=True, bidirectional=True), (2, 3), lambda r: r[0]
    ),
    _recurrent("lstm, two layers", partial(nn.LSTM, 3, 2, 2, batch_first=True), (2, 3), lambda r: r[0]),
    _recurrent("rnn cell", partial(nn.RNNCell, 5, 3), (5,), lambda r: r),
    _recurrent("lstm cell", partial(nn.LSTMCell, 5, 3), (5,), lambda r: r),
    _recurrent("gru cell", partial(nn.GRUCell, 5, 3), (5,), lambda r: r),
    case(
        "rnn of a random value",
        lambda m, x: m.r(m.l(x))[0],
        l=linear(5, 3),
        r=lambda: nn.RNN(3, 2, batch_first=True),
        x=(2, 5),
        shared=True,
    ),
    case(
        "lstm, fixed weights",
        lambda m, x: m.r(m.l(x))[0],
        l=linear(5, 3),
        r=lambda: nn.LSTM(3, 2, batch_first=True),
        x=(2, 5),
        random=("l.weight", "l.bias"),
    ),
)

LAYERS = [*CONVOLUTION, *NORM, *EMBEDDING]
