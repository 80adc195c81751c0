"""`tune`: what it tries, which it takes, and what becomes of candidates that fail."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.demo.data import Split, diabetes, digits
from propagauss.likelihoods import CategoricalLikelihood
from propagauss.predictive.calibration import paired
from propagauss.predictive.predictor import Predictor
from propagauss.tuning import judge as judging
from propagauss.tuning.candidates import Candidate
from propagauss.tuning.cost import Cost, batch_of
from propagauss.tuning.groups import groups
from propagauss.tuning.judge import Verdict, judge
from propagauss.tuning.leaderboard import Leaderboard, choose
from propagauss.tuning.rows import Entry, Row

torch.set_num_threads(1)
MUCH = 1e4  # a budget that nothing exceeds: networks this small are all overhead


def trained(model: nn.Module, pair: tuple[Tensor, Tensor], loss, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(pair[0]), pair[1]).backward()
        optimiser.step()
    return model.eval()


@cache
def toy() -> tuple[nn.Module, Split]:
    """As in the tutorial."""
    torch.manual_seed(0)
    x = torch.randn(900, 2)
    y = (x.prod(dim=1) + 0.3 * torch.randn(900) > 0).long()
    split = Split((x[:150], y[:150]), (x[150:400], y[150:400]), (x[400:], y[400:]))
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    return trained(model, split.train, F.cross_entropy, 200), split


@cache
def digit() -> tuple[nn.Module, Split]:
    torch.manual_seed(0)
    split = digits()
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    return trained(model, split.train, F.cross_entropy, 150), split


@cache
def disease() -> tuple[nn.Module, Split]:
    torch.manual_seed(0)
    split = diabetes()
    return trained(nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)), split.train, F.mse_loss, 300), split


CASES = {"toy": (toy, "classification"), "digits": (digit, "classification"), "diabetes": (disease, "regression")}


@cache
def tuned(case: str) -> Predictor:
    make, likelihood = CASES[case]
    model, split = make()
    return pg.tune(model, split.train_loader, split.validation_loader, likelihood, MUCH, progress=False)


def losses(predictor: Predictor, split: Split) -> Tensor:
    x, y = split.test
    with torch.no_grad():
        return -predictor(x).log_prob(y).double().reshape(len(y), -1).mean(1)


@pytest.mark.parametrize("case", CASES)
def test_the_winner_is_not_worse_than_the_plain_model(case):
    """By more than two standard errors, paired over test points that nothing was fitted on."""
    make, likelihood = CASES[case]
    model, split = make()
    best, net = tuned(case), pg.streamline(model, None, split.test[0][:2])
    if likelihood == "classification":
        plain: Predictor = pg.Classifier(net)
    else:
        plain = pg.Regressor(net).calibrate(split.validation_loader, progress=False)
    mean, error = paired(losses(best, split), losses(plain, split))
    assert mean <= 2 * error


@pytest.mark.parametrize("case", CASES)
def test_the_winner_predicts_is_saved_and_knows_far_inputs(case, tmp_path):
    _, split = CASES[case][0]()
    best = tuned(case)
    row, (x, _) = best.leaderboard.winner, split.test
    loaded = pg.load(best.save(tmp_path / "best.pt2"))
    near, far = (loaded.predict(each, progress=False).epistemic for each in (x, 6 * torch.randn_like(x)))
    near, far = (each.reshape(len(x), -1).mean(1) for each in (near, far))
    if row.engine == "plain":
        assert abs(np.concatenate([near, far])).max() < 1e-6 and "no epistemic uncertainty" in best.leaderboard.why
        return
    scores = torch.from_numpy(np.concatenate([near, far]))
    assert pg.metrics.auroc(scores, torch.arange(2 * len(x)) >= len(x)) > 0.8


@pytest.mark.parametrize("case", CASES)
def test_leaderboard(case, tmp_path):
    board = tuned(case).leaderboard
    text = str(board)
    assert sum(row.name in line for row in board.rows for line in text.splitlines()[2:]) >= len(board)
    assert len(board.records()) == len(board) == len(list(board)) and board.records()[0]["name"] == board.rows[0].name
    judged = [row for row in board if row.nlpd is not None]
    assert [row.nlpd for row in judged] == sorted(row.nlpd for row in judged)
    assert {"streamlined", "linearised", "plain"} <= {row.engine for row in judged}
    assert {"last layer", "all parameters"} <= {row.parameters for row in judged}
    assert all(row.cost > 0 and row.memory >= 1 for row in judged)
    assert (judged[0].ece is not None) == (CASES[case][1] == "classification") == (judged[0].aurc is not None)
    assert board.winner.name in board.why and text.endswith(board.why)
    page = board.report(tmp_path / "tune.html").read_text()
    assert board.winner.name in page and page.count("<figure>") == (3 if judged[0].ece is not None else 1)


def test_the_model_is_left_alone():
    model, _ = toy()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    tuned("toy")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and not model.training
    assert all(p.grad is None or p.requires_grad for p in model.parameters())


# -- other likelihoods


def test_segmentation():
    """Classes in dimension 1, as the labels tell, and labels that are skipped."""
    torch.manual_seed(0)
    x = torch.randn(60, 1, 6, 6)
    y = (x[:, 0] + 0.5 * torch.randn(60, 6, 6) > 0).long()
    y[:, 0] = 255
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    trained(model, (x, y), lambda f, y: F.cross_entropy(f, y, ignore_index=255), 100)
    likelihood = CategoricalLikelihood(ignore_index=255)
    best = pg.tune(model, [(x[:30], y[:30])], [(x[30:], y[30:])], likelihood, progress=False)
    assert isinstance(best, pg.Classifier) and best.likelihood.class_dim == 1 and best.likelihood.ignore_index == 255
    assert best(x).probs.shape == (60, 6, 6, 2) and best.predict(x, progress=False).epistemic.shape == (60, 6, 6)
    engines = {row.engine for row in best.leaderboard if row.nlpd is not None}
    assert {"streamlined", "plain"} <= engines and all(row.ece is not None for row in best.leaderboard if row.nlpd)


def test_of_dense_labels_some_are_judged(monkeypatch):
    """Which they are does not depend on the candidate, and skipped labels stay skipped."""
    monkeypatch.setattr(judging, "TARGETS", 100)
    g = torch.Generator().manual_seed(0)
    mean, y = torch.randn(40, 3, 5, 5, generator=g), torch.randint(0, 3, (40, 5, 5), generator=g)
    y[:, 0] = -100
    verdict = judge([(pg.Gaussian.diagonal(mean, mean.square()), y)], CategoricalLikelihood(class_dim=1), True)
    assert len(verdict.losses) == 40 and verdict.labels is not None and verdict.probs is not None
    assert verdict.probs.shape[1] == 3 and 0 < len(verdict.labels) <= 120 and (verdict.labels >= 0).all()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_variance = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.log_variance(x)


def test_mean_and_log_variance_as_a_tuple():
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = x[:, :1] + (0.5 * x[:, 1:]).exp() * torch.randn(200, 1)
    model = trained(Heads(), (x, y), lambda f, y: F.gaussian_nll_loss(f[0], y, f[1].exp()), 200)
    best = pg.tune(model, [(x[:100], y[:100])], [(x[100:], y[100:])], "heteroscedastic", progress=False)
    assert isinstance(best, pg.HeteroscedasticRegressor) and best(x).mean.shape == (200, 1)
    assert {row.parameters for row in best.leaderboard} == {"", "last layer"}  # both heads are all there is


# -- what it may cost


def test_a_pass_below_a_millisecond_counts_as_one():
    assert not Cost(ratio=40.0, plain=1e-4).exceeds(5.0)  # 4 ms
    assert Cost(ratio=60.0, plain=1e-4).exceeds(5.0)  # 6 ms
    assert Cost(ratio=6.0, plain=2e-3).exceeds(5.0) and not Cost(ratio=4.9, plain=2e-3).exceeds(5.0)


def test_costs_are_those_of_a_whole_batch():
    batch = {"x": torch.arange(3)[:, None], "mask": torch.ones(7), "size": 2}
    many = batch_of(batch, 3, 8)
    assert many["x"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1] and len(many["mask"]) == 7
    assert batch_of(batch, 3, 2)["x"].flatten().tolist() == [0, 1]


# -- failures


class Odd(nn.Module):
    """What comes out depends on a comparison of the sum of all samples: no engine can trace it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.sum()) > 1e9 else self.layer(x) * 2


