"""Vision transformers of the paper's large-scale experiments, at a size that trains here; kept in the cache.

A Hugging Face ViT is trained on all of its weights, then taken apart before its last two blocks: what comes before is
run once for each image, and the suffix (two blocks, final norm, head) is what is fine-tuned, fitted and compared.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from experiments import datasets
from experiments.datasets import DataMissing, Images, Pair
from experiments.frame.experiment import Context
from propagauss.posteriors import Posterior, fit_laplace, from_ivon, load_posterior

Part = Literal["attention", "mlp", "head"]
Kind = Literal["LA", "MFVI"]
BLOCKS = 2  # at the end, with random weights
PARTS: dict[Part, tuple[str, ...]] = {  # parameters of the suffix, as globs
    "attention": ("blocks.*.attention.*",),
    "mlp": ("blocks.*.mlp.*",),
    "head": ("head.*",),
}
FULL: dict[str, Any] = {
    "width": 128,
    "blocks": 6,
    "heads": 4,
    "train": 9000,
    "validation": 1000,
    "test": 2500,
    "epochs": {"cifar10": 24, "fashion_mnist": 8},
    "batch": 64,
    "rate": 1e-3,
    "decay": 0.05,
}
QUICK = FULL | {"width": 32, "blocks": 3, "train": 64, "validation": 40, "test": 40}
QUICK |= {"epochs": {"cifar10": 1, "fashion_mnist": 1}}
TUNING: dict[Kind, dict[str, Any]] = {
    "LA": {"epochs": 10, "batch": 64, "rate": 1e-3, "decay": 0.01},
    "MFVI": {"epochs": 10, "batch": 64, "rate": 0.1, "prior_precision": 10.0, "hess_init": 0.1, "beta2": 0.9999},
}
PATCHES = 4  # in each direction


class ImageClassifier(nn.Module):
    """A Hugging Face ViT that takes pixels in [0, 1] and returns logits; it centres them as ViT's processor does."""

    def __init__(self, vit: nn.Module):
        super().__init__()
        self.vit = vit

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(2 * x - 1).logits


class Prefix(nn.Module):
    """Images `[B, C, H, W]` in [0, 1] -> the tokens that enter the last `blocks` blocks: `[B, T, D]`."""

    def __init__(self, model: ImageClassifier, blocks: int = BLOCKS):
        super().__init__()
        body: Any = model.vit.vit
        self.embeddings, self.blocks = body.embeddings, body.layers[:-blocks]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embeddings(2 * x - 1)
        for block in self.blocks:
            h = block(h)
        return h


class Suffix(nn.Module):
    """Tokens -> logits of the class token. The last MLP runs on that token only: no other one is read."""

    def __init__(self, model: ImageClassifier, blocks: int = BLOCKS):
        super().__init__()
        vit: Any = model.vit
        self.blocks, self.norm, self.head = vit.vit.layers[-blocks:], vit.vit.layernorm, vit.classifier

    def forward(self, h: Tensor) -> Tensor:
        blocks: list[Any] = list(self.blocks)
        for i, block in enumerate(blocks):
            h = h + block.attention(block.layernorm_before(h))[0]
            if i == len(blocks) - 1:
                h = h[:, :1]
            h = h + block.mlp(block.layernorm_after(h))
        return self.head(self.norm(h[:, 0]))


def from_checkpoint(name_or_path: str | os.PathLike[str], **options: Any) -> ImageClassifier:
    """A ViT as the paper uses it, such as "google/vit-base-patch16-224", from disk: nothing is downloaded.

    `options` go to `from_pretrained`, for instance `num_labels=10, ignore_mismatched_sizes=True` for a new head. The
    result goes to `Prefix`, `Suffix` and `vit.evaluate`.
    """
    import transformers

    try:
        found = transformers.AutoModelForImageClassification.from_pretrained(
            os.fspath(name_or_path), local_files_only=True, **options
        )
    except OSError as error:
        raise DataMissing(
            f"{os.fspath(name_or_path)} is neither a folder with a model nor in the Hugging Face cache: download it "
            f"once with transformers.AutoModelForImageClassification.from_pretrained({os.fspath(name_or_path)!r})"
        ) from error
    if not (hasattr(found, "vit") and hasattr(found, "classifier")):
        raise DataMissing(f"{os.fspath(name_or_path)} is a {type(found).__name__}; a ViT is needed")
    return ImageClassifier(found).eval()


# -- data


def settings(context: Context) -> dict[str, Any]:
    return QUICK if context.quick else FULL


@functools.lru_cache(maxsize=2)
def data(context: Context, name: str) -> Images:
    """The last images of the training part for validation; the first of the rest, and of the test part."""
    sizes = settings(context)
    whole = datasets.images(context, name, FULL["validation"])
    parts = zip((whole.train, whole.validation, whole.test), ("train", "validation", "test"), strict=True)
    train, validation, test = ((x[: sizes[part]], y[: sizes[part]]) for (x, y), part in parts)
    return Images(train, validation, test, whole.classes)


# -- training


