"""Links against the integral they approximate; Classifier and Regressor around small nets."""

import functools
import math

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from propagauss import Gaussian, InputError
from propagauss.links import LINKS, bridge, mean_field, monte_carlo, probit
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.regressor import Regressor

torch.set_num_threads(1)
F64 = torch.float64
names = pytest.mark.parametrize("name", LINKS)
structures = pytest.mark.parametrize("full", [False, True], ids=["variance", "covariance"])


def random_latent(batch: int, classes: int, sigma: float = 1.0, full: bool = False, dtype=F64, seed: int = 0):
    """Mean [B, C] of standard deviation 3, and variances or covariances with diagonal about sigma²."""
    g = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(batch, classes, generator=g, dtype=dtype)
    if not full:
        return mean, 2 * sigma**2 * torch.rand(batch, classes, generator=g, dtype=dtype)
    a = torch.randn(batch, classes, classes, generator=g, dtype=dtype)
    return mean, sigma**2 * a @ a.mT / classes


def brute_force(mean: Tensor, covariance: Tensor, draws: int = 40_000) -> Tensor:
    full = covariance if covariance.dim() > mean.dim() else torch.diag_embed(covariance)
    logits = Gaussian(mean, covariance=full).sample((draws,), torch.Generator().manual_seed(1))
    return logits.softmax(-1).mean(0)