def test_nothing_can_be_tried():
    _, split = toy()
    with pytest.raises(pg.InputError, match="nothing could be tried"):
        pg.tune(Odd().eval(), split.train_loader, split.validation_loader, progress=False)


def test_a_small_budget_leaves_the_plain_model():
    model, split = toy()
    best = pg.tune(model, split.train_loader, split.validation_loader, budget=1e-3, progress=False)
    failed = [row for row in best.leaderboard if row.failure]
    assert failed and all("over the budget" in row.failure and row.nlpd is None for row in failed)
    assert best.leaderboard.winner.engine == "plain" and "over the budget" in str(best.leaderboard)
    assert best.leaderboard.winner.name in ("plain model", "temperature scaling")


@pytest.mark.parametrize(("factor", "shift", "message"), [(float("inf"), 0, "finite"), (1.0, 5, "labels go from 5")])
def test_training_data_that_cannot_be_fitted_are_an_error(factor, shift, message):
    """The plain model would win without a word of why."""
    model, split = toy()
    broken = [(split.train[0] * factor, split.train[1] + shift)]
    with pytest.raises(pg.InputError, match=f"no posterior could be fitted to the training data: .*{message}"):
        pg.tune(model, broken, split.validation_loader, budget=MUCH, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"likelihood": "gamma"}, "likelihood is 'gamma'"),
        ({"budget": 0}, "budget is 0"),
        ({"validation": []}, "empty"),
        ({"model": lambda x: x}, "nn.Module"),
    ],
)
def test_bad_arguments(change, message):
    model, split = toy()
    given = {"model": model, "train": split.train_loader, "validation": split.validation_loader} | change
    with pytest.raises(pg.InputError, match=message):
        pg.tune(**given, progress=False)


