"""`fidelity`: its numbers against brute-force Jacobians in double precision, its words, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import propagauss as pg
from posteriors import cases
from propagauss.tasks import fidelity_report
from propagauss.tasks.fidelity_report import BETWEEN, INPUTS, rank_correlation

N = 12


class Attention(nn.Module):
    """Two tokens' worth of everything that streamlining approximates: shared weights, queries, keys, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(4), nn.Linear(4, 12, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(self.norm(x)).chunk(3, -1)
        return self.head((x + F.scaled_dot_product_attention(q, k, v)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (1, 5, 5)),
    "attention": (Attention, (3, 4)),
}


def built(name: str = "mlp") -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make().double().eval(), torch.randn(N, *shape, dtype=torch.float64)


def posterior_of(model: nn.Module, structure: str = "diagonal", scale: float = 1e-8) -> pg.Posterior:
    return cases.make_posterior(structure, {n: p.detach() for n, p in model.named_parameters()}, scale)[0]


def jacobian_variances(model: nn.Module, posterior: pg.Posterior, x: Tensor, only: str | None = None) -> Tensor:
    """`diag(J Σ Jᵀ)` with a dense covariance, an input at a time; `[N, outputs]`."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    sizes = [parameters[n].numel() for n in posterior.names]
    kept = torch.cat([torch.full((s,), only in (None, n)) for n, s in zip(posterior.names, sizes, strict=True)])
    dense = posterior.bind(parameters).to_dense() * kept * kept[:, None]
    found = []
    for row in x:
        by_name = jacrev(lambda p, row=row: functional_call(model, p, (row[None],)).flatten())(parameters)
        jacobian = torch.cat([by_name[n].flatten(1) for n in posterior.names], 1)
        found.append((jacobian @ dense @ jacobian.mT).diagonal())
    return torch.stack(found)


# the engines have tests of their own for every model and structure: what is compared here meets each of them once
@pytest.mark.parametrize(
    ("name", "structure"),
    [("mlp", "diagonal"), ("mlp", "kronecker"), ("mlp", "full"), ("cnn", "kronecker"), ("attention", "full")],
)
def test_against_jacobians(name: str, structure: str) -> None:
    model, x = built(name)
    posterior = posterior_of(model, structure)
    net = pg.streamline(model, posterior, x)
    found = pg.tasks.fidelity(net, model, posterior, x, batch_size=5)
    true, ours = jacobian_variances(model, posterior, x), net(x).variance.detach()
    assert found.sd_ratio == pytest.approx(math.sqrt(ours.mean() / true.mean()), rel=1e-9)
    expected = spearmanr(ours.sqrt().mean(1), true.sqrt().mean(1)).statistic
    assert found.rank_correlation == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(found.exact_sd, true.sqrt().mean(1))
    torch.testing.assert_close(found.sd, ours.sqrt().mean(1))
    assert found.outputs == 3
    for parameter in posterior.names:
        own = jacobian_variances(model, posterior, x, parameter).mean()
        alone = pg.streamline(model, posterior.select(parameter), x)(x).variance.mean()
        row = found.by_parameter[parameter]
        assert row.share == pytest.approx(float(own / true.mean()), rel=1e-8)
        assert row.arrives == pytest.approx(math.sqrt(alone / own), rel=1e-7)
    assert sum(row.share for row in found.by_parameter) == pytest.approx(1)
    assert (found.by_parameter[-1].name == BETWEEN) == (structure == "full")


def test_random_queries_and_keys_lose_all() -> None:
    model, x = built("attention")
    values = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    values["projections.weight"][:8] = 1e-6  # of queries and keys
    values["head.bias"] += 1e-6
    posterior = pg.DiagonalPosterior(values)
    found = pg.tasks.fidelity(pg.streamline(model, posterior, x), model, posterior, x)
    assert found.by_parameter["projections.weight"].arrives == 0
    assert found.by_parameter["head.bias"].arrives == pytest.approx(1)
    assert math.isnan(found.by_parameter["norm.weight"].arrives) and found.by_parameter["norm.weight"].share == 0


OPTIONS: list[dict[str, Any]] = [
    {"covariance": "full"},
    {"activation": "moments"},
    {"attention": "covariance", "normalisation": "jacobian"},
    {"variance_tolerance": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_those_of_the_network(options: dict[str, Any]) -> None:
    model, x = built("attention")
    posterior = posterior_of(model, "diagonal", 1e-2).select("*.weight")
    net = pg.streamline(model, posterior, x, **options)
    assert net.settings == pg.streamline(model, posterior, x, **net.settings).settings
    assert options.items() <= net.settings.items()
    found = pg.tasks.fidelity(net, model, posterior, x)
    alone = pg.streamline(model, posterior.select("head.weight"), x, **options)(x).variance.mean()
    own = jacobian_variances(model, posterior, x, "head.weight").mean()
    assert found.by_parameter["head.weight"].arrives == pytest.approx(math.sqrt(alone / own), rel=1e-6)


@pytest.mark.parametrize(
    ("structure", "covariance"),
    [("diagonal", "full"), ("full", "diagonal"), ("low rank", "full"), ("spectral", "diagonal")],
)
def test_a_linearised_network_is_exact(structure: str, covariance: Any) -> None:
    model, x = built("cnn")
    posterior = posterior_of(model, structure)
    found = pg.tasks.fidelity(pg.linearise(model, posterior, x, covariance=covariance), model, posterior, x)
    assert found.sd_ratio == pytest.approx(1) and found.rank_correlation == pytest.approx(1)
    assert all(row.arrives == pytest.approx(1) for row in found.by_parameter if row.name != BETWEEN)
    assert found.is_fine and "exact to first order" in str(found)


# -- inputs and outputs of all kinds


class Several(nn.Module):
    """Keyword arguments, one of them optional; a dictionary of a tensor, an integer and a constant, or two tensors."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.layer, self.both = nn.Linear(4, 6), both

    def forward(self, x: Tensor, y: Tensor, shift: float | None = None) -> dict[str, Tensor]:
        h = self.layer(x).tanh().view(-1, 2, 3) + y[:, None, None]
        other = h.sum(1) if self.both else x
        return {"a": h + (shift or 0.0), "b": other, "c": x.argmax(-1)}


