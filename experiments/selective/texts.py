"""Pairs of sentences as vectors `[u, v, |u - v|, u v]`, `u` and `v` the embeddings by MiniLM; kept in the cache."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from experiments import datasets
from experiments.datasets import Images, Pair
from experiments.frame.experiment import Context
from experiments.transformers.gpt_features import TESTED_ON, by_length
from experiments.transformers.gpt_networks import BACKBONES

TASKS = ("mrpc", "wic")
TRAINED, HELD_OUT = 2000, 400  # pairs for training and validation
TOKENS = 64  # of a sentence at most
QUICK = 40  # pairs for training, and as many for each other part
NARROW = 32  # entries of an embedding in a quick run
PARTS = ("train", "validation", "test")


def pairs(context: Context, task: str) -> Images:
    """Standardised by the training part; those for validation come from the same file."""
    path = context.cache / f"pairs-{task}-{context.mode}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        save_file(_embedded(context, task), temporary)
        temporary.replace(path)
    stored = load_file(path)
    mean, stddev = stored["x_train"].mean(0), stored["x_train"].std(0) + 1e-6
    parts: list[Pair] = [((stored[f"x_{p}"] - mean) / stddev, stored[f"y_{p}"]) for p in PARTS]
    return Images(*parts, classes=2)


def _embedded(context: Context, task: str) -> dict[str, Tensor]:
    known, test = datasets.text(context, task, "train"), datasets.text(context, task, TESTED_ON[task])
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0)).tolist()
    train, held = (QUICK, QUICK) if context.quick else (TRAINED, HELD_OUT)
    chosen = [known[i] for i in order[: train + held]]
    rows = {"train": chosen[:train], "validation": chosen[train:], "test": test[:QUICK] if context.quick else test}
    found = {}
    for part, some in rows.items():
        both = (_embed([_sentence(task, row, field) for row in some]) for field in ("sentence1", "sentence2"))
        u, v = (vectors[:, : NARROW if context.quick else None] for vectors in both)
        found[f"x_{part}"] = torch.cat([u, v, (u - v).abs(), u * v], 1)
        found[f"y_{part}"] = torch.tensor([int(row["label"]) for row in some])
    return found


def _sentence(task: str, row: dict[str, Any], field: str) -> str:
    return f"{row['word']}: {row[field]}" if task == "wic" else row[field]


@torch.no_grad()
def _embed(sentences: list[str]) -> Tensor:
    """The mean over tokens, of length one, as the model was trained for."""
    import transformers

    found = BACKBONES["minilm"].find()
    assert found is not None  # units are made only if it is here
    tokenizer = transformers.AutoTokenizer.from_pretrained(found[0])
    model = transformers.AutoModel.from_pretrained(found[0], dtype=torch.float32).eval()
    ids = [tokenizer(s, truncation=True, max_length=TOKENS)["input_ids"] for s in sentences]
    vectors = torch.empty(len(ids), model.config.hidden_size)
    for group in tqdm(by_length([len(i) for i in ids]), desc="embedding", disable=None, leave=False):
        tokens = model(torch.tensor([ids[i] for i in group])).last_hidden_state
        vectors[group] = torch.nn.functional.normalize(tokens.mean(1))
    return vectors
