"""Recommenders: embeddings of sparse features, their products, and sequences of what was seen before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp, vectors

FAMILIES = Register("recommender")
FIELDS, ITEMS, WIDTH = 4, 20, 6


def fields() -> Tensor:
    return torch.randint(0, ITEMS, (BATCH, FIELDS))


@FAMILIES("DLRM, embedding bags")
def dlrm() -> Built:
    def forward(self: nn.Module, x: Tensor, bags: Tensor) -> Tensor:
        dense = self.bottom(x)
        parts = torch.stack([dense, *(bag(bags[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat([dense, products[:, rows, columns]], -1))

    bags = nn.ModuleList(nn.EmbeddingBag(ITEMS, WIDTH, mode="sum") for _ in range(2))
    model = Lambda(forward, bags=bags, bottom=mlp(5, 8, WIDTH), top=mlp(WIDTH + 3, 8, 1))
    return model, (vectors(5), torch.randint(0, ITEMS, (BATCH, 2, 3)))


def _bag(mode: str) -> Built:
    return nn.Sequential(nn.EmbeddingBag(ITEMS, WIDTH, mode=mode), mlp(WIDTH, 8, 1)), (fields(),)


FAMILIES("fastText, mean of a bag")(lambda: _bag("mean"))
FAMILIES("maximum of a bag")(lambda: _bag("max"))


@FAMILIES("factorisation machine")
def machine() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        v = self.embedding(x)
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(-1, keepdim=True)
        return self.linear(x).sum(1) + pairs + self.bias

    parts = {"embedding": nn.Embedding(ITEMS, WIDTH), "linear": nn.Embedding(ITEMS, 1)}
    return Lambda(forward, **parts, bias=nn.Parameter(torch.zeros(1))), (fields(),)


@FAMILIES("DeepFM")
def deep_fm() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        v = self.embedding(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
        return torch.sigmoid(self.linear(x).sum(1) + pairs + self.deep(v.flatten(1)))

    parts = {"embedding": nn.Embedding(ITEMS, WIDTH), "linear": nn.EmbeddingBag(ITEMS, 1, mode="sum")}
    parts["linear"] = nn.Embedding(ITEMS, 1)
    return Lambda(forward, **parts, deep=mlp(FIELDS * WIDTH, 16, 1)), (fields(),)


@FAMILIES("wide and deep")
def wide_and_deep() -> Built:
    def forward(self: nn.Module, x: Tensor, dense: Tensor) -> Tensor:
        wide = F.one_hot(x, ITEMS).float().flatten(1)
        return self.wide(wide) + self.deep(torch.cat([self.embedding(x).flatten(1), dense], -1))

    parts = {"wide": nn.Linear(FIELDS * ITEMS, 1), "embedding": nn.Embedding(ITEMS, WIDTH)}
    return Lambda(forward, **parts, deep=mlp(FIELDS * WIDTH + 5, 16, 1)), (fields(), vectors(5))


@FAMILIES("compressed interactions (xDeepFM)")
def xdeepfm() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        start = h = self.embedding(x)
        pooled = []
        for layer in self.layers:
            outer = torch.einsum("bhd,bmd->bhmd", h, start).flatten(1, 2)
            h = torch.relu(layer(outer))
            pooled.append(h.sum(-1))
        return self.head(torch.cat(pooled, -1))

    layers = nn.ModuleList([nn.Conv1d(FIELDS * FIELDS, 5, 1), nn.Conv1d(5 * FIELDS, 5, 1)])
    return Lambda(forward, embedding=nn.Embedding(ITEMS, WIDTH), layers=layers, head=nn.Linear(10, 1)), (fields(),)


@FAMILIES("attention over fields (AutoInt)")
def autoint() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h = torch.relu(self.attention(h, h, h, need_weights=False)[0] + self.residual(h))
        return self.head(h.flatten(1))

    parts = {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True), "residual": nn.Linear(WIDTH, WIDTH)}
    model = Lambda(forward, embedding=nn.Embedding(ITEMS, WIDTH), **parts, head=nn.Linear(FIELDS * WIDTH, 1))
    return model, (fields(),)


@FAMILIES("two towers, cosine")
def towers() -> Built:
    def forward(self: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        u, v = self.user(self.embedding(user)), self.item(self.embedding(item))
        return F.cosine_similarity(u, v, dim=-1)[:, None] * self.scale.exp()

    parts = {"user": mlp(WIDTH, 8, 8), "item": mlp(WIDTH, 8, 8), "scale": nn.Parameter(torch.zeros(()))}
    ids = torch.randint(0, ITEMS, (2, BATCH))
    return Lambda(forward, embedding=nn.Embedding(ITEMS, WIDTH), **parts), (ids[0], ids[1])


@FAMILIES("matrix factorisation with biases")
def factorisation() -> Built:
    def forward(self: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        product = (self.users(user) * self.items(item)).sum(-1, keepdim=True)
        return product + self.user_bias(user) + self.item_bias(item) + self.bias

    parts = {n: nn.Embedding(ITEMS, d) for n, d in (("users", 6), ("items", 6), ("user_bias", 1), ("item_bias", 1))}
    ids = torch.randint(0, ITEMS, (2, BATCH))
    return Lambda(forward, **parts, bias=nn.Parameter(torch.zeros(1))), (ids[0], ids[1])


@FAMILIES("neural collaborative filtering")
def ncf() -> Built:
    def forward(self: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        product = self.users(user) * self.items(item)
        deep = self.mlp(torch.cat([self.users2(user), self.items2(item)], -1))
        return self.head(torch.cat([product, deep], -1))

    parts = {n: nn.Embedding(ITEMS, WIDTH) for n in ("users", "items", "users2", "items2")}
    ids = torch.randint(0, ITEMS, (2, BATCH))
    return Lambda(forward, **parts, mlp=mlp(12, 8, 6), head=nn.Linear(12, 1)), (ids[0], ids[1])


@FAMILIES("interest network (DIN)")
def din() -> Built:
    def forward(self: nn.Module, history: Tensor, target: Tensor) -> Tensor:
        h, t = self.embedding(history), self.embedding(target)[:, None].expand(-1, 5, -1)
        weight = self.attention(torch.cat([h, t, h - t, h * t], -1))
        return self.head(torch.cat([(weight * h).sum(1), t[:, 0]], -1))

    parts = {"attention": mlp(4 * WIDTH, 8, 1, activation=nn.PReLU), "head": mlp(2 * WIDTH, 8, 1, activation=nn.PReLU)}
    example = (torch.randint(0, ITEMS, (BATCH, 5)), torch.randint(0, ITEMS, (BATCH,)))
    return Lambda(forward, embedding=nn.Embedding(ITEMS, WIDTH), **parts), example


@FAMILIES("self-attentive sequence (SASRec)")
def sasrec() -> Built:
    def forward(self: nn.Module, history: Tensor) -> Tensor:
        h = self.embedding(history) + self.position.weight
        h = self.encoder(h, mask=nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)
        return h[:, -1] @ self.embedding.weight.T

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    parts = {"embedding": nn.Embedding(ITEMS, 8), "position": nn.Embedding(5, 8)}
    model = Lambda(forward, **parts, encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return model, (torch.randint(0, ITEMS, (BATCH, 5)),)


@FAMILIES("multi-gate mixture of experts (MMoE)")
def mmoe() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        experts = torch.stack([e(x) for e in self.experts], 1)
        tasks = [(gate(x).softmax(-1)[..., None] * experts).sum(1) for gate in self.gates]
        return torch.cat([head(t) for head, t in zip(self.heads, tasks, strict=True)], -1)

    parts = {
        "experts": nn.ModuleList(mlp(5, 8, 8) for _ in range(3)),
        "gates": nn.ModuleList(nn.Linear(5, 3) for _ in range(2)),
        "heads": nn.ModuleList(nn.Linear(8, 1) for _ in range(2)),
    }
    return Lambda(forward, **parts), (vectors(5),)


@FAMILIES("graph collaborative filtering (LightGCN)")
def lightgcn() -> Built:
    def forward(self: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        h = total = self.embedding.weight
        for _ in range(2):
            h = self.adjacency @ h
            total = total + h
        return (total[user] * total[item]).sum(-1, keepdim=True)

    model = Lambda(forward, embedding=nn.Embedding(ITEMS, WIDTH))
    model.register_buffer("adjacency", torch.rand(ITEMS, ITEMS).softmax(-1))
    ids = torch.randint(0, ITEMS, (2, BATCH))
    return model, (ids[0], ids[1])
