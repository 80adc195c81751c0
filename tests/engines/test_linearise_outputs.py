"""`linearise(outputs=...)`: some rows of the whole covariance, links among them, and no matrix of a vocabulary."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from both_files import both_files
from engines.test_linearise import MODELS, make_posterior, seeded
from posteriors.cases import STRUCTURES, Largest
from propagauss.baselines import GLM
from propagauss.links import LINKS
from propagauss.tasks import linearity, ood

B, T, V = 3, 4, 11


class Language(nn.Module):
    """A causal language model with one block; the logits of all tokens, or of the last one."""

    def __init__(self, vocabulary: int = V, width: int = 8, last: bool = False, cap: float | None = None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.1 * torch.randn(1, T, width))
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary)
        self.last, self.cap = last, cap

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        q, k, v = (t.unsqueeze(1) for t in self.mix(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        logits = logits if self.cap is None else self.cap * (logits / self.cap).tanh()
        return logits[:, -1] if self.last else logits


def words() -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)), lambda: torch.randn(B, 5).double()),
    "ends in tanh": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh()), lambda: torch.randn(B, 5).double()),
    "residual": MODELS["residual"],
    "attention": MODELS["tokens"],
    "tied": MODELS["shared"],
    "language": (Language, words),
    "last token": (lambda: Language(last=True), words),
    "capped": (lambda: Language(last=True, cap=2.0), words),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    make, inputs = CASES[name]
    return seeded(make), inputs()


shared = functools.cache(built)  # for what changes neither: one trace serves all of it


def variances(model: nn.Module, scale: float = 1e-3, *only: str) -> pg.DiagonalPosterior:
    generator = torch.Generator().manual_seed(1)
    named = {n: p for n, p in model.named_parameters() if not only or n.startswith(only)}
    return pg.DiagonalPosterior({n: scale * torch.rand(p.shape, generator=generator).to(p) for n, p in named.items()})


def rows(covariance: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Of the joint covariance `[B, n, n]`, that of the chosen entries at each position: `[B, ..., k, k]`."""
    batch, width = shape[0], shape[-1]
    k = index.shape[-1]
    flat = index.reshape(batch, -1, k)
    found = torch.empty(*flat.shape, k, dtype=covariance.dtype)
    for b in range(batch):
        for t in range(flat.shape[1]):
            entries = t * width + flat[b, t]
            found[b, t] = covariance[b][entries][:, entries]
    return found.reshape(*index.shape, k)


# -- the numbers


