"""The contract that every rule gets by declaring one case, as CONTRIBUTING.md states it: literal loop, Monte Carlo,
zero covariance, batch invariance, positive variances, gradients, export and compile, and that the rule is used.

Tests run case by case (`scope="module"` puts those of one case in a row), so that each network is streamlined once;
networks are exported and compiled a few at a time.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import propagauss as pg
from propagauss.tracing.once import traced_once
from reference import assert_covariance_close, linearised, monte_carlo, random_psd
from rules.cases import CASES, Call, Case
from rules.together import compiled, exported

SAMPLES = 20_000
# cases of the diagonal structure alone come last, which is when pytest runs them
PAIRS = sorted(((c, s) for c in CASES for s in c.structures), key=lambda pair: pair[0].structures == ("diagonal",))
ALL = [pytest.param(c, s, id=f"{c.name}-{s}") for c, s in PAIRS]
TOGETHER = 32  # networks that are exported and compiled as one
every_case = pytest.mark.parametrize("case, structure", ALL, scope="module")


def inputs(case: Case, structure: str, scale: float, batch: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Means away from kinks (|m| >= 0.25) and covariances `[B, n, n]`, diagonal ones in the diagonal structure."""
    generator = torch.Generator().manual_seed(7)
    means, covariances = [], []
    for event in case.events:
        m = torch.randn((batch, *event), dtype=torch.float64, generator=generator)
        m = m.sign() * (m.abs() + 0.25)
        means.append(m.abs() + 0.5 if case.positive else m)
        c = random_psd(int(torch.Size(event).numel()), batch, scale, generator)
        covariances.append(torch.diag_embed(c.diagonal(dim1=1, dim2=2)) if structure == "diagonal" else c)
    return means, covariances


def gaussians(means: list[Tensor], covariances: list[Tensor], structure: str) -> tuple[pg.Gaussian, ...]:
    if structure == "full":
        return tuple(pg.Gaussian(m, covariance=c) for m, c in zip(means, covariances, strict=True))
    variances = [c.diagonal(dim1=1, dim2=2).reshape(m.shape) for m, c in zip(means, covariances, strict=True)]
    return tuple(pg.Gaussian(m, v) for m, v in zip(means, variances, strict=True))


@lru_cache(maxsize=64)
def networks(case: Case) -> dict[str, pg.Streamlined]:
    """In either structure, from one trace."""
    model, (means, _) = Call(case.function).eval(), inputs(case, "full", 0.3)
    examples = {s: gaussians(means, inputs(case, s, 0.3)[1], s) for s in case.structures}
    with traced_once():
        return {s: pg.streamline(model, None, x, covariance=s, **case.options) for s, x in examples.items()}


def build(case: Case, structure: str) -> pg.Streamlined:
    """One network for all tests of a case: what it returns may depend on nothing but the input of the call."""
    return networks(case)[structure]