@pytest.mark.parametrize("form", [tuple, dict, "mapping"])
def test_several_inputs_and_one_uncertain_output(form: Any) -> None:
    torch.manual_seed(0)
    model = Several().double().eval()
    x, y = torch.randn(N, 4, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    inputs: Any = (x, y, 0.5) if form is tuple else {"y": y, "x": x, "shift": 0.5}
    posterior = posterior_of(model)
    net = pg.streamline(model, posterior, inputs)
    if form == "mapping":
        transformers = pytest.importorskip("transformers")
        inputs = transformers.BatchEncoding(inputs)
    found = pg.tasks.fidelity(net, model, posterior, inputs, batch_size=5)
    assert found.sd_ratio == pytest.approx(1) and found.outputs == 6 and len(found.sd) == N


def test_several_uncertain_outputs() -> None:
    model = Several(both=True).double().eval()
    inputs = {"x": torch.randn(N, 4, dtype=torch.float64), "y": torch.randn(N, dtype=torch.float64)}
    posterior = posterior_of(model)
    with pytest.raises(pg.InputError, match=r"2 uncertain outputs, of shapes \(12, 2, 3\), \(12, 3\).*output="):
        pg.tasks.fidelity(pg.streamline(model, posterior, inputs), model, posterior, inputs)
    net = pg.streamline(model, posterior, inputs, output="b")
    assert pg.tasks.fidelity(net, model, posterior, inputs).outputs == 3


@pytest.mark.parametrize("random", [True, False], ids=["posterior too", "inputs alone"])
def test_uncertain_inputs(random: bool) -> None:
    model, x = built()
    posterior = posterior_of(model) if random else None
    uncertain = pg.Gaussian(x, variance=torch.full_like(x, 1e-8))
    net = pg.streamline(model, posterior, uncertain)
    found = pg.tasks.fidelity(net, model, posterior, uncertain, batch_size=5)
    jacobians = torch.stack([jacrev(model)(row) for row in x]).detach()
    own = 1e-8 * jacobians.square().sum(-1)
    true = own if posterior is None else own + jacobian_variances(model, posterior, x)
    ours = net(uncertain).variance.detach()
    assert found.sd_ratio == pytest.approx(math.sqrt(ours.mean() / true.mean()))
    assert found.by_parameter[INPUTS].share == pytest.approx(float(own.mean() / true.mean()))
    assert found.by_parameter[INPUTS].arrives < 0.999
    assert sum(row.share for row in found.by_parameter) == pytest.approx(1)


def test_one_input_has_no_ranking() -> None:
    model, x = built()
    posterior = posterior_of(model)
    found = pg.tasks.fidelity(pg.streamline(model, posterior, x), model, posterior, x[:1])
    assert math.isnan(found.rank_correlation) and "over 1 input: undefined" in str(found)


def test_a_batch_that_is_fixed() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).reshape(N, 3)

    model, x = Fixed().double().eval(), torch.randn(N, 4, dtype=torch.float64)
    posterior = posterior_of(model)
    net = pg.streamline(model, posterior, x)
    assert net.slots[0].sizes[0] == N
    assert pg.tasks.fidelity(net, model, posterior, x, batch_size=5).sd_ratio == pytest.approx(1)


