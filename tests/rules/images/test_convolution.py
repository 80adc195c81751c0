"""Convolutions with random weights: every posterior and covariance structure, against the sums of the paper as loops.

The sums (`reference.convolution_layer`) see a convolution as the dense matrix it is, with one random number behind many
of its entries. All rules give the exact first two moments when the input is independent of the layer, at any variance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from posteriors.cases import make_posterior
from reference import assert_covariance_close, bilinear, convolution_layer, convolution_terms, random_psd
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
SAMPLES = 4000
KINDS = ("diagonal", "kronecker", "full", "low rank")


class Frames(nn.Module):
    """The images of a short film, each through the same convolution: a sample is several entries of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, (2, 1), groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.flatten(0, 1))
        return y.unflatten(0, x.shape[:2])


LAYERS = [
    Layer("conv2d", lambda: nn.Conv2d(2, 2, 2), (2, 3, 2)),
    Layer("without bias", lambda: nn.Conv2d(2, 3, (1, 2), bias=False), (2, 1, 3)),
    Layer("only weight random", lambda: nn.Conv2d(2, 2, 2), (2, 3, 2), random=("weight",)),
    Layer("only bias random", lambda: nn.Conv2d(2, 2, 2), (2, 3, 2), random=("bias",)),
    Layer("strided", lambda: nn.Conv2d(1, 2, 2, stride=(2, 1), padding=(1, 0), dilation=2), (1, 4, 4)),
    Layer("same", lambda: nn.Conv2d(1, 2, (2, 3), padding="same"), (1, 3, 2)),
    Layer("groups", lambda: nn.Conv2d(4, 4, (2, 1), groups=2), (4, 3, 1)),
    Layer("depthwise", lambda: nn.Conv2d(2, 4, 2, groups=2, padding=(1, 0)), (2, 2, 2)),
    Layer("conv1d", lambda: nn.Conv1d(2, 3, 2, stride=2, padding=1), (2, 4)),
    Layer("conv3d", lambda: nn.Conv3d(1, 2, (1, 2, 2)), (1, 2, 2, 3)),
    Layer("transposed", lambda: nn.ConvTranspose2d(2, 2, (2, 1)), (2, 2, 2)),
    Layer("transposed strided", lambda: nn.ConvTranspose2d(1, 2, 3, 2, 1, (1, 0), bias=False), (1, 2, 2)),
    Layer("transposed groups", lambda: nn.ConvTranspose1d(4, 4, 3, 2, 1, groups=2, dilation=2), (4, 2)),
    Layer("transposed 3d", lambda: nn.ConvTranspose3d(1, 2, (2, 1, 2), (1, 1, 2)), (1, 1, 2, 2)),
    Layer("reflected", lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 2, 2)),
    Layer("circular", lambda: nn.Conv1d(2, 2, 2, padding=1, padding_mode="circular"), (2, 3)),
    Layer("frames", Frames, (2, 2, 3, 1)),
]
BY_NAME = {layer.name: layer for layer in LAYERS}
INDIRECT = ("reflected", "circular", "frames")  # more than one op
COMBINATIONS = [
    pytest.param(layer.name, kind, structure, uncertain, id=f"{layer.name}-{kind}-{structure}-{word} input")
    for layer in LAYERS
    for kind in KINDS
    if kind != "low rank" or layer.name in ("conv2d", "without bias", "groups", "transposed groups")
    for structure in ("diagonal", "full")
    for uncertain, word in ((False, "fixed"), (True, "gaussian"))
]
LITERAL = [p for p in COMBINATIONS if p.values[0] not in INDIRECT]
# what a diagonal network carries into the convolution is not independent after reflection or wrapping
EXACT = [p for p in COMBINATIONS if p.values[0] not in ("reflected", "circular") or not p.values[3]]
SAMPLED = [p for p in COMBINATIONS if p.values[2] == "full" and p.values[3] and p.values[1] == "full"]
# a posterior of each kind on a few layers, one kind on all of them
FEWER = [p for p in COMBINATIONS if p.values[1] == "full" or p.values[0] in ("conv2d", "groups", "transposed")]
PORTABLE = [p for p in COMBINATIONS if p.values[0] in ("depthwise", "transposed groups") and p.values[3]]


@cache
def moments(layer: Layer) -> tuple[Tensor, Tensor]:
    """Of the input."""
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn((BATCH, *layer.event), dtype=torch.float64, generator=generator)
    return mean, random_psd(mean[0].numel(), BATCH, generator=generator)


@cache
def setup(name: str, kind: str, structure: str, uncertain: bool) -> Setup:
    layer = BY_NAME[name]
    module = built(layer)
    named = {n: p.detach() for n, p in module.named_parameters()}
    random = {n: named[n] for n in layer.random or named}
    posterior, joint = make_posterior(kind, random, scale=0.5)
    mean, c = moments(layer)
    x: Any = mean
    if uncertain:
        v = c.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        x = pg.Gaussian(mean, covariance=c) if structure == "full" else pg.Gaussian(mean, v)
    net = pg.streamline(module, posterior, x, covariance=structure)
    return Setup(layer, module, random, posterior, joint, x, net, structure)