def propagated(case: Case, refer: Callable[..., Any], means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    """The covariance that `refer` finds, for what the rule holds fixed sample by sample."""
    if case.held is None:
        return refer(case.function, means, covariances)
    samples = [([m[b : b + 1] for m in means], [c[b : b + 1] for c in covariances]) for b in range(len(means[0]))]
    return torch.cat([refer(case.held(m), m, c) for m, c in samples])


def covariance_of(g: pg.Gaussian, batch: int) -> Tensor:
    """Joint covariance if it is kept, else the variances, as `[B, n, n]` or `[B, n]`."""
    return g.covariance if g.is_full else g.variance.reshape(batch, -1)


def reduce(covariance: Tensor, structure: str) -> Tensor:
    return covariance if structure == "full" else covariance.diagonal(dim1=1, dim2=2)


@every_case
def test_equals_the_literal_loop(case: Case, structure: str) -> None:
    means, covariances = inputs(case, structure, 0.3)
    g = build(case, structure)(*gaussians(means, covariances, structure))
    expected = propagated(case, linearised, means, covariances)
    if case.second_order is not None:
        expected = expected + case.second_order(means, covariances)
    torch.testing.assert_close(g.mean, case.function(*means), rtol=0, atol=1e-14)
    torch.testing.assert_close(covariance_of(g, 3), reduce(expected, structure), rtol=case.rtol, atol=1e-12)


@every_case
def test_the_rule_is_used(case: Case, structure: str) -> None:
    """The general rule would pass all other tests in its place."""
    assert "Jacobian" not in {step.rule for step in build(case, structure).plan}


@every_case
def test_agrees_with_monte_carlo(case: Case, structure: str) -> None:
    # Exact rules at any variance; linearised ones where the first order is all there is. One entry of a batch is
    # enough, since test_batch_split_and_permutation_change_nothing compares it with the others.
    means, covariances = inputs(case, structure, 0.5 if case.exact else 1e-6, batch=1)
    g = build(case, structure)(*gaussians(means, covariances, structure))
    sampled = propagated(case, lambda *call: monte_carlo(*call, SAMPLES)[1], means, covariances)
    if structure == "full":
        assert_covariance_close(g.covariance, sampled, SAMPLES, slack=0.0 if case.exact else 0.01)
    else:
        actual = torch.diag_embed(g.variance.reshape(1, -1))
        kept = torch.eye(actual.shape[-1], dtype=torch.bool)
        assert_covariance_close(actual, sampled * kept, SAMPLES, slack=0.0 if case.exact else 0.01)


@every_case
def test_zero_covariance_gives_the_plain_op(case: Case, structure: str) -> None:
    means, covariances = inputs(case, structure, 0.0)
    x = gaussians(means, covariances, structure)
    g = build(case, structure)(*x)
    torch.testing.assert_close(g.mean, case.function(*means), rtol=1e-15, atol=1e-15)
    assert torch.count_nonzero(g.variance) == 0


@every_case
def test_batch_split_and_permutation_change_nothing(case: Case, structure: str) -> None:
    means, covariances = inputs(case, structure, 0.3)
    net = build(case, structure)
    whole = net(*gaussians(means, covariances, structure))
    order = torch.tensor([2, 0, 1])
    parts = [
        net(*gaussians([m[i : i + 1] for m in means], [c[i : i + 1] for c in covariances], structure)) for i in order
    ]
    torch.testing.assert_close(torch.cat([p.mean for p in parts]).reshape(3, -1), whole.mean.reshape(3, -1)[order])
    torch.testing.assert_close(torch.cat([covariance_of(p, 1) for p in parts]), covariance_of(whole, 3)[order])
    empty = net(*gaussians([m[:0] for m in means], [c[:0] for c in covariances], structure))
    assert empty.mean.numel() == empty.variance.numel() == 0


@every_case
def test_result_is_a_covariance(case: Case, structure: str) -> None:
    means, covariances = inputs(case, structure, 2.0)
    x = gaussians(means, covariances, structure)
    g = build(case, structure)(*x)
    assert (g.variance >= 0).all()
    if structure == "full":
        torch.testing.assert_close(g.covariance, g.covariance.mT)
        assert torch.linalg.eigvalsh(g.covariance).min() >= -1e-10 * g.covariance.abs().max()


@every_case
def test_gradients(case: Case, structure: str) -> None:
    means, covariances = inputs(case, structure, 0.3, batch=2)
    net = build(case, structure)
    stored = [torch.as_tensor(c) for c in covariances]
    if structure == "diagonal":
        stored = [c.diagonal(dim1=1, dim2=2).reshape(m.shape).clone() for m, c in zip(means, covariances, strict=True)]
    make = pg.Gaussian.full if structure == "full" else pg.Gaussian.diagonal

    def forward(*flat: Tensor) -> tuple[Tensor, Tensor]:
        half = len(flat) // 2
        g = net(*(make(m, s) for m, s in zip(flat[:half], flat[half:], strict=True)))
        return g.mean, covariance_of(g, 2)

    leaves = [t.clone().requires_grad_() for t in (*means, *stored)]
    assert torch.autograd.gradcheck(forward, leaves, fast_mode=True)


def code_of(net: pg.Streamlined) -> set[object]:
    """The code that runs in a network: of functions (closures of one maker share it) and of modules, by their class."""
    modules = list(net.body.modules())
    graphs = [m.graph for m in modules if isinstance(m, fx.GraphModule)]
    calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    functions = {getattr(node.target, "__code__", node.target) for node in calls}
    return functions | {type(m) for m in modules if not isinstance(m, fx.GraphModule)}


def example(case: Case, structure: str) -> tuple[pg.Gaussian, ...]:
    return gaussians(*inputs(case, structure, 0.3), structure)


_compiled: set[tuple[str, object]] = set()


@cache
def elsewhere(number: int) -> list[list[pg.Gaussian]]:
    """What the cases of one group return after export, and compiled if code runs in them that none before has."""
    group = PAIRS[number * TOGETHER : (number + 1) * TOGETHER]
    nets, given = [build(*pair) for pair in group], [example(*pair) for pair in group]
    found = [[g] for g in exported(nets, given)]
    known, new = set(_compiled), []
    for i, ((_, structure), net) in enumerate(zip(group, nets, strict=True)):
        code = {(structure, each) for each in code_of(net)}
        if code - known:
            known |= code
            new.append(i)
    if new:
        for i, g in zip(new, compiled([nets[i] for i in new], [given[i] for i in new]), strict=True):
            found[i].append(g)
    _compiled.update(known)
    return found


@every_case
def test_exported_and_compiled_equal_eager(case: Case, structure: str) -> None:
    """Every case is exported; it is compiled if code runs in it that no case before has compiled."""
    expected = build(case, structure)(*example(case, structure))
    number, place = divmod(PAIRS.index((case, structure)), TOGETHER)
    for g in elsewhere(number)[place]:
        torch.testing.assert_close(g.mean, expected.mean)
        torch.testing.assert_close(covariance_of(g, 3), covariance_of(expected, 3))