def trained(context: Context, name: str) -> tuple[ImageClassifier, Images]:
    """A small ViT trained on a data set, in evaluation mode, and that data."""
    images, sizes = data(context, name), settings(context)
    model = _network(images, sizes)
    path = _path(context, f"vit-{name}", [sizes])
    if not path.is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            model = _network(images, sizes)
            _train(model, images.train, sizes, sizes["epochs"][name], name)
        _save(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return model.eval(), images


def _network(images: Images, sizes: Mapping[str, Any]) -> ImageClassifier:
    import transformers

    _, channels, height, _ = images.train[0].shape
    options: dict[str, Any] = {
        "image_size": height,
        "patch_size": height // PATCHES,
        "num_channels": channels,
        "hidden_size": sizes["width"],
        "intermediate_size": 4 * sizes["width"],
        "num_hidden_layers": sizes["blocks"],
        "num_attention_heads": sizes["heads"],
        "num_labels": images.classes,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "eager",  # torch.vmap has no rule for the fused kernel, which makes Jacobians slow
    }
    return ImageClassifier(transformers.ViTForImageClassification(transformers.ViTConfig(**options)))


def _train(model: nn.Module, train: Pair, sizes: Mapping[str, Any], epochs: int, title: str) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), sizes["rate"], weight_decay=sizes["decay"], fused=True)
    model.train()
    for x, y in _steps(train, optimiser, epochs, sizes["batch"], title):
        optimiser.zero_grad()
        F.cross_entropy(model(augmented(x)), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()


def augmented(x: Tensor, margin: int = 3) -> Tensor:
    """Each image shifted by up to `margin` pixels, every other one mirrored."""
    batch, _, height, width = x.shape
    padded = F.pad(x, [margin] * 4)
    rows = torch.randint(2 * margin + 1, (batch, 1)) + torch.arange(height)
    columns = torch.randint(2 * margin + 1, (batch, 1)) + torch.arange(width)
    columns = torch.where(torch.rand(batch, 1) < 0.5, columns, columns.flip(1))
    each = torch.arange(batch)[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _steps(train: Pair, optimiser: torch.optim.Optimizer, epochs: int, batch: int, title: str) -> Iterator[Pair]:
    """Batches in random order, epoch after epoch; the step size rises for a tenth of the time, then falls to zero."""
    x, y = train
    total = epochs * -(-len(x) // batch)
    highest = optimiser.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, highest, total, pct_start=0.1, cycle_momentum=False)
    for _ in tqdm(range(epochs), desc=title, leave=False, disable=None):
        for rows in torch.randperm(len(x)).split(batch):
            yield x[rows], y[rows]
            schedule.step()


# -- fine-tuning


@dataclass(frozen=True)
class Tokens:
    """What enters the suffix, for the three parts of the data."""

    train: Pair
    validation: Pair
    test: Pair


@functools.lru_cache(maxsize=2)
def tokens(context: Context, name: str) -> Tokens:
    model, images = trained(context, name)
    return tokens_of(Prefix(model), images)


@torch.no_grad()
def tokens_of(prefix: nn.Module, images: Images) -> Tokens:
    parts = (images.train, images.validation, images.test)
    return Tokens(*((torch.cat([prefix(b) for b in x.split(500)]), y) for x, y in parts))


@functools.lru_cache(maxsize=2)  # methods and engines look at the same networks, one after the other
def tuned(context: Context, name: str, part: Part, kind: Kind) -> tuple[Suffix, Posterior]:
    """The suffix with one part fine-tuned, and a diagonal posterior over that part; neither may be changed."""
    model, _ = trained(context, name)
    suffix, how = Suffix(model), tuning(context, kind)
    stem = _path(context, f"vit-{name}-{part}-{kind}", [settings(context), how])
    posterior_path = stem.with_suffix(".posterior.safetensors")
    if not posterior_path.is_file():
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(context.seed)
            posterior = fit(suffix, PARTS[part], tokens(context, name).train, kind, how)
        _save(suffix.state_dict(), stem)
        posterior.save(posterior_path)
    suffix.load_state_dict(load_file(stem))
    return suffix.eval(), load_posterior(posterior_path)


def tuning(context: Context, kind: Kind) -> dict[str, Any]:
    return TUNING[kind] | ({"epochs": 1} if context.quick else {})


def fit(suffix: nn.Module, patterns: Sequence[str], train: Pair, kind: Kind, how: Mapping[str, Any]) -> Posterior:
    """Fine-tune the chosen parameters of `suffix` in place; returns their posterior."""
    chosen = [p for n, p in suffix.named_parameters() if any(fnmatch.fnmatchcase(n, g) for g in patterns)]
    for p in suffix.parameters():
        p.requires_grad_(any(p is c for c in chosen))
    suffix.eval()  # no dropout, as for the features
    try:
        if kind == "MFVI":
            return tune_ivon(suffix, chosen, train, how)
        optimiser = torch.optim.AdamW(chosen, how["rate"], weight_decay=how["decay"], fused=True)
        for x, y in _steps(train, optimiser, how["epochs"], how["batch"], "fine-tuning"):
            optimiser.zero_grad()
            F.cross_entropy(suffix(x), y).backward()
            optimiser.step()
        return fit_laplace(suffix, datasets.batches(train, 250), structure="diagonal", parameters=list(patterns))
    finally:
        suffix.requires_grad_(True)


def tune_ivon(suffix: nn.Module, chosen: list[nn.Parameter], train: Pair, how: Mapping[str, Any]) -> Posterior:
    """`N(w; m, diag(v))` over the chosen parameters."""
    try:
        import ivon
    except ImportError as error:
        raise DataMissing("MFVI needs IVON: pip install propagauss[ivon]") from error
    count = len(train[0])
    options = {"hess_init": how["hess_init"], "beta2": how["beta2"], "weight_decay": how["prior_precision"] / count}
    optimiser = ivon.IVON(chosen, how["rate"], ess=count, **options)
    for x, y in _steps(train, optimiser, how["epochs"], how["batch"], "IVON"):
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            F.cross_entropy(suffix(x), y).backward()
        optimiser.step()
    return from_ivon(optimiser, suffix)


# -- the cache


def _path(context: Context, name: str, stamp: list[Any]) -> Path:
    digest = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:10]
    return context.cache / f"{name}-{context.mode}-{context.seed}-{digest}.safetensors"


def _save(weights: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: w.detach().contiguous() for name, w in weights.items()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
