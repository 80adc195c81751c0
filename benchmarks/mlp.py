"""A 784-128-64-10 ReLU MLP under each posterior structure, against other ways to predict with the same posterior."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

import propagauss as pg
from benchmarks import formulas, peers
from benchmarks.case import Case, Faster, Method, Predict, SkipMethod
from benchmarks.low_rank import TOLERANCE, described, sd_error

SIZES = (784, 128, 64, 10)
SMALL = (16, 32, 16, 4)
BATCHES = (1, 64, 1024)
SAMPLES = 100
JACOBIANS_UP_TO = 64  # the Jacobians of a GLM take [batch, outputs, parameters]: 4.5 GB at batch 1024

# The limits that the streamlined network is to keep in eager mode, by batch size: ratios to the plain forward,
DIAGONAL_LIMITS = {1: 3.4, 64: 2.9, 1024: 2.7}
KRONECKER_FULL_LIMITS = {1: 9.0, 64: 36.0}
LOW_RANK_LIMITS = {64: 2.0, 1024: 1.6}
EXACT, EXACT_KRONECKER = {1: 4.0, 64: 4.0, 1024: 5.0}, 12.0  # of the linearised network, whole covariance
# and how many times faster it is to be than others.
SUQ, GLM = "suq", "laplace-torch GLM"
FASTER = {SUQ: {1: 4.0, 64: 2.0, 1024: 1.4}, GLM: {1: 20.0, 64: 500.0}}
LINEARISED = 'linearised, covariance="full"'
EXACT_FASTER = {1: 20.0, 64: 800.0}  # than laplace-torch's GLM, which is the same number
ONE_OUTPUT = (*SIZES[:-1], 1)
EXACT_ONE_OUTPUT = {64: 3.3}

Sizes = tuple[int, ...]
Structure = Literal["diagonal", "kronecker", "full"]
Peer = Literal["diag", "kron", "full"]


# -- models, data and posteriors, each made once


@cache
def data(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Classes around centres in a few directions: inputs with a falling spectrum, as real ones have.

    The spectrum of the inputs decides the eigenvalues of Kronecker factors, and with them the cost of that structure.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, sizes[-1], (512,), generator=generator)
    centres = torch.randn(sizes[-1], sizes[0], generator=generator)
    directions = torch.randn(sizes[0], sizes[0], generator=generator) / torch.arange(1, sizes[0] + 1).unsqueeze(1)
    return centres[labels] + torch.randn(512, sizes[0], generator=generator) @ directions, labels


@cache
def trained(sizes: Sizes) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = data(sizes)
    with torch.enable_grad():
        for _ in range(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model.eval()


@cache
def posterior(sizes: Sizes, structure: Structure) -> pg.Posterior:
    return pg.fit_laplace(trained(sizes), [data(sizes)], structure=structure, progress=False)


@cache
def laplace(sizes: Sizes, structure: Peer) -> Any:
    # few samples: its diagonal fit takes a second for every 20, and no timing depends on what it finds
    x, y = data(sizes)
    return peers.laplace(trained(sizes), (x[:32], y[:32]), structure)


@cache
def streamlined(sizes: Sizes, structure: Structure, covariance: Literal["diagonal", "full"]) -> pg.Streamlined:
    return pg.streamline(trained(sizes), posterior(sizes, structure), data(sizes)[0][:2], covariance=covariance)


@cache
def linearised(sizes: Sizes, structure: Structure, covariance: Literal["diagonal", "full"]) -> pg.Streamlined:
    """The exact engine: `J Σ Jᵀ` in one sweep backwards."""
    return pg.linearise(trained(sizes), posterior(sizes, structure), data(sizes)[0][:2], covariance=covariance)


@cache
def low_rank(sizes: Sizes) -> pg.Streamlined:
    """The diagonal posterior, with low-rank variances: ranks found on the first inputs."""
    own, x = posterior(sizes, "diagonal"), data(sizes)[0]
    return described(lambda: pg.streamline(trained(sizes), own, x[:128], variance_tolerance=TOLERANCE))


def inputs(sizes: Sizes, batch: int) -> Tensor:
    x = data(sizes)[0]
    return x.repeat(-(-batch // len(x)), 1)[:batch].clone()


# -- ways to predict


def by_hand(sizes: Sizes) -> Predict:
    names = [name for name, _ in trained(sizes).named_parameters()]
    return formulas.diagonal(trained(sizes), {n: posterior(sizes, "diagonal").variance(n).clone() for n in names})


def by_hand_kronecker(sizes: Sizes) -> Predict:
    """Factors as the paper damps them, from what laplace-torch fitted, with prior precision 1."""
    la = laplace(sizes, "kron")
    inverses = [
        [(q / (lam + 1)) @ q.mT for q, lam in zip(vectors, values, strict=True)]
        for vectors, values in zip(la.H.eigenvectors, la.H.eigenvalues, strict=True)
    ]
    names = [name for name, _ in formulas.linear_layers(trained(sizes))]
    pairs = zip(inverses[::2], inverses[1::2], strict=True)  # weight, bias, weight, bias, ...
    return formulas.kronecker_literal(
        trained(sizes), {n: (*weight, *bias) for n, (weight, bias) in zip(names, pairs, strict=True)}
    )


@cache
def suq_diagonal(sizes: Sizes) -> Predict:
    own = posterior(sizes, "diagonal")
    flat = torch.cat([own.variance(name).flatten() for name, _ in trained(sizes).named_parameters()])
    return peers.suq_diagonal(trained(sizes), flat)


def compiled(sizes: Sizes) -> Predict:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise SkipMethod("torch.compile needs a C++ compiler")
    torch.compiler.reset()
    # a copy: compiling changes how the module is called, also for whoever times it without compilation
    net = pg.streamline(trained(sizes), posterior(sizes, "diagonal"), data(sizes)[0][:2])
    return torch.compile(net, dynamic=False)


def common(sizes: Sizes, structure: Structure, peer: Peer, batch: int) -> list[Method]:
    """The methods that work from any posterior."""
    own: Callable[[], tuple[nn.Module, pg.Posterior]] = lambda: (trained(sizes), posterior(sizes, structure))  # noqa: E731
    large = batch > 1 and sizes == SIZES
    jacobian = [
        Method(GLM, lambda: peers.laplace_glm(laplace(sizes, peer)), heavy=large and peer == "kron"),
        Method("our GLM baseline", lambda: pg.baselines.GLM(*own()), heavy=large and peer == "kron"),
    ]
    sampling = [
        Method(
            f"laplace-torch, {SAMPLES} samples",
            lambda: peers.laplace_samples(laplace(sizes, peer), SAMPLES),
            heavy=large,
        ),
        Method(f"our {SAMPLES} samples", lambda: pg.baselines.MonteCarlo(*own(), samples=SAMPLES), heavy=large),
    ]
    return (jacobian if batch <= JACOBIANS_UP_TO else []) + sampling


# -- cases


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    sizes = tuple(batches or BATCHES)
    small = [b for b in sizes if b <= JACOBIANS_UP_TO]
    return [*map(diagonal, sizes), *map(regression, sizes), *map(kronecker, small), *map(full, small)]


def diagonal(batch: int) -> Case:
    ours = Method(
        "streamlined", lambda: streamlined(SIZES, "diagonal", "diagonal"), limit=DIAGONAL_LIMITS.get(batch), same=True
    )
    exact = partial(streamlined, SIZES, "diagonal", "diagonal")
    methods = [
        Method("count of multiplications", computed=lambda: formulas.diagonal_products(list(SIZES))),
        ours,
        Method(
            f"streamlined, variance_tolerance={TOLERANCE}",
            partial(low_rank, SIZES),
            limit=LOW_RANK_LIMITS.get(batch),
            error=partial(sd_error, exact, lambda: data(SIZES)[0][256:]),
            error_limit=TOLERANCE,
        ),
        Method("streamlined, torch.compile", partial(compiled, SIZES), same=True, heavy=True),
        Method("same formulas by hand", partial(by_hand, SIZES), same=True),
        Method(LINEARISED, lambda: linearised(SIZES, "diagonal", "full"), limit=EXACT.get(batch)),
        Method('linearised, covariance="diagonal"', lambda: linearised(SIZES, "diagonal", "diagonal")),
        Method(SUQ, partial(suq_diagonal, SIZES), same=True, needs_grad=True),
        *common(SIZES, "diagonal", "diag", batch),
    ]
    exact_one = Faster(LINEARISED, GLM, EXACT_FASTER.get(batch))
    return _case("diagonal", SIZES, batch, methods, [*_than_others("streamlined", methods, batch), exact_one])


def regression(batch: int) -> Case:
    """One output: the plain forward is as long, and the exact covariance a single number."""
    methods = [
        Method("streamlined", lambda: pg.streamline(*_one_output())),
        Method("linearised", lambda: pg.linearise(*_one_output()), limit=EXACT_ONE_OUTPUT.get(batch)),
    ]
    title = f"{'-'.join(map(str, ONE_OUTPUT))} ReLU MLP (regression), diagonal posterior, batch {batch}"
    own = partial(inputs, SIZES, batch), lambda: _one_output()[0]
    return Case(f"mlp/regression/{batch}", title, *own, methods)


@cache
def _one_output() -> tuple[nn.Module, pg.Posterior, Tensor]:
    """The same network with one output, and variances that no timing depends on."""
    head = nn.Linear(ONE_OUTPUT[-2], 1)
    model = nn.Sequential(*list(trained(SIZES))[:-1], head).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-4) for n, p in model.named_parameters()})
    return model, posterior, data(SIZES)[0][:2]


def kronecker(batch: int) -> Case:
    methods = [
        Method("count of multiplications", computed=lambda: formulas.kronecker_full_products(list(SIZES))),
        Method(
            'streamlined, covariance="full"',
            lambda: streamlined(SIZES, "kronecker", "full"),
            limit=KRONECKER_FULL_LIMITS.get(batch),
        ),
        Method('streamlined, covariance="diagonal"', lambda: streamlined(SIZES, "kronecker", "diagonal")),
        Method(LINEARISED, lambda: linearised(SIZES, "kronecker", "full"), limit=EXACT_KRONECKER),
        Method(
            "paper's formulas, literally", partial(by_hand_kronecker, SIZES), note="written here, part of no library"
        ),
        Method(
            SUQ, lambda: peers.suq_kronecker(trained(SIZES), laplace(SIZES, "kron")), needs_grad=True, heavy=batch > 1
        ),
        *common(SIZES, "kronecker", "kron", batch),
    ]
    return _case("kronecker", SIZES, batch, methods, _than_others('streamlined, covariance="full"', methods))


def full(batch: int) -> Case:
    methods = [
        Method('streamlined, covariance="full"', lambda: streamlined(SMALL, "full", "full")),
        Method('streamlined, covariance="diagonal"', lambda: streamlined(SMALL, "full", "diagonal")),
        *common(SMALL, "full", "full", batch),
    ]
    return _case("full", SMALL, batch, methods, _than_others('streamlined, covariance="full"', methods))


def _than_others(ours: str, methods: list[Method], batch: int | None = None) -> list[Faster]:
    """Comparisons with every other method; limits, for the batch sizes that have one."""
    others = [m.name for m in methods if m.make is not None and not m.name.startswith(("streamlined", "same"))]
    return [Faster(ours, name, FASTER.get(name, {}).get(batch or 0)) for name in others]


def _case(structure: Structure, sizes: Sizes, batch: int, methods: list[Method], faster: list[Faster]) -> Case:
    title = f"{'-'.join(map(str, sizes))} ReLU MLP, {structure} posterior, batch {batch}"
    own = partial(inputs, sizes, batch), partial(trained, sizes)
    return Case(f"mlp/{structure}/{batch}", title, *own, methods, faster=faster)
