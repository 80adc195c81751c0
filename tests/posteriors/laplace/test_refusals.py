"""Models, data and options that fit_laplace cannot use: it says so."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posteriors.laplace.models import Recurrent, X, loader, targets
from propagauss.errors import InputError
from propagauss.posteriors import fit_laplace, memory


class Dropping(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2, dropout=0.1)])
def test_training_mode_is_refused(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3)).train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(InputError, match=r"at '1' is in training mode: call model\.eval\(\)"):
        fit_laplace(model, loader(X, targets("classification")))
    torch.testing.assert_close(model.state_dict(), state)


def test_training_mode_that_does_not_matter_and_dropout_as_a_function():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)).train()
    fit_laplace(model, loader(X, targets("classification")))
    with pytest.raises(InputError, match=r"dropout in training mode; call model\.eval"):
        fit_laplace(Dropping(4, 3).train(), loader(X, targets("classification")))


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("data", "likelihood", "message"),
    [
        ([], "classification", "loader is empty"),
        ([(X, LABELS - 1)], "classification", "labels go from -1 to 1, but the model has classes 0 to 2"),
        ([(X, LABELS + 1)], "classification", "labels go from 1 to 3"),
        ([(X, LABELS[:, None])], "classification", r"labels must be \[B\]"),
        ([(X, LABELS[:4])], "classification", r"labels must be \[B\]"),
        ([(X, LABELS.float())], "classification", "labels must be integers"),
        ([(X, LABELS.float())], "regression", r"targets have shape \(6,\), outputs \(6, 3\)"),
        ([(X, torch.full((6, 3), math.nan))], "regression", "the loss is nan"),
        ([(X * math.inf, LABELS)], "classification", "outputs of the model are not finite"),
        ([X], "classification", r"must yield \(x, y\)"),
        (
            [{"x": X, "labels": LABELS}],
            "classification",
            r"takes forward\(.*, but .* hold x: name the",
        ),
        ([{"x": X}], "classification", r"without 'labels' \(x\).*yield \(inputs, labels\)"),
    ],
)
def test_bad_data(data, likelihood, message):
    with pytest.raises(InputError, match=message):
        fit_laplace(nn.Linear(4, 3).eval(), data, likelihood)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_labels_that_are_all_skipped(structure):
    with pytest.raises(InputError, match="every label of the loader is skipped"):
        fit_laplace(nn.Linear(4, 3).eval(), [(X, LABELS * 0 - 100)], structure=structure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "kron"}, "structure is 'kron'; it must be 'diagonal', 'kronecker' or 'full'"),
        ({"likelihood": "probit"}, "likelihood is 'probit'; it must be 'classification', 'binary',"),
        ({"likelihood": "poisson", "noise": 0.3}, "poisson has none"),
        ({"prior_precision": 0.0}, "prior_precision is .* must be a positive number"),
        ({"prior_precision": "gridsearch"}, "prior_precision is .* must be a positive number"),
        ({"noise": 0.3}, "noise= is for likelihood='regression'"),
        ({"likelihood": "regression", "noise": -1.0}, "noise is .* must be a positive number"),
        ({"parameters": []}, "empty list"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        fit_laplace(nn.Linear(4, 3).eval(), [(X, LABELS)], **options)


def test_unusable_models():
    with pytest.raises(InputError, match="returns a tuple"):
        fit_laplace(nn.LSTM(4, 3).eval(), [(X, LABELS)])
    with pytest.raises(InputError, match="use likelihood='binary'"):
        fit_laplace(nn.Linear(4, 1).eval(), [(X, LABELS)])
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double()).eval()
    with pytest.raises(InputError, match="mixed dtypes"):
        fit_laplace(mixed, [(X, LABELS)])


@pytest.mark.parametrize(("outputs", "count"), [(3, 6), (3, 2), (1000, 2)])  # dense, rows, rows of many parameters
def test_what_does_not_fit_is_refused(monkeypatch, outputs, count):
    available = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 512}
    monkeypatch.setattr(memory.os, "sysconf", available.__getitem__)
    with pytest.raises(InputError, match=r"full covariance over \d+ parameters needs about .* GB.*kronecker"):
        fit_laplace(nn.Linear(4, outputs).eval(), [(X[:count], LABELS[:count])], structure="full")


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Shifted(nn.Linear):
    """`shift [4]` belongs to all samples, which only shows if the batch does not have 4 of them."""

    def forward(self, x, shift):
        return super().forward(x * shift)


def test_samples_must_not_depend_on_each_other():
    with pytest.raises(InputError, match="depend on the rest of its batch"):
        fit_laplace(Mixing(4, 3).eval(), [(X, LABELS)])
    data = [({"x": X[:4], "shift": torch.arange(4.0)}, LABELS[:4])]
    with pytest.raises(InputError, match="use another batch size"):
        fit_laplace(Shifted(4, 3).eval(), data)
    fit_laplace(Shifted(4, 3).eval(), [({"x": X, "shift": torch.arange(4.0)}, LABELS)])


class MixingLast(nn.Linear):
    """Samples meet after the last layer, where each structure would read another curvature."""

    def __init__(self, mix):
        super().__init__(4, 3)
        self.mix = mix

    def forward(self, x):
        return self.mix(super().forward(x))


MIXES = {
    "the first": lambda h: h + h[0],
    "two in the middle": lambda h: torch.cat([h[:2], h[2:3] + h[3:4], h[3:]]),
    "sum in the first": lambda h: h.index_add(0, torch.zeros(len(h), dtype=torch.long), h),
    "mean": lambda h: h - h.mean(0),
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
}


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("name", MIXES)
def test_samples_must_not_meet_after_the_last_layer(name, structure):
    with pytest.raises(InputError, match="depend on the rest of its batch"):
        fit_laplace(MixingLast(MIXES[name]).eval(), [(X, LABELS)], structure=structure)


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), 1)


class Counting(nn.Linear):
    """Changes a buffer in every call."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("model", [Drawing(4, 3), Counting()], ids=lambda m: type(m).__name__)
def test_models_that_return_something_else_at_every_call(model):
    with pytest.raises(InputError, match="something else at every call"):
        fit_laplace(model.eval(), [(X, LABELS)])


class Overwriting(nn.Linear):
    def forward(self, x):
        h = super().forward(x).clone()
        h[:, 0] = h[:, 1] ** 2
        return h


def test_a_model_without_gradients_says_why():
    with pytest.raises(InputError, match="batch 0: the model writes in place to values whose gradients need them"):
        fit_laplace(Overwriting(4, 3).eval(), [(X, LABELS)])


class Unused(nn.Module):
    """A parameter without effect, next to an LSTM that torch.vmap refuses."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = Recurrent(), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore:torch.vmap cannot run")
def test_a_parameter_without_effect_keeps_its_prior():
    data = loader(torch.randn(6, 2, 4), targets("classification"))
    with pytest.warns(UserWarning, match="say nothing about spare: .* leave them out with parameters="):
        posterior = fit_laplace(Unused().eval(), data, prior_precision=2.0, parameters="spare")
    torch.testing.assert_close(posterior.variance("spare"), torch.full((2,), 0.5))
    with pytest.warns(UserWarning, match="spare, which stay"):
        fit_laplace(Unused().eval(), data, structure="kronecker", parameters=["spare", "body.head.*"])
