"""Every form in which a loader may yield its batches gives the same fit, the same scale and the same scores."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import propagauss as pg
from propagauss.baselines import MAP, TemperatureScaling
from propagauss.inputs import Takes, batches, input_batches, taken_by
from propagauss.tasks import ood

torch.manual_seed(0)
A, B = torch.randn(12, 3), torch.randn(12, 2)
Y = torch.randint(0, 2, (12,))


class Two(nn.Module):
    """A model of two inputs, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.first(a) + (0 if b is None else self.second(b))


class Wrapper(nn.Module):
    """Passes on whatever it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs)


MODEL = Two().eval()
BERT = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
POSITIONAL: dict[str, Callable[[], Any]] = {
    "((a, b), y)": lambda: [((A, B), Y)],
    "([a, b], y)": lambda: [([A, B], Y)],
    "(a, b, y)": lambda: [(A, B, Y)],
    "[a, b, y]": lambda: [[A, B, Y]],
    "DataLoader": lambda: DataLoader(TensorDataset(A, B, Y), batch_size=5),
}
NAMED: dict[str, Callable[[], Any]] = {
    "({}, y)": lambda: [({"b": B, "a": A}, Y)],
    "labels": lambda: [{"a": A, "b": B, "labels": Y}],
    "label": lambda: [{"a": A, "label": Y, "b": B}],
    "BatchEncoding": lambda: [transformers.BatchEncoding({"a": A, "b": B, "labels": Y})],
    "UserDict": lambda: [UserDict(a=A, b=B, labels=Y)],
    "in parts": lambda: [{"a": A[i : i + 5], "b": B[i : i + 5], "labels": Y[i : i + 5]} for i in (0, 5, 10)],
}
FORMS = POSITIONAL | NAMED


@pytest.fixture(scope="module")
def posterior() -> pg.Posterior:
    return pg.fit_laplace(MODEL, [((A, B), Y)], prior_precision=1.0)


def net(posterior: pg.Posterior, form: str) -> pg.Streamlined:
    return pg.streamline(MODEL, posterior, (A, B) if form in POSITIONAL else {"a": A, "b": B})


@pytest.mark.parametrize("form", FORMS)
def test_fits_do_not_depend_on_the_form(form: str, posterior: pg.Posterior) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pg.fit_laplace(MODEL, FORMS[form](), prior_precision=1.0)
    for name in posterior.names:
        torch.testing.assert_close(found.variance(name), posterior.variance(name), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_calibration_and_scores_do_not_depend_on_the_form(form: str, posterior: pg.Posterior) -> None:
    classifier = pg.Classifier(net(posterior, form)).fit_scale(FORMS[form](), progress=False)
    expected = pg.Classifier(net(posterior, "(a, b, y)")).fit_scale([(A, B, Y)], progress=False)
    assert classifier.scale == pytest.approx(expected.scale, rel=1e-3)
    assert len(ood.scores(classifier, FORMS[form]()).entropy) == len(Y)


@pytest.mark.parametrize("form", FORMS)
def test_baselines_take_every_form(form: str) -> None:
    found = TemperatureScaling(MODEL).fit(FORMS[form](), progress=False)
    expected = TemperatureScaling(MODEL).fit([((A, B), Y)], progress=False)
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-3)


def test_what_is_not_taken_is_left_out_with_one_warning(posterior: pg.Posterior) -> None:
    batch = {"a": A, "b": B, "labels": Y, "idx": torch.arange(12), "text": ["x"] * 12}
    made = pg.streamline(MODEL, posterior, {"a": A, "b": B})
    for fit, who in (
        (lambda: pg.fit_laplace(MODEL, [batch, batch]), "model"),
        (lambda: pg.Classifier(made).fit_scale([batch, batch], progress=False), "network"),
        (lambda: ood.scores(pg.Classifier(made), [batch, batch]), "network"),
    ):
        with pytest.warns(UserWarning, match=f"yields idx, text, which the {who} does not take") as told:
            fit()
        assert len(told) == 1


def test_which_names_a_model_takes() -> None:
    assert taken_by(MODEL) == Takes("forward(a, b)", names=frozenset({"a", "b"}), most=2, further=False)
    assert taken_by(MAP(MODEL)) == taken_by(MODEL)
    assert taken_by(Wrapper(MODEL)).names is None
    assert taken_by(lambda x: x) == Takes()
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    names = taken_by(bert).names
    assert names is not None and {"input_ids", "attention_mask", "token_type_ids"} <= names and "labels" not in names


def test_a_wrapper_of_any_inputs_gets_them_all(posterior: pg.Posterior) -> None:
    found = pg.fit_laplace(Wrapper(MODEL), [{"a": A, "b": B, "labels": Y}], prior_precision=1.0)
    torch.testing.assert_close(found.variance("model.first.weight"), posterior.variance("first.weight"))


def test_inputs_named_apart_from_the_labels_reach_further_arguments() -> None:
    seen = []

    class Open(Two):
        def forward(self, a: Tensor, **more: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(set(more))
            return super().forward(a)

    pg.fit_laplace(Open().eval(), [({"a": A, "extra": B}, Y)], parameters="first.*")
    assert {"extra"} in seen


def test_a_tokenised_batch_is_an_example_and_an_input(posterior: pg.Posterior) -> None:
    batch = transformers.BatchEncoding({"a": A, "b": B})
    made = pg.streamline(MODEL, posterior, batch)
    assert torch.equal(made(batch).variance, made(a=A, b=B).variance)
    assert torch.equal(pg.Classifier(made)(batch).probs, pg.Classifier(made)(a=A, b=B).probs)


def test_what_a_trainer_of_hugging_face_leaves(tmp_path: Path) -> None:
    """Its model, and its loaders of dictionaries."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    ids, mask = torch.randint(1, 32, (12, 6)), torch.ones(6, dtype=torch.long)
    rows: Any = [{"input_ids": ids[i], "attention_mask": mask, "labels": i % 2} for i in range(12)]
    options = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    options.save_strategy = "no"  # type: ignore[assignment]
    trainer = transformers.Trainer(model, options, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    with pytest.raises(pg.InputError, match=r"but is a Trainer: give its \.model"):
        pg.fit_laplace(trainer, trainer.get_eval_dataloader())  # type: ignore[arg-type]
    fitted = pg.fit_laplace(model.eval(), trainer.get_eval_dataloader(), parameters="classifier.*")
    made = pg.streamline(model, fitted, {"input_ids": ids[:2], "attention_mask": torch.ones(2, 6, dtype=torch.long)})
    found = pg.Classifier(made).predict(trainer.get_eval_dataloader())
    expected = model(ids).logits.argmax(-1)
    assert len(found) == 12 and (torch.from_numpy(found.prediction) == expected).float().mean() > 0.9


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "other names": (
        lambda: [{"x": A, "labels": Y}],
        r"takes (forward\(a, b\)|a= and b=), but .* hold x",
    ),
    "no labels": (lambda: [{"a": A, "b": B}], r"a dict of 2 without 'labels' \(a, b\): add the targets under that"),
    "lists": (lambda: [{"a": A.tolist(), "b": B, "labels": Y}], "'a' is a list of 12; .*return_tensors='pt'"),
    "labels that are lists": (lambda: [{"a": A, "b": B, "labels": Y.tolist()}], "'labels' is a list of 12"),
    "too many": (lambda: [(A, B, B, Y)], r"yields a tuple of 4; .*takes (forward|2 positional)"),
    "labels as text": (lambda: [(A, B, "yes")], "yields a tuple of 3"),
    "a row for names": (lambda: [((A,), Y)], "network was streamlined for a= and b="),
}


