"""Graph networks: messages along edges, gathered by index and added up by scatter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp

FAMILIES = Register("graph")
NODES, WIDTH = 6, 8


def edges() -> Tensor:
    """`[2, E]`: a ring in both directions, with a chord."""
    ring = torch.arange(NODES)
    pairs = torch.stack([ring, (ring + 1) % NODES])
    return torch.cat([pairs, pairs.flip(0), torch.tensor([[0, 3], [3, 0]])], dim=1)


def nodes() -> Tensor:
    return torch.randn(NODES, WIDTH)


def sparse_example() -> tuple[Tensor, Tensor]:
    return nodes(), edges()


def adjacency() -> Tensor:
    a = torch.eye(NODES)
    a[edges()[0], edges()[1]] = 1.0
    return a / a.sum(-1, keepdim=True)


class Convolution(nn.Module):
    """Kipf and Welling: `D^-½ A D^-½ x W`, by index_add."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        source, target = edge
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(target.shape[0])) + 1
        h = self.linear(x)
        weight = (degree[source] * degree[target]).rsqrt()[:, None]
        return torch.zeros_like(h).index_add(0, target, weight * h[source]) + h / degree[:, None]


class Attention(nn.Module):
    """Veličković et al.: a softmax over the edges that enter a node, by scatter_add and scatter_reduce."""

    def __init__(self, inside: int, outside: int, dynamic: bool = False):
        super().__init__()
        self.linear, self.dynamic = nn.Linear(inside, outside), dynamic
        self.score = nn.Linear(2 * outside, 1, bias=False)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        source, target = edge
        h = self.linear(x)
        pair = torch.cat([h[source], h[target]], dim=-1)
        e = self.score(F.leaky_relu(pair, 0.2)) if self.dynamic else F.leaky_relu(self.score(pair), 0.2)
        e = e.squeeze(-1)
        largest = torch.full((x.shape[0],), -1e9).scatter_reduce(0, target, e, "amax")
        weight = (e - largest[target]).exp()
        total = torch.zeros(x.shape[0]).scatter_add(0, target, weight)
        weight = weight / total[target]
        index = target[:, None].expand(-1, h.shape[-1])
        return torch.zeros_like(h).scatter_add(0, index, weight[:, None] * h[source])


class Isomorphism(nn.Module):
    """GIN: `MLP((1 + ε) x + sum of neighbours)`."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.mlp, self.eps = mlp(inside, 16, outside), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        summed = torch.zeros_like(x).index_add(0, edge[1], x[edge[0]])
        return self.mlp((1 + self.eps) * x + summed)


class Sage(nn.Module):
    """GraphSAGE: own features beside the mean or the maximum of the neighbours'."""

    def __init__(self, inside: int, outside: int, reduce: str = "mean"):
        super().__init__()
        self.own, self.others, self.reduce = nn.Linear(inside, outside), nn.Linear(inside, outside), reduce

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        index = edge[1][:, None].expand(-1, x.shape[-1])
        summary = torch.zeros_like(x).scatter_reduce(0, index, x[edge[0]], self.reduce, include_self=False)
        return F.normalize(self.own(x) + self.others(summary), dim=-1)


class EdgeConvolution(nn.Module):
    """DGCNN: the maximum over neighbours of `MLP(x_i, x_j - x_i)`."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.mlp = mlp(2 * inside, 16, outside)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        here, there = x[edge[1]], x[edge[0]]
        message = self.mlp(torch.cat([here, there - here], dim=-1))
        index = edge[1][:, None].expand_as(message)
        return torch.zeros(x.shape[0], message.shape[-1]).scatter_reduce(0, index, message, "amax", include_self=False)


class Relational(nn.Module):
    """R-GCN: a weight matrix per kind of edge."""

    def __init__(self, inside: int, outside: int, kinds: int = 2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kinds, inside, outside) / inside**0.5)
        self.own = nn.Linear(inside, outside)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        kind = (edge[0] < edge[1]).long()
        message = torch.bmm(x[edge[0]][:, None], self.weight[kind]).squeeze(1)
        return self.own(x).index_add(0, edge[1], message)


class Gated(nn.Module):
    """GGNN: messages update a gated recurrent cell."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.message, self.cell, self.out = nn.Linear(inside, inside), nn.GRUCell(inside, inside), None
        self.out = nn.Linear(inside, outside)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        for _ in range(2):
            x = self.cell(torch.zeros_like(x).index_add(0, edge[1], self.message(x)[edge[0]]), x)
        return self.out(x)


