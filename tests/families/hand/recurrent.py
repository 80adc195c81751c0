"""Recurrent networks: PyTorch's layers and cells, and those that people write out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp, vectors

FAMILIES = Register("recurrent")
LENGTH, INSIDE, WIDTH = 5, 4, 6


class Recurrent(nn.Module):
    """An `nn.RNNBase` and a head on its last position, or on all of them."""

    def __init__(self, core: nn.RNNBase, whole: bool = False):
        super().__init__()
        self.core, self.whole = core, whole
        outside = (core.proj_size or core.hidden_size) * (2 if core.bidirectional else 1)
        self.head = nn.Linear(outside, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.core(x)
        return self.head(out if self.whole else out[:, -1])


def _layer(name: str, kind: type[nn.RNNBase], whole: bool = False, **settings: object) -> None:
    FAMILIES(name)(
        lambda: (Recurrent(kind(INSIDE, WIDTH, batch_first=True, **settings), whole), (vectors(LENGTH, INSIDE),))
    )


_layer("LSTM", nn.LSTM)
_layer("GRU", nn.GRU)
_layer("RNN, tanh", nn.RNN)
_layer("RNN, relu", nn.RNN, nonlinearity="relu")
_layer("LSTM, two layers", nn.LSTM, num_layers=2)
_layer("LSTM, bidirectional", nn.LSTM, bidirectional=True)
_layer("LSTM, projected", nn.LSTM, proj_size=3)
_layer("LSTM, every position", nn.LSTM, whole=True)
_layer("GRU, bidirectional, two layers", nn.GRU, bidirectional=True, num_layers=2)


@FAMILIES("LSTM, positions first")
def positions_first() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.core(x.transpose(0, 1))[1][0][-1])

    return Lambda(forward, core=nn.LSTM(INSIDE, WIDTH), head=nn.Linear(WIDTH, 2)), (vectors(LENGTH, INSIDE),)


def _cell(name: str, kind: type[nn.Module]) -> None:
    def build() -> Built:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            h = torch.zeros(x.shape[0], WIDTH)
            state = (h, h) if kind is nn.LSTMCell else h
            for t in range(LENGTH):
                state = self.cell(x[:, t], state)
            return self.head(state[0] if kind is nn.LSTMCell else state)

        return Lambda(forward, cell=kind(INSIDE, WIDTH), head=nn.Linear(WIDTH, 2)), (vectors(LENGTH, INSIDE),)

    FAMILIES(name)(build)


_cell("LSTM cell", nn.LSTMCell)
_cell("GRU cell", nn.GRUCell)
_cell("RNN cell", nn.RNNCell)


@FAMILIES("LSTM language model, tied")
def language_model() -> Built:
    def forward(self: nn.Module, ids: Tensor) -> Tensor:
        return F.linear(self.core(self.embedding(ids))[0], self.embedding.weight)

    model = Lambda(forward, embedding=nn.Embedding(20, WIDTH), core=nn.LSTM(WIDTH, WIDTH, batch_first=True))
    return model, (torch.randint(0, 20, (BATCH, LENGTH)),)


@FAMILIES("LSTM, written out")
def written_out() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        for t in range(LENGTH):
            i, f, g, o = (self.w(x[:, t]) + self.u(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)

    parts = {"w": nn.Linear(INSIDE, 4 * WIDTH), "u": nn.Linear(WIDTH, 4 * WIDTH, bias=False)}
    return Lambda(forward, **parts, head=nn.Linear(WIDTH, 2)), (vectors(LENGTH, INSIDE),)


@FAMILIES("ConvLSTM")
def conv_lstm() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 4, 6, 6)
        for t in range(3):
            i, f, g, o = self.conv(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)

    return Lambda(forward, conv=nn.Conv2d(6, 16, 3, padding=1), head=nn.Conv2d(4, 1, 1)), (vectors(3, 2, 6, 6),)


@FAMILIES("sequence to sequence with attention")
def attention() -> Built:
    def forward(self: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embedding(source))
        out, _ = self.decoder(self.embedding(target), state)
        context = (out @ memory.transpose(1, 2)).softmax(-1) @ memory
        return self.head(torch.tanh(self.mix(torch.cat([out, context], -1))))

    parts = {n: nn.GRU(WIDTH, WIDTH, batch_first=True) for n in ("encoder", "decoder")}
    ids = torch.randint(0, 20, (2, BATCH, LENGTH))
    model = Lambda(forward, embedding=nn.Embedding(20, WIDTH), **parts, mix=nn.Linear(12, WIDTH), head=nn.Linear(6, 20))
    return model, (ids[0], ids[1])


@FAMILIES("quasi-recurrent network")
def qrnn() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z, f, o = self.conv(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2).chunk(3, -1)
        z, f, c, out = z.tanh(), f.sigmoid(), 0.0, []
        for t in range(LENGTH):
            c = f[:, t] * c + (1 - f[:, t]) * z[:, t]
            out.append(o[:, t].sigmoid() * c)
        return self.head(torch.stack(out, 1))

    return Lambda(forward, conv=nn.Conv1d(INSIDE, 18, 2), head=nn.Linear(6, 2)), (vectors(LENGTH, INSIDE),)


@FAMILIES("minimal gated unit (minGRU), by cumulative sums")
def min_gru() -> Built:
    """h_t as a ratio of cumulative sums in log space."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        k = self.gate(x)
        log_keep, log_take = -F.softplus(k), -F.softplus(-k)
        log_value = torch.log(F.softplus(self.value(x)) + 1e-3)
        a = F.pad(log_keep, (0, 0, 1, 0)).cumsum(1)[:, 1:]
        h = torch.exp(a + torch.logcumsumexp(log_take + log_value - a, dim=1))
        return self.head(h[:, -1])

    parts = {"gate": nn.Linear(INSIDE, WIDTH), "value": nn.Linear(INSIDE, WIDTH)}
    return Lambda(forward, **parts, head=nn.Linear(WIDTH, 2)), (vectors(LENGTH, INSIDE),)


