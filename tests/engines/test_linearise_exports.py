"""Linearised models as files: `.pt2` and `.onnx` with an open batch, equal to what they were written from.

The models are in single precision, so what they are written from is also compared with the Jacobian form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from both_files import both_files
from compatibility import LENGTH, VOCABULARY, Model, hugging_face, pixels, tokens
from exactness import called, cast, make_posterior, relative
from predictive.hostile import MODEL, entries
from propagauss.baselines import GLM
from propagauss.predict.models.loading import load

TRACED, OTHER = 2, 5  # samples
# of transformers: the first layer, so that all of the model is walked back through, some of attention, and the head
RANDOM = ("word_embeddings", "wte", "projection.weight", "query", "q_proj", "c_attn", "classifier", "score")


def mlp() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).eval(), torch.randn(OTHER, 6)


def cnn() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)]
    end = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers, *end).eval(), torch.randn(OTHER, 1, 12, 12)


def transformer(architecture: str, **settings: Any) -> tuple[nn.Module, Any]:
    """One block, with the ends of some sequences hidden by the mask, if it has one."""
    config = f"{architecture.partition('For')[0]}Config"
    example = pixels if "Image" in architecture else tokens
    model = Model(architecture, hugging_face(architecture, config, **settings), example, "tokens")
    try:
        network, x = model.build(), model.example(OTHER, LENGTH)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    if "attention_mask" in x:
        for sample, length in enumerate((LENGTH, 3, 1, 4, LENGTH)):
            x["attention_mask"][sample, length:] = 0
            x["input_ids"][sample, length:] = 0
    return network, x


BLOCK = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0}
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "MLP": mlp,
    "CNN": cnn,
    "ViT": lambda: transformer("ViTForImageClassification", **BLOCK, image_size=8, patch_size=4, num_labels=3),
    "BERT": lambda: transformer("BertForSequenceClassification", **BLOCK, **WORDS),
    "GPT-2": lambda: transformer("GPT2ForSequenceClassification", **WORDS, n_embd=8, n_layer=1, n_head=2),
}


def first(x: Any, count: int) -> Any:
    return {name: t[:count] for name, t in x.items()} if isinstance(x, dict) else x[:count]


@pytest.fixture
def written(request: pytest.FixtureRequest) -> tuple[pg.Classifier, Any]:
    """Traced on two samples; what it says of all of them is the Jacobian form, in single precision."""
    model, x = MODELS[request.param]()
    everything = make_posterior(model, "diagonal").to(torch.float32)
    chosen = [n for n in everything.names if any(word in n for word in RANDOM)]
    posterior = everything.select(*chosen) if chosen else everything
    net = pg.linearise(model, posterior, first(x, TRACED))
    with torch.no_grad():
        found = called(net, x)
        truth = called(GLM(model.double(), posterior.to(torch.float64)), cast(x, torch.float64))
    assert relative(found, truth) < 1e-4
    return pg.Classifier(net, link="mean_field"), x


def expected(classifier: pg.Classifier, x: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        latent = called(classifier.latent, x)
        probabilities = called(classifier, x).probs
    found = {"mean": latent.mean, "variance": latent.variance, "covariance": latent.covariance}
    return found | {"probabilities": probabilities}


@pytest.mark.parametrize("written", MODELS, indirect=True)
def test_files_equal_what_they_were_written_from(written: Any, tmp_path: Path) -> None:
    """On more samples than were traced; probabilities, means, variances and covariances."""
    classifier, x = written
    values = expected(classifier, x)
    for path in both_files(classifier, tmp_path, covariance=True).values():
        assert domains(path) <= {"aten", "prims", "_operator", ""}, "custom ops"
        model = load(path)
        assert model.batch is None
        arrays = [(x[i.name] if isinstance(x, dict) else x).numpy() for i in model.inputs]
        found = model(*arrays)
        for name, value in values.items():
            tolerance = 1e-5 * float(value.abs().amax())
            torch.testing.assert_close(torch.as_tensor(found[name]), value, rtol=1e-5, atol=tolerance)


def domains(path: Path) -> set[str]:
    """Where the ops of a file come from; ONNX's own have no name."""
    if path.suffix == ".onnx":
        return {node.domain for node in pytest.importorskip("onnx").load(path).graph.node}
    nodes = json.loads(entries(path)[MODEL])["graph_module"]["graph"]["nodes"]
    return {node["target"].removeprefix("torch.ops.").partition(".")[0] for node in nodes}
