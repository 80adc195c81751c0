"""from_laplace and fit_laplace against the real laplace-torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from propagauss.errors import PosteriorError
from propagauss.posteriors import DiagonalPosterior, FullPosterior, KroneckerPosterior, fit_laplace, from_laplace

laplace = pytest.importorskip("laplace")
pytestmark = pytest.mark.peer
STRUCTURES = {"diag": "diagonal", "kron": "kronecker", "full": "full"}


@pytest.fixture(autouse=True)
def double_by_default():
    """laplace-torch multiplies its full curvature with an identity of the default dtype, and loses half the digits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Nested(nn.Module):
    """The last layer is neither the last attribute nor called `last_layer`."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(5, 3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh()))

    def forward(self, x):
        return self.classifier(self.body(x))


class MeanOver(nn.Module):
    def forward(self, x):
        return x.mean(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def problem(likelihood: str, build=mlp, shape=(4,)):
    torch.manual_seed(3)
    model = build().eval()
    x = torch.randn(20, *shape)
    y = torch.randint(0, 3, (20,)) if likelihood == "classification" else torch.randn(20, 3)
    return model, DataLoader(TensorDataset(x, y), batch_size=8)


def fitted(model, data, likelihood="classification", subset="all", structure="diag", **options):
    la = laplace.Laplace(model, likelihood, subset_of_weights=subset, hessian_structure=structure, **options)
    la.fit(data)
    return la


def reported(la) -> Tensor:
    """The covariance that laplace-torch itself reports, dense."""
    if hasattr(la, "posterior_variance"):
        return torch.diag(la.posterior_variance)
    if hasattr(la, "posterior_covariance"):
        return la.posterior_covariance
    return torch.linalg.inv(la.posterior_precision.to_matrix())


# -- the adapter


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", ["scalar", "layer", "parameter"])
def test_all_weights(structure, likelihood, prior):
    model, data = problem(likelihood, Nested)
    sizes = [p.numel() for p in model.parameters()]
    priors = {
        "scalar": torch.tensor(0.7),
        "layer": torch.rand(len(sizes)) + 0.1,
        "parameter": torch.rand(sum(sizes)) + 0.1,
    }
    if structure == "kron" and prior == "parameter":
        pytest.skip("laplace-torch takes no prior per parameter here")
    options = {"sigma_noise": 0.4} if likelihood == "regression" else {}
    precision = priors[prior]
    la = fitted(model, data, likelihood, structure=structure, prior_precision=precision, temperature=0.8, **options)
    posterior = from_laplace(la)
    kinds = {"diag": DiagonalPosterior, "kron": KroneckerPosterior, "full": FullPosterior}
    assert type(posterior) is kinds[structure]
    assert posterior.names == tuple(n for n, _ in model.named_parameters())
    torch.testing.assert_close(posterior.to_dense(), reported(la), rtol=1e-9, atol=1e-12)
    expected = {"prior_precision": 0.7} if prior == "scalar" else {}
    assert posterior.details == pytest.approx(expected | ({"noise": 0.4} if options else {}))
    assert all(posterior.variance(n).shape == p.shape for n, p in model.named_parameters())


def test_every_parameter_gets_its_own_block():
    model, data = problem("classification", Nested)
    la = fitted(model, data, structure="full", prior_precision=0.7)
    posterior, start = from_laplace(la), 0
    for name, p in model.named_parameters():
        block = la.posterior_covariance[start : start + p.numel(), start : start + p.numel()]
        torch.testing.assert_close(posterior.covariance(name), block)
        start += p.numel()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("named", [False, True])
def test_last_layer_has_the_names_of_the_original_model(structure, named):
    model, data = problem("classification", Nested)
    options = {"last_layer_name": "classifier"} if named else {}
    la = fitted(model, data, subset="last_layer", structure=structure, prior_precision=0.7, **options)
    posterior = from_laplace(la)
    assert posterior.names == ("classifier.weight", "classifier.bias")
    posterior.bind(dict(model.named_parameters()))
    torch.testing.assert_close(posterior.to_dense(), reported(la), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_subnetwork_of_single_entries(structure):
    model, data = problem("classification")
    total = sum(p.numel() for p in model.parameters())
    indices = torch.tensor([total - 1, 3, 25, 0, total - 2])  # of 0.weight, 0.bias and 2.bias, in no order
    options = {"subnetwork_indices": indices, "prior_precision": 0.7}
    la = fitted(model, data, subset="subnetwork", structure=structure, **options)
    posterior = from_laplace(la)
    assert posterior.names == ("0.weight", "0.bias", "2.bias")
    everything = torch.zeros(total, total)
    everything[indices[:, None], indices] = reported(la)
    keep = torch.cat([torch.arange(30), torch.arange(total - 3, total)])
    torch.testing.assert_close(posterior.to_dense(), everything[keep][:, keep])
    variance = posterior.variance("0.bias")
    assert variance[1] > 0 and (variance > 0).sum() == 1


def test_frozen_parameters():
    model, data = problem("classification")
    model[0].requires_grad_(False)
    for structure in STRUCTURES:
        la = fitted(model, data, structure=structure, prior_precision=0.7)
        posterior = from_laplace(la)
        assert posterior.names == ("2.weight", "2.bias")
        torch.testing.assert_close(posterior.to_dense(), reported(la))


def test_damping_is_what_laplace_torch_makes_of_it():
    """Version 0.3 loses `damping` when it adds the prior; whatever posterior_precision says is what we take."""
    model, data = problem("classification")
    la = laplace.KronLaplace(model, "classification", prior_precision=0.7, damping=True)
    la.fit(data)
    torch.testing.assert_close(from_laplace(la).to_dense(), reported(la))

    damped = la.posterior_precision
    damped.damping = True
    type(la).posterior_precision, original = property(lambda self: damped), type(la).posterior_precision
    try:
        torch.testing.assert_close(from_laplace(la).to_dense(), torch.linalg.inv(damped.to_matrix()))
    finally:
        type(la).posterior_precision = original


def test_prior_precision_changed_after_the_fit():
    model, data = problem("regression")
    for structure in STRUCTURES:
        la = fitted(model, data, "regression", structure=structure)
        la.optimize_prior_precision(method="marglik", n_steps=5)
        la.sigma_noise = 0.3
        posterior = from_laplace(la)
        torch.testing.assert_close(posterior.to_dense(), reported(la))
        assert posterior.details["prior_precision"] == pytest.approx(la.prior_precision.item())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_unfitted(structure, subset):
    model, _ = problem("classification")
    la = laplace.Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure)
    with pytest.raises(PosteriorError, match=r"not fitted: call la\.fit"):
        from_laplace(la)


def test_what_is_not_a_gaussian_of_a_known_structure():
    model, _ = problem("classification")
    functional = laplace.FunctionalLaplace(model, "classification", n_subset=5)
    with pytest.raises(PosteriorError, match=r"holds no diagonal, Kronecker or full covariance.*fit_laplace"):
        from_laplace(functional)
    with pytest.raises(PosteriorError, match="LowRankLaplace holds no diagonal"):
        from_laplace(object.__new__(laplace.LowRankLaplace))
    with pytest.raises(PosteriorError, match="takes an object of laplace-torch, got a Sequential"):
        from_laplace(model)


# -- the built-in fit, on the same model and data


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_fit_agrees(structure, likelihood, subset):
    model, data = problem(likelihood, Nested)
    noise = {"sigma_noise": 0.4} if likelihood == "regression" else {}
    la = fitted(model, data, likelihood, subset, structure, prior_precision=0.7, **noise)
    ours = fit_laplace(
        model,
        data,
        likelihood,
        STRUCTURES[structure],
        parameters="*" if subset == "all" else "classifier.*",
        prior_precision=0.7,
        **({"noise": 0.4} if noise else {}),
    )
    torch.testing.assert_close(ours.to_dense(), from_laplace(la).to_dense(), rtol=1e-8, atol=1e-11)
    evidence = la.log_marginal_likelihood().item()
    assert ours.details["log_marginal_likelihood"] == pytest.approx(evidence, rel=1e-10)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_chosen_hyperparameters_are_a_maximum_for_laplace_torch(structure, likelihood):
    model, data = problem(likelihood)
    la = fitted(model, data, likelihood, structure=structure)
    found = fit_laplace(model, data, likelihood, STRUCTURES[structure]).details

    def evidence(delta: float = 1.0, sigma: float = 1.0) -> float:
        noise = {"sigma_noise": torch.tensor(found["noise"] * sigma)} if likelihood == "regression" else {}
        precision = torch.tensor(found["prior_precision"] * delta)
        return la.log_marginal_likelihood(prior_precision=precision, **noise).item()

    assert evidence() == pytest.approx(found["log_marginal_likelihood"], rel=1e-10)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert evidence(delta=factor) < evidence()
        if likelihood == "regression":
            assert evidence(sigma=factor) < evidence()
            assert evidence(factor, factor**-0.5) < evidence()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), MeanOver(), nn.Linear(5, 3)), (6, 4)),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)), (2, 5, 5)),
    ],
    ids=["sequence", "convolution"],
)
def test_fit_agrees_where_weights_are_shared_over_positions(build, shape):
    model, data = problem("classification", build, shape)
    for structure in STRUCTURES:
        la = fitted(model, data, structure=structure, prior_precision=0.7)
        ours = fit_laplace(model, data, structure=STRUCTURES[structure], prior_precision=0.7)
        torch.testing.assert_close(ours.to_dense(), from_laplace(la).to_dense(), rtol=1e-8, atol=1e-11)
        assert ours.details["log_marginal_likelihood"] == pytest.approx(la.log_marginal_likelihood().item())
