"""`streamline(..., check=True)`: a warning where standard deviations are not of the size that derivatives give."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import propagauss as pg
from propagauss.passes.check import first_order_variances
from propagauss.tracing.trace import trace

WARNING = "times those of the model's own derivatives"
SIDE = 12


def pooled(side: int = SIDE) -> nn.Module:
    """A weight shared over `side²` places whose mean is taken: the diagonal structure is too certain by that side."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(side), nn.Flatten()).double().eval()


def positive(*shape: int) -> Tensor:
    """All alike, so that nothing cancels in a mean over places."""
    return 1 + 0.1 * torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp(inputs: int = 5, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).double().eval()


def posterior(model: nn.Module, variance: float = 1e-4) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})


def checked(*args: Any, **options: Any) -> tuple[pg.Streamlined, list[str]]:
    """The network, and what the check had to say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = pg.streamline(*args, check=True, **options)
    return net, [str(w.message) for w in caught if WARNING in str(w.message)]


class Several(nn.Module):
    """A pooled value, which is wrong, a plain one, which is right, and one that is certain."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled, self.plain = pooled(), mlp(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.pooled(x), self.plain(x[:, :, 0, 0]), x.mean((1, 2, 3))


class Attention(nn.Module):
    """One head, whose values are all alike if the input is constant over positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.query(hidden), self.key(hidden), self.value(hidden)
        return F.scaled_dot_product_attention(q, k, v, mask)[:, 0]


def exact(model: nn.Module, p: pg.Posterior, *x: Tensor) -> Tensor:
    """`diag(J Σ Jᵀ)` of a model with one output `[B, C]`."""
    means = {n: w.detach() for n, w in model.named_parameters() if n in p.names}
    jacobian = jacrev(lambda w: functional_call(model, w, x))(means)
    return p.quadratic(jacobian).diagonal(dim1=-2, dim2=-1)


# -- when it warns


def test_warns_about_a_weight_shared_over_positions():
    model, x = pooled(), positive(2, 3, SIDE, SIDE)
    net, said = checked(model, posterior(model), x)
    assert len(said) == 1 and "output are about" in said[0] and "covariance='diagonal'" in said[0]
    assert "pg.linearise" in said[0] and "pg.tasks.fidelity" in said[0]
    found = float(re.search(r"about ([\d.e-]+) times", said[0]).group(1))
    true = float((net(x).variance.mean() / exact(model, posterior(model), x).mean()).sqrt())
    assert true < 1 / 3 and found == pytest.approx(true, rel=0.4)  # sixteen draws


def test_warns_about_standard_deviations_that_are_too_large():
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h[:, 0] - h[:, 1]

    model, x = Difference().eval(), 1 + 0.01 * positive(2, 2, 4)
    net, said = checked(model, posterior(model), x)
    true = float((net(x).variance.mean() / exact(model, posterior(model), x).mean()).sqrt())
    assert true > 100 and len(said) == 1
    assert float(re.search(r"about ([\d.e+-]+) times", said[0]).group(1)) == pytest.approx(true, rel=0.4)


def test_names_the_output():
    model, x = Several().eval(), positive(2, 3, SIDE, SIDE)
    _, said = checked(model, posterior(model), x)
    assert len(said) == 1 and "output 0 are about" in said[0]


def test_a_few_positions_are_not_worth_a_warning():
    model = pooled(2)
    assert checked(model, posterior(model), positive(2, 3, 2, 2))[1] == []


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_batch_of_examples(batch: int):
    model = pooled()
    assert len(checked(model, posterior(model), positive(batch, 3, SIDE, SIDE))[1]) == 1


def test_off_by_default():
    model = pooled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pg.streamline(model, posterior(model), positive(2, 3, SIDE, SIDE))


# -- when it does not


def test_silent_on_an_mlp():
    model = mlp()
    assert checked(model, posterior(model), positive(4, 5))[1] == []


def test_silent_in_full_mode():
    model = pooled()
    assert checked(model, posterior(model), positive(2, 3, SIDE, SIDE), covariance="full")[1] == []


@pytest.mark.parametrize("structure", ["kronecker", "low-rank", "full"])
def test_every_posterior(structure: str):
    model, x = mlp(), positive(3, 5)
    loader = [(torch.randn(40, 5).double(), torch.randint(3, (40,)))]
    if structure == "low-rank":
        directions = {n: 0.01 * torch.randn(2, *p.shape).double() for n, p in model.named_parameters()}
        found: pg.Posterior = pg.LowRankPosterior({n: d[0].square() for n, d in directions.items()}, directions)
    else:
        found = pg.fit_laplace(model, loader, structure=structure, progress=False)  # type: ignore[arg-type]
    assert checked(model, found.scale(1e-4), x, covariance="full")[1] == []


def test_a_posterior_over_a_part():
    model = mlp()
    assert checked(model, posterior(model).select("2.*"), positive(3, 5))[1] == []


def test_values_that_nothing_moves():
    """Where neither we nor derivatives see any variance, there is nothing to warn about."""
    model = mlp()
    certain = pg.DiagonalPosterior({n: torch.zeros_like(p) for n, p in model.named_parameters()})
    assert checked(model, certain, positive(3, 5))[1] == []


# -- inputs


def uncertain(x: Tensor) -> pg.Gaussian:
    return pg.Gaussian(x, variance=torch.full_like(x, 1e-4))


@pytest.mark.parametrize("random", [True, False])
def test_uncertain_inputs(random: bool):
    model = mlp()
    assert checked(model, posterior(model) if random else None, uncertain(positive(3, 5)))[1] == []


def test_uncertain_inputs_that_move_together():
    """The covariance of the input is what the diagonal structure forgets."""
    model = nn.Linear(64, 1).double().eval()
    nn.init.ones_(model.weight)
    joint = pg.Gaussian(positive(2, 64), covariance=torch.full((2, 64, 64), 1e-4, dtype=torch.float64))
    assert len(checked(model, None, joint)[1]) == 1
    assert checked(model, None, joint, covariance="full")[1] == []


def test_several_inputs_of_which_one_is_uncertain():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) * y

    model = Sum().eval()
    assert checked(model, posterior(model), (uncertain(positive(3, 5)), positive(3, 3)))[1] == []


def test_dict_inputs():
    model = Attention().eval()
    hidden = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 6, 6, dtype=torch.bool).tril()
    assert checked(model, posterior(model).select("value.*"), {"hidden": hidden, "mask": mask})[1] == []


# -- attention


def test_attention_over_many_positions():
    """Values of one weight are mixed over positions: the same mistake as in pooling."""
    model, x = Attention().eval(), positive(2, 100, 1).expand(-1, -1, 4).contiguous()
    assert len(checked(model, posterior(model), x)[1]) == 1
    assert checked(model, posterior(model).select("value.*"), x, covariance="full")[1] == []


@pytest.mark.parametrize("chosen", ["value.*", "*"])
def test_variances_of_attention(chosen: str):
    """The check itself: queries and keys are random in it, and forward derivatives pass through the op."""
    model, x = Attention().eval(), torch.randn(2, 6, 4, dtype=torch.float64)
    p = posterior(model).select(chosen)
    found = first_order_variances(trace(model, x), p, [x], draws=650)[0]
    assert found is not None
    torch.testing.assert_close(found, exact(model, p, x), rtol=0.25, atol=0)  # four standard errors and a half


# -- what is returned


@pytest.mark.parametrize("make", [pooled, mlp])
@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_never_changes_the_network(make: Callable[[], nn.Module], tolerance: float):
    model = make()
    x = positive(8, 3, SIDE, SIDE) if make is pooled else positive(8, 5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    p = posterior(model)
    net, _ = checked(model, p, x, variance_tolerance=tolerance)
    plain = pg.streamline(model, p, x, variance_tolerance=tolerance)
    assert net.body.code == plain.body.code and str(net.plan) == str(plain.plan)
    ours, theirs = net.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(net(x).variance, plain(x).variance) and torch.equal(net(x).mean, plain(x).mean)
    assert all(torch.equal(before[n], q) and q.grad is None for n, q in model.named_parameters())


def test_draws_nothing_from_the_global_generator():
    model, x = mlp(), positive(3, 5)
    pg.streamline(model, posterior(model), x)
    torch.manual_seed(3)
    pg.streamline(model, posterior(model), x)
    before = torch.get_rng_state()
    torch.manual_seed(3)
    pg.streamline(model, posterior(model), x, check=True)
    assert torch.equal(before, torch.get_rng_state())
