"""Whole models: the streamlined mean is the model's own output, always, and variances are what theory says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import propagauss as pg
from engines.models import MODELS, TOLERANCE, assert_same_mean, build, inputs, leaves, mlp, posterior_for
from posteriors.cases import make_posterior
from reference import assert_covariance_close

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    **{
        layer.__name__: layer
        for layer in (
            *(nn.ELU, nn.CELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU),
            *(nn.LogSigmoid, nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus),
            *(nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
        )
    },
    "LogSoftmax": lambda: nn.LogSoftmax(-1),
    "Softmax": lambda: nn.Softmax(-1),
    "Softmin": lambda: nn.Softmin(-1),
    "Threshold": lambda: nn.Threshold(0.1, 20.0),
}


# every model with the least and with the most covariance; the other combinations on a few
SETTINGS = [
    *[(name, "diagonal", "diagonal", torch.float32) for name in MODELS],
    *[(name, "full", "full", torch.float64) for name in MODELS],
    *[
        (name, kind, covariance, dtype)
        for name in ("MLP", "nested outputs", "tied decoder", "normalised", "sequence", "SwiGLU")
        for kind, covariance, dtype in (
            ("diagonal", "full", torch.float32),
            ("kronecker", "diagonal", torch.float64),
            ("kronecker", "full", torch.float32),
            ("full", "diagonal", torch.float32),
        )
    ],
]


@pytest.mark.parametrize("name, kind, covariance, dtype", SETTINGS)
def test_mean_is_the_models_output(name: str, kind: str, covariance: str, dtype: torch.dtype) -> None:
    model, x = build(name, dtype), inputs(name, dtype)
    net = pg.streamline(model, posterior_for(model, kind, MODELS[name].names), x, covariance=covariance)
    out = net(*x)
    assert_same_mean(out, model(*x), **TOLERANCE[dtype])
    variances = [g.variance for g in leaves(out) if isinstance(g, pg.Gaussian)]
    assert any(v.max() > 0 for v in variances)


def test_every_activation_is_tried() -> None:
    skipped = {"MultiheadAttention", "Softmax2d"}  # attention, and images: not feed-forward networks
    assert set(ACTIVATIONS) == set(nn.modules.activation.__all__) - skipped


@pytest.mark.parametrize(
    "activation, covariance",
    [
        *[(a, "diagonal") for a in ACTIVATIONS],
        *[(a, "full") for a in ("GLU", "PReLU", "Softmax", "Softmin", "Tanhshrink")],
    ],
)
def test_mean_with_every_activation(activation: str, covariance: str) -> None:
    torch.manual_seed(0)
    model = mlp(ACTIVATIONS[activation](), hidden=2 if activation == "GLU" else 4).double().eval()
    x = torch.randn(3, 3, dtype=torch.float64)
    net = pg.streamline(model, posterior_for(model, "diagonal"), x, covariance=covariance)
    assert_same_mean(net(x), model(x), **TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    "name",
    ["MLP", "images", "skip", "two inputs", "nested outputs", "in-place", "normalised", "softmax", "SwiGLU", "mixer"],
)
def test_moments_of_whole_models(name: str) -> None:
    """The mean moves away from the model's output, but less and less as the variance shrinks."""
    model, x = build(name), inputs(name)
    posterior = posterior_for(model, "diagonal", MODELS[name].names, scale=1e-10)
    out = pg.streamline(model, posterior, x, activation="moments")(*x)
    assert_same_mean(out, model(*x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["MLP", "skip", "dense", "sequence", "softmax"])
def test_moments_with_full_covariance(name: str) -> None:
    model, x = build(name), inputs(name)
    net = pg.streamline(model, posterior_for(model, "full"), x, covariance="full", activation="moments")
    for g in leaves(net(*x)):
        assert g.mean.isfinite().all()
        assert torch.linalg.eigvalsh(g.covariance).min() >= -1e-10 * g.covariance.abs().max()


# -- which parameters are random


@pytest.mark.parametrize("posterior", [None, pg.DiagonalPosterior({})], ids=["None", "empty"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_without_random_parameters(posterior: pg.Posterior | None, covariance: str) -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    net = pg.streamline(model, posterior, x, covariance=covariance)
    g = net(x)
    assert torch.equal(g.mean, model(x)) and torch.count_nonzero(g.variance) == 0
    assert len(net.plan) == 0 and net.plan.parameters == ()
    uncertain = pg.Gaussian(x, 0.1 * torch.ones_like(x))
    assert (pg.streamline(model, posterior, uncertain, covariance=covariance)(uncertain).variance > 0).all()


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_selection_makes_the_rest_deterministic(kind: str) -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    named = {n: p.detach() for n, p in model.named_parameters()}
    posterior, dense = make_posterior(kind, named)
    net = pg.streamline(model, posterior.bind(named).select("2.*"), x, covariance="full")
    assert net.plan.parameters == ("2.bias", "2.weight")
    assert net.plan.untouched == 2
    # a last layer on a fixed input: Σ_ij h_i h_j Cov(W_ki, W_lj) and so on, by its Jacobian
    h = torch.relu(model[0](x)).detach()
    eye = torch.eye(2, dtype=torch.float64)
    jacobian = torch.cat([torch.einsum("kl,bi->bkli", eye, h).flatten(2), eye.expand(3, 2, 2)], -1)
    joint = dense[16:, 16:]
    torch.testing.assert_close(net(x).covariance, jacobian @ joint @ jacobian.mT)


def test_unused_parameters_are_named_in_a_warning() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"never uses.*spare\.bias, spare\.weight"):
        pg.streamline(model, posterior_for(model, "diagonal"), torch.zeros(2, 3))


# -- the variance, where theory says what it must be


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_one_hidden_layer_agrees_with_monte_carlo(covariance: str) -> None:
    """Independent weights make hidden units independent, so even variances alone are right to first order."""
    samples = 40_000
    torch.manual_seed(0)
    model = mlp(nn.Tanh()).double()
    x = torch.randn(3, 3, dtype=torch.float64)
    posterior = posterior_for(model, "diagonal", scale=1e-6)
    g = pg.streamline(model, posterior, x, covariance=covariance)(x)
    draws = posterior.sample(samples, torch.Generator().manual_seed(0))
    weights = {n: p.detach() + draws[n] for n, p in model.named_parameters()}
    values = torch.vmap(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    centred = values - values.mean(0)
    sampled = torch.einsum("sbi,sbj->bij", centred, centred) / samples
    if covariance == "diagonal":
        sampled = torch.diag_embed(sampled.diagonal(dim1=1, dim2=2))
    assert_covariance_close(g.covariance, sampled, samples, slack=0.01)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
@pytest.mark.parametrize("name", ["MLP", "nested", "without bias", "normalised", "images"])
def test_full_covariance_is_linear_in_the_weights(name: str, kind: str) -> None:
    """Layers independent of one another, tiny variance: `J Σ Jᵀ`, the GLM, at any depth."""
    model, (x,) = build(name), inputs(name)
    posterior = posterior_for(model, kind, scale=1e-9).bind(dict(model.named_parameters()))
    g = pg.streamline(model, posterior, x, covariance="full")(x)
    named = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)).flatten(1))(named)
    torch.testing.assert_close(g.covariance, posterior.quadratic(jacobian), rtol=1e-5, atol=1e-15)


def test_diagonal_covariance_forgets_what_deeper_layers_share() -> None:
    """Two hidden layers: hidden units are correlated, the full structure knows, the diagonal one does not."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    posterior = posterior_for(model, "diagonal", scale=1e-6)
    full, diagonal = (pg.streamline(model, posterior, x, covariance=c)(x) for c in ("full", "diagonal"))
    assert ((full.variance - diagonal.variance).abs() > 0.01 * full.variance).any()
    assert (diagonal.variance / full.variance > 0.1).all() and (diagonal.variance / full.variance < 10).all()
