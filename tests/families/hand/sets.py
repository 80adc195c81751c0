"""Sets, points and similarities: networks whose input has no order, and heads that compare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp, vectors

FAMILIES = Register("sets")
POINTS, WIDTH = 6, 8


def points(width: int = WIDTH) -> Tensor:
    return vectors(POINTS, width)


def _deep_sets(pool: object) -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.rho(pool(self.phi(x)))

    return Lambda(forward, phi=mlp(WIDTH, 16, 8), rho=mlp(8, 16, 2)), (points(),)


FAMILIES("deep sets, sum")(lambda: _deep_sets(lambda h: h.sum(1)))
FAMILIES("deep sets, maximum")(lambda: _deep_sets(lambda h: h.max(1).values))
FAMILIES("deep sets, sorted (FSPool)")(lambda: _deep_sets(lambda h: h.sort(1).values[:, 1:5].mean(1)))
FAMILIES("deep sets, median")(lambda: _deep_sets(lambda h: h.median(1).values))
FAMILIES("deep sets, log-sum-exp")(lambda: _deep_sets(lambda h: h.logsumexp(1)))
FAMILIES("statistics pooling (x-vector)")(
    lambda: _deep_sets(lambda h: torch.cat([h.mean(1)[:, :4], h.std(1)[:, :4]], -1))
)


@FAMILIES("masked mean over a padded set")
def masked_mean() -> Built:
    def forward(self: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        h = self.phi(x).masked_fill(~mask[..., None], 0.0)
        return self.rho(h.sum(1) / mask.sum(1, keepdim=True))

    mask = torch.arange(POINTS) < torch.tensor([[2], [4], [6]])
    return Lambda(forward, phi=mlp(WIDTH, 16, 8), rho=mlp(8, 16, 2)), (points(), mask)


class Pool(nn.Module):
    """Multi-head attention of some queries to a set, with a residual perceptron (MAB)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dense = nn.MultiheadAttention(WIDTH, 2, batch_first=True), mlp(WIDTH, 16, WIDTH)
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, q: Tensor, x: Tensor) -> Tensor:
        h = self.one(q + self.attention(q, x, x, need_weights=False)[0])
        return self.two(h + self.dense(h))


@FAMILIES("set transformer, induced points")
def set_transformer() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        inner = self.one(self.points.expand(x.shape[0], -1, -1), x)
        x = self.two(x, inner)
        return self.head(self.pool(self.seed.expand(x.shape[0], -1, -1), x)[:, 0])

    parts = {n: Pool() for n in ("one", "two", "pool")}
    seeds = {"points": nn.Parameter(torch.randn(1, 3, WIDTH)), "seed": nn.Parameter(torch.randn(1, 1, WIDTH))}
    return Lambda(forward, **parts, **seeds, head=nn.Linear(WIDTH, 2)), (points(),)


@FAMILIES("perceiver")
def perceiver() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = self.latents.expand(x.shape[0], -1, -1)
        for cross, own in zip(self.cross, self.own, strict=True):
            z = cross(z, x)
            z = own(z, z)
        return self.head(z.mean(1))

    parts = {n: nn.ModuleList(Pool() for _ in range(2)) for n in ("cross", "own")}
    return Lambda(forward, latents=nn.Parameter(torch.randn(1, 4, WIDTH)), **parts, head=nn.Linear(8, 2)), (points(),)


@FAMILIES("slot attention")
def slots() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        s = self.start.expand(x.shape[0], -1, -1)
        k, v = self.k(x), self.v(x)
        for _ in range(2):
            weight = (self.q(s) @ k.transpose(1, 2)).softmax(1) + 1e-6
            update = (weight / weight.sum(-1, keepdim=True)) @ v
            s = self.cell(update.flatten(0, 1), s.flatten(0, 1)).view_as(s)
        return self.head(s)

    parts = {n: nn.Linear(WIDTH, WIDTH) for n in "qkv"}
    model = Lambda(
        forward, start=nn.Parameter(torch.randn(1, 3, 8)), **parts, cell=nn.GRUCell(8, 8), head=nn.Linear(8, 2)
    )
    return model, (points(),)


def _process(kind: str) -> Built:
    def forward(self: nn.Module, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        r = self.encoder(torch.cat([x, y], -1))
        if kind == "attentive":
            q, k = self.place(target), self.place(x)
            r = (q @ k.transpose(1, 2) / 3).softmax(-1) @ r
        else:
            r = r.mean(1, keepdim=True).expand(-1, target.shape[1], -1)
        return self.decoder(torch.cat([r, target], -1))

    parts = {"encoder": mlp(3, 16, 8), "decoder": mlp(10, 16, 2), "place": nn.Linear(2, 8)}
    return Lambda(forward, **parts), (points(2), points(1), vectors(4, 2))


FAMILIES("neural process, conditional")(lambda: _process("conditional"))
FAMILIES("neural process, attentive")(lambda: _process("attentive"))


@FAMILIES("PointNet with an input transform")
def pointnet() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        turn = self.transform(self.local(x).amax(1)).unflatten(-1, (3, 3)) + torch.eye(3)
        h = self.shared((x @ turn).transpose(1, 2))
        return self.head(h.max(-1)[0])

    shared = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1))
    return Lambda(forward, local=mlp(3, 8, 8), transform=nn.Linear(8, 9), shared=shared, head=mlp(16, 8, 2)), (
        points(3),
    )


