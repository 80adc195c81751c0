"""Baselines against closed forms, brute force and laplace-torch."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset

from propagauss import DiagonalPosterior, FullPosterior, InputError, KroneckerPosterior, PosteriorError
from propagauss.baselines import GLM, MAP, MonteCarlo, TemperatureScaling
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.regressor import Regressor

torch.set_num_threads(1)
F64 = torch.float64
KINDS = ["diagonal", "kronecker", "full"]
kinds = pytest.mark.parametrize("kind", KINDS)


def mlp(inputs: int = 3, hidden: int = 5, outputs: int = 2, dtype=F64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(dtype).eval()


def random_psd(n: int, dtype=F64) -> Tensor:
    a = torch.randn(n, n, dtype=dtype)
    return a @ a.mT / n


def posterior_for(model: nn.Module, kind: str, scale: float = 1.0):
    torch.manual_seed(1)
    parameters = dict(model.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    if kind == "diagonal":
        return DiagonalPosterior({n: scale * torch.rand(p.shape, dtype=dtype) for n, p in parameters.items()})
    if kind == "full":
        return FullPosterior(list(parameters), scale * random_psd(sum(p.numel() for p in parameters.values()), dtype))
    factors = {n: tuple(random_psd(k, dtype) for k in p.shape) for n, p in parameters.items()}
    return KroneckerPosterior(factors).scale(scale)


def dense(model: nn.Module, posterior) -> Tensor:
    return posterior.bind(dict(model.named_parameters())).to_dense()


def jacobian(model: nn.Module, x: Tensor, names) -> Tensor:
    """Literal loop over inputs and outputs: [B, C, P]."""
    parameters = dict(model.named_parameters())
    rows = []
    for sample in x:
        out = model(sample[None]).flatten()
        grads = [torch.autograd.grad(o, [parameters[n] for n in names], retain_graph=True) for o in out]
        rows.append(torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads]))
    return torch.stack(rows)


# -- MAP


def test_map_is_the_model_without_variance():
    model, x = mlp(), torch.randn(4, 3, dtype=F64)
    latent = MAP(model)(x)
    assert torch.equal(latent.mean, model(x)) and not latent.variance.any()
    torch.testing.assert_close(Classifier(MAP(model))(x).probs, model(x).softmax(-1))


# -- GLM


@kinds
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_glm_against_a_literal_jacobian(kind, chunk):
    model, x = mlp(), torch.randn(7, 3, dtype=F64)
    posterior = posterior_for(model, kind)
    j = jacobian(model, x, posterior.names)
    expected = j @ dense(model, posterior) @ j.mT
    latent = GLM(model, posterior, chunk=chunk)(x)
    torch.testing.assert_close(latent.mean, model(x))
    torch.testing.assert_close(latent.covariance, expected)
    diagonal = GLM(model, posterior, covariance="diagonal", chunk=chunk)(x)
    assert not diagonal.is_full
    torch.testing.assert_close(diagonal.variance, expected.diagonal(dim1=1, dim2=2))


def test_glm_over_some_parameters_only():
    model, x = mlp(), torch.randn(4, 3, dtype=F64)
    posterior = posterior_for(model, "full").bind(dict(model.named_parameters())).select("2.*")
    j = jacobian(model, x, posterior.names)
    torch.testing.assert_close(GLM(model, posterior)(x).covariance, j @ posterior.to_dense() @ j.mT)


@pytest.mark.parametrize("batch", [0, 1])
def test_glm_small_batches(batch):
    model = mlp()
    latent = GLM(model, posterior_for(model, "diagonal"))(torch.randn(batch, 3, dtype=F64))
    assert latent.covariance.shape == (batch, 2, 2)


def test_glm_gradients_reach_the_input():
    model = mlp()
    net = GLM(model, posterior_for(model, "diagonal"))
    x = torch.randn(2, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: net(x).covariance, (x,))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model, x = mlp(), torch.randn(4, 3, dtype=F64)
    for net in (GLM(model, posterior_for(model, "diagonal")), MonteCarlo(model, posterior_for(model, "full"), 5)):
        expected = net(x)
        with mode():
            torch.testing.assert_close(net(x).variance, expected.variance)


class TwoInputs(nn.Module):
    """Several inputs, a keyword, an output per token, and one weight used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 3, bias=False).double()
        self.b = nn.Linear(3, 3, bias=False).double()
        self.b.weight = self.a.weight

    def forward(self, x, *, other, factor=1.0):
        return torch.stack([self.b(torch.tanh(self.a(x))), other * factor], 1)


