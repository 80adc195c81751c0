"""Feed-forward models as people write them, with inputs and posteriors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import propagauss as pg
from posteriors.cases import make_posterior


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.out(h + F.relu(self.second(h))) + x[:, :2]


class Dense(nn.Module):
    """Every layer sees the outputs of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 2), nn.Linear(7, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.silu(layer(x))], dim=-1)
        return x


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.relu(self.left(x) + self.right(y)))


class Heads(nn.Module):
    """Several outputs: nested containers, an index, and an input handed through."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body, self.mean, self.stddev = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.body(x))
        mean, stddev = self.mean(h), F.softplus(self.stddev(h))
        if self.form == "tuple":
            return mean, stddev
        if self.form == "dict":
            return {"mean": mean, "stddev": stddev, "input": x}
        return {"both": (mean, [stddev]), "label": mean.argmax(-1), "none": None}


class TiedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.offset)


class TiedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(self.first(x))))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.relu_()
        h += 0.5
        h[:, 0] *= 2
        return self.second(h).mul_(0.3).add_(h)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.tensor([0.1, -0.4, 0.9]))
        self.register_buffer("width", torch.tensor([1.5, 0.7, 2.0]), persistent=False)
        self.register_buffer("order", torch.tensor([1, 0]))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x - self.centre) / self.width)[:, self.order] * self.width[:2]


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((3, 4), (3, 4), (4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixer(nn.Module):
    """Layers over positions and over features of `[B, T, D]`, then the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.features, self.out = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(x.transpose(1, 2)).transpose(1, 2)
        x = x + F.gelu(self.features(x))
        return self.out(x.mean(1))


class OwnParameters(nn.Module):
    """A scale, an offset and a temperature next to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))
        self.temperature = nn.Parameter(torch.tensor([1.7]))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x * self.scale) + self.offset) / self.temperature


class Options(nn.Module):
    """Ordinary Python: keyword arguments, loops, a branch on a setting."""

    def __init__(self, repeats: int = 2) -> None:
        super().__init__()
        self.layer, self.repeats = nn.Linear(3, 3), repeats

    def forward(self, x: Tensor, *, power: float = 2.0, mask: Tensor | None = None) -> Tensor:
        for _ in range(self.repeats):
            x = torch.sigmoid(self.layer(x))
        if mask is not None:
            x = x * mask
        return x**power


def frozen() -> nn.Module:
    model = mlp(nn.Tanh())
    model[0].requires_grad_(False)
    return model


def normalised() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    return nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def mlp(activation: nn.Module, hidden: int = 4, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4, **options), activation, nn.Linear(hidden, 2, **options))


@dataclass(frozen=True)
class Model:
    """A model and its positional inputs (their event shapes); `names` restricts the posterior."""

    make: Callable[[], nn.Module]
    events: tuple[tuple[int, ...], ...] = ((3,),)
    names: tuple[str, ...] | None = None


MODELS: dict[str, Model] = {
    "MLP": Model(lambda: mlp(nn.ReLU())),
    "one layer": Model(lambda: nn.Linear(3, 2)),
    "without bias": Model(lambda: mlp(nn.Tanh(), bias=False)),
    "nested": Model(
        lambda: nn.Sequential(
            nn.Identity(), nn.Sequential(mlp(nn.ReLU()), nn.Sequential(nn.ELU(), nn.Linear(2, 3))), nn.Tanh()
        )
    ),
    "images": Model(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
        ((3, 2, 2),),
    ),
    "skip": Model(Skip),
    "dense": Model(Dense),
    "two inputs": Model(TwoInputs, ((3,), (2,))),
    "tuple": Model(lambda: Heads("tuple")),
    "dict": Model(lambda: Heads("dict")),
    "nested outputs": Model(lambda: Heads("nested")),
    "tied decoder": Model(TiedDecoder),
    "tied twice": Model(TiedTwice),
    "frozen": Model(frozen, names=("2.weight", "2.bias")),
    "in-place": Model(InPlace),
    "in-place activations": Model(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ELU(inplace=True))
    ),
    "normalised": Model(normalised),
    "normalisation only": Model(normalised, names=("1.weight", "1.bias")),
    "softmax": Model(lambda: nn.Sequential(mlp(nn.ReLU()), nn.Softmax(-1))),
    "log-softmax": Model(lambda: nn.Sequential(mlp(nn.ReLU()), nn.LogSoftmax(-1))),
    "buffers": Model(Buffers),
    "SwiGLU": Model(SwiGLU),
    "sequence": Model(lambda: mlp(nn.ReLU()), ((2, 3),)),
    "mixer": Model(Mixer, ((2, 3),)),
    "own parameters": Model(OwnParameters),
    "one number": Model(lambda: nn.Sequential(mlp(nn.Tanh()), nn.Linear(2, 1), nn.Flatten(0))),
    "Python": Model(Options),
    "last layer": Model(lambda: mlp(nn.ReLU()), names=("2.weight", "2.bias")),
    "only biases": Model(lambda: mlp(nn.ReLU()), names=("0.bias", "2.bias")),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name].make().to(dtype).eval()


def inputs(name: str, dtype: torch.dtype = torch.float64, batch: int = 3) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn((batch, *e), generator=generator, dtype=torch.float64).to(dtype) for e in MODELS[name].events
    )


def posterior_for(
    model: nn.Module, kind: str, names: tuple[str, ...] | None = None, scale: float = 0.1
) -> pg.Posterior:
    named = {n: p.detach() for n, p in model.named_parameters()}
    return make_posterior(kind, {n: named[n] for n in names or named}, scale)[0]


def leaves(output: Any) -> list[Any]:
    return pytree.tree_leaves(output, is_leaf=lambda v: isinstance(v, pg.Gaussian))


def assert_same_mean(output: Any, expected: Any, **tolerance: float) -> None:
    """Same structure; a Gaussian wherever the model returns floating-point numbers, the value itself elsewhere."""
    got, want = leaves(output), pytree.tree_leaves(expected)
    assert len(got) == len(want)
    bare = pytree.tree_map_only(pg.Gaussian, lambda g: 0, output, is_leaf=lambda v: isinstance(v, pg.Gaussian))
    assert pytree.tree_structure(bare) == pytree.tree_structure(expected)
    for g, e in zip(got, want, strict=True):
        if isinstance(e, Tensor) and e.is_floating_point():
            assert isinstance(g, pg.Gaussian)
            torch.testing.assert_close(g.mean, e.detach(), **tolerance)
            assert g.variance.shape == e.shape and g.variance.dtype == e.dtype
            assert g.variance.isfinite().all() and (g.variance >= 0).all()
        else:
            assert torch.equal(g, e) if isinstance(e, Tensor) else g == e


TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-13}}