@functools.cache
def sampled(full: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A latent, and its probabilities by draws."""
    latent = random_latent(50, 5, full=full)
    return *latent, brute_force(*latent)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum(-1)


# -- links: where they are exact


@structures
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("link", [probit, mean_field, monte_carlo])
def test_zero_variance_is_softmax(link, dtype, full):
    mean, covariance = random_latent(6, 5, full=full, dtype=dtype)
    # the Monte Carlo link adds a slack of one rounding unit to the variance
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(link(mean, covariance * 0), mean.log_softmax(-1), atol=tolerance, rtol=tolerance)


def test_bridge_without_variance_is_softmax_for_two_classes_only():
    two, _ = random_latent(6, 2)
    torch.testing.assert_close(bridge(two, two * 0), two.log_softmax(-1))
    three = torch.tensor([[4.0, 0.0, 0.0]])
    assert (bridge(three, three * 0).exp() - three.softmax(-1)).abs().max() > 0.01


@structures
@pytest.mark.parametrize("name", LINKS)
def test_normalised_and_indifferent_to_order(name, full):
    mean, covariance = random_latent(7, 5, full=full)
    out = LINKS[name](mean, covariance)
    torch.testing.assert_close(out.logsumexp(-1), torch.zeros(7, dtype=F64), atol=1e-12, rtol=0)
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = covariance[:, order][..., order] if full else covariance[:, order]
    # draws belong to a position, so the sampled link agrees up to its error only
    tolerance = 5e-3 if name == "monte_carlo" else 1e-12
    torch.testing.assert_close(LINKS[name](mean[:, order], permuted).exp(), out[:, order].exp(), atol=tolerance, rtol=0)


@names
def test_diagonal_covariance_equals_variances(name):
    mean, variance = random_latent(4, 5)
    tolerance = 1e-9 if name == "monte_carlo" else 1e-12
    torch.testing.assert_close(
        LINKS[name](mean, torch.diag_embed(variance)), LINKS[name](mean, variance), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("link", [mean_field, monte_carlo])
def test_what_all_logits_share_does_not_matter(link):
    mean, _ = random_latent(4, 5)
    shared = torch.full((4, 5, 5), 9.0, dtype=F64)  # rank one: one random shift of all logits
    torch.testing.assert_close(link(mean, shared), mean.log_softmax(-1), atol=1e-5, rtol=1e-5)


# -- links: how close they are


@pytest.mark.parametrize("d", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("s", [0.1, 1.0, 10.0, 100.0])
def test_two_classes_against_the_integral(d, s):
    """With two classes only the difference d, of variance s, counts; MacKay's approximation is within 0.02."""
    exact, _ = quad(lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / (1 + math.exp(-d - z * s**0.5)), -12, 12)
    mean = torch.tensor([[d, 0.0]], dtype=F64)
    halves, one = torch.tensor([[s / 2, s / 2]], dtype=F64), torch.tensor([[s, 0.0]], dtype=F64)
    correlated = torch.tensor([[[s, s / 4], [s / 4, s / 2]]], dtype=F64)  # s + s/2 - 2 s/4 = s
    for covariance in (halves, one, correlated):
        assert mean_field(mean, covariance).exp()[0, 0].item() == pytest.approx(exact, abs=0.02)
        assert monte_carlo(mean, covariance, samples=4096).exp()[0, 0].item() == pytest.approx(exact, abs=3e-3)
    assert probit(mean, one).exp()[0, 0].item() == pytest.approx(exact, abs=0.02)
    # both logits random: the probit link takes the larger variance for that of the difference, and is worse
    assert probit(mean, halves).exp()[0, 0].item() == pytest.approx(exact, abs=0.13)


@structures
@pytest.mark.parametrize(
    ("name", "tolerance"), [("probit", 0.06), ("mean_field", 0.03), ("monte_carlo", 0.01), ("bridge", 0.20)]
)
def test_close_to_sampling(name, tolerance, full):
    """Mean total variation distance to 40,000 draws, 5 classes, variance 1. The reference itself is within 0.003."""
    mean, covariance, exact = sampled(full)
    assert total_variation(LINKS[name](mean, covariance).exp(), exact).mean() < tolerance


def test_mean_field_beats_probit_on_unequal_variances():
    mean, covariance = random_latent(50, 10, sigma=3)
    exact = brute_force(mean, covariance)
    errors = {n: total_variation(link(mean, covariance).exp(), exact).mean().item() for n, link in LINKS.items()}
    assert errors["monte_carlo"] < errors["mean_field"] < errors["probit"] < errors["bridge"]


def test_mean_field_keeps_the_arg_max_that_probit_loses():
    mean, variance = torch.tensor([[2.0, 1.0, -4.0]]), torch.tensor([[10.0, 0.0, 0.0]])
    assert probit(mean, variance).argmax() == 1
    assert mean_field(mean, variance).argmax() == 0 == brute_force(mean, variance).argmax()


@pytest.mark.parametrize("variance", [0.5, 7.0])
def test_bridge_against_its_formula(variance):
    """Equal variances, where projection and conditioning agree: 0.5 is below the correction, 7 above."""
    mean, _ = random_latent(1, 4)
    k, m = 4, [x - mean.mean().item() for x in mean[0].tolist()]
    v = variance * (1 - 1 / k)
    c = max(v / math.sqrt(k / 2), 1.0)
    m, v = [x / math.sqrt(c) for x in m], v / c
    alpha = [(1 - 2 / k + math.exp(a) / k**2 * sum(math.exp(-b) for b in m)) / v for a in m]
    expected = torch.tensor([[a / sum(alpha) for a in alpha]], dtype=F64)
    torch.testing.assert_close(bridge(mean, torch.full_like(mean, variance)).exp(), expected)


@pytest.mark.peer
@pytest.mark.parametrize(("variance", "variant"), [(0.5, "bridge"), (7.0, "bridge_norm")])
def test_bridge_equals_laplace_torch_for_equal_variances(variance, variant):
    laplace = pytest.importorskip("laplace")
    mean, _ = random_latent(3, 4, dtype=torch.float32)
    la = laplace.Laplace(nn.Linear(2, 4), "classification", "all", "diag")
    covariance = variance * torch.eye(4).expand(3, 4, 4).clone()
    la._glm_predictive_distribution = lambda *a, **k: (mean.clone(), covariance)
    theirs = la._glm_forward_call(torch.zeros(3, 2), "classification", link_approx=variant)
    torch.testing.assert_close(bridge(mean, torch.full_like(mean, variance)).exp(), theirs, atol=1e-5, rtol=1e-5)


# -- links: numerics


@structures
@names
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extremes_stay_finite(name, dtype, full):
    values = torch.tensor([-1e4, 0.0, 1e4], dtype=dtype)
    sizes = torch.tensor([0.0, 1.0, 1e8], dtype=dtype)
    mean = torch.cartesian_prod(values, values, values).repeat_interleave(27, 0).requires_grad_()
    variance = torch.cartesian_prod(sizes, sizes, sizes).repeat(27, 1)
    covariance = (torch.diag_embed(variance) if full else variance).requires_grad_()
    out = LINKS[name](mean, covariance)
    assert out.isfinite().all() and (out <= 1e-4).all()
    gradients = torch.autograd.grad(out[:, 0].sum(), (mean, covariance))
    assert all(g.isfinite().all() for g in gradients)


@structures
@names
def test_gradcheck(name, full):
    mean, covariance = random_latent(2, 3, full=full)

    def run(m, s):
        s = (s + s.mT) / 2 if full else s  # Cholesky reads one triangle only
        return LINKS[name](m, s)

    assert torch.autograd.gradcheck(run, (mean.requires_grad_(), (covariance + 0).requires_grad_()))


def test_monte_carlo_gradient_where_the_variance_vanishes():
    """d/dv E[softmax] at v = 0 is half the second derivative of the softmax."""
    mean = torch.tensor([[1.0, 0.0, -1.0]], dtype=F64)
    variance = torch.zeros_like(mean).requires_grad_()
    (gradient,) = torch.autograd.grad(monte_carlo(mean, variance, samples=8192).exp()[0, 0], variance)
    hessian = torch.autograd.functional.hessian(lambda m: m.softmax(-1)[0], mean[0])
    torch.testing.assert_close(gradient[0], hessian.diagonal() / 2, atol=2e-3, rtol=0)


@structures
@names
@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches_and_no_interaction(name, batch, full):
    mean, covariance = random_latent(3, 4, full=full)
    out = LINKS[name](mean[:batch], covariance[:batch])
    torch.testing.assert_close(out, LINKS[name](mean, covariance)[:batch])


@structures
@names
def test_leading_dimensions(name, full):
    mean, covariance = random_latent(6, 4, full=full)
    out = LINKS[name](mean.reshape(2, 3, 4), covariance.reshape(2, 3, *covariance.shape[1:]))
    torch.testing.assert_close(out.reshape(6, 4), LINKS[name](mean, covariance))


class AsModule(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, mean, covariance):
        return LINKS[self.name](mean, covariance)


@structures
@names
def test_export_with_an_open_batch(name, full):
    mean, covariance = random_latent(5, 4, full=full, dtype=torch.float32)
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        AsModule(name), (mean[:3], covariance[:3]), dynamic_shapes=({0: batch}, {0: batch}), strict=False
    )
    torch.testing.assert_close(program.module()(mean, covariance), LINKS[name](mean, covariance))


