"""Single logits: the links against the integral, one logit against two, weights, shapes and types of labels."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.special import expit, log_expit, log_ndtr, logsumexp
from scipy.stats import norm
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.func import functional_call, hessian

import propagauss as pg
from both_files import both_files
from propagauss.likelihoods import BernoulliLikelihood
from propagauss.likelihoods.sigmoids import probit, quadrature
from propagauss.metrics import accuracy, brier, ece, nlpd

torch.set_num_threads(1)
F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# -- the links


@pytest.mark.parametrize("m", [0.0, -0.3, 2.0, -6.0, 15.0, -40.0, 90.0])
@pytest.mark.parametrize("v", [0.0, 1e-6, 0.1, 0.99, 1.0, 1.01, 3.0, 10.0, 40.0, 300.0, 1e4])
def test_quadrature_is_the_integral(m, v):
    """Also of the less likely answer, down to e^-90."""
    z = np.linspace(-40, 40, 80_001)  # so fine that the trapezoidal rule is exact to rounding
    for found, sign in zip(quadrature(tensor(m), tensor(v)), (1, -1), strict=True):
        exact = logsumexp(log_expit(sign * (m + math.sqrt(v) * z)) + norm.logpdf(z)) + math.log(z[1] - z[0])
        assert found.item() == pytest.approx(exact, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("v", [1e8, 1e20, 1e30])
@pytest.mark.parametrize("z", [0.0, 1.0, -5.0, -20.0])
def test_with_hardly_any_knowledge_it_is_a_step(v, z):
    assert quadrature(tensor(z * math.sqrt(v)), tensor(v))[0].item() == pytest.approx(log_ndtr(z), rel=1e-6)


def test_a_million_draws():
    m, v = tensor(0.5, -2.0, 4.0, -1.0), tensor(0.3, 2.0, 20.0, 500.0)
    f = m + v.sqrt() * torch.randn(1_000_000, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert ((quadrature(m, v)[0].exp() - f.sigmoid().mean(0)).abs() < 5 * f.sigmoid().std(0) / 1e3).all()
    assert ((probit(m, v)[0].exp() - f.sigmoid().mean(0)).abs() < 0.02).all()


@pytest.mark.parametrize("link", [probit, quadrature])
def test_gradients(link):
    m, v = tensor(-9.0, -0.5, 0.0, 1.0, 20.0).requires_grad_(), tensor(0.5, 3.0, 1.5, 40.0, 2.0).requires_grad_()
    assert torch.autograd.gradcheck(link, (m, v))


@pytest.mark.parametrize("m", [-3.0, 0.0, 1.0])
def test_gradient_where_there_is_no_variance(m):
    """`d/dv E[σ] = ½ σ''`"""
    mean, v = tensor(m).requires_grad_(), tensor(0.0).requires_grad_()
    gradients = torch.autograd.grad(quadrature(mean, v)[0].exp(), (mean, v))
    p = expit(m)
    assert gradients[0].item() == pytest.approx(p * (1 - p), rel=1e-6)
    assert gradients[1].item() == pytest.approx(p * (1 - p) * (1 - 2 * p) / 2, rel=1e-6, abs=1e-8)


def test_in_single_precision():
    m, v = tensor(-30.0, -1.0, 0.0, 8.0), tensor(4.0, 0.2, 1e5, 30.0)
    single = torch.stack(quadrature(m.float(), v.float())).double()
    torch.testing.assert_close(single, torch.stack(quadrature(m, v)), rtol=1e-4, atol=1e-6)


def test_temperature_comes_after_the_link():
    latent = pg.Gaussian(tensor(-1.0, 2.0), variance=tensor(3.0, 0.5))
    plain, cooled = (BernoulliLikelihood("quadrature", t).predictive(latent).logits for t in (1.0, 0.5))
    torch.testing.assert_close(cooled, 2 * plain)
    for link in ("probit", "quadrature"):
        likelihood = BernoulliLikelihood(link, 3.0)
        y = tensor(1, 0)
        found = likelihood.log_predictive(likelihood.moments(latent), y)
        torch.testing.assert_close(found, likelihood.predictive(latent).log_prob(y))


def test_mutual_information_against_a_million_draws():
    m, v = tensor(0.0, 3.0, -8.0, 1.0, 5.0), tensor(1e-3, 1.0, 9.0, 1e4, 1e3)
    found = BernoulliLikelihood("quadrature").decompose(pg.Gaussian(m, v)).epistemic
    f = m + v.sqrt() * torch.randn(1_000_000, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = Bernoulli(f.sigmoid().mean(0)).entropy() - Bernoulli(logits=f).entropy().mean(0)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-6)


# -- the fit


class WithZero(nn.Module):
    """Two logits, of which the first is always zero."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x)
        return torch.cat([torch.zeros_like(f), f], 1)


