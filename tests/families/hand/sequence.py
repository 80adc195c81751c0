"""Sequences without recurrence: convolutions in time, attention of many kinds, memories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp, vectors

FAMILIES = Register("sequence")
LENGTH, WIDTH, HEADS = 8, 8, 2


def example() -> tuple[Tensor]:
    return (vectors(LENGTH, WIDTH),)


class Attention(nn.Module):
    """Projections around a function of queries, keys and values `[B, H, T, d]`."""

    def __init__(self, mix: object, **extra: nn.Module | nn.Parameter):
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mix
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.mix(self, q, k, v).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Two pre-norm blocks and a head."""

    def __init__(self, make: object):
        super().__init__()
        self.mixers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), make()) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), mlp(8, 16, 8, activation=nn.GELU)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for mixer, dense in zip(self.mixers, self.mlps, strict=True):
            x = x + mixer(x)
            x = x + dense(x)
        return self.head(x)


def attention(name: str, **extra: object) -> object:
    """Register two blocks with this function of queries, keys and values; `extra` makes parameters of its own."""

    def add(mix: object) -> object:
        FAMILIES(name)(lambda: (Blocks(lambda: Attention(mix, **{n: f() for n, f in extra.items()})), example()))
        return mix

    return add


@attention("linear attention (elu + 1)")
def linear(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.transpose(-2, -1) @ v)) / (q @ k.sum(-2)[..., None] + 1e-6)