@names
def test_compiles_in_one_graph(name):
    compiled = torch.compile(AsModule(name), backend="eager", fullgraph=True)
    for batch in (3, 5):
        mean, covariance = random_latent(batch, 4)
        torch.testing.assert_close(compiled(mean, covariance), LINKS[name](mean, covariance))


def test_more_classes_than_a_sobol_sequence_has():
    mean = torch.zeros(1, 21_202)
    torch.testing.assert_close(monte_carlo(mean, mean, samples=2), mean.log_softmax(-1))


def test_link_refuses_shapes_that_do_not_fit():
    with pytest.raises(InputError, match="one more dimension"):
        probit(torch.zeros(2, 3), torch.zeros(2, 4))


# -- Classifier


class Latent(nn.Module):
    """Inputs [B, D] -> a latent of the given shape: mean linear, covariance a fixed matrix times |x|²."""

    def __init__(self, inputs: int = 3, outputs: int = 4, full: bool = False, tokens: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.shape = (outputs,) if tokens is None else (tokens, outputs)
        n = math.prod(self.shape)
        self.linear = nn.Linear(inputs, n).double()
        root = torch.randn(n, n, dtype=F64)
        self.register_buffer("covariance", root @ root.mT / n)
        self.full = full

    def forward(self, x):
        mean = self.linear(x).reshape(x.shape[0], *self.shape)
        covariance = self.covariance * x.square().sum(1)[:, None, None]
        if self.full:
            return Gaussian.full(mean, covariance)
        return Gaussian.diagonal(mean, covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape))