@FAMILIES("linear recurrent unit (complex)")
def lru() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        decay = torch.exp(torch.complex(-self.nu.exp(), self.theta))
        u = self.b(x)
        h = torch.zeros(x.shape[0], WIDTH, dtype=torch.complex64)
        for t in range(LENGTH):
            h = decay * h + u[:, t]
        return self.head(torch.cat([h.real, h.imag], -1))

    rates = {"nu": nn.Parameter(torch.randn(WIDTH)), "theta": nn.Parameter(torch.randn(WIDTH))}
    return Lambda(forward, **rates, b=nn.Linear(INSIDE, WIDTH), head=nn.Linear(12, 2)), (vectors(LENGTH, INSIDE),)


@FAMILIES("echo state network")
def echo() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 10)
        for t in range(LENGTH):
            h = 0.7 * h + 0.3 * torch.tanh(x[:, t] @ self.inputs + h @ self.reservoir)
        return self.head(h)

    model = Lambda(forward, head=mlp(10, 8, 2))
    model.register_buffer("inputs", torch.randn(INSIDE, 10))
    model.register_buffer("reservoir", 0.2 * torch.randn(10, 10))
    return model, (vectors(LENGTH, INSIDE),)


@FAMILIES("clockwork of gated layers (SRU)")
def sru() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        c = torch.zeros(x.shape[0], INSIDE)
        out = []
        for t in range(LENGTH):
            value, f, r = self.w(x[:, t]).chunk(3, -1)
            f = torch.sigmoid(f + self.vf * c)
            c = f * c + (1 - f) * value
            r = torch.sigmoid(r + self.vr * c)
            out.append(r * c + (1 - r) * x[:, t])
        return self.head(torch.stack(out).mean(0))

    weights = {"vf": nn.Parameter(torch.randn(INSIDE)), "vr": nn.Parameter(torch.randn(INSIDE))}
    return Lambda(forward, w=nn.Linear(INSIDE, 12), **weights, head=nn.Linear(INSIDE, 2)), (vectors(LENGTH, INSIDE),)
