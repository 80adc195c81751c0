"""Posteriors over chosen parts of transformers, from each of their sources, through to a prediction."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg

transformers = pytest.importorskip("transformers")
TOKENS = 5


def vit() -> tuple[nn.Module, Tensor]:
    config = transformers.ViTConfig(
        num_labels=3,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
    )
    return transformers.ViTForImageClassification(config).eval(), torch.randn(8, 3, 8, 8)


def gpt() -> tuple[nn.Module, Tensor]:
    config = transformers.GPT2Config(num_labels=3, pad_token_id=0, n_embd=16, n_layer=3, n_head=2, vocab_size=30)
    return transformers.GPT2ForSequenceClassification(config).eval(), torch.randint(1, 30, (8, TOKENS))


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(
        num_labels=3, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=30
    )
    tokens = torch.randint(1, 30, (8, TOKENS))
    mask = torch.ones_like(tokens)
    mask[3:, 4:] = 0
    return transformers.BertForSequenceClassification(config).eval(), {"input_ids": tokens, "attention_mask": mask}


CASES = [
    pytest.param(vit, ["vit.layers.[12].attention.v_proj.*", "classifier.*"], id="ViT values"),
    pytest.param(vit, ["vit.layers.2.mlp.*"], id="ViT MLP"),
    pytest.param(gpt, ["transformer.h.[12].mlp.*"], id="GPT-2 MLPs"),
    pytest.param(gpt, ["transformer.h.2.attn.c_attn.*", "score.*"], id="GPT-2 fused projection"),
    pytest.param(bert, ["bert.encoder.layer.1.*.value.*", "classifier.*"], id="BERT values"),
]


def matching(model: nn.Module, patterns: list[str]) -> set[str]:
    return {n for n, _ in model.named_parameters() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def logits(model: nn.Module, x: Any) -> Tensor:
    with torch.no_grad():
        return (model(**x) if isinstance(x, dict) else model(x)).logits


def assert_predicts(model: nn.Module, posterior: pg.Posterior, x: Any) -> pg.Gaussian:
    g = pg.streamline(model, posterior, x)(x)
    torch.testing.assert_close(g.mean, logits(model, x), rtol=1e-4, atol=1e-5)
    assert (g.variance > 0).all() and g.variance.isfinite().all()
    return g


@functools.cache
def kept(build: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """Model and inputs for tests that leave both as they are."""
    torch.manual_seed(0)
    return build()


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("build, patterns", CASES)
def test_fitted(build: Any, patterns: list[str], structure: Any) -> None:
    model, x = kept(build)
    posterior = pg.fit_laplace(
        model, [(x, torch.arange(8) % 3)], structure=structure, parameters=patterns, progress=False
    )
    assert set(posterior.names) == matching(model, patterns)
    assert_predicts(model, posterior, x)


@pytest.mark.peer
@pytest.mark.parametrize("build, patterns", CASES)
def test_from_ivon(build: Any, patterns: list[str]) -> None:
    ivon = pytest.importorskip("ivon")
    torch.manual_seed(0)
    model, x = build()
    chosen = {n: p for n, p in model.named_parameters() if n in matching(model, patterns)}
    optimiser = ivon.IVON(list(chosen.values()), lr=1e-3, ess=100, weight_decay=1e-2, hess_init=0.5)
    for _ in range(3):
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            output = model(**x) if isinstance(x, dict) else model(x)
            nn.functional.cross_entropy(output.logits, torch.randint(0, 3, (8,))).backward()
        optimiser.step()
    posterior = pg.from_ivon(optimiser, model)
    assert set(posterior.names) == set(chosen)
    assert_predicts(model, posterior, x)


class Logits(nn.Module):
    """laplace-torch wants a tensor; the wrapper's name becomes part of the parameters' names."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


@pytest.mark.peer
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_from_laplace(structure: str) -> None:
    """laplace-torch covers what has a gradient: values of the last block, and the head."""
    laplace = pytest.importorskip("laplace")
    torch.manual_seed(0)
    model, x = vit()
    patterns = ["vit.layers.2.attention.v_proj.*", "classifier.*"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in matching(model, patterns))
    wrapped = Logits(model).eval()
    la = laplace.Laplace(wrapped, "classification", subset_of_weights="all", hessian_structure=structure)
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 3, (8,)))
    la.fit(torch.utils.data.DataLoader(data, batch_size=4))
    posterior = pg.from_laplace(la)
    assert set(posterior.names) == {f"model.{n}" for n in matching(model, patterns)}
    g = pg.streamline(wrapped, posterior, x)(x)
    torch.testing.assert_close(g.mean, wrapped(x).detach(), rtol=1e-4, atol=1e-5)
    sampled = la.predictive_samples(x, pred_type="nn", n_samples=10)
    assert sampled.shape[1:] == g.mean.shape
