"""Networks for tables: feature tokens, soft trees, feature masks, plain and residual perceptrons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp, vectors

FAMILIES = Register("tabular")
COLUMNS, WIDTH = 6, 16


class Tokens(nn.Module):
    """A vector per numeric column, `x_j w_j + b_j`, beside embeddings of categories and a class token."""

    def __init__(self, categories: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, WIDTH))
        self.bias = nn.Parameter(torch.randn(COLUMNS, WIDTH))
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.embedding = nn.Embedding(categories, WIDTH) if categories else None

    def forward(self, x: Tensor, categories: Tensor | None = None) -> Tensor:
        parts = [self.first.expand(x.shape[0], -1, -1), x[..., None] * self.weight + self.bias]
        if self.embedding is not None and categories is not None:
            parts.append(self.embedding(categories))
        return torch.cat(parts, dim=1)


def encoder(**settings: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@FAMILIES("FT-Transformer")
def ft_transformer() -> Built:
    def forward(self: nn.Module, x: Tensor, c: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x, c))[:, 0])

    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    model = Lambda(forward, tokens=Tokens(5), encoder=encoder(), head=head)
    return model, (vectors(COLUMNS), torch.randint(0, 5, (BATCH, 2)))


@FAMILIES("TabTransformer")
def tab_transformer() -> Built:
    def forward(self: nn.Module, x: Tensor, c: Tensor) -> Tensor:
        context = self.encoder(self.embedding(c)).flatten(1)
        return self.head(torch.cat([context, self.norm(x)], -1))

    parts = {"embedding": nn.Embedding(5, WIDTH), "encoder": encoder(), "norm": nn.LayerNorm(COLUMNS)}
    model = Lambda(forward, **parts, head=mlp(2 * WIDTH + COLUMNS, 16, 3))
    return model, (vectors(COLUMNS), torch.randint(0, 5, (BATCH, 2)))


@FAMILIES("SAINT")
def saint() -> Built:
    """Attention over columns, then over the rows of the batch: samples depend on each other."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.columns(self.tokens(x))
        rows = h.flatten(1)[None]
        q, k, v = self.projection(rows).chunk(3, -1)
        rows = rows + F.scaled_dot_product_attention(q, k, v)
        return self.head(rows[0])

    width = WIDTH * (COLUMNS + 1)
    parts = {"tokens": Tokens(), "columns": encoder(), "projection": nn.Linear(width, 3 * width)}
    return Lambda(forward, **parts, head=nn.Linear(width, 3)), (vectors(COLUMNS),)


