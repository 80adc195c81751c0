"""Uses with text as inputs: a small BERT, and a small Llama with LoRA. Which source are eight words from?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets import text
from experiments.frame.experiment import Context
from experiments.uses.use import Batches, Kind, Use, trained

WORDS, KNOWN = 8, 1500
SOURCES = (("mrpc", "sentence1"), ("boolq", "passage"), ("wic", "sentence1"))  # news, an encyclopaedia, a dictionary
QUESTIONS = ("boolq", "question")
SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
COUNTS = {"train": 2400, "validation": 300, "test": 400}  # texts of each source


class Snippets:
    """Eight words in a row from each text, as numbers; 1 is any word that is not among the most frequent."""

    def __init__(self, context: Context):
        self._context, self._number = context, {}
        words = Counter(word for source in SOURCES for row in self._rows(*source, "train") for word in row)
        self._number = {word: 2 + i for i, (word, _) in enumerate(words.most_common(KNOWN))}
        self.vocabulary = 2 + len(self._number)

    def _rows(self, task: str, field: str, part: str) -> list[list[str]]:
        # the test part of BoolQ has no file, so that its validation part is divided
        stored = "validation" if (task, part) == ("boolq", "test") else part
        rows = text(self._context, task, stored)
        if task == "boolq" and part != "train":
            rows = rows[part == "test" :: 2]
        return [re.findall(r"\w+", str(row[field]).lower()) or ["the"] for row in rows]

    def of(self, task: str, field: str, part: str) -> Tensor:
        """`[N, 8]`; texts that are too short are repeated."""
        rows = self._rows(task, field, part)
        chosen = [rows[i] for i in torch.randperm(len(rows))[: COUNTS[part]].tolist()]
        found = []
        for row in chosen:
            start = int(torch.randint(max(1, len(row) - WORDS), ()))
            found.append([self._number.get(row[(start + i) % len(row)], 1) for i in range(WORDS)])
        return torch.tensor(found)


def _batches(ids: Tensor, labels: Tensor | None, size: int = 128) -> Batches:
    """Dictionaries, as a tokeniser and a collator make them."""
    found: Batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids.split(size)]
    if labels is None:
        return found
    return [batch | {"labels": y} for batch, y in zip(found, labels.split(size), strict=True)]


def _data(snippets: Snippets, sources: Sequence[tuple[str, str]], size: int = 64) -> dict[str, Batches]:
    found = {}
    for part in ("train", "validation", "test"):
        by_class = [snippets.of(*source, part) for source in sources]
        labels = torch.cat([torch.full((len(x),), c) for c, x in enumerate(by_class)])
        order = torch.randperm(len(labels))
        found[part] = _batches(torch.cat(by_class)[order], labels[order], size if part == "train" else 128)
    far = torch.randint(2, snippets.vocabulary, (COUNTS["test"], WORDS))
    return found | {"far": _batches(far, None), "nearer": _batches(snippets.of(*QUESTIONS, "test"), None)}


def bert(context: Context, seed: int) -> Use:
    from transformers import BertConfig, BertForSequenceClassification

    snippets = Snippets(context)
    data = _data(snippets, SOURCES)
    sizes: dict[str, Any] = {"vocab_size": snippets.vocabulary, "max_position_embeddings": 16, "num_labels": 3}
    config = BertConfig(**sizes, **SIZE)
    model = BertForSequenceClassification(config)
    trained(model, lambda batch: model(**batch).loss, data["train"], 500, decay=0.1)
    return Use(model, "classification", **data)


def llama(context: Context, seed: int) -> Use:
    """First a language model of the training texts; then adapters and a head tell two of the sources apart."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    snippets = Snippets(context)
    data = _data(snippets, SOURCES[::2])
    sizes: dict[str, Any] = {"vocab_size": snippets.vocabulary, "max_position_embeddings": 16, "num_labels": 2}
    config = LlamaConfig(**sizes, **SIZE, use_cache=False, pad_token_id=0)
    language = LlamaForCausalLM(config)
    trained(language, lambda b: language(input_ids=b["input_ids"], labels=b["input_ids"]).loss, data["train"], 400)
    base = LlamaForSequenceClassification(config)
    base.model.load_state_dict(language.model.state_dict())
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model: nn.Module = get_peft_model(base, lora)  # type: ignore[arg-type]
    trained(model, lambda batch: model(**batch).loss, data["train"], 400, decay=0.1)
    return Use(model, "classification", **data)


FAR = "eight words at random of those that it knows"
BERT = Kind("small BERT", FAR, bert, nearer="questions")
LLAMA = Kind("small Llama, LoRA", FAR, llama, nearer="questions")