def network(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def data(outputs: int = 1, rows: int = 25) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 3, dtype=F64), torch.randint(0, 2, (rows, outputs))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_one_logit_is_two_of_which_one_is_zero(structure):
    model, (x, y) = network(), data()
    one = pg.fit_laplace(model, [(x, y)], "binary", structure)
    two = pg.fit_laplace(WithZero(model).eval(), [(x, y[:, 0])], "classification", structure)
    torch.testing.assert_close(one.to_dense(), two.to_dense())
    for name, value in two.details.items():
        assert one.details[name] == pytest.approx(value)


@pytest.mark.parametrize("weight", [3.0, tensor(0.5, 4.0)], ids=["one", "per label"])
def test_weights_of_positive_labels_against_the_loss_of_torch(weight):
    model, (x, y) = network(2), data(2)
    likelihood = BernoulliLikelihood(positive_weight=weight)
    posterior = pg.fit_laplace(model, [(x, y)], likelihood, "full", "2.*", prior_precision=0.7)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    chosen = {n: parameters[n] for n in ("2.weight", "2.bias")}
    loss = nn.BCEWithLogitsLoss(reduction="sum", pos_weight=torch.as_tensor(weight, dtype=F64))

    def of(flat: Tensor) -> Tensor:  # the last layer is linear, so the Hessian is the GGN
        parts = flat.split([p.numel() for p in chosen.values()])
        new = {n: part.reshape(p.shape) for (n, p), part in zip(chosen.items(), parts, strict=True)}
        return loss(functional_call(model, parameters | new, (x,)), y.double())

    flat = torch.cat([p.flatten() for p in chosen.values()])
    expected = torch.linalg.inv(hessian(of)(flat) + 0.7 * torch.eye(len(flat), dtype=F64))
    torch.testing.assert_close(posterior.to_dense(), expected)
    with_torch = -of(flat) - 0.35 * flat.square().sum() + 0.5 * torch.logdet(expected) + 0.5 * len(flat) * math.log(0.7)
    assert posterior.details["log_marginal_likelihood"] == pytest.approx(with_torch.item())


def test_labels_of_every_type_and_both_shapes():
    model, (x, y) = network(), data()
    expected = pg.fit_laplace(model, [(x, y)], "binary", prior_precision=1.0).to_dense()
    for labels in (y[:, 0], y.bool(), y.float(), y[:, 0].double(), y.to(torch.uint8)):
        found = pg.fit_laplace(model, [(x, labels)], "binary", prior_precision=1.0)
        torch.testing.assert_close(found.to_dense(), expected)
    flat = nn.Sequential(*model, nn.Flatten(0)).eval()
    for labels in (y, y[:, 0]):
        found = pg.fit_laplace(flat, [(x, labels)], "binary", prior_precision=1.0)
        torch.testing.assert_close(found.to_dense(), expected)


def test_labels_in_the_shape_of_an_image():
    torch.manual_seed(0)
    model = nn.Conv2d(2, 1, 1).double().eval()
    x, y = torch.randn(6, 2, 3, 3, dtype=F64), torch.randint(0, 2, (6, 1, 3, 3))
    found = pg.fit_laplace(model, [(x, y)], "binary", "full", prior_precision=1.0)
    p = model(x).sigmoid().flatten()
    rows = torch.cat([x.movedim(1, -1).reshape(-1, 2), torch.ones(54, 1, dtype=F64)], 1)
    expected = torch.linalg.inv(rows.mT @ ((p * (1 - p))[:, None] * rows) + torch.eye(3, dtype=F64))
    torch.testing.assert_close(found.to_dense(), expected.detach())


