"""The experiments vit, value-covariance, gpt and runtime, on models and data small enough to be made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import propagauss as pg
from experiments.cost import runtime
from experiments.datasets import DataMissing
from experiments.frame.experiment import Context
from experiments.methods import draws
from experiments.methods.classify import Label, Predictor
from experiments.published import gpt as published_gpt
from experiments.report import score_tables
from experiments.transformers import gpt, gpt_engines, gpt_features, gpt_networks, value_covariance, vit, vit_networks
from propagauss.baselines import GLM
from propagauss.tracing.once import traced_once

transformers = pytest.importorskip("transformers")
Records = Callable[[str], dict[str, Any]]
SIZES = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


# -- sampling one draw at a time


def linear() -> tuple[nn.Module, pg.Posterior]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).eval()
    return model, pg.DiagonalPosterior({"weight": torch.full((2, 3), 0.3), "bias": torch.full((2,), 0.1)})


def test_draws_average_probabilities() -> None:
    """Against the integral over the two logits, which are Gaussian here."""
    model, posterior = linear()
    x = torch.randn(4, 3)
    found = draws.Draws(model, posterior, 2000).log_probs([x[:1], x[1:]])
    latent = pg.streamline(model, posterior, x)(x)
    expected = pg.Classifier(lambda x: latent, "monte_carlo", samples=2048).log_probs(x).exp()
    assert (found.exp() - expected).abs().max() < 0.03  # three standard errors at most
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(4))


def test_draws_are_the_same_however_inputs_are_batched() -> None:
    model, posterior = linear()
    x, some = torch.randn(6, 3), draws.Draws(model, posterior, 3, seed=5)
    torch.testing.assert_close(some.log_probs([x]), some.log_probs(list(x.split(2))))
    assert not torch.equal(some.log_probs([x]), draws.Draws(model, posterior, 3, seed=6).log_probs([x]))


def test_scale_of_sampling() -> None:
    """Found where it is, and as it is if no other is better."""
    for best in (3e-3, 2e3):  # the second is beyond what is tried first
        found = draws.best_scale(lambda s, best=best: (np.log(s) - np.log(best)) ** 2)
        assert found == pytest.approx(best, rel=0.2)
    model, posterior = linear()
    held = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    as_it_is, fitted = draws.sampling(model, posterior, "LA", held, samples=3, fit_samples=2, fit_points=6)
    assert (as_it_is.label.scale, as_it_is.label.fitted, fitted.label.fitted) == (1.0, False, True)
    torch.testing.assert_close(fitted([x for x, _ in held])[:4], fitted.log_probs(held[0][0]))


# -- tables and sentences


def constant(method: str, probability: float, link: str = "", fitted: bool = False) -> Predictor:
    label = Label(method, "" if method == "MAP" else "LA", link, scale=1.0, fitted=fitted)
    log_probs = torch.tensor([probability, 1 - probability]).log()
    return Predictor(label, lambda x: log_probs.expand(len(x), 2))


def test_scores_know_the_best_and_the_first() -> None:
    test = [(torch.zeros(5, 1), torch.tensor([0, 0, 0, 0, 1]))]
    found = score_tables.score_all([constant("MAP", 0.8), constant("sampling", 0.3)], test)
    assert [s["agreement"] for s in found] == [1.0, 0.0]
    assert found[0]["accuracy"] == pytest.approx(0.8) and "nlpd" in found[0]["best"]
    json.dumps(found, allow_nan=False)


def test_sentence_says_whether_the_paper_agrees() -> None:
    predictors = [constant("sampling", 0.5), constant("GLM", 0.6, "probit"), constant("ours", 0.7, "probit", True)]
    test = [(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long))]
    scores = score_tables.score_all(predictors, test)
    theirs = {"sampling": 0.6, "GLM": 0.2, "ours": 0.4}
    (line,) = score_tables.readings("Here", scores, "LA", lambda s: {"nlpd": (theirs[s["method"]], None)})
    assert "ours, probit 0.357" in line and "other order against GLM" in line and "No fitted method is below" in line
    body = score_tables.table(scores, lambda s: {"nlpd": (theirs[s["method"]], 0.001)})
    assert body.count("0.400 ± 0.001") == 1


# -- vision transformers


def tiny_vit(**options: Any) -> Any:
    config = SIZES | {"image_size": 8, "patch_size": 4, "num_labels": 10} | options
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config))


def test_vit_parts_are_the_model() -> None:
    model = vit_networks.ImageClassifier(tiny_vit()).eval()
    x = torch.rand(3, 3, 8, 8)
    tokens = vit_networks.Prefix(model)(x)
    torch.testing.assert_close(vit_networks.Suffix(model)(tokens), model(x))
    torch.testing.assert_close(model(x), model.vit(2 * x - 1).logits)


def test_vit_checkpoint(tmp_path: Path) -> None:
    saved = tiny_vit().eval()
    saved.save_pretrained(tmp_path / "vit")
    model, x = vit_networks.from_checkpoint(tmp_path / "vit"), torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(model(x), saved(2 * x - 1).logits)
    other = vit_networks.from_checkpoint(tmp_path / "vit", num_labels=3, ignore_mismatched_sizes=True)
    assert other(x).shape == (2, 3)
    with pytest.raises(DataMissing, match="download it once with"):
        vit_networks.from_checkpoint("nobody/nothing-of-this-name")


def test_augmentation_shifts_and_mirrors() -> None:
    torch.manual_seed(0)
    x = torch.arange(1.0, 65.0).reshape(1, 1, 8, 8).expand(40, 1, 8, 8)
    found = vit_networks.augmented(x, margin=1)
    centres = found[:, 0, 2:6, 2:6]
    steps = centres[:, :, 1:] - centres[:, :, :-1]
    assert set(steps.unique().tolist()) == {-1.0, 1.0}  # mirrored or not, never torn
    assert ((centres[:, 1:] - centres[:, :-1]) == 8).all()
    assert torch.equal(vit_networks.augmented(x, margin=0).sum((1, 2, 3)), x.sum((1, 2, 3)))


def test_vit_experiment(quick: Callable[[str], Any], records: Records) -> None:
    pytest.importorskip("ivon")
    context, _ = quick("vit")
    units = vit.EXPERIMENT.units(context)
    keys = [f"cifar10-{part}{ending}" for part in ("attention", "mlp", "head") for ending in ("", "-engines")]
    assert [u.key for u in units] == keys
    left_out = ("cifar10-mlp", "cifar10-mlp-engines", "cifar10-attention-engines")
    some = {key: record for key, record in records("vit").items() if key not in left_out}
    names = {s["name"] for s in some["cifar10-attention"]["scores"]}
    assert {
        "MAP",
        "temperature scaling",
        "LA sampling",
        "LA GLM probit",
        "LA ours mean_field",
        "MFVI sampling",
    } <= names
    found = vit.EXPERIMENT.section(some)
    assert "0.087 ± 0.005" in found.body and len(found.readings) == 4
    assert "last layer, both engines: streamlined" in found.body
    assert "attention of the last two blocks, both engines with and without calibration: not run" in found.body
    _, images = vit.trained(context, "cifar10")  # from the cache now
    tokens = vit_networks.tokens(context, "cifar10")
    x = images.test[0]
    by_image = vit.predictors(context, "cifar10", "head")
    suffix, _ = vit.tuned(context, "cifar10", "head", "LA")
    torch.testing.assert_close(by_image[0]([x]), suffix(tokens.test[0]).log_softmax(-1).detach())
    torch.testing.assert_close(by_image[2]([x]), by_image[2].log_probs(x))


def test_value_covariance_experiment(records: Records) -> None:
    pytest.importorskip("ivon")
    ((key, record),) = records("value-covariance").items()
    assert record["kinds"]["LA"]["stddev_ratio"]["low"] > 0
    found = value_covariance.EXPERIMENT.section({key: record})
    assert "0.083 ± 0.005" in found.body and len(found.readings) == 2


# -- language models


def words(folder: Path) -> Any:
    """A tokenizer of whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    text = "? Answer whether sentence 2 1 is a b c d . : Sentence Answer: word"
    known = {word: i for i, word in enumerate(text.split())}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    found.save_pretrained(folder)
    return found


