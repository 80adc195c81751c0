"""Layers with random parameters: the contract of `test_contract.py`, for every posterior and covariance structure.

All of these rules give the exact first two moments when the input is independent of the layer, at any variance; a PReLU
is linearised, and that the input of a tied layer depends on its own weights is followed to first order. A parameter
outside a linear layer ("lone") enters as a Gaussian of the network's structure, so a diagonal network knows its
variances only.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from posteriors.cases import KINDS, kronecker_covariance, kronecker_factors, make_posterior
from reference import assert_covariance_close, bilinear, linear_layer, random_psd, shared_layer
from rules.layers import (
    BATCH,
    Layer,
    Own,
    Setup,
    built,
    check_batches,
    check_covariance,
    check_diagonal,
    check_gradients,
    check_portable,
    covariance_of,
    elsewhere,
    reduce,
)

pytestmark = pytest.mark.usefixtures("one_trace")
SAMPLES = 20_000


def addmm(layer: Own, x: Tensor) -> Tensor:
    return torch.addmm(layer.bias, x, layer.weight)


def conv1d(layer: Own, x: Tensor) -> Tensor:
    """GPT-2's linear layer: `[in, out]` weight, positions merged with the batch."""
    flat = torch.addmm(layer.bias, x.view(-1, x.size(-1)), layer.weight)
    return flat.view(*x.size()[:-1], layer.weight.size(-1))


def class_token(layer: Own, x: Tensor) -> Tensor:
    """One random position in front of the others, the same for every sample."""
    return torch.cat([layer.token.expand(x.shape[0], -1, -1), x], 1)


def einsum(layer: Own, x: Tensor) -> Tensor:
    return torch.einsum("bd,kd->bk", x, layer.weight)


def tied(dim: int) -> nn.Module:
    layer = nn.Linear(dim, dim)
    return nn.Sequential(layer, layer)


def batch_norm(channels: int) -> nn.Module:
    layer = nn.BatchNorm1d(channels)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    layer.running_mean = torch.randn(channels)
    layer.running_var = torch.rand(channels) + 0.5
    return layer


def layer_norm(*shape: int) -> nn.Module:
    layer = nn.LayerNorm(shape)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


LAYERS = [
    Layer("linear", lambda: nn.Linear(3, 2), linear="row"),
    Layer("without bias", lambda: nn.Linear(3, 2, bias=False), linear="row"),
    Layer("only bias random", lambda: nn.Linear(3, 2), random=("bias",)),
    Layer("only weight random", lambda: nn.Linear(3, 2), random=("weight",), linear="row"),
    Layer("x @ W", lambda: Own(lambda s, x: x @ s.weight, weight=(3, 2)), linear="column"),
    Layer("x @ W.t()", lambda: Own(lambda s, x: x @ s.weight.t(), weight=(2, 3)), linear="row"),
    Layer("linear of W.t()", lambda: Own(lambda s, x: F.linear(x, s.weight.t()), weight=(3, 2)), linear="column"),
    Layer("linear of W.T", lambda: Own(lambda s, x: F.linear(x, s.weight.T), weight=(3, 2)), linear="column"),
    Layer("linear of W.mT", lambda: Own(lambda s, x: F.linear(x, s.weight.mT), weight=(3, 2)), linear="column"),
    Layer("addmm", lambda: Own(addmm, weight=(3, 2), bias=(2,)), linear="column"),
    Layer("linear on positions", lambda: nn.Linear(3, 2), (2, 3), linear="row"),
    Layer("bias on positions", lambda: nn.Linear(3, 2), (2, 3), random=("bias",)),
    Layer("Conv1D on positions", lambda: Own(conv1d, weight=(3, 2), bias=(2,)), (2, 3), linear="column"),
    Layer("matmul on positions", lambda: Own(lambda s, x: x @ s.weight, weight=(3, 2)), (2, 3), linear="column"),
    Layer("tied layer", lambda: tied(2), (2,), exact=False),
    Layer("scale", lambda: Own(lambda s, x: x * s.scale, scale=(3,)), lone=True),
    Layer("scale on positions", lambda: Own(lambda s, x: s.scale * x, scale=(3,)), (2, 3), lone=True),
    Layer("one scale for all", lambda: Own(lambda s, x: x * s.scale, scale=(1,)), lone=True),
    Layer("offset", lambda: Own(lambda s, x: x + s.offset, offset=(3,)), lone=True),
    Layer("minus offset", lambda: Own(lambda s, x: s.offset - x, offset=(3,)), (2, 3), lone=True),
    Layer("divided by one number", lambda: Own(lambda s, x: x / s.scale, scale=(1,)), exact=False, lone=True),
    Layer("batch norm", lambda: batch_norm(3)),
    Layer("batch norm on positions", lambda: batch_norm(3), (3, 2)),
    Layer("only the shift of batch norm random", lambda: batch_norm(3), (3, 2), random=("bias",)),
    Layer("layer norm", lambda: layer_norm(3), fixed=True),
    Layer("layer norm on positions", lambda: layer_norm(3), (2, 3), fixed=True),
    Layer("layer norm of matrices", lambda: layer_norm(2, 3), (2, 3), fixed=True),
    Layer("group norm", lambda: nn.GroupNorm(2, 4), (4, 2), fixed=True),
    Layer("PReLU", lambda: nn.PReLU(1), exact=False, lone=True),
    Layer("PReLU per channel", lambda: nn.PReLU(3), (3, 2), exact=False, lone=True),
    Layer("embedding", lambda: nn.Embedding(4, 2), lone=True, vocabulary=4),
    Layer("class token", lambda: Own(class_token, token=(1, 1, 2)), (2, 2), lone=True),
    Layer("vector weight", lambda: Own(lambda s, x: x @ s.weight, weight=(3,)), lone=True, first_order=True),
    Layer("W @ x", lambda: Own(lambda s, x: s.weight @ x, weight=(2, 3)), (3, 2), lone=True, first_order=True),
    Layer("einsum", lambda: Own(einsum, weight=(2, 3)), lone=True, first_order=True),
]  # fmt: skip
BY_NAME = {layer.name: layer for layer in LAYERS}