def test_without_the_table() -> None:
    model, x = built()
    posterior = posterior_of(model)
    found = pg.tasks.fidelity(pg.streamline(model, posterior, x), model, posterior, x, by_parameter=False)
    assert len(found.by_parameter) == 0 and "share" not in str(found)
    assert len(found.plot().axes) == 1


# -- words and figure


def test_table_and_figure() -> None:
    model, x = built("cnn")
    posterior = posterior_of(model, "full")
    found = pg.tasks.fidelity(pg.streamline(model, posterior, x), model, posterior, x)
    lines = str(found).splitlines()
    assert lines[0].split() == ["parameter", "share", "of", "variance", "sd", "that", "arrives"]
    assert [line.split("  ")[0] for line in lines[2:7]] == [*posterior.names, BETWEEN]
    assert lines[6].endswith("-") and lines[-1] == found.advice
    assert len(found.plot().axes) == 3
    with pytest.raises(pg.InputError, match=r"no row '0\.weigth'; did you mean '0\.weight'"):
        _ = found.by_parameter["0.weigth"]


def words(**changed: Any) -> str:
    part = fidelity_report.Part("0.weight", 0.9, 0.1)
    given = {"sd_ratio": 1.0, "rank_correlation": 1.0, "outputs": 3, "linearised": False} | changed
    table = fidelity_report.Table((part,))
    return fidelity_report.Fidelity(by_parameter=table, sd=torch.ones(2), exact_sd=torch.ones(2), **given).advice


def test_the_last_line_says_what_to_do() -> None:
    assert words().startswith("Fine") and words(rank_correlation=math.nan).startswith("Fine")
    size = words(sd_ratio=0.3)
    assert size.startswith("Only the ranking") and "scale" in size and "pg.linearise" in size
    order = words(rank_correlation=0.2)
    assert order.startswith("Not fine: inputs") and "Use pg.linearise" in order and "'0.weight'" in order
    many = words(sd_ratio=0.3, rank_correlation=0.2, outputs=1000)
    assert many.startswith("Not fine: the standard") and "Make fewer layers random" in many and "1,000 outputs" in many


def test_rank_correlation_with_ties() -> None:
    a, b = torch.tensor([1.0, 2, 2, 3, 5, 5, 5]), torch.tensor([3.0, 1, 4, 4, 4, 6, 6])
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert math.isnan(rank_correlation(a, torch.ones(7))) and math.isnan(rank_correlation(a[:1], b[:1]))


def test_the_plan_points_here_where_values_count_as_independent() -> None:
    model, x = built("cnn")
    posterior = posterior_of(model)
    assert "pg.tasks.fidelity" in str(pg.streamline(model, posterior, x).plan)
    assert "pg.tasks.fidelity" not in str(pg.streamline(model, posterior.select("4.*"), x).plan)
    assert "pg.tasks.fidelity" not in str(pg.linearise(model, posterior, x).plan)


# -- what it refuses


