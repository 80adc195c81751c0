"""What values of the full structure have in common: residual blocks, shared parameters, a module's own covariances."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from reference import random_psd

BATCH, WIDTH = 3, 4


class Model(nn.Module):
    """Two layers, a lone parameter, and any function of them."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def residual(m: Model, x: Tensor) -> Tensor:
    h = m.one(x).tanh()
    return h - 0.9 * m.two(h)


def gate(m: Model, x: Tensor) -> Tensor:
    h = m.one(x)
    return h * torch.sigmoid(m.two(h) * m.gain)


def branches(m: Model, x: Tensor) -> Tensor:
    h = m.one(x).tanh()
    return torch.cat([m.two(h).relu(), h.softmax(-1)], -1).cumsum(-1)


def twice(m: Model, x: Tensor) -> Tensor:
    return m.one(m.one(x).sin())


def siamese(m: Model, x: Tensor) -> Tensor:
    return (m.one(x) - m.one(x.flip(-1))).square().sum(-1, keepdim=True)


def recurrent(m: Model, x: Tensor) -> Tensor:
    h = x
    for _ in range(3):
        h = h + 0.3 * torch.tanh(m.two(F.layer_norm(h, (WIDTH,), m.gain)))
    return h


CASES = [residual, gate, branches, twice, siamese, recurrent]


def truth(model: nn.Module, posterior: pg.Posterior, x: Tensor) -> Tensor:
    means = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)).flatten(1), chunk_size=1)(means)
    return posterior.bind(means).quadratic(jacobian)


def assert_exact(model: nn.Module, posterior: pg.Posterior, x: Tensor) -> None:
    net = pg.streamline(model, posterior, x, covariance="full")
    g, expected = net(x), truth(model, posterior, x)
    torch.testing.assert_close(g.mean, model(x))
    size = expected.diagonal(dim1=1, dim2=2).max()
    torch.testing.assert_close(g.covariance / size, expected / size, rtol=0, atol=1e-6)
    assert torch.linalg.eigvalsh(g.covariance / size).min() > -1e-8


@pytest.mark.parametrize("function", CASES)
def test_full_structure_is_exact_to_first_order(function: Callable[..., Tensor]) -> None:
    model = Model(function).double().eval()
    names = [n for n, p in model.named_parameters() if truth_depends(model, n)]
    posterior = pg.DiagonalPosterior({n: torch.full_like(model.get_parameter(n), 1e-10) for n in names})
    with torch.no_grad():
        assert_exact(model, posterior, torch.randn(BATCH, WIDTH, dtype=torch.float64))


def truth_depends(model: nn.Module, name: str) -> bool:
    loss = model(torch.ones(1, WIDTH, dtype=torch.float64)).sum()
    (gradient,) = torch.autograd.grad(loss, model.get_parameter(name), allow_unused=True)
    return gradient is not None


class ByHand(nn.Module):
    """A layer in pieces: weight and bias belong together all the same."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        torch.manual_seed(1)
        self.w, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w, self.b)


@pytest.mark.parametrize(
    "function",
    [lambda x, w, b: x @ w + b, lambda x, w, b: F.linear(x, 2 * w.t(), b), lambda x, w, b: (x @ w).tanh() * b.exp()],
    ids=["product and sum", "computed weight", "scale"],
)
def test_covariance_of_a_modules_own_parameters(function: Callable[..., Tensor]) -> None:
    model = ByHand(function).double().eval()
    joint = 1e-10 * random_psd(WIDTH * 2 + 2, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert_exact(model, pg.FullPosterior(["w", "b"], joint), 10 + torch.randn(BATCH, WIDTH, dtype=torch.float64))


def test_a_parameter_too_large_to_follow_is_named_in_the_plan() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(50, 50)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    model = Large().eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-4) for n, p in model.named_parameters()})
    plan = pg.streamline(model, posterior, torch.randn(2, 50), covariance="full").plan
    assert any("used at several places" in note and "layer.weight" in note for note in plan.notes)


def test_an_output_whose_rows_are_not_samples_has_a_covariance_for_each_row() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1)).double().eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    g = pg.streamline(model, posterior, x, covariance="full")(x)
    whole = pg.streamline(model[:1], posterior, x, covariance="full")(x).covariance
    assert g.mean.shape == (2 * BATCH, 3)
    torch.testing.assert_close(g.covariance[0], whole[0, :3, :3])
    torch.testing.assert_close(g.covariance[3], whole[1, 3:, 3:])
    assert pg.Classifier(pg.streamline(model, posterior, x, covariance="full"), link="mean_field")(x).probs.shape == (
        6,
        3,
    )


def test_random_ops_and_memory_layouts_are_refused() -> None:
    for function in (
        lambda m, x: m.one(x) + torch.randn_like(m.one(x)),
        lambda m, x: m.one(x).as_strided((3, 2), (4, 1)),
    ):
        model = Model(function).eval()
        posterior = pg.DiagonalPosterior({"one.weight": torch.ones(WIDTH, WIDTH)})
        with pytest.raises(pg.UnsupportedOpError, match=r"randn_like.*draws|as_strided.*memory"):
            pg.streamline(model, posterior, torch.randn(BATCH, WIDTH))