def sparsemax(x: Tensor) -> Tensor:
    """Projection on the simplex, by sorting."""
    ordered = x.sort(dim=-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    sums = ordered.cumsum(-1)
    support = (1 + ranks * ordered > sums).sum(-1, keepdim=True)
    threshold = (sums.gather(-1, support - 1) - 1) / support
    return (x - threshold).clamp(min=0)


def _tabnet(mask: object) -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.norm(x)
        prior, out, a = torch.ones_like(x), 0.0, self.shared(x)[..., 8:]
        for attend, step in zip(self.attends, self.steps, strict=True):
            m = mask(attend(a) * prior)
            prior = prior * (1.3 - m)
            h = F.glu(step(F.glu(self.shared2(m * x), -1)), -1)
            out, a = out + torch.relu(h[..., :8]), h[..., 8:]
        return self.head(out)

    parts = {
        "norm": nn.BatchNorm1d(COLUMNS),
        "shared": nn.Linear(COLUMNS, 16),
        "shared2": nn.Linear(COLUMNS, 32),
        "attends": nn.ModuleList(nn.Sequential(nn.Linear(8, COLUMNS), nn.BatchNorm1d(COLUMNS)) for _ in range(2)),
        "steps": nn.ModuleList(nn.Linear(16, 32) for _ in range(2)),
    }
    return Lambda(forward, **parts, head=nn.Linear(8, 3)), (vectors(COLUMNS),)


FAMILIES("TabNet, softmax")(lambda: _tabnet(lambda x: x.softmax(-1)))
FAMILIES("TabNet, sparsemax")(lambda: _tabnet(sparsemax))


class Trees(nn.Module):
    """NODE: oblivious trees; a leaf's weight is the product of the choices that lead to it."""

    def __init__(self, inside: int, trees: int = 4, depth: int = 3):
        super().__init__()
        self.choice = nn.Parameter(torch.randn(inside, trees * depth))
        self.threshold = nn.Parameter(torch.randn(trees, depth))
        self.response = nn.Parameter(torch.randn(trees, 2, 2**depth))
        bits = torch.tensor([[i >> d & 1 for d in range(depth)] for i in range(2**depth)])
        self.register_buffer("codes", torch.stack([bits, 1 - bits], -1).float())  # [leaves, depth, 2]

    def forward(self, x: Tensor) -> Tensor:
        features = x @ self.choice.softmax(0)
        split = torch.sigmoid(features.unflatten(-1, self.threshold.shape) - self.threshold)
        both = torch.stack([split, 1 - split], -1)
        leaves = torch.einsum("btdc,ldc->btld", both, self.codes).prod(-1)
        return torch.einsum("btl,tol->bto", leaves, self.response).flatten(1)


@FAMILIES("NODE, soft trees")
def node() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], -1)
        return self.head(x)

    return Lambda(forward, layers=nn.ModuleList([Trees(6), Trees(14)]), head=nn.Linear(22, 3)), (vectors(COLUMNS),)


@FAMILIES("ResNet for tables")
def resnet() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def block() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, WIDTH))

    blocks = nn.ModuleList([block(), block()])
    model = Lambda(forward, first=nn.Linear(COLUMNS, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 3))
    return model, (vectors(COLUMNS),)


@FAMILIES("MLP-Mixer")
def mixer() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for one, two, rows, columns in zip(self.norms, self.norms2, self.rows, self.columns, strict=True):
            x = x + rows(one(x).transpose(1, 2)).transpose(1, 2)
            x = x + columns(two(x))
        return self.head(x.mean(1))

    n = COLUMNS + 1
    parts = {
        "rows": nn.ModuleList(mlp(n, 8, n, activation=nn.GELU) for _ in range(2)),
        "columns": nn.ModuleList(mlp(WIDTH, 32, WIDTH, activation=nn.GELU) for _ in range(2)),
        "norms": nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)),
        "norms2": nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)),
    }
    return Lambda(forward, tokens=Tokens(), **parts, head=nn.Linear(WIDTH, 3)), (vectors(COLUMNS),)


@FAMILIES("gated MLP (gMLP)")
def gmlp() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.tokens(x)
        u, v = F.gelu(self.up(h)).chunk(2, -1)
        v = self.spatial(self.norm(v).transpose(1, 2)).transpose(1, 2)
        return self.head((h + self.down(u * v)).mean(1))

    n = COLUMNS + 1
    parts = {"up": nn.Linear(WIDTH, 32), "norm": nn.LayerNorm(16), "spatial": nn.Linear(n, n)}
    return Lambda(forward, tokens=Tokens(), **parts, down=nn.Linear(16, 16), head=nn.Linear(16, 3)), (vectors(COLUMNS),)


@FAMILIES("self-normalising (SELU)")
def selu() -> Built:
    return nn.Sequential(mlp(COLUMNS, 16, 16, 3, activation=nn.SELU)), (vectors(COLUMNS),)