def test_another_model_or_posterior() -> None:
    model, x = built()
    posterior = posterior_of(model)
    net = pg.streamline(model, posterior, x)
    with pytest.raises(pg.InputError, match=r"not made from this model and posterior.*0\.5 times"):
        pg.tasks.fidelity(net, model, posterior.scale(4.0), x)
    with pytest.raises(pg.InputError, match="not made from this model and posterior"):
        pg.tasks.fidelity(net, model, posterior.select("4.*"), x)
    with pytest.raises(pg.InputError, match="not made from this model and posterior"):
        pg.tasks.fidelity(pg.linearise(model, posterior, x), model, posterior.scale(4.0), x)
    with pytest.raises(pg.PosteriorError, match="not a parameter of the model"):
        pg.tasks.fidelity(net, nn.Linear(4, 3).double().eval(), posterior, x)


def test_bad_arguments() -> None:
    model, x = built()
    posterior = posterior_of(model)
    net = pg.streamline(model, posterior, x)
    with pytest.raises(pg.InputError, match=r"is a Classifier; .* pass its \.net"):
        pg.tasks.fidelity(pg.Classifier(net), model, posterior, x)  # type: ignore[arg-type]
    with pytest.raises(pg.InputError, match="the network is a Sequential"):
        pg.tasks.fidelity(model, model, posterior, x)  # type: ignore[arg-type]
    with pytest.raises(pg.InputError, match="posterior is a dict"):
        pg.tasks.fidelity(net, model, {}, x)  # type: ignore[arg-type]
    with pytest.raises(pg.InputError, match=r"nn\.Module"):
        pg.tasks.fidelity(net, "model", posterior, x)  # type: ignore[arg-type]
    with pytest.raises(pg.InputError, match="at least one input"):
        pg.tasks.fidelity(net, model, posterior, x[:0])
    with pytest.raises(pg.InputError, match="batch_size is 0"):
        pg.tasks.fidelity(net, model, posterior, x, batch_size=0)
    with pytest.raises(pg.InputError, match="convert it with"):
        pg.tasks.fidelity(net, model, posterior, x.float())
    with pytest.raises(pg.InputError, match="not finite"):
        pg.tasks.fidelity(net, model, posterior, torch.full_like(x, torch.nan))
    still = posterior.scale(0.0)
    with pytest.raises(pg.InputError, match="no variance reaches"):
        pg.tasks.fidelity(pg.streamline(model, still, x), model, still, x)


def test_samples_must_come_first() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mT

    model, x = Turned().double().eval(), torch.randn(N, 4, dtype=torch.float64)
    posterior = posterior_of(model)
    with pytest.raises(pg.InputError, match=r"shape \(3, 12\) for inputs of shape \(12, 4\)"):
        pg.tasks.fidelity(pg.streamline(model, posterior, x), model, posterior, x)


def test_the_model_is_traced_once_however_many_parameters_it_has() -> None:
    calls = []

    class Counted(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            calls.append(input)
            return super().forward(input)

    torch.manual_seed(0)
    model, x = Counted(*mlp()).double().eval(), torch.randn(N, 4, dtype=torch.float64)
    posterior = posterior_of(model)
    net = pg.streamline(model, posterior, x)
    calls.clear()
    found = pg.tasks.fidelity(net, model, posterior, x, progress=False)
    assert len(calls) == 1
    assert [part.name for part in found.by_parameter] == list(posterior.names)


@pytest.mark.parametrize("outputs", [2, [0, 3]])
def test_some_outputs_of_many(outputs: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double().eval()
    x = torch.randn(7, 3).double()
    posterior = pg.DiagonalPosterior({n: 1e-4 * torch.rand_like(p) for n, p in model.named_parameters()})
    net = pg.streamline(model, posterior, x)
    found = pg.tasks.fidelity(net, model, posterior, x, outputs=outputs, by_parameter=False, progress=False)
    index = model(x).topk(2).indices if outputs == 2 else torch.tensor(outputs).expand(7, 2)
    exact = pg.baselines.GLM(model, posterior)(x).variance.gather(-1, index)
    ours = net(x).variance.gather(-1, index)
    assert found.sd_ratio == pytest.approx(float((ours.mean() / exact.mean()).sqrt()))
