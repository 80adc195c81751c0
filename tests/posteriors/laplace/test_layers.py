"""A prior precision for each layer: against a search over the marginal likelihood of the dense posterior."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import propagauss as pg

torch.set_num_threads(1)
F64 = torch.float64


def network(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double().eval()
    with torch.no_grad():
        model[0].weight *= 3.0  # so that the two want different priors
        model[2].weight *= 0.5
    return model


def data(likelihood: str, rows: int = 40) -> tuple[nn.Sequential, Tensor, Tensor]:
    model = network(3 if likelihood == "classification" else 1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, dtype=F64, generator=generator)
    if likelihood == "classification":
        return model, x, torch.randint(0, 3, (rows,), generator=generator)
    return model, x, model(x).detach() + 0.3 * torch.randn(rows, 1, dtype=F64, generator=generator)


def curvature(model: nn.Sequential, x: Tensor, likelihood: str, structure: str) -> Tensor:
    """The GGN at unit noise, dense; for "kronecker" its factors are taken from a fit, and multiplied out."""
    size = sum(p.numel() for p in model.parameters())
    if structure == "kronecker":
        y = (
            torch.zeros(len(x), dtype=torch.long)
            if likelihood == "classification"
            else torch.zeros(len(x), 1, dtype=F64)
        )
        fixed = {} if likelihood == "classification" else {"noise": 1.0}
        found = pg.fit_laplace(model, [(x, y)], likelihood, structure, prior_precision=1.0, **fixed)
        return torch.linalg.inv(found.to_dense()) - torch.eye(size, dtype=F64)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    rows = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    j = torch.cat([rows[n].flatten(2) for n in parameters], 2)  # [B, C, P]
    if likelihood == "regression":
        ggn = torch.einsum("bcp,bcq->pq", j, j)
    else:
        p = model(x).softmax(1).detach()
        ggn = torch.einsum("bcp,bcd,bdq->pq", j, p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1), j)
    return ggn if structure == "full" else ggn.diagonal().diag()


def log_z(theta: np.ndarray, h: Tensor, model: nn.Sequential, f: Tensor, y: Tensor, likelihood: str) -> float:
    """`theta`: logarithms of the two precisions and, for regression, of the noise; `f = model(x)`."""
    deltas, sigma = np.exp(theta[:2]), math.exp(theta[2]) if likelihood == "regression" else 1.0
    d = torch.cat(
        [torch.full((p.numel(),), float(deltas[i // 2]), dtype=F64) for i, p in enumerate(model.parameters())]
    )
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    if likelihood == "regression":
        log_p = torch.distributions.Normal(f, sigma).log_prob(y).sum()
    else:
        log_p = torch.distributions.Categorical(logits=f).log_prob(y).sum()
    return (log_p + 0.5 * (d.log().sum() - torch.logdet(h / sigma**2 + d.diag()) - (d * flat.square()).sum())).item()


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_against_a_search_over_the_dense_evidence(likelihood, structure):
    model, x, y = data(likelihood)
    h = curvature(model, x, likelihood, structure)
    posterior = pg.fit_laplace(model, [(x[:25], y[:25]), (x[25:], y[25:])], likelihood, structure, per_layer=True)
    arguments = (h, model, model(x).detach(), y, likelihood)
    starts = [(a, b, math.log(0.3))[: 3 if likelihood == "regression" else 2] for a in (-3, 0, 3) for b in (-3, 0, 3)]
    runs = [
        minimize(
            lambda t: -log_z(t, *arguments), np.array(s), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10}
        )
        for s in starts
    ]
    best = min(runs, key=lambda run: run.fun)
    found = posterior.details
    assert set(found) - {"noise"} == {"prior_precision.0", "prior_precision.2", "log_marginal_likelihood"}
    assert found["log_marginal_likelihood"] == pytest.approx(-best.fun, abs=1e-6)
    own = [math.log(found["prior_precision.0"]), math.log(found["prior_precision.2"])]
    own += [math.log(found["noise"])] if likelihood == "regression" else []
    np.testing.assert_allclose(own, best.x, atol=1e-3)
    sigma = found.get("noise", 1.0)
    d = torch.cat(
        [torch.full((p.numel(),), math.exp(own[i // 2]), dtype=F64) for i, p in enumerate(model.parameters())]
    )
    torch.testing.assert_close(posterior.to_dense(), torch.linalg.inv(h / sigma**2 + d.diag()), rtol=1e-6, atol=1e-9)
    common = pg.fit_laplace(model, [(x, y)], likelihood, structure).details
    assert found["log_marginal_likelihood"] > common["log_marginal_likelihood"] + 0.1


def test_few_data_for_many_parameters():
    """The full curvature is kept as its rows; the answer is the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    x, y = torch.randn(6, 4, dtype=F64), torch.randint(0, 2, (6,))
    few = pg.fit_laplace(model, [(x, y)], structure="full", per_layer=True)
    h = curvature(model, x, "classification", "full")  # type: ignore[arg-type]
    d = [few.details["prior_precision.0"]] * 40 + [few.details["prior_precision.2"]] * 18
    expected = torch.linalg.inv(h + torch.tensor(d, dtype=F64).diag())
    torch.testing.assert_close(few.to_dense(), expected, rtol=1e-6, atol=1e-9)


def test_it_can_be_streamlined_and_saved(tmp_path):
    model, x, y = data("classification")
    for structure in ("diagonal", "kronecker", "full"):
        posterior = pg.fit_laplace(model, [(x, y)], structure=structure, per_layer=True)
        posterior.save(tmp_path / "p.safetensors")
        again = pg.load_posterior(tmp_path / "p.safetensors")
        assert again.details == pytest.approx(posterior.details)
        first, second = (pg.streamline(model, p, x[:2])(x).variance for p in (posterior, again))
        torch.testing.assert_close(first, second)


def test_a_given_noise_stays():
    model, x, y = data("regression")
    assert pg.fit_laplace(model, [(x, y)], "regression", noise=0.5, per_layer=True).details["noise"] == 0.5


def test_a_layer_that_the_data_say_nothing_about_is_named():
    model, x, y = data("classification")
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()
    with pytest.warns(UserWarning, match="prior precision of"):
        pg.fit_laplace(model, [(x, y)], per_layer=True)


def test_a_number_and_a_choice_exclude_each_other():
    model, x, y = data("classification")
    with pytest.raises(pg.InputError, match="per_layer=True chooses prior precisions"):
        pg.fit_laplace(model, [(x, y)], prior_precision=1.0, per_layer=True)
    with pytest.raises(pg.InputError, match="per_layer is 'yes'; it must be True or False"):
        pg.fit_laplace(model, [(x, y)], per_layer="yes")  # type: ignore[arg-type]