@FAMILIES("periodic embeddings (PLR)")
def periodic() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        angle = 2 * torch.pi * self.frequency * x[..., None]
        features = torch.cat([angle.cos(), angle.sin()], -1)
        return self.head(torch.relu(torch.einsum("bcf,cfo->bco", features, self.weight) + self.bias).flatten(1))

    parameters = {
        "frequency": nn.Parameter(0.3 * torch.randn(COLUMNS, 4)),
        "weight": nn.Parameter(torch.randn(COLUMNS, 8, 4)),
        "bias": nn.Parameter(torch.randn(COLUMNS, 4)),
    }
    return Lambda(forward, **parameters, head=mlp(COLUMNS * 4, 16, 3)), (vectors(COLUMNS),)


@FAMILIES("TabM, batch ensemble")
def batch_ensemble() -> Built:
    """One weight shared by k members, each with its own scales before and after."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = x[:, None].expand(-1, 4, -1)
        h = torch.relu(self.first(h * self.r1) * self.s1 + self.b1)
        h = torch.relu(self.second(h * self.r2) * self.s2 + self.b2)
        return torch.einsum("bki,kio->bko", h, self.heads).mean(1)

    def scale(width: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(4, width))

    parts = {"first": nn.Linear(COLUMNS, 16, bias=False), "second": nn.Linear(16, 16, bias=False)}
    scales = {"r1": scale(COLUMNS), "s1": scale(16), "b1": scale(16), "r2": scale(16), "s2": scale(16), "b2": scale(16)}
    return Lambda(forward, **parts, **scales, heads=nn.Parameter(torch.randn(4, 16, 3))), (vectors(COLUMNS),)


@FAMILIES("neural additive model")
def additive() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([part(x[:, i : i + 1]) for i, part in enumerate(self.parts)]).sum(0) + self.bias

    return (
        Lambda(forward, parts=nn.ModuleList(mlp(1, 8, 2) for _ in range(COLUMNS)), bias=nn.Parameter(torch.zeros(2))),
        (vectors(COLUMNS),),
    )


@FAMILIES("retrieval (TabR)")
def retrieval() -> Built:
    """Attention by distance to stored candidates."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        k, c = self.encoder(x), self.encoder(self.candidates)
        similarity = -torch.cdist(k, c).square()
        return self.head(k + similarity.softmax(-1) @ (c + self.labels))

    model = Lambda(forward, encoder=mlp(COLUMNS, 16, 8), head=mlp(8, 8, 3))
    model.register_buffer("candidates", torch.randn(10, COLUMNS))
    model.register_buffer("labels", torch.randn(10, 1))
    return model, (vectors(COLUMNS),)


@FAMILIES("prior-fitted network (TabPFN)")
def pfn() -> Built:
    """A table with its labels as context, a query row at the end."""

    def forward(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        context = self.x(x[:, :-1]) + self.y(y[..., None])
        return self.head(self.encoder(torch.cat([context, self.x(x[:, -1:])], 1))[:, -1])

    model = Lambda(forward, x=nn.Linear(COLUMNS, WIDTH), y=nn.Linear(1, WIDTH), encoder=encoder(), head=mlp(16, 16, 3))
    return model, (vectors(5, COLUMNS), vectors(4))


@FAMILIES("deep and cross (DCN-v2)")
def cross() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = x * layer(h) + h
        return self.head(torch.cat([h, self.deep(x)], -1))

    layers = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS) for _ in range(2))
    return Lambda(forward, layers=layers, deep=mlp(COLUMNS, 16, 8), head=nn.Linear(COLUMNS + 8, 2)), (vectors(COLUMNS),)


@FAMILIES("self-attention over rows (GrowNet stack)")
def grownet() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        total = hidden = torch.zeros(x.shape[0], 8)
        for learner, head in zip(self.learners, self.heads, strict=True):
            hidden = torch.relu(learner(torch.cat([x, hidden], -1)))
            total = total + 0.5 * head(hidden)
        return total

    learners, heads = (nn.ModuleList(nn.Linear(i, 8) for _ in range(3)) for i in (COLUMNS + 8, 8))
    return Lambda(forward, learners=learners, heads=heads), (vectors(COLUMNS),)