def test_several_inputs_tokens_and_tied_weights():
    model = TwoInputs().eval()
    posterior = DiagonalPosterior({"a.weight": torch.full((3, 3), 0.1, dtype=F64)})
    x, other = torch.randn(4, 3, dtype=F64), torch.randn(4, 3, dtype=F64)
    inputs = {"x": x, "other": other, "factor": 2.0}
    latent = GLM(model, posterior)(inputs)
    assert latent.mean.shape == (4, 2, 3) and latent.covariance.shape == (4, 6, 6)
    rows = model(**inputs)[:, 0]  # the other token does not depend on the weight
    grads = [[torch.autograd.grad(o, model.a.weight, retain_graph=True)[0].flatten() for o in row] for row in rows]
    j = torch.stack([torch.stack(g) for g in grads])
    torch.testing.assert_close(latent.covariance[:, :3, :3], 0.1 * j @ j.mT)
    assert not latent.covariance[:, 3:].any()
    sampled = MonteCarlo(model, posterior, samples=4000)
    torch.testing.assert_close(sampled(**inputs).mean[:, 1], 2 * other)
    assert sampled.latents(inputs).shape == (4000, 4, 2, 3)


class Branching(nn.Module):
    """A model that vmap refuses: it branches on a value."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x):
        out = self.linear(x)
        return out if out.sum() > -1e9 else -out


def test_models_that_vmap_refuses():
    branching = Branching().eval()
    plain = nn.Sequential()
    plain.add_module("linear", branching.linear)
    posterior, x = posterior_for(branching, "full"), torch.randn(5, 3, dtype=F64)
    torch.testing.assert_close(GLM(branching, posterior)(x).covariance, GLM(plain, posterior)(x).covariance)
    slow, fast = (MonteCarlo(m, posterior, samples=20) for m in (branching, plain))
    torch.testing.assert_close(slow.latents(x), fast.latents(x))


# -- Monte Carlo


@kinds
def test_samples_of_a_linear_model_have_the_exact_moments(kind):
    """Tolerance: five standard errors, √(2/S) relative for a variance."""
    torch.manual_seed(0)
    model, x, samples = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=F64), 20_000
    posterior = posterior_for(model, kind)
    exact = GLM(model, posterior)(x)
    latent = MonteCarlo(model, posterior, samples=samples, covariance="full")(x)
    deviation = exact.variance.sqrt()
    assert ((latent.mean - exact.mean).abs() / deviation < 5 / math.sqrt(samples)).all()
    size = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    assert ((latent.covariance - exact.covariance).abs() / size < 5 * math.sqrt(2 / samples)).all()
    diagonal = MonteCarlo(model, posterior, samples=samples)(x)
    torch.testing.assert_close(diagonal.variance, latent.variance)


@kinds
def test_same_draws_for_every_input(kind):
    model, x = mlp(), torch.randn(8, 3, dtype=F64)
    net = MonteCarlo(model, posterior_for(model, kind), samples=30, chunk=7)
    whole = net.latents(x)
    assert whole.shape == (30, 8, 2)
    torch.testing.assert_close(torch.cat([net.latents(x[:3]), net.latents(x[3:])], 1), whole)
    again = MonteCarlo(model, posterior_for(model, kind), samples=30, chunk=7)
    assert torch.equal(again.latents(x), whole)
    assert not torch.equal(MonteCarlo(model, posterior_for(model, kind), samples=30, seed=1).latents(x), whole)


def test_each_draw_is_the_model_with_those_weights():
    model, x = mlp(), torch.randn(4, 3, dtype=F64)
    posterior = posterior_for(model, "diagonal")
    draws = posterior.sample(3, torch.Generator().manual_seed(5))
    latents = MonteCarlo(model, posterior, samples=3, seed=5).latents(x)
    for s in range(3):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p.add_(draws[name][s])
        torch.testing.assert_close(latents[s], moved(x))


def test_never_holds_all_weights_at_once(monkeypatch):
    model = mlp()
    posterior = posterior_for(model, "diagonal")
    counts = []
    sample = DiagonalPosterior.sample
    monkeypatch.setattr(DiagonalPosterior, "sample", lambda self, n, g=None: counts.append(n) or sample(self, n, g))
    MonteCarlo(model, posterior, samples=25, chunk=10).latents(torch.randn(2, 3, dtype=F64))
    assert counts == [10, 10, 5]


def test_classify_averages_probabilities():
    model, x = mlp(), torch.randn(4, 3, dtype=F64)
    net = MonteCarlo(model, posterior_for(model, "full"), samples=50)
    predictive = net.classify(x)
    assert isinstance(predictive, Categorical)
    torch.testing.assert_close(predictive.probs, net.latents(x).softmax(-1).mean(0))
    assert net.classify(1e5 * x).logits.isfinite().all()


@pytest.mark.parametrize("noise", [0.3, [0.3, 2.0]], ids=["one", "per output"])
def test_regress_is_the_mixture_of_the_samples(noise):
    model, x, y = mlp(), torch.randn(4, 3, dtype=F64), torch.randn(4, 2, dtype=F64)
    net = MonteCarlo(model, posterior_for(model, "diagonal"), samples=50)
    level = torch.as_tensor(noise, dtype=F64)
    density = Normal(net.latents(x), level).log_prob(y).exp().mean(0)
    predictive = net.regress(x, noise if isinstance(noise, float) else level)
    torch.testing.assert_close(predictive.log_prob(y), density.log())
    torch.testing.assert_close(predictive.mean, net(x).mean)


@pytest.mark.parametrize("batch", [0, 1])
def test_monte_carlo_small_batches(batch):
    model, x = mlp(), torch.randn(batch, 3, dtype=F64)
    for covariance in ("diagonal", "full"):
        net = MonteCarlo(model, posterior_for(model, "diagonal"), samples=5, covariance=covariance)
        assert net(x).covariance.shape == (batch, 2, 2)
    assert (
        TemperatureScaling(model)(x).probs.shape
        == net.classify(x).probs.shape
        == net.regress(x, 1.0).mean.shape
        == (batch, 2)
    )


def test_single_precision():
    model, x = mlp(dtype=torch.float32), torch.randn(4, 3)
    posterior = posterior_for(model, "diagonal", 0.01)
    assert GLM(model, posterior)(x).dtype == MonteCarlo(model, posterior, samples=5)(x).dtype == torch.float32


# -- in place of a streamlined net


def test_likelihoods_and_scale_work_on_baselines():
    model, x = mlp(), torch.randn(60, 3, dtype=F64)
    posterior = posterior_for(model, "diagonal", 0.1)
    labels = torch.randint(2, (60,))
    targets = model(x).detach() + 0.3 * torch.randn(60, 2, dtype=F64)
    for net in (GLM(model, posterior), MonteCarlo(model, posterior, samples=20), MAP(model)):
        clf = Classifier(net, link="mean_field").fit_scale(DataLoader(TensorDataset(x, labels), 16))
        assert clf.fit_report is not None and clf.fit_report.nlpd_after <= clf.fit_report.nlpd_before
        reg = Regressor(net, noise=1.0).fit_scale(DataLoader(TensorDataset(x, targets), 16), fit_noise=True)
        assert reg.fit_report is not None and reg.fit_report.nlpd_after < reg.fit_report.nlpd_before


def test_the_model_is_left_alone():
    model, x = mlp(), torch.randn(4, 3, dtype=F64)
    before = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    identities = [id(p) for p in model.parameters()]
    posterior = posterior_for(model, "full")
    for net in (MAP(model), GLM(model, posterior), MonteCarlo(model, posterior, samples=3), TemperatureScaling(model)):
        net(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert flags == [p.requires_grad for p in model.parameters()]
    assert identities == [id(p) for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters()) and not model.training and not model._forward_hooks


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(5)], ids=["dropout", "batch norm"])
def test_training_mode_is_refused(layer):
    model = nn.Sequential(nn.Linear(3, 5), layer, nn.Linear(5, 2)).train()
    posterior = DiagonalPosterior({"0.weight": torch.ones(5, 3)})
    for make in (MAP, TemperatureScaling, lambda m: GLM(m, posterior), lambda m: MonteCarlo(m, posterior)):
        with pytest.raises(InputError, match=r"'1' is in training mode: call model\.eval"):
            make(model)
        net = make(model.eval())
        net(torch.randn(2, 3))
        with pytest.raises(InputError, match="training mode"):
            model.train()
            net(torch.randn(2, 3))


def test_training_mode_that_does_not_matter():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)).train()
    assert MAP(model)(torch.randn(2, 3)).shape == (2, 2)


X = torch.ones(1, 3, dtype=F64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: GLM(m, DiagonalPosterior({})), InputError, "use MAP"),
        (
            lambda m: GLM(m, DiagonalPosterior({"0.weigth": torch.ones(5, 3)})),
            PosteriorError,
            "did you mean '0.weight'",
        ),
        (lambda m: MonteCarlo(m, DiagonalPosterior({"0.weight": torch.ones(5, 3)})), PosteriorError, "float64"),
        (lambda m: MonteCarlo(m, posterior_for(m, "diagonal"), samples=0), InputError, "at least 1"),
        (lambda m: GLM(m, posterior_for(m, "diagonal"), chunk=0), InputError, "at least 1"),
        (lambda m: GLM(m, posterior_for(m, "diagonal"), covariance="both"), InputError, "'diagonal' or 'full'"),
        (
            lambda m: MonteCarlo(m, posterior_for(m, "diagonal"), samples=1)(torch.ones(1, 3, dtype=F64)),
            InputError,
            "2",
        ),
        (
            lambda m: MonteCarlo(m, posterior_for(m, "diagonal"), samples=2).regress(torch.ones(1, 3, dtype=F64), 0.0),
            InputError,
            "variance is zero",
        ),
        (lambda m: MAP(nn.LSTM(3, 2).double())(X), InputError, "a tuple of 2"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make(mlp())


# -- against laplace-torch


def fitted_laplace(structure: str, likelihood: str = "classification"):
    laplace = pytest.importorskip("laplace")
    model = mlp(dtype=torch.float32)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=g)
    y = torch.randint(2, (64,), generator=g) if likelihood == "classification" else torch.randn(64, 2, generator=g)
    la = laplace.Laplace(model, likelihood, subset_of_weights="all", hessian_structure=structure, prior_precision=5.0)
    la.fit(DataLoader(TensorDataset(x, y), 32))
    names = [n for n, _ in model.named_parameters()]
    if structure == "full":
        return la, model, FullPosterior(names, la.posterior_covariance)
    parts = la.posterior_variance.split([p.numel() for p in model.parameters()])
    shapes = [p.shape for p in model.parameters()]
    return la, model, DiagonalPosterior({n: v.reshape(s) for n, v, s in zip(names, parts, shapes, strict=True)})


@pytest.mark.peer
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_glm_agrees_with_laplace_torch(structure, likelihood):
    la, model, posterior = fitted_laplace(structure, likelihood)
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    mean, covariance = la._glm_predictive_distribution(x)
    latent = GLM(model, posterior)(x)
    torch.testing.assert_close(latent.mean, mean)
    torch.testing.assert_close(latent.covariance, covariance, atol=1e-6, rtol=1e-4)


@pytest.mark.peer
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_probit_glm_agrees_with_laplace_torch(structure):
    la, model, posterior = fitted_laplace(structure)
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    ours = Classifier(GLM(model, posterior), link="probit")(x).probs
    torch.testing.assert_close(ours, la(x, pred_type="glm", link_approx="probit"), atol=1e-5, rtol=1e-4)


@pytest.mark.peer
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_sampling_agrees_with_laplace_torch(structure):
    """Both average 10,000 independent draws of probabilities with standard deviation below 0.3."""
    la, model, posterior = fitted_laplace(structure)
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    theirs = la.predictive_samples(x, pred_type="nn", n_samples=10_000, generator=torch.Generator().manual_seed(2))
    ours = MonteCarlo(model, posterior, samples=10_000).latents(x).softmax(-1)
    tolerance = 5 * 0.3 * math.sqrt(2 / 10_000)
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), atol=tolerance, rtol=0)
    torch.testing.assert_close(ours.std(0), theirs.std(0), atol=tolerance, rtol=0)