# how entries are chosen decides where the walk starts, and no more: one structure for each model shows it
LARGEST = [(name, structure, 2) for name in CASES for structure in STRUCTURES]
BY_INDEX = [(name, STRUCTURES[i % len(STRUCTURES)], [0, 2]) for i, name in enumerate(CASES)]


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(("name", "structure", "outputs"), LARGEST + BY_INDEX, ids=str)
def test_equals_rows_of_the_whole_covariance(name: str, structure: str, outputs: Any) -> None:
    model, x = shared(name)
    posterior = make_posterior(model, structure)
    whole = GLM(model, posterior)(x)
    found = pg.linearise(model, posterior, x, outputs=outputs)(x)
    torch.testing.assert_close(found.mean, model(x))
    assert found.chosen is not None and found.is_full
    index, mean, covariance = found.chosen
    if outputs == 2:
        torch.testing.assert_close(index, model(x).topk(2, -1).indices)
    else:
        assert (index == torch.tensor(outputs)).all() and index.shape[:-1] == found.shape[:-1]
    torch.testing.assert_close(mean, model(x).gather(-1, index))
    own = rows(whole.covariance, index, found.shape)
    torch.testing.assert_close(covariance, own, rtol=1e-9, atol=1e-12 * own.max().item())

    others = torch.ones_like(found.mean).scatter(-1, index, 0.0)
    torch.testing.assert_close(found.variance, whole.variance * (1 - others), rtol=1e-9, atol=1e-15)
    kept = (1 - others).flatten(1)
    dense = whole.covariance * kept.unsqueeze(-1) * kept.unsqueeze(-2)
    torch.testing.assert_close(found.covariance, dense, rtol=1e-9, atol=1e-12 * own.max().item())

    diagonal = pg.linearise(model, posterior, x, outputs=outputs, covariance="diagonal")(x)
    assert not diagonal.is_full and diagonal.chosen is not None
    torch.testing.assert_close(diagonal.variance, found.variance, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(diagonal.chosen.covariance, own.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("outputs", [6, 99, [5, 3, 1, 0, 2, 4]])
def test_all_outputs_are_the_plain_result(outputs: Any) -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "diagonal")
    found = pg.linearise(model, posterior, x, outputs=outputs)(x)
    assert found.chosen is None
    torch.testing.assert_close(found.covariance, pg.linearise(model, posterior, x)(x).covariance)


def test_one_output_and_one_number_per_sample() -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double().eval()  # [B]: there is nothing to choose
    x = torch.randn(B, 5).double()
    posterior = make_posterior(model, "diagonal")
    found = pg.linearise(model, posterior, x, outputs=1)(x)
    assert found.chosen is None and found.shape == (B,)


def test_no_posterior_is_no_variance() -> None:
    model, x = built("language")
    found = pg.linearise(model, None, x, outputs=2)(x)
    assert found.chosen is not None and found.chosen.covariance.shape == (B, T, 2, 2)
    assert not found.variance.any()


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_uncertain_inputs(covariance: Any) -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "kronecker")
    given = pg.Gaussian(x, variance=torch.rand_like(x))
    whole = pg.linearise(model, posterior, given)(given)
    found = pg.linearise(model, posterior, given, outputs=2, covariance=covariance)(given)
    index = found.chosen.index  # type: ignore[union-attr]
    torch.testing.assert_close(found.variance.gather(-1, index), whole.variance.gather(-1, index))
    if covariance == "full":
        torch.testing.assert_close(found.chosen.covariance, rows(whole.covariance, index, found.shape))  # type: ignore[union-attr]


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("name", ["mlp", "language", "capped"])
def test_bounded_memory_changes_nothing(name: str, covariance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(name)
    posterior = make_posterior(model, "diagonal")
    whole = pg.linearise(model, posterior, x, outputs=2, covariance=covariance)(x)
    monkeypatch.setattr("propagauss.network.linearised.WORKING_BYTES", 1)
    net = pg.linearise(model, posterior, x, outputs=2, covariance=covariance)
    assert net._at_once == 1 and (net._rows is None) == (covariance == "full")
    parts = net(x)
    for a, b in zip(parts.chosen, whole.chosen, strict=True):
        torch.testing.assert_close(a, b)


def test_a_batch_size_that_the_model_fixes() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).reshape(B, 6).tanh()

    model, x = seeded(Fixed), torch.randn(B, 5).double()
    posterior = make_posterior(model, "diagonal")
    whole, found = pg.linearise(model, posterior, x)(x), pg.linearise(model, posterior, x, outputs=2)(x)
    torch.testing.assert_close(found.chosen.covariance, rows(whole.covariance, found.chosen.index, found.shape))  # type: ignore[union-attr]


# -- what a Gaussian does


def test_it_moves_scales_and_samples_as_any_gaussian() -> None:
    model, x = built("language")
    net = pg.linearise(model.float(), variances(model, 1e-1), x, outputs=3)
    latent = net(x)
    doubled = latent.scale(2.0).to(torch.float64).detach()
    torch.testing.assert_close(doubled.variance, 2 * latent.variance.double())
    assert doubled.chosen is not None and doubled.dtype == torch.float64 and "chosen='3 of 11'" in repr(doubled)
    drawn = latent.sample((20_000,), torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.var(0), latent.variance, rtol=0.1, atol=1e-6)
    torch.testing.assert_close(drawn.mean(0), latent.mean, rtol=0, atol=0.02)
    flat = drawn[:, 0].flatten(1).double()
    both = (flat - flat.mean(0)).mT @ (flat - flat.mean(0)) / len(flat)
    torch.testing.assert_close(both, latent.covariance[0].double(), rtol=0, atol=0.02 * latent.variance.max().item())


def test_another_precision() -> None:
    model, x = built("last token")
    posterior = make_posterior(model, "diagonal")
    net = pg.linearise(model, posterior, x, outputs=2)
    truth = net(x)
    single = net.to(torch.float32)(x)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.chosen.covariance.double(), truth.chosen.covariance, rtol=1e-4, atol=1e-8)


