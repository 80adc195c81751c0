"""Streamlined networks under `torch.compile`: one graph, and the results of eager mode."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from engines.test_cnn_models import Basic, conv

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def posterior(model: nn.Module) -> pg.Posterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, 1e-4) for n, p in model.named_parameters()})


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).eval(), torch.randn(4, 6)


def resnet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    model = nn.Sequential(*conv(3, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), Basic(4, 6, 2), *head)
    return model.eval(), torch.randn(5, 3, 8, 8)


def vit() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes)
    return transformers.ViTForImageClassification(config).eval(), torch.randn(5, 3, 8, 8)


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(num_labels=3, pad_token_id=0, n_embd=16, n_layer=1, n_head=2, vocab_size=30)
    model = transformers.GPT2ForSequenceClassification(config).eval()
    return model, {"input_ids": torch.randint(1, 30, (5, 6)), "attention_mask": torch.ones(5, 6, dtype=torch.long)}


NETWORKS: dict[str, Any] = {"MLP": mlp, "MLP, full covariance": mlp, "ResNet": resnet, "ViT": vit, "GPT-2": gpt}


def streamlined(name: str) -> tuple[pg.Streamlined, Any]:
    """A network, and an input of several samples."""
    model, x = NETWORKS[name]()
    covariance = "full" if name.endswith("full covariance") else "diagonal"
    return pg.streamline(model, posterior(model), x, covariance=covariance), x


def assert_same(found: pg.Gaussian, expected: pg.Gaussian) -> None:
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_graph_with_the_results_of_eager_mode(name: str) -> None:
    """The network, and a predictor around it; `fullgraph` refuses a second graph."""
    net, x = streamlined(name)
    classifier = pg.Classifier(net, "mean_field", scale=0.5)

    def both(x: Any) -> tuple[pg.Gaussian, Tensor]:
        latent = net(x)
        return latent, classifier.log_probs_of(latent)

    backend = "eager" if name in ("ViT", "GPT-2") else "aot_eager"  # the second splits ops: slow for large graphs
    found, log_probs = torch.compile(both, backend=backend, fullgraph=True)(x)
    expected = both(x)
    assert_same(found, expected[0])
    torch.testing.assert_close(log_probs, expected[1], rtol=1e-4, atol=1e-5)


def test_any_batch() -> None:
    net, x = streamlined("MLP")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for samples in (4, 3, 1):  # the second is compiled for an open batch
        assert_same(compiled(x[:samples]), net(x[:samples]))


@pytest.mark.parametrize("link", ["probit", "mean_field", "bridge"])
def test_classifier(link: Any) -> None:
    net, x = streamlined("MLP")
    classifier = pg.Classifier(net, link)
    compiled = torch.compile(classifier, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).probs, classifier(x).probs)


def test_regressor() -> None:
    net, x = streamlined("MLP")
    regressor = pg.Regressor(net, noise=0.1, scale=2.0)
    compiled = torch.compile(regressor, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).stddev, regressor(x).stddev)


def test_uncertain_input() -> None:
    model, x = mlp()
    example = pg.Gaussian(x, variance=torch.full_like(x, 0.1))
    net = pg.streamline(model, posterior(model), example)
    assert_same(torch.compile(net, backend="aot_eager", fullgraph=True)(example), net(example))


def test_wrong_input_is_still_named() -> None:
    net, x = streamlined("MLP")
    with pytest.raises(Exception, match="float64"):
        torch.compile(net, backend="eager")(x.double())


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_inductor() -> None:
    """An activation, a layer with random weights and a predictor: two loops in C++, with products between them."""
    from torch._inductor import config

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.GELU(), nn.Linear(6, 3)).eval(), torch.randn(4, 6)
    example = pg.Gaussian(x, variance=torch.full_like(x, 0.1))
    net = pg.streamline(model, posterior(model), example)
    classifier = pg.Classifier(net)

    def both(x: pg.Gaussian) -> tuple[pg.Gaussian, Tensor]:
        latent = net(x)
        return latent, classifier.log_probs_of(latent)

    # what the processor has is used without compiling a program for each kind of vectors, to try whether it is there;
    # and two programs take less time than the header that many would share
    with config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        found, log_probs = torch.compile(both, fullgraph=True)(example)
    expected = both(example)
    assert_same(found, expected[0])
    torch.testing.assert_close(log_probs, expected[1])