@pytest.mark.parametrize("y", [[0, 2], [0.5, 1.0], [-1, 1], [0.0, math.nan]])
def test_labels_that_are_no_answers_are_refused(y):
    x, labels = torch.zeros(2, 1), torch.tensor(y)
    with pytest.raises(pg.InputError, match="batch 0: likelihood='binary' needs labels of 0 and 1"):
        pg.fit_laplace(nn.Linear(1, 1).eval(), [(x, labels)], "binary")
    classifier = pg.BinaryClassifier(lambda x: pg.Gaussian(x, torch.ones_like(x)))
    with pytest.raises(pg.InputError, match=r"labels of 0 and 1|finite"):
        classifier.fit_scale([(x, labels)], progress=False)


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(pg.InputError, match="there is no link 'quadratur'; did you mean 'quadrature'"):
        BernoulliLikelihood("quadratur")
    with pytest.raises(pg.InputError, match="positive_weight"):
        BernoulliLikelihood(positive_weight=0.0)
    with pytest.raises(pg.InputError, match="positive_weight has values"):
        BernoulliLikelihood(positive_weight=tensor(1.0, -1.0))
    with pytest.raises(pg.InputError, match="temperature"):
        pg.BinaryClassifier(lambda x: x, temperature=-1.0)
    with pytest.raises(pg.InputError, match=r"batch 0: positive_weight has shape \(3,\)"):
        pg.fit_laplace(network(2), [data(2)], BernoulliLikelihood(positive_weight=torch.ones(3)))


# -- the predictor


def posterior_of(model: nn.Module) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})


@pytest.mark.parametrize("outputs", [1, 3])
def test_predictor(outputs):
    model, (x, y) = network(outputs), data(outputs)
    net = pg.streamline(model, posterior_of(model), x[:2])
    classifier = pg.BinaryClassifier(net, "quadrature")
    found = classifier(x)
    assert isinstance(found, Bernoulli) and found.probs.shape == (25, outputs)
    latent = net(x)
    torch.testing.assert_close(found.probs, quadrature(latent.mean, latent.variance)[0].exp())
    before = -found.log_prob(y.double()).mean().item()
    classifier.fit_scale([(x, y)], progress=False)
    assert classifier.fit_report is not None and classifier.fit_report.nlpd_before == pytest.approx(before)
    assert classifier.decompose(x).total.shape == (25, outputs)
    assert classifier(x[:0]).probs.shape == (0, outputs)


def test_metrics_take_it_as_two_classes():
    torch.manual_seed(0)
    predictive = Bernoulli(logits=torch.randn(40, 1, dtype=F64))
    y = torch.randint(0, 2, (40, 1))
    two = torch.cat([1 - predictive.probs, predictive.probs], 1)
    for labels in (y, y[:, 0], y.bool(), y.double()):
        assert nlpd(predictive, labels) == pytest.approx(-predictive.log_prob(y.double()).mean().item())
        for metric in (accuracy, ece, brier):
            assert metric(predictive, labels) == pytest.approx(metric(two, y[:, 0]))
    with pytest.raises(pg.InputError, match="must be 0 and 1"):
        accuracy(predictive, 2 * y)


def test_temperature_is_saved_with_the_module():
    net = pg.streamline(network(), posterior_of(network()), torch.zeros(2, 3, dtype=F64))
    first, second = pg.BinaryClassifier(net, temperature=2.5, scale=3.0), pg.BinaryClassifier(net)
    second.load_state_dict(first.state_dict())
    assert second.temperature == 2.5 and second.scale == 3.0
    assert "temperature=2.5" in repr(second)


@pytest.mark.parametrize("link", ["probit", "quadrature"])
def test_exported(tmp_path, link):
    runtime = pytest.importorskip("onnxruntime")
    model, x = network().float(), torch.randn(5, 3)
    net = pg.streamline(model, posterior_of(model), x[:2])
    classifier = pg.BinaryClassifier(net, link, scale=40.0, temperature=1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = both_files(classifier, tmp_path)
    archive = torch.export.load(files[".pt2"]).module()(x)["probabilities"]
    session = runtime.InferenceSession(str(files[".onnx"]), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    graph = torch.from_numpy(session.run(None, {"x": x.numpy()})[names.index("probabilities")])
    for found in (archive, graph):
        torch.testing.assert_close(found, classifier(x).probs.detach(), rtol=1e-4, atol=1e-6)