@structures
@names
def test_classifier_applies_the_scale_and_the_link(name, full):
    net, x = Latent(full=full), torch.randn(5, 3, dtype=F64)
    clf = Classifier(net, link=name, scale=2.5)
    latent = net(x)
    assert isinstance(clf(x), Categorical) and clf.scale == 2.5
    torch.testing.assert_close(clf.latent(x).variance, 2.5 * latent.variance)
    covariance = latent.covariance if full and name != "probit" else latent.variance
    torch.testing.assert_close(clf(x).logits, LINKS[name](latent.mean, 2.5 * covariance))
    torch.testing.assert_close(clf(x).logits, clf.log_probs(x))


@names
@pytest.mark.parametrize("batch", [0, 1])
def test_classifier_small_batches(name, batch):
    clf = Classifier(Latent(full=True), link=name)
    assert clf(torch.randn(batch, 3, dtype=F64)).probs.shape == (batch, 4)


@names
def test_classifier_per_token_uses_each_token_s_own_block(name):
    net, x = Latent(full=True, tokens=2), torch.randn(5, 3, dtype=F64)
    latent = net(x)
    blocks = torch.stack([latent.covariance[:, :4, :4], latent.covariance[:, 4:, 4:]], 1)
    torch.testing.assert_close(Classifier(net, link=name).log_probs(x), LINKS[name](latent.mean, blocks))
    assert Classifier(net, link=name)(x[:0]).probs.shape == (0, 2, 4)


@names
def test_confident_and_wrong_is_finite(name):
    clf = Classifier(lambda x: Gaussian(x, torch.full_like(x, 1e-3)), link=name)
    predictive = clf(torch.tensor([[-2e3, 2e3, 0.0]]))
    assert predictive.log_prob(torch.tensor([0])).isfinite().all() and predictive.entropy().isfinite().all()


def test_inputs_as_tuple_dict_and_arguments():
    def net(a, b):
        return Gaussian(a + b, torch.ones_like(a))

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    clf = Classifier(net)
    expected = clf(a, b).probs
    for given in (clf((a, b)), clf([a, b]), clf({"a": a, "b": b}), clf(a=a, b=b)):
        torch.testing.assert_close(given.probs, expected)