def terms_of(layer: Any, entry: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """The dense matrix of a convolution module, from its own settings."""
    sides = [(p, p) for p in layer.padding] if not isinstance(layer.padding, str) else []
    for k, d in zip(layer.kernel_size, layer.dilation, strict=True):
        if layer.padding == "same":
            sides.append((d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2))
    settings = (layer.stride, sides, layer.dilation, layer.groups, layer.transposed, layer.output_padding)
    return convolution_terms(layer.weight.shape, entry, *settings)


@pytest.mark.parametrize("name, kind, structure, uncertain", LITERAL)
def test_equals_the_sums_of_the_paper(name: str, kind: str, structure: str, uncertain: bool) -> None:
    s = setup(name, kind, structure, uncertain)
    g, channels = s.net(s.x), s.random["bias"].numel() if "bias" in s.random else None
    weight, terms = s.module.weight.detach().flatten(), terms_of(s.module, s.layer.event)
    pairs = list(zip(s.mean.flatten(1), s.covariance, strict=True))[:2]  # the loops are slow
    expected = torch.stack([convolution_layer(weight, terms, s.joint, m, c, channels) for m, c in pairs])
    assert g.is_full == (structure == "full")
    torch.testing.assert_close(g.mean, s.module(s.mean), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance_of(g)[:2], reduce(expected, structure), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name, kind, structure, uncertain", [p for p in EXACT if p.values[0] in INDIRECT])
def test_equals_the_covariance_of_a_bilinear_function(name: str, kind: str, structure: str, uncertain: bool) -> None:
    s = setup(name, kind, structure, uncertain)
    expected = torch.stack([expected_covariance(s, b) for b in range(BATCH)])
    torch.testing.assert_close(s.net(s.x).mean, s.module(s.mean), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance_of(s.net(s.x)), reduce(expected, structure), rtol=1e-9, atol=1e-12)


def expected_covariance(s: Setup, b: int) -> Tensor:
    def call(theta: Tensor, x: Tensor) -> Tensor:
        return s.call(theta, x.reshape(1, *s.layer.event)).flatten()

    return bilinear(call, s.theta(), s.joint, s.mean[b].flatten(), s.covariance[b], products=True)


@pytest.mark.parametrize("name, kind, structure, uncertain", SAMPLED)
def test_agrees_with_monte_carlo(name: str, kind: str, structure: str, uncertain: bool) -> None:
    s = setup(name, kind, structure, uncertain)
    generator = torch.Generator().manual_seed(3)

    def draw(mean: Tensor, covariance: Tensor) -> Tensor:
        white = torch.randn((SAMPLES, *mean.shape), dtype=torch.float64, generator=generator)
        return mean + torch.einsum("...ij,s...j->s...i", torch.linalg.cholesky(covariance), white)

    xs = draw(s.mean.flatten(1), s.covariance).reshape(SAMPLES, *s.mean.shape)
    values = torch.vmap(s.call)(draw(s.theta(), s.joint), xs).reshape(SAMPLES, BATCH, -1)
    centred = values - values.mean(0)
    g = s.net(s.x)
    assert_covariance_close(g.covariance, torch.einsum("sbi,sbj->bij", centred, centred) / SAMPLES, SAMPLES)
    error = (g.mean.reshape(BATCH, -1) - values.mean(0)).abs()
    assert (error <= 6 * (g.variance.reshape(BATCH, -1) / SAMPLES).sqrt()).all()


@pytest.mark.parametrize("name, kind, structure, uncertain", FEWER)
def test_no_posterior_covariance_gives_the_deterministic_layer(
    name: str, kind: str, structure: str, uncertain: bool
) -> None:
    s = setup(name, kind, structure, uncertain)
    g = pg.streamline(s.module, s.posterior.scale(0.0), s.x, covariance=structure)(s.x)
    torch.testing.assert_close(g.mean, s.module(s.mean), rtol=1e-13, atol=1e-13)
    if uncertain:
        torch.testing.assert_close(
            covariance_of(g), covariance_of(deterministic(name, structure)), rtol=1e-12, atol=1e-14
        )
    else:
        assert torch.count_nonzero(g.variance) == 0


@cache
def deterministic(name: str, structure: str) -> pg.Gaussian:
    s = setup(name, "diagonal", structure, True)  # module and input are the same for every posterior
    return pg.streamline(s.module, None, s.x, covariance=structure)(s.x)


@pytest.mark.parametrize("name, kind, structure, uncertain", COMBINATIONS)
def test_batch_split_and_permutation_change_nothing(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_batches(setup(name, kind, structure, uncertain))


@pytest.mark.parametrize("name, kind, structure, uncertain", COMBINATIONS)
def test_result_is_a_covariance(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_covariance(setup(name, kind, structure, uncertain))


@pytest.mark.parametrize("name, kind, structure, uncertain", FEWER)
def test_gradients(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_gradients(setup(name, kind, structure, uncertain))


@cache
def portable() -> dict[tuple[object, ...], tuple[pg.Gaussian, ...]]:
    return dict(zip([p.values for p in PORTABLE], elsewhere([setup(*p.values) for p in PORTABLE]), strict=True))


@pytest.mark.parametrize("name, kind, structure, uncertain", PORTABLE)
def test_exported_and_compiled_equal_eager(name: str, kind: str, structure: str, uncertain: bool) -> None:
    check_portable(setup(name, kind, structure, uncertain), portable()[name, kind, structure, uncertain])


@pytest.mark.parametrize("name, kind, structure, uncertain", [p for p in EXACT if p.values[2] == "full"])
def test_diagonal_structure_is_the_diagonal_of_the_full_one(
    name: str, kind: str, structure: str, uncertain: bool
) -> None:
    check_diagonal(setup(name, kind, "diagonal", uncertain), setup(name, kind, "full", uncertain))


@pytest.mark.parametrize("uncertain", [False, True])
def test_a_weight_that_the_model_computes(uncertain: bool) -> None:
    """`W = 2 U` with random `U` has the variances of a plain layer with four times the posterior variance."""
    s = setup("conv2d", "diagonal", "diagonal", uncertain)
    computed = Own(lambda o, x: F.conv2d(x, 2 * o.weight, o.bias), weight=(2, 2, 2, 2), bias=(2,)).double().eval()
    computed.load_state_dict({"weight": s.module.weight / 2, "bias": s.module.bias})
    variances = {"weight": s.posterior.variance("weight") / 4, "bias": s.posterior.variance("bias")}
    net = pg.streamline(computed, pg.DiagonalPosterior(variances), s.x)
    torch.testing.assert_close(net(s.x).mean, s.net(s.x).mean)
    torch.testing.assert_close(net(s.x).variance, s.net(s.x).variance)
    full = pg.streamline(computed, pg.DiagonalPosterior(variances), s.x, covariance="full")
    torch.testing.assert_close(full(s.x).mean, s.net(s.x).mean)


def test_joint_covariance_that_cannot_fit_is_refused() -> None:
    model = nn.Conv2d(3, 64, 3, padding=1).eval()
    posterior = pg.DiagonalPosterior({"weight": torch.ones(64, 3, 3, 3)})
    with pytest.raises(pg.InputError, match=r"64 x 999 x 999 outputs .* GB .* covariance='diagonal'"):
        pg.streamline(model, posterior, torch.zeros(1, 3, 999, 999), covariance="full")


def test_dense_covariance_of_a_transposed_weight_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny_machine(needed: int, what: str, device: torch.device) -> None:
        if needed > 1e5:
            raise pg.InputError("too much")

    monkeypatch.setattr("propagauss.rules.images.memory.require_memory", tiny_machine)
    model = nn.ConvTranspose2d(8, 8, 2).eval()
    posterior = pg.KroneckerPosterior({"weight": (torch.eye(8), torch.eye(32))})
    with pytest.raises(pg.InputError, match=r"256 parameters of 'weight' .* GB .* diagonal posterior"):
        pg.streamline(model, posterior, torch.zeros(1, 8, 2, 2))


def test_plan_says_what_the_diagonal_structure_drops() -> None:
    assert "correlation between places dropped" in str(setup("conv2d", "diagonal", "diagonal", False).net.plan)
    assert "exact moments" in str(setup("conv2d", "diagonal", "full", False).net.plan)


NORMS: list[tuple[str, Callable[[], nn.Module]]] = [
    ("group norm", lambda: nn.GroupNorm(2, 4)),
    ("instance norm", lambda: nn.InstanceNorm2d(4, affine=True)),
    ("instance norm with statistics", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
]


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("name, make", NORMS)
def test_random_scale_and_shift_of_a_norm(name: str, make: Callable[[], nn.Module], structure: str) -> None:
    """For a fixed input the layer is linear in them, so the moments are exact."""
    module = make().double().eval()
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    posterior, joint = make_posterior("diagonal", parameters)
    x = torch.randn(BATCH, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g = pg.streamline(module, posterior, x, covariance=structure)(x)

    def call(theta: Tensor) -> Tensor:
        weight, bias = theta.split(4)
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,)).flatten(1)

    jacobian = torch.func.jacrev(call)(torch.cat([p.flatten() for p in parameters.values()]))
    torch.testing.assert_close(g.mean, module(x).detach())
    torch.testing.assert_close(covariance_of(g), reduce(jacobian @ joint @ jacobian.mT, structure))