# the same layer written in another way: the joint posterior, which holds every covariance, is the one to try
VARIANTS = {"x @ W.t()", "linear of W.t()", "linear of W.T", "linear of W.mT", "addmm", "matmul on positions"}


def _kinds(layer: Layer) -> tuple[str, ...]:
    """Posteriors to try: all on a few linear layers; a lone parameter just asks for its covariance."""
    if layer.name in VARIANTS:
        return ("full",)
    if layer.name in ("linear", "linear on positions"):
        return KINDS
    if layer.name in ("batch norm on positions", "layer norm", "group norm", "only bias random"):
        return ("diagonal", "full", "low rank")
    return ("diagonal", "kronecker", "full") if layer.linear in ("row", "column") else ("diagonal", "full")


def _combinations() -> list:
    found = []
    for layer in LAYERS:
        for kind in _kinds(layer):
            for structure in ("diagonal", "full"):
                # a lone parameter behaves alike in every posterior, so the second one gets only the richer input
                both = (True,) if layer.lone and kind == "diagonal" else (False, True)
                if layer.first_order and structure == "full":
                    both = (False,)
                for uncertain in (False,) if layer.vocabulary or layer.fixed else both:
                    tag = f"{layer.name}-{kind}-{structure}-{'gaussian' if uncertain else 'fixed'} input"
                    found.append(pytest.param(layer.name, kind, structure, uncertain, id=tag))
    return found


COMBINATIONS = _combinations()
EXACT = [p for p in COMBINATIONS if BY_NAME[p.values[0]].exact]
DIFFERENTIABLE = [p for p in COMBINATIONS if BY_NAME[p.values[0]].vocabulary is None]
# scaling a posterior to nothing is the posterior's work: all structures on one layer, one structure on all layers
FIRST_ORDER = [layer.name for layer in LAYERS if layer.first_order]
VANISHING = [p for p in COMBINATIONS if p.values[0] == "linear" or (p.values[1] == "full" and p.values[3])]
LITERAL = [p for p in COMBINATIONS if BY_NAME[p.values[0]].linear]
# exporting and compiling take most of the time: every structure on a linear layer, and a few layers unlike it
UNLIKE = {"Conv1D on positions", "scale on positions", "PReLU", "class token"}
PORTABLE = [
    p
    for p in COMBINATIONS
    if (
        p.values[:1] + p.values[3:] == ("linear", True)
        and p.values[1:3]
        in {("diagonal", "diagonal"), ("diagonal", "full"), ("kronecker", "full"), ("full", "diagonal")}
    )
    or (p.values[0] in UNLIKE and p.values[1] == "full" and p.values[3] == (p.values[2] == "full"))
]