@pytest.mark.parametrize("form", BAD)
def test_errors_say_what_is_taken(form: str, posterior: pg.Posterior) -> None:
    make, match = BAD[form]
    if form == "a row for names":
        made = net(posterior, "labels")
    else:
        made = net(posterior, "(a, b, y)" if form == "too many" else "labels")
        with pytest.raises(pg.InputError, match=match) as error:
            pg.fit_laplace(MODEL, make())
        assert "TreeSpec" not in str(error.value)
    with pytest.raises(pg.InputError, match=match) as error:
        pg.Classifier(made).fit_scale(make(), progress=False)
    assert "TreeSpec" not in str(error.value) and "LeafSpec" not in str(error.value)


# -- inputs alone

ALONE: dict[str, Callable[[], Any]] = {
    "tensor": lambda: A,
    "tensors": lambda: [A[:5], A[5:]],
    "lists of one": lambda: DataLoader(TensorDataset(A), batch_size=5),
    "pairs": lambda: DataLoader(TensorDataset(A, Y), batch_size=5),
    "iterator": lambda: iter([(A, Y)]),
}


@pytest.mark.parametrize("form", ALONE)
def test_inputs_with_and_without_targets(form: str) -> None:
    takes = Takes("2 positional inputs", "the network", frozenset(), 1, further=False, exact=True)
    for one in (takes, Takes()):
        assert torch.equal(torch.cat(list(input_batches(ALONE[form](), one, rows=4))), A)


@pytest.mark.parametrize("form", [*FORMS, "(a, b)", "{}", "both at once", "all at once", "encoded at once"])
def test_several_inputs_with_and_without_targets(form: str, posterior: pg.Posterior) -> None:
    further = {
        "(a, b)": lambda: [(A, B)],
        "both at once": lambda: (A, B),
        "{}": lambda: [{"a": A, "b": B}],
        "all at once": lambda: {"a": A, "b": B, "labels": Y},
        "encoded at once": lambda: transformers.BatchEncoding({"a": A, "b": B}),
    }
    named = form in NAMED or (form in further and form not in ("(a, b)", "both at once"))
    made = net(posterior, "labels" if named else "(a, b, y)")
    parts = [made(x).mean for x in input_batches((FORMS | further)[form](), made.takes, rows=5)]
    torch.testing.assert_close(torch.cat(parts), MODEL(A, B))


def test_uncertain_inputs_are_cut_into_rows() -> None:
    g = pg.Gaussian(A, variance=A.square())
    parts = list(input_batches(g, Takes(), rows=5))
    assert [len(p.mean) for p in parts] == [5, 5, 2] and torch.equal(parts[1].variance, A[5:10].square())


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], "there are no data"),
        (A[:0], "there are no data"),
        ({"a": A, "b": B[:3]}, "12 and 3 rows"),
        (torch.tensor(1.0), "no tensor with a batch dimension"),
        ([()], "batch 0 is empty"),
        ([(A, B, Y, Y)], r"yields a tuple of 4; the network takes 2 positional inputs"),
        (None, "the loader is None"),
        (pyarrow.array([1.0]), r"the data are a DoubleArray: give its \.to_numpy"),
        (TensorDataset(A), "is a dataset"),
    ],
)
def test_errors_of_inputs(data: Any, match: str) -> None:
    takes = Takes("2 positional inputs", "the network", frozenset(), 2, further=False, exact=True)
    with pytest.raises(pg.InputError, match=match):
        list(input_batches(data, takes))


def test_labels_that_a_network_was_made_with_stay() -> None:
    takes = Takes("2 positional inputs", "the network", frozenset({"a", "labels"}), 0, further=False, exact=True)
    ((x, y),) = batches([{"a": A, "labels": Y}], takes)
    assert set(x) == {"a", "labels"} and torch.equal(y, Y)