def language_model(family: str) -> Any:
    options: dict[str, Any] = SIZES | {"vocab_size": 40}
    if family == "gpt2":
        return transformers.GPT2Model(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2))
    if family == "bert":
        return transformers.BertModel(transformers.BertConfig(**options), add_pooling_layer=False)
    return transformers.LlamaModel(transformers.LlamaConfig(**options, num_key_value_heads=1))


@pytest.fixture(scope="module", params=["gpt2", "bert", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("model"), language_model(request.param).eval()
    model.save_pretrained(folder)
    words(folder)
    return model, folder


def test_language_model_in_parts_is_the_model(checkpoint: tuple[Any, Path]) -> None:
    model, folder = checkpoint
    parts = gpt_networks.from_checkpoint(folder, blocks=2)
    ids = torch.randint(40, (2, 7))
    nn.init.normal_(parts.suffix.get_parameter("head.weight"))
    hidden = model(ids).last_hidden_state
    pooled = hidden.mean(1) if model.config.model_type == "bert" else hidden[:, -1]
    expected = parts.suffix.get_submodule("head")(pooled)
    torch.testing.assert_close(parts.suffix(parts.prefix(ids)), expected, rtol=1e-4, atol=1e-5)


def test_random_mlps_of_the_suffix(checkpoint: tuple[Any, Path]) -> None:
    parts = gpt_networks.from_checkpoint(checkpoint[1], blocks=2)
    nn.init.normal_(parts.suffix.get_parameter("head.weight"))
    variances = {n: torch.full_like(p, 1e-4) for n, p in parts.suffix.named_parameters()}
    posterior = pg.DiagonalPosterior(variances).select(*parts.mlps)
    assert not any("attention" in n or "attn" in n for n in posterior.names)
    assert {n.split(".")[1] for n in posterior.names} == {"0", "1"}
    net = pg.streamline(parts.suffix, posterior, torch.randn(2, 6, 16))
    x = torch.randn(3, 9, 16)  # another length
    torch.testing.assert_close(net(x).mean, parts.suffix(x), rtol=1e-4, atol=1e-5)
    assert (net(x).variance > 0).all()


def test_missing_language_model() -> None:
    with pytest.raises(DataMissing, match="download it once with"):
        gpt_networks.from_checkpoint("nobody/nothing-of-this-name")
    nowhere = gpt_networks.Backbone("Nothing", 1, lambda: None, "pip install nothing")
    with pytest.raises(DataMissing, match="pip install nothing"):
        nowhere.load()


def test_prompts_that_are_too_long_lose_the_start_of_a_field(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    row = {"sentence1": "a b c d " * 5, "sentence2": "word"}
    whole = gpt_features.prompt(tokenizer, "mrpc", row, 100)
    assert whole == tokenizer(published_gpt.PROMPTS["mrpc"].format(**row))["input_ids"]
    cut = gpt_features.prompt(tokenizer, "mrpc", row, len(whole) - 3)
    assert len(cut) == len(whole) - 3
    assert cut[-8:] == whole[-8:] and cut[:13] == whole[:13]
    assert tokenizer.decode(cut).split(" 1 : ")[1].startswith("d a b c d")


def test_batches_hold_one_length_each() -> None:
    lengths = [3, 5, 3, 3, 5, 4]
    groups = gpt_features.by_length(lengths, 2)
    assert sorted(i for g in groups for i in g) == list(range(6))
    assert all(len({lengths[i] for i in g}) == 1 and len(g) <= 2 for g in groups)
    some = gpt_features.Features([torch.full((n, 2), float(n)).half() for n in lengths], torch.arange(6))
    for x, y in some.batches(2):
        assert x.dtype == torch.float32
        assert all(lengths[i] == x.shape[1] for i in y.tolist())
    assert torch.equal(some.some(slice(2)).labels, torch.arange(2))


@pytest.fixture
def sentences(checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Context]:
    for part in ("train", "test"):
        path = tmp_path / "text" / "mrpc" / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        # two lengths, each of which takes a linearised network of its own
        rows = [{"sentence1": "a b " * (1 + i // 2 % 2), "sentence2": "a c", "label": i % 2} for i in range(30)]
        path.write_text("\n".join(map(json.dumps, rows)))
    here = gpt_networks.Backbone("Here", 2, lambda: (checkpoint[1], {}), "")
    monkeypatch.setattr(gpt_networks, "BACKBONES", {"here": here})
    monkeypatch.setattr(gpt, "BACKBONES", {"here": here})
    monkeypatch.setattr(gpt, "PRIORS", (1.0, 1e4))  # each takes a streamlining
    gpt_networks.loaded.cache_clear()
    with traced_once():
        yield Context("quick", 0, tmp_path, tmp_path / "cache")
    gpt_networks.loaded.cache_clear()


def test_gpt_experiment(sentences: Context) -> None:
    unit, both = gpt.EXPERIMENT.units(sentences)
    assert (unit.key, both.key) == ("here-mrpc", "here-mrpc-engines")
    record = json.loads(json.dumps(unit.run(sentences), allow_nan=False))
    at_map = score_tables.pick(record["on_test"], "MAP")
    mean_field = score_tables.pick(record["on_test"], "ours", "LA", "mean_field", True)
    assert mean_field["agreement"] == 1.0 and mean_field["accuracy"] == at_map["accuracy"]
    assert score_tables.pick(record["on_subset"], "GLM", "LA", "probit", False) is not None
    engines = json.loads(json.dumps(both.run(sentences), allow_nan=False))
    assert [s["method"] for s in engines["engines"]][2:] == 3 * ["streamlined"] + 3 * ["linearised"]
    assert engines["engines"][-1]["agreement"] == 1.0
    found = gpt.EXPERIMENT.section({unit.key: record, both.key: engines})
    assert "0.416 ± 0.012" in found.body and "LA linearised mean-field, calibrated" in found.body
    assert any("1 of 1 cases" in line for line in found.readings)
    again = gpt_features.features(sentences, "here", "mrpc", unit.config["counts"], unit.config["tokens"])
    assert [len(f.labels) for f in again] == unit.config["counts"]
    assert {len(x) for f in again for x in f.sequences} == {24, 26}


def test_linearised_for_each_length() -> None:
    class Mean(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh().mean(1)

    torch.manual_seed(0)
    model = Mean(3, 2).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})
    found, expected = gpt_engines.EachLength(model, posterior), GLM(model, posterior)
    for length in (4, 4, 7):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(found(x).covariance.float(), expected(x).covariance)


def test_fine_tuning_learns_and_keeps_the_rest(checkpoint: tuple[Any, Path]) -> None:
    parts = gpt_networks.from_checkpoint(checkpoint[1], blocks=1)
    torch.manual_seed(0)
    labels = torch.arange(32) % 2
    sequences = [torch.randn(5, 16) + 2 * (2 * y - 1) * torch.eye(16)[0] for y in labels.tolist()]
    before = {n: p.detach().clone() for n, p in parts.suffix.named_parameters()}
    how = {"epochs": 10, "rate": 1e-3, "head_rate": 1e-1, "decay": 0.0, "batch": 8}
    gpt.fine_tune(parts.suffix, parts.mlps, gpt_features.Features(sequences, labels), how)
    changed = {n for n, p in parts.suffix.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("mlp" in n or "dense" in n or n.startswith("head") for n in changed)
    assert not any("attention" in n for n in changed)
    assert gpt._accuracy(parts.suffix, gpt_features.Features(sequences, labels).batches()) > 0.9


# -- time


def test_runtime_experiment(records: Records) -> None:
    stored = records("runtime")
    times = stored["vit"]["times"]
    assert times["MAP"]["median"] == 1.0
    assert times["LA sampling"]["median"] > times["ours"]["median"]
    found = runtime.EXPERIMENT.section(stored)
    assert "51.1" in found.body  # 190.806 / 3.737
    assert len(found.readings) == 3