@cache
def setup(name: str, kind: str, structure: str, uncertain: bool) -> Setup:
    layer = BY_NAME[name]
    module = built(layer)
    named = {n: p.detach() for n, p in module.named_parameters()}
    random = {n: named[n] for n in layer.random or named}
    posterior, joint = make_posterior(kind, random, scale=0.5 if layer.exact else 0.2)
    if layer.lone and structure == "diagonal":
        joint = joint.diagonal().diag()
    x = make_input(layer, structure if uncertain else "diagonal", uncertain)
    net = pg.streamline(module, posterior, x, covariance=structure)
    return Setup(layer, module, random, posterior, joint, x, net, structure)


@cache
def make_input(layer: Layer, structure: str, uncertain: bool) -> pg.Gaussian | Tensor:
    generator = torch.Generator().manual_seed(2)
    if layer.vocabulary:  # repeated indices: copies of one random row
        return torch.randint(layer.vocabulary, (BATCH, *layer.event), generator=generator)
    m = torch.randn((BATCH, *layer.event), dtype=torch.float64, generator=generator)
    if not uncertain:
        return m
    c = random_psd(m[0].numel(), BATCH, 0.5, generator)
    if structure == "full":
        return pg.Gaussian(m, covariance=c)
    return pg.Gaussian(m, c.diagonal(dim1=1, dim2=2).reshape(m.shape))


def expected_covariance(s: Setup) -> Tensor:
    """`[B, n', n']` from first principles; a tied layer is the paper's sums twice, and what its uses have in common."""
    if s.layer.name == "tied layer":
        return tied_covariance(s)
    if s.layer.vocabulary:  # nothing but the table is random: rows of the identity pick it apart
        rows = torch.func.jacrev(lambda t: s.call(t, s.mean).flatten(1))(s.theta())
        return rows @ s.joint @ rows.mT
    event = s.mean.shape[1:]
    return torch.stack(
        [
            bilinear(
                lambda t, x: s.call(t, x.reshape(1, *event)).flatten(),
                s.theta(),
                s.joint,
                s.mean[b].flatten(),
                s.covariance[b],
                products=s.layer.exact,
            )
            for b in range(BATCH)
        ]
    )


def tied_covariance(s: Setup) -> Tensor:
    weight, bias = s.random["0.weight"], s.random["0.bias"]
    result = []
    for m, c in zip(s.mean, s.covariance, strict=True):
        for _ in range(2):
            c = linear_layer(weight, s.joint, m, c, has_bias=True)
            # the diagonal structure forgets covariances between the two uses
            c = c if s.structure == "full" else c.diagonal().diag()
            m = weight @ m + bias
        result.append(c)
    independent = torch.stack(result)
    return independent if s.structure == "diagonal" else independent + between_uses(s)


def between_uses(s: Setup) -> Tensor:
    """`J_1 Σ J_2ᵀ` and its transpose, with `J_i` the derivative by the parameters at one of the two uses."""

    def twice(first: Tensor, second: Tensor) -> Tensor:
        h = s.mean
        for theta in (first, second):
            weight, bias = theta[:-2].reshape(2, 2), theta[-2:]
            h = F.linear(h, weight, bias)
        return h

    one, other = torch.func.jacrev(twice, argnums=(0, 1))(s.theta(), s.theta())
    term = one @ s.joint @ other.mT
    return term + term.mT