def test_it_goes_into_another_network() -> None:
    model, x = built("mlp")
    latent = pg.linearise(model, make_posterior(model, "diagonal"), x, outputs=2)(x)
    second = nn.Linear(6, 2).double().eval()
    example = pg.Gaussian(latent.mean, covariance=latent.covariance)
    for net in (pg.streamline(second, None, example, covariance="full"), pg.linearise(second, None, example)):
        torch.testing.assert_close(net(latent).covariance, second.weight @ latent.covariance @ second.weight.mT)


def test_gradients_flow_to_the_input() -> None:
    model, x = built("mlp")
    net = pg.linearise(model, make_posterior(model, "diagonal"), x, outputs=2)
    assert torch.autograd.gradcheck(lambda t: net(t).chosen.covariance, (x.clone().requires_grad_(),))


def test_the_plan_says_it() -> None:
    model, x = built("language")
    largest = pg.linearise(model, None, x, outputs=2).plan
    assert "the 2 largest of 11 along the last dimension" in str(largest) and "variance 0" in str(largest)
    assert "numbers 0, 4 of 11" in str(pg.linearise(model, None, x, outputs=[0, 4]).plan)


# -- memory


class Narrow(nn.Module):
    """A vocabulary whose covariance would take 10 GB for each sample, or a smaller one; a layer without attention."""

    def __init__(self, last: bool, vocabulary: int = 50_257) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, 16), nn.Linear(16, vocabulary)
        self.last = last

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layer(self.words(tokens)).tanh())
        return logits[:, -1] if self.last else logits


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("random", ["layer.", "head."])
@pytest.mark.parametrize("last", [True, False])
def test_nothing_of_the_size_of_a_vocabulary_squared(last: bool, random: str, covariance: Any) -> None:
    torch.manual_seed(0)
    model, x = Narrow(last).eval(), torch.randint(0, 50_257, (2, 3))
    posterior = variances(model, 1e-2, random)
    with torch.no_grad(), Largest() as plain:
        model(x)
    with torch.no_grad(), Largest() as building:
        net = pg.linearise(model, posterior, x, outputs=5, covariance=covariance)
    with torch.no_grad(), Largest() as running:
        latent = net(x)
        probs = pg.Classifier(net, link="mean_field")(x).probs
        none = pg.linearise(model, None, x, outputs=5, covariance=covariance)(x)
    assert plain.entries == 50_257 * 16  # the weight itself
    assert running.entries <= plain.entries and building.entries <= plain.entries
    assert latent.variance.count_nonzero() == latent.chosen.index.numel() and not none.variance.any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(x.shape[:1] if last else x.shape))
    with pytest.raises(pg.InputError, match=r"GiB.*latent\.chosen"):
        _ = latent.covariance


def test_only_the_last_token_is_computed() -> None:
    model, x = built("last token")
    net = pg.linearise(model, make_posterior(model, "diagonal"), x, outputs=2)
    (head,) = [s for s in net.plan if s.path == "head"]
    assert head.shape == ("B", V) and head.rule == "layer"
    assert "seed" not in net.code


# -- links


@functools.cache
def wide(name: str, covariance: Any) -> Any:
    """Three outputs with much variance."""
    model, x = built(name)
    return pg.linearise(model, make_posterior(model, "diagonal").scale(300.0), x, outputs=3, covariance=covariance)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("name", ["mlp", "language"])
@pytest.mark.parametrize("link", LINKS)
def test_links_share_the_probability_of_the_chosen(link: Any, name: str, covariance: Any) -> None:
    model, x = built(name)
    whole = GLM(model, make_posterior(model, "diagonal").scale(300.0))(x)
    classifier = pg.Classifier(wide(name, covariance), link=link, scale=2)
    probs = classifier(x).probs.detach()
    plain = model(x).softmax(-1).detach()
    index = plain.topk(3, -1).indices
    own = 2 * rows(whole.covariance, index, whole.shape).detach()
    if covariance == "diagonal":
        own = own.diagonal(dim1=-2, dim2=-1)
    expected = plain.clone()
    among = LINKS[link](model(x).gather(-1, index).detach(), own).exp()
    expected.scatter_(-1, index, plain.gather(-1, index).sum(-1, keepdim=True) * among)
    torch.testing.assert_close(probs, expected)
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))
    assert (probs - plain).abs().max() > 0.01  # there was something to shrink