# -- parts


def test_groups_follow_the_structure_of_the_model():
    mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    found = groups(mlp)
    assert found["last layer"] == ("4.weight", "4.bias")
    assert found["last block"] == ("2.weight", "2.bias", "4.weight", "4.bias")
    assert len(found["all parameters"]) == 6
    deep = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), "head": nn.Linear(3, 2)})
    assert groups(deep)["last block"] == ("blocks.2.weight", "blocks.2.bias", "head.weight", "head.bias")
    assert groups(nn.Linear(3, 2)) == {"last layer": ("weight", "bias")}
    assert groups(nn.ReLU()) == {}
    two = nn.ModuleDict({"body": nn.Linear(3, 3), "mean": nn.Linear(3, 1), "log_variance": nn.Linear(3, 1)})
    assert groups(two, 2)["last layer"] == ("mean.weight", "mean.bias", "log_variance.weight", "log_variance.bias")
    assert len(groups(two, 2)["all parameters"]) == 6 and len(groups(mlp, 2)["last layer"]) == 2
    frozen = mlp.requires_grad_(False)
    frozen[4].requires_grad_(True)
    assert groups(frozen) == {"last layer": ("4.weight", "4.bias")}


def entry(name: str, shift: float, engine="streamlined", kept: bool = True, structure="kronecker") -> Entry:
    base = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = 0.02 * torch.randn(400, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    verdict = Verdict(base + own - own.mean() + shift, None, None, kept)
    candidate = Candidate("all parameters", structure, engine)
    return Entry(Row(name, "", "", engine, "", nlpd=verdict.nlpd), candidate, verdict)


def test_choice():
    """Ties are those within two standard errors, here 0.0028; of the plain model, within half of one."""
    plain, best = entry("plain", 0.0, "plain"), entry("best", -0.0004)
    exact, bad = entry("exact one", 0.0005, "linearised"), entry("bad one of all", 0.1, "linearised")
    away = entry("away", 0.0, "linearised", kept=False)
    # the exact one of those with a variance, though others are as good
    winner, why = choose([plain, best, exact, bad, away], 400)
    assert winner is exact and "says most" in why
    assert choose([plain, best, bad], 400)[0] is best
    winner, why = choose([plain, bad, away], 400)
    assert winner is plain and "no epistemic uncertainty" in why
    tempered = replace(entry("with temperature", -0.0001, "plain"), candidate=Candidate(calibrated=True))
    plain = replace(plain, candidate=Candidate(calibrated=False))
    assert choose([plain, tempered, bad], 400)[0] is plain
    assert choose([plain, replace(exact, verdict=entry("exact one", 0.001).verdict)], 400)[0] is plain
    better = entry("better than all", -0.1)
    winner, why = choose([plain, best, exact, better], 400)
    assert winner is better and "least NLPD" in why
    assert choose([best, entry("diagonal!", -0.0005, structure="diagonal")], 400)[0] is best  # it has correlations
    board = Leaderboard([plain, best, exact], exact, "why", 400)
    assert board.winner.name == "exact one" and str(board).count("*") == 1


def test_what_a_variance_says():
    """Exact before approximate, a linear last layer being exact, then more parameters, then correlations."""
    given = [
        ("all parameters", "diagonal", "streamlined"),
        ("all parameters", "kronecker", "streamlined"),
        ("last layer", "full", "streamlined"),
        ("last block", "kronecker", "linearised"),
        ("all parameters", "diagonal", "linearised"),
        ("all parameters", "full", "linearised"),
    ]
    known = [Candidate(*each).knows for each in given]
    assert known == sorted(known) and len(set(known)) == len(known)