@FAMILIES("dynamic graph of nearest neighbours (DGCNN)")
def dgcnn() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for layer in self.layers:
            near = torch.cdist(x, x).topk(3, largest=False).indices
            rows = torch.arange(x.shape[0])[:, None, None]
            there = x[rows, near]
            x = layer(torch.cat([x[:, :, None].expand_as(there), there - x[:, :, None]], -1)).amax(2)
        return self.head(x.amax(1))

    return Lambda(forward, layers=nn.ModuleList([mlp(6, 8, 8), mlp(16, 8, 8)]), head=nn.Linear(8, 2)), (points(3),)


@FAMILIES("relation network")
def relation() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        n = x.shape[1]
        pairs = torch.cat([x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1)], -1)
        return self.f(self.g(pairs).sum((1, 2)))

    return Lambda(forward, g=mlp(2 * WIDTH, 16, 8), f=mlp(8, 8, 2)), (points(),)


@FAMILIES("siamese, absolute difference")
def siamese() -> Built:
    def forward(self: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.body(a) - self.body(b)).abs())

    return Lambda(forward, body=mlp(WIDTH, 16, 8), head=nn.Linear(8, 1)), (vectors(WIDTH), vectors(WIDTH))


@FAMILIES("siamese, pairwise distance")
def distance() -> Built:
    def forward(self: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return F.pairwise_distance(self.body(a), self.body(b))

    return Lambda(forward, body=mlp(WIDTH, 16, 8)), (vectors(WIDTH), vectors(WIDTH))


@FAMILIES("prototypical network")
def prototypes() -> Built:
    def forward(self: nn.Module, support: Tensor, query: Tensor) -> Tensor:
        centre = self.body(support).mean(2)
        return -torch.cdist(self.body(query), centre).square()

    return Lambda(forward, body=mlp(WIDTH, 16, 8)), (vectors(4, 5, WIDTH), vectors(3, WIDTH))


@FAMILIES("matching network, cosine")
def matching() -> Built:
    def forward(self: nn.Module, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        a, b = F.normalize(self.body(query), dim=-1), F.normalize(self.body(support), dim=-1)
        return (10 * a @ b.transpose(1, 2)).softmax(-1) @ F.one_hot(labels, 3).float()

    example = (vectors(5, WIDTH), torch.randint(0, 3, (BATCH, 5)), vectors(2, WIDTH))
    return Lambda(forward, body=mlp(WIDTH, 16, 8)), example


@FAMILIES("cosine head (ArcFace)")
def cosine() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return 16.0 * F.linear(F.normalize(self.body(x)), F.normalize(self.weight))

    return Lambda(forward, body=mlp(WIDTH, 16, 8), weight=nn.Parameter(torch.randn(4, 8))), (vectors(WIDTH),)


@FAMILIES("contrastive pair (CLIP head)")
def clip() -> Built:
    def forward(self: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        u, v = (F.normalize(f(x), dim=-1) for f, x in ((self.a, a), (self.b, b)))
        return self.scale.exp() * u @ v.T

    parts = {"a": mlp(WIDTH, 16, 8), "b": mlp(5, 16, 8), "scale": nn.Parameter(torch.tensor(1.0))}
    return Lambda(forward, **parts), (vectors(WIDTH), vectors(5))


@FAMILIES("radial basis functions")
def radial() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        squared = (x[:, None] - self.centres).square().sum(-1)
        return self.head(torch.exp(-squared * self.precision.exp()))

    weights = {"centres": nn.Parameter(torch.randn(6, WIDTH)), "precision": nn.Parameter(torch.full((6,), -2.0))}
    return Lambda(forward, **weights, head=nn.Linear(6, 2)), (vectors(WIDTH),)


@FAMILIES("radial basis functions, cdist")
def radial_cdist() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(torch.exp(-0.3 * torch.cdist(x, self.centres)))

    return Lambda(forward, centres=nn.Parameter(torch.randn(6, WIDTH)), head=nn.Linear(6, 2)), (vectors(WIDTH),)


@FAMILIES("learned vector quantisation (soft)")
def lvq() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return -(torch.einsum("bi,io->bo", x, self.metric)[:, None] - self.codes).square().sum(-1)

    weights = {"metric": nn.Parameter(torch.randn(WIDTH, 4)), "codes": nn.Parameter(torch.randn(5, 4))}
    return Lambda(forward, **weights), (vectors(WIDTH),)


@FAMILIES("optimal transport layer (Sinkhorn)")
def sinkhorn() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        p = self.score(x)
        for _ in range(3):
            p = p - p.logsumexp(1, keepdim=True)
            p = p - p.logsumexp(2, keepdim=True)
        return self.head(p.exp().transpose(1, 2) @ x)

    return Lambda(forward, score=mlp(WIDTH, 16, 4), head=nn.Linear(WIDTH, 2)), (points(),)