@pytest.mark.parametrize("link", LINKS)
def test_a_single_output_keeps_its_probability(link: Any) -> None:
    model, x = built("mlp")
    net = pg.linearise(model, make_posterior(model, "diagonal"), x, outputs=1)
    torch.testing.assert_close(pg.Classifier(net, link=link)(x).probs, model(x).softmax(-1))


@pytest.mark.parametrize("link", ["probit", "mean_field"])
def test_the_scale_is_fitted(link: Any) -> None:
    torch.manual_seed(0)
    model, x = seeded(CASES["mlp"][0]), torch.randn(200, 5).double()
    y = torch.distributions.Categorical(logits=0.3 * 8 * model(x)).sample()
    for p in model[2].parameters():  # type: ignore[index]
        p.data *= 8.0  # far too sure
    posterior = variances(model)
    classifier = pg.Classifier(pg.linearise(model, posterior, x[:2], outputs=3), link=link)
    classifier.fit_scale([(x[:90], y[:90]), (x[90:], y[90:])], progress=False)
    report = classifier.fit_report
    assert report is not None and report.nlpd_after < report.nlpd_before and report.points == 200
    nlpd = -classifier(x).log_prob(y).mean()
    torch.testing.assert_close(nlpd.item(), report.nlpd_after, rtol=1e-6, atol=0)


EXPORTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {  # for attention: test_linearise_exports
    "mlp": CASES["mlp"],
    "last token": (lambda: Narrow(True, V), words),
    "language": (lambda: Narrow(False, V), words),
}


@pytest.mark.parametrize(("name", "outputs"), [("mlp", 3), ("mlp", [0, 4]), ("last token", 3), ("language", 2)])
def test_exported_with_an_open_batch(name: str, outputs: Any, tmp_path: Any) -> None:
    from propagauss.predict.models.loading import load  # reads both kinds of file

    make, inputs = EXPORTED[name]
    model, x = seeded(make).float(), inputs()
    x = x.float() if x.is_floating_point() else x
    net = pg.linearise(model, variances(model, 0.3), x, outputs=outputs)
    classifier = pg.Classifier(net, link="mean_field", scale=1.5)
    more = torch.cat([x.flip(0), x])
    with torch.no_grad():
        latent, probs = classifier.latent(more), classifier(more).probs
    index, _, covariance = latent.chosen  # type: ignore[misc]
    expected = {"mean": latent.mean, "variance": latent.variance, "probabilities": probs, "covariance": covariance}
    for path in both_files(classifier, tmp_path, covariance=True).values():
        found = {name: torch.as_tensor(value) for name, value in load(path)(more.numpy()).items()}
        assert found["chosen"].equal(index)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("link", ["probit", "monte_carlo", "bridge"])
def test_other_links_are_exported(link: Any, tmp_path: Any) -> None:
    from propagauss.predict.models.loading import load

    model, x = built("mlp")
    model, x = model.float(), x.float()
    net = pg.linearise(model, variances(model, 0.3), x, outputs=3, covariance="diagonal")
    classifier = pg.Classifier(net, link=link)
    path = tmp_path / "model.onnx"
    classifier.export(path)
    found = torch.as_tensor(load(path)(x.numpy())["probabilities"])
    torch.testing.assert_close(found, classifier(x).probs.detach(), rtol=1e-4, atol=1e-5)


# -- other predictors and tasks


