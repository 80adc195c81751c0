"""`linearise`: equal to the Jacobian form for every posterior and kind of model, in bounded memory, exported.

`referee/test_battery.py` has many more models.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from posteriors import cases
from posteriors.cases import STRUCTURES
from propagauss.baselines import GLM

B = 3


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return model


class Residual(nn.Module):
    """Convolutions with groups, strides and batch normalisation, a branch, pooling of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.branch, self.last = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        h = F.max_pool2d(h + self.branch(h).tanh(), 2)
        return self.head(F.adaptive_avg_pool2d(self.last(h), 1).flatten(1))


class Tokens(nn.Module):
    """Embeddings, positions, a class token, attention with random queries and keys, layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.layer(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Shared(nn.Module):
    """One layer used three times, and a weight that is the transpose of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.up = nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.layer(x).tanh()) + self.layer(x)
        return F.linear(self.up(h).sigmoid(), self.up.weight.t())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), lambda: torch.randn(B, 5).double()),
    "residual": (Residual, lambda: torch.randn(B, 1, 8, 8).double()),
    "tokens": (Tokens, lambda: torch.randint(0, 9, (B, 5))),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(B, 2, 3).double()),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(B, 2, 3).double()),
    "shared": (Shared, lambda: torch.randn(B, 4).double()),
}


def make_posterior(model: nn.Module, structure: str) -> pg.Posterior:
    return cases.make_posterior(structure, {n: p.detach() for n, p in model.named_parameters()}, scale=1e-3)[0]


def built(name: str) -> tuple[nn.Module, Tensor]:
    make, inputs = MODELS[name]
    return seeded(make), inputs()


# a GRU is unrolled into the same layers as an LSTM, in another order
PAIRS = [(name, s) for name in MODELS for s in STRUCTURES if name != "gru" or s in ("diagonal", "full")]


once_built = cache(built)


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(("name", "structure"), PAIRS)
def test_equals_the_jacobian_form(name: str, structure: str) -> None:
    model, x = once_built(name)
    posterior = make_posterior(model, structure)
    truth = GLM(model, posterior)(x)
    found = pg.linearise(model, posterior, x)(x)
    assert found.is_full
    torch.testing.assert_close(found.mean, model(x))
    torch.testing.assert_close(found.covariance, truth.covariance, rtol=1e-9, atol=1e-12 * truth.variance.max().item())
    variances = pg.linearise(model, posterior, x, covariance="diagonal")(x)
    assert not variances.is_full
    torch.testing.assert_close(variances.variance, truth.variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_uncertain_inputs_add_their_part(covariance: Any) -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "diagonal")
    root = torch.randn(B, 5, 5).double()
    c = root @ root.mT
    jacobian = torch.stack([torch.func.jacrev(model)(row) for row in x])
    own = jacobian @ c @ jacobian.mT
    truth = GLM(model, posterior)(x).covariance + own
    net = pg.linearise(model, posterior, pg.Gaussian(x, covariance=c), covariance=covariance)
    found = net(pg.Gaussian(x, covariance=c))
    torch.testing.assert_close(found.variance, truth.diagonal(dim1=-2, dim2=-1))
    if covariance == "full":
        torch.testing.assert_close(found.covariance, truth)


@pytest.mark.parametrize("name", ["mlp", "residual", "tokens"])
def test_bounded_memory_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(name)
    posterior = make_posterior(model, "diagonal")
    whole = pg.linearise(model, posterior, x, covariance="diagonal")
    monkeypatch.setattr("propagauss.network.linearised.WORKING_BYTES", 1)
    parts = pg.linearise(model, posterior, x, covariance="diagonal")
    assert (parts._rows, parts._at_once) == (1, 1)
    torch.testing.assert_close(parts(x).variance, whole(x).variance)


def test_any_batch_and_single_precision() -> None:
    model, x = built("residual")
    posterior = make_posterior(model, "kronecker")
    truth = GLM(model, posterior)(x).covariance
    net = pg.linearise(model.float(), posterior.to(torch.float32), x[:2].float())
    torch.testing.assert_close(net(x.float()).covariance.double(), truth, rtol=1e-4, atol=1e-4 * truth.max().item())
    assert net(x[:1].float()).covariance.shape == (1, 3, 3)


def test_gradients_flow_to_the_input() -> None:
    model, x = built("mlp")
    net = pg.linearise(model, make_posterior(model, "diagonal"), x)
    assert torch.autograd.gradcheck(lambda t: net(t).covariance, (x.clone().requires_grad_(),))


