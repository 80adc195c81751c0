"""One family: how a small member of it is built, what goes in, and which tensor comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Example = dict[str, Any] | tuple[Any, ...]
Built = tuple[nn.Module, Example]

# The output of a model that stands for it, by name; the first floating-point tensor if it has none of them.
WANTED = ("logits", "last_hidden_state", "prediction_logits", "predicted_depth", "pred_masks", "prediction_outputs")


@dataclass(frozen=True)
class Family:
    """A name such as `graph/GCN`, and a function that builds a small member of it with an example of two samples."""

    name: str
    build: Callable[[], Built]
    initialise: bool = False  # whether its own random weights are too small to say anything

    @property
    def group(self) -> str:
        return self.name.split("/")[0]


class Wanted(nn.Module):
    """A model that returns one tensor. Caches and the like, which `torch.export` refuses, stay behind."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return wanted(self.model(*args, **kwargs))


def wanted(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    if isinstance(result, dict):
        for name in WANTED:
            if isinstance(result.get(name), Tensor):
                return result[name]
    for tensor in _tensors(result):
        if tensor.is_floating_point():
            return tensor
    raise TypeError(f"the model returns a {type(result).__name__} without a floating-point tensor")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def call(model: nn.Module, example: Example) -> Tensor:
    return model(**example) if isinstance(example, dict) else model(*example)


def cloned(example: Example) -> Any:
    """A failed export may leave marks on the tensors that it was given."""
    if isinstance(example, dict):
        return {name: _clone(value) for name, value in example.items()}
    return tuple(_clone(value) for value in example)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def trained_size(model: nn.Module) -> None:
    """Give the weights the size that training leaves: those of an untrained transformer are tiny.

    Only what ordinary layers hold is drawn anew; other parameters (a decay, a time step) keep their own scale.
    """
    with torch.no_grad():
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if not p.is_floating_point() or not p.numel():
                    continue
                if p.dim() > 1 and (name == "weight" or float(p.abs().max()) < 0.2):
                    fan = p.shape[-1] if isinstance(module, nn.Embedding) else p[0].numel()
                    p.normal_(0.0, 0.7 * max(fan, 1) ** -0.5)
                elif p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))