@pytest.mark.parametrize("name, kind, structure, uncertain", COMBINATIONS)
def test_equals_the_formula(name: str, kind: str, structure: str, uncertain: bool) -> None:
    s = setup(name, kind, structure, uncertain)
    g = s.net(s.x)
    assert g.is_full == (s.structure == "full")
    torch.testing.assert_close(g.mean, s.module(s.mean), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance_of(g), reduce(expected_covariance(s), s.structure), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name, kind, structure, uncertain", LITERAL)
def test_linear_layer_equals_the_sums_of_the_paper(name: str, kind: str, structure: str, uncertain: bool) -> None:
    s = setup(name, kind, structure, uncertain)
    weight, order = s.random["weight"], torch.arange(len(s.joint))
    if s.layer.linear == "column":  # the sums want the weight as [out, in]
        order[: weight.numel()] = order[: weight.numel()].reshape(weight.shape).t().flatten()
        weight = weight.t()
    joint = s.joint[order][:, order]
    inputs = weight.shape[1]
    samples = []
    for m, c in zip(s.mean, s.covariance, strict=True):
        positions = m.numel() // inputs
        sums = shared_layer(
            weight,
            joint,
            m.reshape(positions, inputs),
            c.reshape(positions, inputs, positions, inputs),
            has_bias="bias" in s.random,
        )
        if positions == 1:  # the paper's own form
            torch.testing.assert_close(sums, linear_layer(weight, joint, m, c, has_bias="bias" in s.random))
        samples.append(sums)
    torch.testing.assert_close(
        covariance_of(s.net(s.x)), reduce(torch.stack(samples), structure), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name, kind, structure, uncertain", EXACT)
def test_agrees_with_monte_carlo(name: str, kind: str, structure: str, uncertain: bool) -> None:
    s = setup(name, kind, structure, uncertain)
    generator = torch.Generator().manual_seed(3)

    def draw(mean: Tensor, covariance: Tensor) -> Tensor:
        white = torch.randn((SAMPLES, *mean.shape), dtype=torch.float64, generator=generator)
        return (mean + torch.einsum("...ij,s...j->s...i", torch.linalg.cholesky(covariance), white)).contiguous()

    thetas = draw(s.theta(), s.joint)
    if uncertain:
        xs = draw(s.mean.flatten(1), s.covariance).reshape(SAMPLES, *s.mean.shape)
        values = torch.vmap(s.call)(thetas, xs)
    else:
        values = torch.vmap(s.call, in_dims=(0, None))(thetas, s.mean)
    values = values.reshape(SAMPLES, BATCH, -1)
    centred = values - values.mean(0)
    sampled = torch.einsum("sbi,sbj->bij", centred, centred) / SAMPLES
    g = s.net(s.x)
    if structure == "full":
        actual = g.covariance
    else:
        actual = torch.diag_embed(covariance_of(g))
        sampled = sampled * torch.eye(actual.shape[-1], dtype=torch.float64)
    assert_covariance_close(actual, sampled, SAMPLES)
    error = (g.mean.reshape(BATCH, -1) - values.mean(0)).abs()
    assert (error <= 6 * (g.variance.reshape(BATCH, -1) / SAMPLES).sqrt() + 1e-12).all()


@pytest.mark.parametrize("name, kind, structure, uncertain", VANISHING)
def test_no_posterior_covariance_gives_the_deterministic_layer(
    name: str, kind: str, structure: str, uncertain: bool
) -> None:
    s = setup(name, kind, structure, uncertain)
    g = pg.streamline(s.module, s.posterior.scale(0.0), s.x, covariance=structure)(s.x)
    torch.testing.assert_close(g.mean, s.module(s.mean), rtol=1e-13, atol=1e-13)
    if uncertain:
        plain = deterministic(name, structure)
        torch.testing.assert_close(covariance_of(g), covariance_of(plain), rtol=1e-12, atol=1e-14)
    else:
        assert torch.count_nonzero(g.variance) == 0


@cache
def deterministic(name: str, structure: str) -> pg.Gaussian:
    s = setup(name, "diagonal", structure, True)
    return pg.streamline(s.module, None, s.x, covariance=structure)(s.x)


@pytest.mark.parametrize("name, kind, structure, uncertain", COMBINATIONS)
def test_batch_split_and_permutation_change_nothing(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_batches(setup(name, kind, structure, uncertain))


@pytest.mark.parametrize("name, kind, structure, uncertain", COMBINATIONS)
def test_result_is_a_covariance(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_covariance(setup(name, kind, structure, uncertain))


@pytest.mark.parametrize("name, kind, structure, uncertain", DIFFERENTIABLE)
def test_gradients(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_gradients(setup(name, kind, structure, uncertain))


@cache
def portable() -> dict[tuple[object, ...], tuple[pg.Gaussian, ...]]:
    return dict(zip([p.values for p in PORTABLE], elsewhere([setup(*p.values) for p in PORTABLE]), strict=True))


@pytest.mark.parametrize("name, kind, structure, uncertain", PORTABLE)
def test_exported_and_compiled_equal_eager(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_portable(setup(name, kind, structure, uncertain), portable()[name, kind, structure, uncertain])


@pytest.mark.parametrize("name, kind, structure, uncertain", [p for p in COMBINATIONS if p.values[2] == "full"])
def test_diagonal_structure_is_the_diagonal_of_the_full_one(
    name: str, kind: str, structure: str, uncertain: bool
) -> None:
    """A tied layer counts as two."""
    full, diagonal = setup(name, kind, "full", uncertain), setup(name, kind, "diagonal", uncertain)
    if name == "tied layer" or (full.layer.lone and kind != "diagonal"):
        pytest.skip("loses covariances on the way")
    check_diagonal(diagonal, full)


sizes = st.integers(1, 5)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 4),
    inputs=sizes,
    outputs=sizes,
    positions=st.none() | st.integers(1, 3),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
    structure=st.sampled_from(["diagonal", "full"]),
    uncertain=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_linear_layer_of_any_size(
    batch: int,
    inputs: int,
    outputs: int,
    positions: int | None,
    bias: bool,
    kind: str,
    structure: str,
    uncertain: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(inputs, outputs, bias=bias).double()
    random = {n: p.detach() for n, p in module.named_parameters()}
    posterior, joint = make_posterior(kind, random, seed=seed)
    event = (inputs,) if positions is None else (positions, inputs)
    m = torch.randn((batch, *event), dtype=torch.float64, generator=generator)
    c = random_psd(m[0].numel(), batch, generator=generator) if uncertain else m.new_zeros(batch, *2 * (m[0].numel(),))
    if structure == "diagonal":
        c = torch.diag_embed(c.diagonal(dim1=1, dim2=2))
    x = pg.Gaussian(m, covariance=c) if uncertain else m
    g = pg.streamline(module, posterior, x, covariance=structure)(x)

    def call(theta: Tensor, v: Tensor) -> Tensor:
        weight = theta[: inputs * outputs].reshape(outputs, inputs)
        return F.linear(v.reshape(event), weight, theta[inputs * outputs :] if bias else None).flatten()

    theta = torch.cat([p.flatten() for p in random.values()])
    expected = [bilinear(call, theta, joint, m[b].flatten(), c[b], products=True) for b in range(batch)]
    torch.testing.assert_close(g.mean, module(m).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance_of(g, batch), reduce(torch.stack(expected), structure), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("damping", ["exact", "factored"])
def test_column_flattened_factors_are_the_same_layer(damping: str) -> None:
    """The paper states `A⊗B` on column-flattened weights; both conventions must describe one posterior."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(3, 2, bias=False).double()
    left, right = kronecker_factors(module.weight.shape, generator)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    nets = [
        pg.streamline(module, pg.KroneckerPosterior({"weight": f}, 0.7, damping, flatten), x, covariance="full")
        for f, flatten in (((left, right), "row"), ((right, left), "column"))
    ]
    torch.testing.assert_close(nets[0](x).covariance, nets[1](x).covariance)
    # column by column: index (input, output) of the dense covariance of A⊗B
    dense = kronecker_covariance((right, left), 0.7, damping).reshape(3, 2, 3, 2)
    torch.testing.assert_close(nets[1](x).covariance, torch.einsum("bi,ikjl,bj->bkl", x, dense, x))


@pytest.mark.parametrize("name", ["layer norm", "layer norm of matrices"])
def test_scale_and_shift_of_a_norm_stay_correlated_on_a_random_input(name: str) -> None:
    """Written out: PyTorch's mixed second derivative of a layer norm, which `bilinear` would take, is wrong."""
    layer = BY_NAME[name]
    module = layer.make().double().eval()
    random = {n: p.detach() for n, p in module.named_parameters()}
    posterior, joint = make_posterior("full", random, scale=0.5)
    x = make_input(layer, "full", True)
    assert isinstance(x, pg.Gaussian)
    g = pg.streamline(module, posterior, x, covariance="full")(x)
    w, half = random["weight"].flatten(), len(joint) // 2
    ww, wb, bb = joint[:half, :half], joint[:half, half:], joint[half:, half:]
    assert wb.abs().max() > 0.01

    def unit(t: Tensor) -> Tensor:
        return F.layer_norm(t.reshape(layer.event), layer.event).flatten()

    for m, c, found in zip(x.mean.flatten(1), x.covariance, g.covariance, strict=True):
        u, slope = unit(m), torch.func.jacrev(unit)(m)
        carried = (slope @ c @ slope.mT) * (w.outer(w) + ww)
        own = u.outer(u) * ww + u[:, None] * wb + wb.mT * u + bb
        torch.testing.assert_close(found, carried + own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_full_structure_linearises_what_it_has_no_rule_for(name: str) -> None:
    s = setup(name, "full", "full", True)
    g, event = s.net(s.x), s.mean.shape[1:]
    assert any("own Jacobian" in step.note for step in s.net.plan)
    for m, c, found in zip(s.mean, s.covariance, g.covariance, strict=True):
        call = lambda t, x: s.call(t, x.reshape(1, *event)).flatten()  # noqa: E731
        expected = bilinear(call, s.theta(), s.joint, m.flatten(), c, products=False)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