def test_regression_has_only_noise_elsewhere() -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "diagonal")
    net = pg.linearise(model, posterior, x, outputs=[1, 3])
    regressor = pg.Regressor(net, noise=0.5)
    variance = pg.linearise(model, posterior, x)(x).variance.detach()
    epistemic, aleatoric = regressor.decompose(x)
    torch.testing.assert_close(epistemic[:, [1, 3]], variance[:, [1, 3]])
    assert not epistemic[:, [0, 2, 4, 5]].any() and (aleatoric == 0.25).all()
    torch.testing.assert_close(regressor(x).variance, epistemic + aleatoric)
    assert regressor.joint(x).covariance_matrix.shape == (B, 6, 6)
    regressor.fit_scale([(x, model(x).detach() + 0.5)], fit_noise=True, progress=False)
    with pytest.raises(pg.InputError, match="variance is zero"):
        pg.Regressor(net, noise=0.0)(x)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_outlier_scores(k: int, covariance: Any) -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "diagonal").scale(300.0)
    classifier = pg.Classifier(pg.linearise(model, posterior, x, outputs=k, covariance=covariance), link="monte_carlo")
    scores = ood.scores(classifier, x, samples=2048)
    latent = classifier.latent(x).detach()
    index, mean, own = latent.chosen  # type: ignore[misc]
    torch.testing.assert_close(scores.epistemic_variance, latent.variance.gather(-1, index).mean(-1))
    share = latent.mean.softmax(-1).gather(-1, index).sum(-1)
    dense = own if covariance == "full" else torch.diag_embed(own)
    draws = pg.Gaussian(mean, covariance=dense).sample((200_000,), torch.Generator().manual_seed(0))
    p = (share.unsqueeze(-1) * draws.softmax(-1)).double()
    inner = -(p * p.log()).sum(-1).mean(0)
    information = -(p.mean(0) * p.mean(0).log()).sum(-1) - inner  # what is certain cancels
    torch.testing.assert_close(scores.mutual_information, information, rtol=0, atol=3e-3)
    assert k == 1 or (scores.mutual_information > 0.01).all()  # type: ignore[operator]


def test_comparison_with_samples_and_sensitivity() -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "diagonal").scale(1e-2)
    check = linearity.against_samples(pg.linearise(model, posterior, x, outputs=2), model, posterior, x, samples=2000)
    assert 0.9 < check.variance_ratio < 1.1
    with pytest.raises(pg.InputError, match="carries none forwards"):
        linearity.layers(pg.linearise(model, posterior, x, outputs=2), x)
    net = pg.linearise(model, posterior, pg.Gaussian(x, variance=torch.zeros_like(x)), outputs=2)
    found = pg.tasks.sensitivity.estimate(pg.Classifier(net), x, model(x).argmax(-1), max_steps=3, progress=False)
    assert found.maps.isfinite().all()


# -- what it refuses


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (True, "outputs is True; it must be a number"),
        (0, "outputs is 0; it must be at least 1"),
        (-3, "outputs is -3; it must be at least 1"),
        (2.0, r"outputs is 2\.0; it must be a number"),
        ("first", "outputs is 'first'; it must be a number"),
        ([], "outputs is an empty list"),
        ([0, 1.5], r"outputs holds 1\.5; indices of outputs must be whole numbers"),
        ([True], "outputs holds True; indices of outputs must be whole numbers"),
        ([0, -1], "outputs holds -1; indices count from 0"),
        ([2, 0, 2], r"outputs is \[2, 0, 2\]; every index may stand in it once"),
        ([0, 6], "outputs holds 6, but the last dimension of the output has indices from 0 to 5"),
    ],
    ids=str,
)
def test_bad_outputs(outputs: Any, message: str) -> None:
    model, x = built("mlp")
    with pytest.raises(pg.InputError, match=message):
        pg.linearise(model, None, x, outputs=outputs)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(x).tanh()
        return {"scores": self.head(h), "hidden": h}


def test_several_outputs() -> None:
    model, x = seeded(Several), torch.randn(B, 5).double()
    posterior = make_posterior(model, "diagonal")
    with pytest.raises(pg.InputError, match=r"returns 2 floating-point tensors: name one with output="):
        pg.linearise(model, posterior, x, outputs=2)
    assert pg.linearise(model, posterior, x, outputs=2, output="scores")(x).chosen.index.shape == (B, 2)


def test_too_many_chosen() -> None:
    model = nn.Sequential(nn.Linear(2, 40_000), nn.Unflatten(1, (10_000, 4))).eval()
    posterior = pg.DiagonalPosterior({"0.bias": torch.ones(40_000)})
    with pytest.raises(pg.InputError, match=r"outputs= chooses 20,000 entries.*GiB.*choose fewer"):
        pg.linearise(model, posterior, torch.randn(2, 2), outputs=2)