class Masked(nn.Module):
    """Attention in which one query sees nothing; its result is zero, and so is its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).unsqueeze(1).chunk(3, -1)
        mask = torch.zeros(3, 3, dtype=x.dtype)
        mask[1] = -torch.inf
        return F.scaled_dot_product_attention(q, k, v, mask).flatten(1)


def test_a_query_that_sees_nothing() -> None:
    model, x = seeded(Masked), torch.randn(B, 3, 4).double()
    found = pg.linearise(model, make_posterior(model, "diagonal"), x)(x)
    assert found.covariance.isfinite().all()
    seen = found.variance.reshape(B, 3, 4)
    assert (seen[:, 1] == 0).all() and (seen[:, [0, 2]] > 0).all()


class Kernel(nn.Module):
    """A kernel that is itself the result of a convolution of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.blur = nn.Parameter(torch.randn(2, 1, 3, 3)), nn.Parameter(torch.randn(1, 1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, F.conv2d(self.small, self.blur)).flatten(1)


def test_a_convolution_of_parameters() -> None:
    model, x = seeded(Kernel), torch.randn(B, 1, 4, 4).double()
    posterior = make_posterior(model, "full")
    truth = GLM(model, posterior)(x).covariance
    torch.testing.assert_close(pg.linearise(model, posterior, x)(x).covariance, truth, rtol=1e-9, atol=1e-15)


def test_detach_is_an_identity() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h * h.detach()

    model, x = seeded(Detached), torch.randn(B, 5).double()
    posterior = make_posterior(model, "diagonal")
    own = pg.DiagonalPosterior({n.removeprefix("layer."): posterior.variance(n) for n in posterior.names})
    layer = pg.linearise(model.layer, own, x)(x)  # type: ignore[arg-type]
    found = pg.linearise(model, posterior, x)(x)
    torch.testing.assert_close(found.variance, layer.variance * (2 * layer.mean) ** 2)


def test_predictors_take_it() -> None:
    model, x = built("mlp")
    posterior = make_posterior(model, "diagonal")
    net = pg.linearise(model, posterior, x)
    assert pg.Classifier(net, link="mean_field")(x).probs.shape == (B, 3)
    parts = pg.Regressor(net, noise=0.5).decompose(x)
    torch.testing.assert_close(parts[0], GLM(model, posterior)(x).variance)
    assert "Linearised" in repr(net) and "aten.linear" in str(net.plan)


# -- what it refuses


def test_samples_that_depend_on_each_other() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h - h.mean(0)

    model, x = seeded(Mixed), torch.randn(B, 5).double()
    with pytest.raises(pg.UnsupportedOpError, match="depends on the others"):
        pg.linearise(model, make_posterior(model, "diagonal"), x)


def test_a_batch_that_is_taken_apart() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row.tanh() * (i + 1) for i, row in enumerate(self.layer(x).unbind(0))])

    model, x = seeded(Apart), torch.randn(B, 5).double()
    with pytest.raises(pg.UnsupportedOpError, match=r"takes the batch apart|could not be told"):
        pg.linearise(model, make_posterior(model, "diagonal"), x)


@pytest.mark.parametrize("shape", ["batch last", "two rows for each sample"])
def test_an_output_without_samples_first(shape: str) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h.mT if shape == "batch last" else h.reshape(-1, 2)

    model, x = seeded(Turned), torch.randn(B, 5).double()
    with pytest.raises(pg.UnsupportedOpError, match=r"first dimension|depends on the others"):
        pg.linearise(model, make_posterior(model, "diagonal"), x)


def test_a_number_beside_the_output() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x.square().mean()

    model, x = seeded(lambda: Two(5, 3)), torch.randn(B, 5).double()
    values, number = pg.linearise(model, make_posterior(model, "diagonal"), x)(x)
    assert values.covariance.any() and number.variance == 0
    torch.testing.assert_close(number.mean, x.square().mean())


def test_outputs_that_are_not_wanted_may_mix_samples() -> None:
    class Balanced(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = super().forward(x)
            return {"logits": h, "balance": h.mean()}

    model, x = seeded(lambda: Balanced(5, 3)), torch.randn(B, 5).double()
    posterior = make_posterior(model, "diagonal")
    plain = nn.Linear(5, 3).double()
    plain.load_state_dict(model.state_dict())
    found = pg.linearise(model, posterior, x, output="logits")(x)
    torch.testing.assert_close(found.covariance, GLM(plain, posterior)(x).covariance)


def test_a_huge_output() -> None:
    model = nn.Linear(2, 10_000)
    posterior = pg.DiagonalPosterior({"bias": torch.ones(10_000)})
    with pytest.raises(pg.InputError, match=r"10,000 entries.*GiB.*outputs=5.*streamline"):
        pg.linearise(model.eval(), posterior, torch.randn(2, 2))


def test_bad_options() -> None:
    model, x = built("mlp")
    with pytest.raises(pg.InputError, match="covariance is 'thick'"):
        pg.linearise(model, None, x, covariance="thick")  # type: ignore[arg-type]


def test_no_posterior_is_no_variance() -> None:
    model, x = built("mlp")
    found = pg.linearise(model, None, x)(x)
    torch.testing.assert_close(found.mean, model(x))
    assert not found.covariance.any()