class Simulator(nn.Module):
    """A graph network with features on the edges, updated from both ends, and residual sums."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.encode, self.edge = nn.Linear(inside, 8), mlp(24, 16, 8)
        self.node, self.decode, self.first = mlp(16, 16, 8), nn.Linear(8, outside), nn.Linear(2 * inside, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        e = self.first(torch.cat([x[edge[0]], x[edge[1]]], -1))
        h = self.encode(x)
        for _ in range(2):
            e = e + self.edge(torch.cat([e, h[edge[0]], h[edge[1]]], -1))
            h = h + self.norm(self.node(torch.cat([h, torch.zeros_like(h).index_add(0, edge[1], e)], -1)))
        return self.decode(h)


class Principal(nn.Module):
    """PNA: mean, maximum, minimum and standard deviation of the neighbours, scaled by the degree."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.mix = nn.Linear(5 * inside, outside)

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        index, sent = edge[1][:, None].expand(-1, x.shape[-1]), x[edge[0]]

        def reduced(values: Tensor, how: str) -> Tensor:
            return torch.zeros_like(x).scatter_reduce(0, index, values, how, include_self=False)

        mean = reduced(sent, "mean")
        sd = (reduced(sent * sent, "mean") - mean * mean + 1e-5).clamp(min=1e-5).sqrt()
        return self.mix(torch.cat([x, mean, reduced(sent, "amax"), reduced(sent, "amin"), sd], -1))


class Two(nn.Module):
    """Two layers, and a readout of nodes or of the whole graph."""

    def __init__(self, first: nn.Module, second: nn.Module, pool: bool = False):
        super().__init__()
        self.layers, self.head, self.pool = nn.ModuleList([first, second]), nn.Linear(WIDTH, 3), pool

    def forward(self, x: Tensor, edge: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.elu(layer(x, edge))
        if self.pool:
            graph = (torch.arange(NODES) >= NODES // 2).long()
            x = torch.zeros(2, x.shape[-1]).index_add(0, graph, x)
        return self.head(x)


def _two(layer: type[nn.Module], **settings: object) -> Built:
    return Two(layer(WIDTH, WIDTH, **settings), layer(WIDTH, WIDTH, **settings)), sparse_example()


FAMILIES("GCN")(lambda: _two(Convolution))
FAMILIES("GAT")(lambda: _two(Attention))
FAMILIES("GATv2")(lambda: _two(Attention, dynamic=True))
FAMILIES("GIN")(lambda: _two(Isomorphism))
FAMILIES("GIN, graph pooling")(
    lambda: (Two(Isomorphism(WIDTH, WIDTH), Isomorphism(WIDTH, WIDTH), pool=True), sparse_example())
)
FAMILIES("GraphSAGE, mean")(lambda: _two(Sage))
FAMILIES("GraphSAGE, maximum")(lambda: _two(Sage, reduce="amax"))
FAMILIES("EdgeConv")(lambda: _two(EdgeConvolution))
FAMILIES("R-GCN")(lambda: _two(Relational))
FAMILIES("GGNN")(lambda: _two(Gated))
FAMILIES("graph network simulator")(lambda: _two(Simulator))
FAMILIES("PNA")(lambda: _two(Principal))


@FAMILIES("GCN, dense adjacency")
def dense() -> Built:
    def forward(self: nn.Module, x: Tensor, a: Tensor) -> Tensor:
        return self.second(a @ torch.relu(self.first(a @ x)))

    x = torch.randn(BATCH, NODES, WIDTH)
    return Lambda(forward, first=nn.Linear(WIDTH, 8), second=nn.Linear(8, 3)), (x, adjacency().expand(BATCH, -1, -1))


@FAMILIES("SGC, APPNP")
def appnp() -> Built:
    def forward(self: nn.Module, x: Tensor, a: Tensor) -> Tensor:
        start = h = self.mlp(x)
        for _ in range(4):
            h = 0.9 * (a @ h) + 0.1 * start
        return h

    return Lambda(forward, mlp=mlp(WIDTH, 8, 3)), (torch.randn(BATCH, NODES, WIDTH), adjacency().expand(BATCH, -1, -1))


@FAMILIES("ChebNet")
def chebyshev() -> Built:
    def forward(self: nn.Module, x: Tensor, a: Tensor) -> Tensor:
        basis = [x, a @ x]
        basis.append(2 * a @ basis[1] - basis[0])
        return self.head(torch.relu(sum(layer(t) for layer, t in zip(self.layers, basis, strict=True))))

    layers = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))
    example = (torch.randn(BATCH, NODES, WIDTH), adjacency().expand(BATCH, -1, -1))
    return Lambda(forward, layers=layers, head=nn.Linear(8, 3)), example