def test_classifier_gradients_reach_the_input():
    x = torch.randn(2, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(Classifier(Latent(full=True), link="mean_field").log_probs, (x,))


def test_classifier_is_deterministic_and_saves_its_scale():
    net, x = Latent(), torch.randn(5, 3, dtype=F64)
    clf = Classifier(net, link="monte_carlo", scale=3.0, samples=64, seed=1)
    assert torch.equal(clf(x).logits, clf(x).logits)
    other = Classifier(Latent(), link="monte_carlo", samples=64, seed=1)
    other.load_state_dict(clf.state_dict())
    assert other.scale == 3.0 and torch.equal(other(x).logits, clf(x).logits)
    assert not torch.equal(Classifier(net, link="monte_carlo", scale=3.0, samples=64, seed=2)(x).logits, clf(x).logits)
    assert "link='monte_carlo', scale=3" in repr(clf)


def test_classifier_exports_through_log_probs():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.clf = Classifier(Latent(), link="monte_carlo", samples=16)

        def forward(self, x):
            return self.clf.log_probs(x)

    x = torch.randn(5, 3, dtype=F64)
    program = torch.export.export(Head(), (x[:3],), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
    torch.testing.assert_close(program.module()(x), Head()(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classifier(Latent(), link="probitt"), "did you mean 'probit'"),
        (lambda: Classifier(Latent(), scale=-1.0), "positive"),
        (lambda: Classifier(Latent(), scale=math.nan), "positive"),
        (lambda: Classifier(Latent(), link="monte_carlo", samples=1), "at least 2"),
        (lambda: Classifier("net"), "must map inputs"),
        (lambda: Classifier(nn.Linear(3, 4))(torch.zeros(1, 3)), "a Gaussian is needed"),
        (lambda: Classifier(Latent(outputs=1))(torch.zeros(1, 3, dtype=F64)), "two classes"),
        (lambda: Regressor(Latent(), noise=-1.0), "none negative"),
        (lambda: Regressor(Latent(), noise=torch.ones(2, 2)), "one per output"),
        (lambda: Regressor(Latent(), noise=[1.0, 2.0])(torch.ones(1, 3, dtype=F64)), "2 noise levels"),
        (lambda: Regressor(Latent())(torch.zeros(1, 3, dtype=F64)), "noise="),
    ],
)
def test_errors(make, message):
    with pytest.raises(InputError, match=message):
        make()


# -- Regressor


@structures
@pytest.mark.parametrize("noise", [0.5, [0.1, 0.2, 0.3, 0.4]], ids=["one", "per output"])
def test_regressor_adds_noise(noise, full):
    net, x = Latent(full=full), torch.randn(5, 3, dtype=F64)
    reg = Regressor(net, noise=noise if isinstance(noise, float) else torch.tensor(noise), scale=2.0)
    predictive, parts = reg(x), reg.decompose(x)
    assert isinstance(predictive, Normal)
    torch.testing.assert_close(predictive.mean, net(x).mean)
    torch.testing.assert_close(parts.epistemic, 2 * net(x).variance)
    levels = torch.as_tensor(noise, dtype=torch.float32).double()
    torch.testing.assert_close(parts.aleatoric, levels.square().expand(5, 4))
    torch.testing.assert_close(predictive.variance, parts.epistemic + parts.aleatoric)
    torch.testing.assert_close(torch.as_tensor(reg.noise, dtype=F64), levels)


def test_regressor_joint():
    net, x = Latent(full=True), torch.randn(5, 3, dtype=F64)
    joint = Regressor(net, noise=0.5, scale=2.0).joint(x)
    torch.testing.assert_close(joint.covariance_matrix, 2 * net(x).covariance + 0.25 * torch.eye(4, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("batch", [0, 1])
def test_regressor_small_batches_and_dtypes(batch, dtype):
    reg = Regressor(lambda x: Gaussian(x, torch.ones_like(x)), noise=0.1)
    predictive = reg(torch.zeros(batch, 2, dtype=dtype))
    assert predictive.stddev.shape == (batch, 2) and predictive.stddev.dtype == dtype


def test_regressor_without_output_dimension():
    reg = Regressor(lambda x: Gaussian(x[:, 0], torch.ones(len(x))), noise=1.0)
    torch.testing.assert_close(reg(torch.zeros(3, 2)).variance, torch.full((3,), 2.0))


def test_regressor_shows_its_noise_and_compiles():
    reg = Regressor(Latent(), noise=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert "noise=[0.1, 0.2, 0.3, 0.4], scale=1" in repr(reg)
    assert "noise=0.5, scale=2" in repr(Regressor(Latent(), noise=0.5, scale=2.0))
    x = torch.randn(5, 3, dtype=F64)
    compiled = torch.compile(lambda x: reg(x).variance, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), reg(x).variance)
