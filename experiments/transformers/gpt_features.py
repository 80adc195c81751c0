"""Prompts of the language tasks, and what the frozen part of a language model makes of them, kept in the cache.

What is kept is rounded to half precision.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from experiments import datasets
from experiments.frame.experiment import Context
from experiments.published.gpt import PROMPTS
from experiments.transformers.gpt_networks import Parts, loaded

CUT = {"mrpc": "sentence1", "wic": "sentence1", "boolq": "passage"}  # which field gives way in a prompt too long
# the labelled part that the standard errors of the paper point to; validation rows come from the training part
TESTED_ON = {"mrpc": "test", "wic": "validation", "boolq": "validation"}
ROWS = 1024  # tokens in a batch, about


# -- prompts


def prompt(tokenizer: Any, task: str, row: dict[str, Any], most: int) -> list[int]:
    """Token ids of the paper's prompt; where it has more than `most`, the start of its longest field is left out."""
    whole = tokenizer(PROMPTS[task].format(**row), verbose=False)["input_ids"]
    if len(whole) <= most:
        return whole
    before, after = (part.format(**row) for part in PROMPTS[task].split("{" + CUT[task] + "}"))
    head, body, tail = (_ids(tokenizer, t) for t in (before.rstrip(), f" {row[CUT[task]]}", after))
    first, last = _special(tokenizer)
    room = most - len(first) - len(head) - len(tail) - len(last)
    return [*first, *head, *body[max(0, len(body) - max(room, 0)) :], *tail, *last]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text (BERT)."""
    marked, bare = tokenizer("a")["input_ids"], _ids(tokenizer, "a")
    at = next(i for i in range(len(marked)) if marked[i : i + len(bare)] == bare)
    return marked[:at], marked[at + len(bare) :]


def rows(context: Context, task: str, counts: Sequence[int]) -> list[list[dict[str, Any]]]:
    """A random `counts` of rows for training, validation and test; the first two from the training part."""
    train, validation, test = counts
    known = datasets.text(context, task, "train")
    chosen = _some(known, train + validation, context.seed)
    return [
        chosen[:train],
        chosen[train:],
        _some(datasets.text(context, task, TESTED_ON[task]), test, context.seed),
    ]


def _some(known: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    return [known[i] for i in order[:count].tolist()]


# -- features


@dataclass(frozen=True)
class Features:
    """Of each prompt the sequence that enters the suffix (`[T, D]`, half precision), and its label."""

    sequences: list[Tensor]
    labels: Tensor

    def some(self, which: slice) -> Features:
        return Features(self.sequences[which], self.labels[which])

    def batches(self, size: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Sequences of one length each, so that no mask is needed; about `ROWS` tokens, or at most `size` prompts."""
        return [
            (torch.stack([self.sequences[i] for i in group]).float(), self.labels[group])
            for group in by_length([len(s) for s in self.sequences], size)
        ]


def by_length(lengths: Sequence[int], size: int | None = None) -> list[list[int]]:
    """Indices in groups of equal length, shortest first."""
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        groups.setdefault(length, []).append(i)
    steps = {length: size or max(1, ROWS // max(length, 1)) for length in groups}
    return [groups[t][i : i + steps[t]] for t in sorted(groups) for i in range(0, len(groups[t]), steps[t])]


def features(context: Context, backbone: str, task: str, counts: Sequence[int], most: int) -> list[Features]:
    """Training, validation and test, from the cache or computed and put there."""
    name = f"text-{backbone}-{task}-{'-'.join(map(str, counts))}-{most}-{context.seed}.safetensors"
    path = context.cache / name
    if not path.is_file():
        parts = loaded(backbone)
        stored: dict[str, Tensor] = {}
        for part, some in zip(("train", "validation", "test"), rows(context, task, counts), strict=True):
            found = compute(parts, task, some, most, f"{backbone} {task} {part}")
            stored[f"{part}.hidden"] = torch.cat(found.sequences)
            stored[f"{part}.lengths"] = torch.tensor([len(s) for s in found.sequences])
            stored[f"{part}.labels"] = found.labels
        _save(stored, path)
    stored = load_file(path)
    return [
        Features(
            list(stored[f"{part}.hidden"].split(stored[f"{part}.lengths"].tolist())),
            stored[f"{part}.labels"],
        )
        for part in ("train", "validation", "test")
    ]


@torch.no_grad()
def compute(parts: Parts, task: str, some: list[dict[str, Any]], most: int, title: str) -> Features:
    """Run the prefix on the prompts of these rows."""
    ids = [prompt(parts.tokenizer, task, row, most) for row in some]
    sequences: list[Tensor] = [torch.empty(0)] * len(ids)
    for group in tqdm(by_length([len(i) for i in ids]), desc=title, disable=None, leave=False):
        for index, h in zip(group, parts.prefix(torch.tensor([ids[i] for i in group])), strict=True):
            sequences[index] = h.half()
    return Features(sequences, torch.tensor([int(row["label"]) for row in some]))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