@FAMILIES("SchNet")
def schnet() -> Built:
    """Filters from distances of atoms, in a dense form."""

    def forward(self: nn.Module, kind: Tensor, place: Tensor) -> Tensor:
        h = self.embedding(kind)
        distance = (place[:, :, None] - place[:, None]).square().sum(-1).add(1e-6).sqrt()
        basis = torch.exp(-10 * (distance[..., None] - torch.linspace(0, 3, 6)) ** 2)
        for block, filters in zip(self.blocks, self.filters, strict=True):
            h = h + block((filters(basis) * h[:, None]).sum(2))
        return self.head(h).sum(1)

    blocks = nn.ModuleList(mlp(8, 8, 8, activation=nn.Softplus) for _ in range(2))
    filters = nn.ModuleList(mlp(6, 8, 8, activation=nn.Softplus) for _ in range(2))
    model = Lambda(forward, embedding=nn.Embedding(5, 8), blocks=blocks, filters=filters, head=mlp(8, 8, 1))
    return model, (torch.randint(0, 5, (BATCH, NODES)), torch.randn(BATCH, NODES, 3))


@FAMILIES("EGNN, equivariant")
def egnn() -> Built:
    def forward(self: nn.Module, h: Tensor, place: Tensor) -> Tensor:
        n = h.shape[1]
        for message, move, update in zip(self.messages, self.moves, self.updates, strict=True):
            apart = place[:, :, None] - place[:, None]
            squared = apart.square().sum(-1, keepdim=True)
            pair = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), squared], -1)
            m = message(pair)
            place = place + (apart * move(m)).mean(2)
            h = h + update(torch.cat([h, m.sum(2)], -1))
        return torch.cat([self.head(h), place], -1)

    parts = {
        "messages": nn.ModuleList(mlp(2 * WIDTH + 1, 8, 8, activation=nn.SiLU) for _ in range(2)),
        "moves": nn.ModuleList(mlp(8, 8, 1, activation=nn.SiLU) for _ in range(2)),
        "updates": nn.ModuleList(mlp(WIDTH + 8, 8, WIDTH, activation=nn.SiLU) for _ in range(2)),
    }
    example = (torch.randn(BATCH, NODES, WIDTH), torch.randn(BATCH, NODES, 3))
    return Lambda(forward, **parts, head=nn.Linear(WIDTH, 2)), example


@FAMILIES("Graphormer")
def graphormer() -> Built:
    """Attention over nodes with a learned bias per distance in the graph."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        bias = self.bias(self.hops).squeeze(-1)
        q, k, v = self.projection(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.head(x.mean(1))

    model = Lambda(
        forward, bias=nn.Embedding(4, 1), projection=nn.Linear(8, 24), norm=nn.LayerNorm(8), head=mlp(8, 8, 2)
    )
    model.register_buffer("hops", torch.randint(0, 4, (NODES, NODES)))
    return model, (torch.randn(BATCH, NODES, WIDTH),)
