"""What two processes do in test_distributed.py: importable, as each of them is started with nothing of the test."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from propagauss.errors import InputError
from propagauss.posteriors import Posterior, fit_laplace

Data = list[tuple[Tensor, Tensor]]
# What the server that processes are forked from imports once for all of them. It does not find modules of the tests
# (Python 3.11 does not tell it where they are), and says nothing.
# PyTorch imports the second one, and sympy with it, at the first derivative.
PRELOADED = ["propagauss.posteriors", "torch.fx.experimental.symbolic_shapes"]
POINTS = 11


class Branching(nn.Module):
    """Batches of odd and of even size go through different layers, so two ranks may not see the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(3, 4), nn.Linear(3, 4), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x) * self.scale if len(x) % 2 else self.right(x)))


class Untrained(nn.Module):
    """What no gradient reaches: a row of padding (2), and a layer behind no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.features = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.features(x)
        words = nn.functional.embedding(x.sign().long() + 1, self.table, padding_idx=2)
        return self.head(torch.tanh(features + words.mean(1)))


def network(kind: str, outputs: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("branches", "untrained"):
        return (Branching() if kind == "branches" else Untrained()).to(dtype).eval()
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype).eval()


def data(likelihood: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(POINTS, 3, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        return x.to(dtype), torch.randint(3, (POINTS,), generator=generator)
    return x.to(dtype), x[:, :1].sin().to(dtype)


def batches(x: Tensor, y: Tensor, size: int = 2) -> Data:
    return list(zip(x.split(size), y.split(size), strict=True)) if len(x) else []


# name -> kind of model, likelihood, structure, points on rank 0, options
CASES: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    f"{likelihood} {structure} {first}": ("mlp", likelihood, structure, first, {})
    for likelihood in ("classification", "regression")
    for structure in ("diagonal", "kronecker", "full")
    for first in (7, POINTS, 0)
} | {
    "branches": ("branches", "classification", "kronecker", 5, {}),
    "untrained, diagonal": ("untrained", "classification", "diagonal", 0, {}),
    "untrained, kronecker": ("untrained", "classification", "kronecker", 0, {}),
    "untrained, full": ("untrained", "classification", "full", 0, {}),
    "chosen prior": ("mlp", "regression", "full", 7, {"prior_precision": "marginal_likelihood"}),
    "chosen noise": ("mlp", "regression", "kronecker", 4, {"noise": "marginal_likelihood"}),
    "single precision, diagonal": ("mlp", "classification", "diagonal", 7, {"dtype": torch.float32}),
    "single precision, kronecker": ("mlp", "classification", "kronecker", 7, {"dtype": torch.float32}),
    "single precision, full": ("mlp", "classification", "full", 7, {"dtype": torch.float32}),
}


def fit(name: str, rank: int | None) -> Posterior:
    """A case on one rank of two, or for `None` in a single process."""
    kind, likelihood, structure, first, options = CASES[name]
    options = {"prior_precision": 0.7} | ({"noise": 0.4} if likelihood == "regression" else {}) | options
    dtype = options.pop("dtype", torch.float64)
    x, y = data(likelihood, dtype)
    model = network(kind, 3 if likelihood == "classification" else 1, dtype)
    size = 6 if kind == "branches" else 2
    parts = [batches(x[:first], y[:first], size), batches(x[first:], y[first:], size)]
    mine = parts[0] + parts[1] if rank is None else parts[rank]
    return fit_laplace(model, mine, likelihood, structure, distributed=rank is not None, **options)  # type: ignore[arg-type]


def warned(name: str, rank: int | None) -> tuple[Posterior, list[str]]:
    """A case, and what it says of parameters that it learnt nothing about."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        posterior = fit(name, rank)
    return posterior, [str(w.message) for w in found if "say nothing" in str(w.message)]


def other_weights(rank: int) -> None:
    model = network("mlp", 3)
    with torch.no_grad():
        model[0].weight[1, 2] += 1e-9 * rank
    fit_laplace(model, batches(*data("classification")), distributed=True)


def other_statistics(rank: int) -> None:
    model = network("mlp", 3)
    model[1].running_mean += rank
    fit_laplace(model, batches(*data("classification")), distributed=True)


def other_structure(rank: int) -> None:
    structure = ("diagonal", "full")[rank]
    fit_laplace(network("mlp", 3), batches(*data("classification")), structure=structure, distributed=True)


def other_model(rank: int) -> None:
    model = network(("mlp", "branches")[rank], 3)
    fit_laplace(model, batches(*data("classification")), parameters="*", distributed=True)


def bad_data(rank: int) -> None:
    x, y = data("classification")
    fit_laplace(network("mlp", 3), batches(x, y + 5 * rank), distributed=True)


def bad_option(rank: int) -> None:
    fit_laplace(network("mlp", 3), batches(*data("classification")), prior_precision=1.0 - 2 * rank, distributed=True)


def no_data(rank: int) -> None:
    fit_laplace(network("mlp", 3), [], distributed=True)


def outside_of_the_group(rank: int) -> None:
    first = dist.new_group([0])
    fit_laplace(network("mlp", 3), batches(*data("classification")), distributed=first)  # type: ignore[arg-type]
    raise InputError("only a member of the group gets here")


FAILURES = (
    other_weights,
    other_statistics,
    other_structure,
    other_model,
    bad_data,
    bad_option,
    no_data,
    outside_of_the_group,
)


def work(rank: int, folder: str) -> None:
    """All cases and all failures, one after the other, on one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{path / 'store'}", rank=rank, world_size=2)
    messages: dict[str, str] = {}
    for failure in FAILURES:
        try:
            failure(rank)
        except InputError as error:
            messages[failure.__name__] = str(error)
    said: dict[str, list[str]] = {}
    for name in CASES:
        posterior, said[name] = warned(name, rank)
        posterior.save(path / f"{name} on {rank}.safetensors")
    path.joinpath(f"{rank}.json").write_text(json.dumps(messages | said))
    dist.destroy_process_group()
