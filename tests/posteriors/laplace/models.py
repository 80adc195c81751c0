"""Models with every way in which a parameter can take part in a forward pass, and explicit Jacobians of them."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Custom(nn.Module):
    """Functional calls, a skip connection, a bare matmul, in-place activations, a scale that is no layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(6, 4, bias=False)))
        self.mix = nn.Parameter(torch.randn(4, 5) / 2)
        self.scale = nn.Parameter(torch.rand(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = (x + self.inner(x)) @ self.mix
        return F.linear((h * self.scale).tanh_(), self.head.weight, self.head.bias)


class Shared(nn.Module):
    """One layer applied twice, and one weight held by two layers with biases of their own."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(torch.tanh(self.second(torch.tanh(self.first(h)))))


class Sequence(nn.Module):
    """Tokens to a pooled prediction; `turned` puts time before batch, and the batch is as large as the sequence."""

    def __init__(self, turned: bool = False, folded: bool = False):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)
        self.turned, self.folded = turned, folded

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h.transpose(0, 1) if self.turned else h
        shape = h.shape[:2]
        h = h.reshape(-1, 4) if self.folded else h
        h = torch.tanh(self.body(h)).reshape(*shape, 5)
        return self.head(self.norm(h.mean(0 if self.turned else 1)))


class Conv1D(nn.Module):
    """GPT-2's linear layer: addmm with a weight stored as [in, out], on folded positions."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5) / 2), nn.Parameter(torch.randn(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = torch.addmm(self.bias, x.view(-1, 4), self.weight).view(*x.shape[:-1], 5)
        return SimpleNamespace(logits=self.head(torch.tanh(h).mean(1)))


class Inputless(nn.Module):
    """Parameters as the inputs of layers: the same for all samples, and once multiplied with itself."""

    def __init__(self):
        super().__init__()
        self.query, self.square = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 4) / 2)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        keys = self.body(self.query).mean(0)
        return self.head(torch.tanh((self.body(x) + keys) @ F.linear(self.square, self.square)))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(2, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, a, b, scale=1.0):
        return self.head(torch.tanh(self.left(a) + scale * self.right(b)))


class Recurrent(nn.Module):
    """torch.vmap refuses the LSTM, so its gradients come one sample at a time."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def images(*layers):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


X, TOKENS, IMAGES = torch.randn(6, 4), torch.randint(0, 7, (6, 6)), torch.randn(6, 2, 5, 5)
CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), X),
    "norms": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Linear(6, 3)),
        X,
    ),
    "custom": (Custom, X),
    "shared": (Shared, X),
    "inputless": (Inputless, X),
    "sequence": (Sequence, TOKENS),
    "time first": (lambda: Sequence(turned=True), TOKENS),
    "time first, folded": (lambda: Sequence(turned=True, folded=True), TOKENS),
    "batch first, folded": (lambda: Sequence(folded=True), TOKENS),
    "addmm": (Conv1D, torch.randn(6, 2, 4)),
    "tuple": (TwoInputs, (X, torch.randn(6, 2))),
    "dict": (TwoInputs, {"a": X, "b": torch.randn(6, 2), "scale": 0.7}),
    "lstm": (Recurrent, torch.randn(6, 2, 4)),
    "convolution": (lambda: images(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU()), IMAGES),
    "grouped": (lambda: images(nn.Conv2d(2, 4, (3, 2), dilation=2, groups=2, padding="same"), nn.Tanh()), IMAGES),
    "circular": (lambda: images(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Tanh()), IMAGES),
}


def make(name: str, seed: int = 0):
    torch.manual_seed(seed)
    build, x = CASES[name]
    model = build().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(), module.running_var.uniform_(0.5, 2)
    x = map_tensors(x, lambda t: t.double() if t.is_floating_point() else t)
    return model, x


def map_tensors(x, f):
    if isinstance(x, tuple):
        return tuple(map_tensors(t, f) for t in x)
    if isinstance(x, dict):
        return {k: map_tensors(t, f) for k, t in x.items()}
    return f(x) if isinstance(x, Tensor) else x


def call(model, x, parameters=None):
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    out = torch.func.functional_call(model, parameters or {}, args, kwargs)
    return getattr(out, "logits", out)


def loader(x, y, size=4):
    spans = [slice(i, i + size) for i in range(0, len(y), size)]
    return [(map_tensors(x, lambda t, s=s: t[s]), y[s]) for s in spans]


def jacobians(model, x, count: int, names) -> list[Tensor]:
    """`[C, P]` for each sample on its own, by one backward pass per output."""
    found = []
    for i in range(count):
        chosen = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if n in names}
        out = call(model, map_tensors(x, lambda t, i=i: t[i : i + 1]), chosen).reshape(-1)
        rows = [torch.autograd.grad(o, list(chosen.values()), retain_graph=True, allow_unused=True) for o in out]
        zeros = [torch.zeros_like(p) for p in chosen.values()]
        flat = [torch.cat([(z if g is None else g).flatten() for g, z in zip(r, zeros, strict=True)]) for r in rows]
        found.append(torch.stack(flat))
    return found


def dense_ggn(model, x, count: int, likelihood: str, names=None) -> Tensor:
    names = names or [n for n, _ in model.named_parameters()]
    total = 0
    for i, j in enumerate(jacobians(model, x, count, names)):
        hessian = torch.eye(j.shape[0], dtype=j.dtype)
        if likelihood == "classification":
            p = call(model, map_tensors(x, lambda t, i=i: t[i : i + 1])).detach().softmax(-1)[0]
            hessian = torch.diag(p) - torch.outer(p, p)
        total = total + j.T @ hessian @ j
    return total


def targets(likelihood: str, count: int = 6) -> Tensor:
    torch.manual_seed(5)
    return torch.randint(0, 3, (count,)) if likelihood == "classification" else torch.randn(count, 3).double()
