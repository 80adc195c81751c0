"""Recurrent layers and cells, written out step by step while the model is traced.

    LSTM  i, f, g, o = W_ih x + b_ih + W_hh h + b_hh;  c' = σ(f) c + σ(i) tanh(g);  h' = σ(o) tanh(c')
    GRU   r, z, n = W_ih x + b_ih;  r', z', n' = W_hh h + b_hh
          r, z = σ(r + r'), σ(z + z');  n = tanh(n + r n');  h' = z h + (1 - z) n
    RNN   h' = tanh or relu of (W_ih x + b_ih + W_hh h + b_hh)

The length of the sequence becomes part of the graph, the batch stays open. Inside, samples come first: the projection
of the inputs is one layer over all steps `[B, T, gates]`, and every state is `[B, H]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from propagauss.errors import InputError

aten = torch.ops.aten

State = tuple[Tensor, ...]  # (h,) or (h, c), each [B, H]
Step = Callable[[Tensor, State, Sequence[Tensor | None]], State]

RECURRENT_OPS = {
    *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
    *(aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default),
}


def lstm_step(gates: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    """`gates [B, 4H]` is the projected input; weights are W_hh, b_hh and, if states are projected, W_hr."""
    h, c = state
    i, f, g, o = (gates + _linear(h, weights[0], weights[1])).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if weights[2] is None else _linear(h, weights[2], None)), c


def gru_step(gates: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    (h,) = state
    (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), _linear(h, weights[0], weights[1]).chunk(3, -1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    return (z * h + (1 - z) * n,)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(gates: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        return (activation(gates + _linear(state[0], weights[0], weights[1])),)

    return step


tanh_step, relu_step = _plain_step(torch.tanh), _plain_step(torch.relu)


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.linear(x, weight, bias)


def _layer(step: Step, *args: Any) -> tuple[Tensor, ...] | None:
    """`_VF.lstm(x, hx, weights, biases, layers, dropout, training, bidirectional, batch_first)` and its siblings.

    None for packed sequences, whose lengths are data.
    """
    if len(args) != 9 or not isinstance(args[2], (tuple, list)):
        return None
    x, first, weights, biases, layers, dropout, training, bidirectional, batch_first = args
    if training and dropout > 0 and layers > 1:
        raise InputError("a recurrent layer is in training mode, where its dropout is random: call model.eval() first")
    first = tuple(first) if isinstance(first, (tuple, list)) else (first,)
    x = x if batch_first else x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    per_direction = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            own = weights[k * per_direction : (k + 1) * per_direction]
            state, states = _sequence(step, x, tuple(s.select(0, k) for s in first), own, biases, bool(direction))
            last.append(state)
            outputs.append(states)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    x = x if batch_first else x.transpose(0, 1)
    return (x, *(torch.stack(parts) for parts in zip(*last, strict=True)))


def _sequence(
    step: Step, x: Tensor, state: State, weights: Sequence[Tensor], biases: bool, reverse: bool
) -> tuple[State, Tensor]:
    """One direction of one layer: `x [B, T, D]` -> the last state and `h` of all steps `[B, T, H]`."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if biases else (None, None)
    own = (w_hh, b_hh, rest[0] if rest else None)
    gates = F.linear(x, w_ih, b_ih)
    length = int(x.shape[-2])
    outputs = []
    for t in reversed(range(length)) if reverse else range(length):
        state = step(gates.select(-2, t), state, own)
        outputs.append(state[0])
    return state, torch.stack(outputs[::-1] if reverse else outputs, -2)


def _cell(step: Step, x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    states: State = tuple(state) if isinstance(state, (tuple, list)) else (state,)
    new = step(F.linear(x, w_ih, b_ih), states, (w_hh, b_hh, None))
    return new[0] if len(new) == 1 else new


def _unrollers() -> dict[Any, Callable[..., Any]]:
    steps = {"lstm": lstm_step, "gru": gru_step, "rnn_tanh": tanh_step, "rnn_relu": relu_step}
    found: dict[Any, Callable[..., Any]] = {}
    for name, step in steps.items():
        found[getattr(torch._VF, name)] = lambda *args, s=step: _layer(s, *args)  # type: ignore[attr-defined]
        found[getattr(torch._VF, f"{name}_cell")] = lambda *args, s=step: _cell(s, *args)  # type: ignore[attr-defined]
    return found


UNROLL = _unrollers()  # what nn.LSTM and the others call -> the same in plain ops, or None where that cannot be
