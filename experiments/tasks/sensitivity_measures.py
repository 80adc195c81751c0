"""What sensitivity maps of digits look like: where they are strong, how smooth they are, how far two of them agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from experiments.datasets import Pair
from propagauss.tasks.sensitivity import Sensitivity

SIDE = 28  # pixels
NEAR, INK, INFORMED = 2, 0.25, 0.05  # pixels; share of the range; share of a pixel's variance that the digit explains
MIDDLE = (10 / SIDE) ** 2


def near(x: Tensor) -> Tensor:
    """Pixels within `NEAR` of the strokes of each image: `[N, 784]`."""
    low = x.amin(1, keepdim=True)
    ink = ((x - low) / (x.amax(1, keepdim=True) - low) > INK).double().reshape(-1, 1, SIDE, SIDE)
    return F.max_pool2d(ink, 2 * NEAR + 1, 1, NEAR).flatten(1) > 0


def informed(train: Pair) -> Tensor:
    """Pixels of which the digit explains at least a share `INFORMED` of the variance over training images: `[784]`."""
    x, y = train
    means = torch.stack([x[y == digit].mean(0) for digit in y.unique().tolist()])
    sizes = torch.stack([(y == digit).double().mean() for digit in y.unique().tolist()])
    between = (sizes.unsqueeze(1) * (means - x.mean(0)).square()).sum(0)
    return between >= INFORMED * x.var(0).clamp(min=1e-12)


def measures(result: Sensitivity, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each map looks like, and how its search went: values `[N]`."""
    maps = result.maps.double()
    low, high = result.log_variance.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64), dim=1)
    return {kind: (maps * mask).sum(1) / maps.sum(1) for kind, mask in masks.items()} | {
        "smooth": smoothness(maps),
        "stddev": result.stddev.double().mean(1),
        "contrast": ((high - low) / 2).exp(),
        "steps": result.steps.double(),
        "nlpd": result.nlpd_before.double(),
        "converged": result.converged.double(),
    }


def summary(values: dict[str, Tensor]) -> dict[str, float]:
    """Means over images, with standard errors."""
    errors = {f"{key}_error": v.std().item() / len(v) ** 0.5 for key, v in values.items()}
    return {key: v.mean().item() for key, v in values.items()} | errors | {"images": len(values["steps"])}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """The other minus the one, in means over images, with the errors of paired means."""
    return summary({key: other[key] - value for key, value in one.items()})


def smoothness(maps: Tensor) -> Tensor:
    """Correlation, over the pixels of a map, of each with the mean of its eight neighbours: `[N]`."""
    images = maps.reshape(-1, 1, SIDE, SIDE)
    around = (9 * F.avg_pool2d(images, 3, 1) - images[..., 1:-1, 1:-1]) / 8
    pair = torch.stack([images[..., 1:-1, 1:-1].flatten(1), around.flatten(1)])
    pair = pair - pair.mean(-1, keepdim=True)
    return (pair[0] * pair[1]).sum(-1) / (pair[0].norm(dim=-1) * pair[1].norm(dim=-1)).clamp(min=1e-12)


def agreement(one: Tensor, other: Tensor) -> float:
    """Mean rank correlation of two maps of the same image."""
    pairs = zip(one.numpy(), other.numpy(), strict=True)
    return sum(float(spearmanr(a, b)[0]) for a, b in pairs) / len(one)  # pyright: ignore[reportArgumentType]


def places(maps: Tensor, y: Tensor, digits: Sequence[int]) -> dict[str, dict[str, float]]:
    """Where the most sensitive pixels (map above 0.5, as drawn) of each digit lie: shares of them."""
    strong = (maps.reshape(-1, SIDE, SIDE) > 0.5).double()
    centre, corner = torch.zeros(2, SIDE, SIDE)
    centre[9:19, 9:19], corner[: SIDE // 2, SIDE // 2 :] = 1, 1
    found = {}
    for i, digit in enumerate(digits):
        mine = strong[y == i]
        total = mine.sum().clamp(min=1)
        found[str(digit)] = {
            "middle": ((mine * centre).sum() / total).item(),
            "upper right": ((mine * corner).sum() / total).item(),
        }
    return found


def pack(values: Tensor) -> str:
    """Numbers, brought to a range of 0 to 255, as two hexadecimal digits each."""
    low, high = values.min(), values.max()
    return bytes(((values - low) / (high - low).clamp(min=1e-12) * 255).round().int().tolist()).hex()


def unpack(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.float64) / 255