@attention("causal linear attention, by cumulative sums")
def causal_linear(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
    return torch.einsum("bhtd,bhtde->bhte", q, state) / ((q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6)


@attention("retention (RetNet)")
def retention(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = torch.arange(LENGTH)
    decay = 0.9 ** (t[:, None] - t).clamp(min=0) * (t[:, None] >= t)
    return F.group_norm(((q @ k.transpose(-2, -1)) * decay) @ v, HEADS)


@attention("relative attention (Transformer-XL)", relative=lambda: nn.Parameter(torch.randn(2 * LENGTH - 1, 4)))
def relative(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = F.pad(q @ self.relative.T, (1, 0))
    shifted = scores.view(*scores.shape[:2], 2 * LENGTH, LENGTH)[:, :, 1:].reshape(*scores.shape[:3], -1)[..., :LENGTH]
    return ((q @ k.transpose(-2, -1) + shifted) / 2).softmax(-1) @ v


@attention("disentangled bias (T5 buckets)", bias=lambda: nn.Embedding(6, HEADS))
def buckets(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = torch.arange(LENGTH)
    bias = self.bias((t[:, None] - t).abs().clamp(max=5)).permute(2, 0, 1)
    return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v


@attention("ALiBi")
def alibi(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = torch.arange(LENGTH)
    slope = torch.tensor([0.5, 0.25]).view(-1, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=-slope * (t[:, None] - t).abs())


@attention("rotary, complex numbers")
def rotary_complex(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angle = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1])
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    return F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)


@attention("cosine attention (query-key norm)", scale=lambda: nn.Parameter(torch.ones(HEADS, 1, 1)))
def cosine(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (self.scale.exp() * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1) @ v


@attention("top-k sparse attention")
def top_k(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    least = scores.topk(3, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v


@attention("talking heads", before=lambda: nn.Linear(HEADS, HEADS), after=lambda: nn.Linear(HEADS, HEADS))
def talking(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = self.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
    return self.after(scores).permute(0, 3, 1, 2) @ v


@attention("attention sink", sink=lambda: nn.Parameter(torch.randn(HEADS)))
def sink(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    extra = self.sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v


@attention("differential attention", weight=lambda: nn.Parameter(torch.tensor(0.5)))
def differential(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    one, two = ((a @ b.transpose(-2, -1)).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
    return (one - self.weight * two) @ v


@attention("random features (Performer)")
def performer(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, 24).view(4, 6)
    q, k = (torch.exp(x @ w - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
    return (q @ (k.transpose(-2, -1) @ v)) / (q @ k.sum(-2)[..., None])


@attention("projected keys and values (Linformer)", shorten=lambda: nn.Linear(LENGTH, 3))
def linformer(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (self.shorten(x.transpose(-2, -1)).transpose(-2, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


@attention("local windows")
def windows(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).flatten(2, 3)


@attention("hyper-connections of values (value residual)")
def sigmoid_attention(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.transpose(-2, -1) / 2 - 2.0) @ v


class Tcn(nn.Module):
    """Dilated causal convolutions with residual sums."""

    def __init__(self, gated: bool):
        super().__init__()
        self.gated = gated
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 16 if gated else WIDTH, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(WIDTH, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = x.transpose(1, 2), 0.0
        for i, (layer, skip) in enumerate(zip(self.layers, self.skips, strict=True)):
            h = layer(F.pad(x, (2**i, 0)))
            h = torch.tanh(h[:, :WIDTH]) * torch.sigmoid(h[:, WIDTH:]) if self.gated else torch.relu(h)
            total, x = total + skip(h), x + h
        return self.head(total)


FAMILIES("temporal convolution network")(lambda: (Tcn(False), example()))
FAMILIES("WaveNet")(lambda: (Tcn(True), example()))


@FAMILIES("gated convolutions (ConvS2S)")
def conv_glu() -> Built:
    return nn.Sequential(
        nn.Conv1d(WIDTH, 16, 3, padding=1), nn.GLU(1), nn.Conv1d(8, 16, 3, padding=1), nn.GLU(1)
    ), example()


@FAMILIES("dynamic convolution")
def dynamic() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        kernel = self.kernel(x).softmax(-1)
        return self.head((F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1) * kernel[:, :, None]).sum(-1))

    return Lambda(forward, kernel=nn.Linear(WIDTH, 3), head=mlp(WIDTH, 8, 3)), example()


@FAMILIES("text CNN")
def text_cnn() -> Built:
    def forward(self: nn.Module, ids: Tensor) -> Tensor:
        h = self.embedding(ids).transpose(1, 2)
        return self.head(torch.cat([torch.relu(conv(h)).amax(-1) for conv in self.convs], -1))

    convs = nn.ModuleList(nn.Conv1d(WIDTH, 4, k) for k in (2, 3, 4))
    model = Lambda(forward, embedding=nn.Embedding(20, WIDTH), convs=convs, head=nn.Linear(12, 2))
    return model, (torch.randint(0, 20, (BATCH, LENGTH)),)


@FAMILIES("memory network, end to end")
def memory() -> Built:
    def forward(self: nn.Module, story: Tensor, question: Tensor) -> Tensor:
        u = self.b(question).sum(1)
        for a, c in zip(self.a, self.c, strict=True):
            p = (a(story).sum(2) @ u[..., None]).squeeze(-1).softmax(-1)
            u = u + (p[..., None] * c(story).sum(2)).sum(1)
        return self.head(u)

    tables = {n: nn.ModuleList(nn.Embedding(20, WIDTH) for _ in range(2)) for n in "ac"}
    model = Lambda(forward, b=nn.Embedding(20, WIDTH), **tables, head=nn.Linear(WIDTH, 20))
    return model, (torch.randint(0, 20, (BATCH, 4, 3)), torch.randint(0, 20, (BATCH, 3)))


@FAMILIES("neural Turing machine, read only")
def turing() -> Built:
    """Addressing by content (cosine), by a gate and by a circular shift."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        w = torch.full((x.shape[0], 6), 1 / 6)
        out = []
        for t in range(3):
            key, gate, shift = self.control(x[:, t]).split([WIDTH, 1, 3], -1)
            content = F.cosine_similarity(key[:, None], self.memory[None], dim=-1).softmax(-1)
            w = gate.sigmoid() * content + (1 - gate.sigmoid()) * w
            s = shift.softmax(-1)
            w = sum(s[:, i : i + 1] * torch.roll(w, i - 1, -1) for i in range(3))
            out.append(w @ self.memory)
        return self.head(torch.stack(out, 1))

    model = Lambda(
        forward,
        control=nn.Linear(WIDTH, WIDTH + 4),
        memory=nn.Parameter(torch.randn(6, WIDTH)),
        head=nn.Linear(WIDTH, 2),
    )
    return model, example()


@FAMILIES("pointer network")
def pointer() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.v(torch.tanh(self.keys(x)[:, None] + self.queries(x)[:, :, None])).squeeze(-1).log_softmax(-1)

    return Lambda(forward, **{n: nn.Linear(WIDTH, 8) for n in ("keys", "queries")}, v=nn.Linear(8, 1)), example()


@FAMILIES("N-BEATS")
def nbeats() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        total = 0.0
        for block, back, ahead in zip(self.blocks, self.backs, self.aheads, strict=True):
            h = block(x)
            x, total = x - back(h), total + ahead(h)
        return total

    kinds = {"blocks": (LENGTH, 8), "backs": (8, LENGTH), "aheads": (8, 3)}
    parts = {n: nn.ModuleList(nn.Sequential(nn.Linear(*s), nn.ReLU()) for _ in range(2)) for n, s in kinds.items()}
    return Lambda(forward, **parts), (vectors(LENGTH),)


@FAMILIES("decomposition, reversible norm (DLinear, RevIN)")
def dlinear() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mean, sd = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        x = (x - mean) / sd * self.gain
        trend = F.avg_pool1d(F.pad(x[:, None], (1, 1), mode="replicate"), 3, 1).squeeze(1)
        return (self.trend(trend) + self.season(x - trend)) / self.gain * sd + mean

    parts = {"trend": nn.Linear(LENGTH, 3), "season": nn.Linear(LENGTH, 3), "gain": nn.Parameter(torch.ones(1))}
    return Lambda(forward, **parts), (vectors(LENGTH),)
