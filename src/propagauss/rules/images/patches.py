"""A convolution as a linear layer on patches: how its weight is stored, and which entries of the input it meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# (padding beforehand as for F.pad, then what torch.convolution takes:
#  stride, padding, dilation, transposed, output_padding, groups)
Settings = tuple[Any, ...]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    sides, *rest = settings
    return torch.convolution(F.pad(x, sides) if sides else x, weight, bias, *rest)


@dataclass(frozen=True)
class Layout:
    """A convolution as a linear layer on patches: `G` groups, a weight matrix `[out, P]`, `P = in / G * kernel`."""

    shape: torch.Size  # of the weight as stored: [out, in / G, *kernel], or [in, out / G, *kernel] if transposed
    settings: Settings

    @property
    def groups(self) -> int:
        return self.settings[-1]

    @property
    def transposed(self) -> bool:
        return self.settings[4]

    @property
    def out(self) -> int:
        return self.shape[1] * self.groups if self.transposed else self.shape[0]

    @property
    def inner(self) -> int:
        return self.shape[0] // self.groups if self.transposed else self.shape[1]

    @property
    def width(self) -> int:
        return self.inner * self.shape[2:].numel()

    def rows(self, stored: Tensor) -> Tensor:
        """A weight as stored -> `[out, P]`"""
        if self.transposed:
            stored = stored.reshape(self.groups, self.inner, -1, self.shape[2:].numel()).transpose(1, 2)
        return stored.reshape(self.out, self.width)

    def kernels(self, rows: Tensor) -> Tensor:
        """Any number of kernels per group, `[G * kernels, P]` -> a weight that the op takes."""
        if not self.transposed:
            return rows.reshape(-1, self.inner, *self.shape[2:])
        split = rows.reshape(self.groups, -1, self.inner, self.shape[2:].numel()).transpose(1, 2)
        return split.reshape(self.groups * self.inner, -1, *self.shape[2:])

    def index(self, entry: torch.Size, frames: int) -> Tensor:
        """Which entry of a sample (counted from 1; 0 for padding) each patch holds: `[frames * L, G, P]`.

        Found by convolving the entries' numbers with kernels that pick out one entry each.
        """
        numbers = torch.arange(1, frames * entry.numel() + 1, dtype=torch.float64).reshape(frames, *entry)
        picks = self.kernels(torch.eye(self.width, dtype=torch.float64).repeat(self.groups, 1))
        found = convolve(numbers, picks, None, self.settings).round().long()
        return found.reshape(frames, self.groups, self.width, -1).permute(0, 3, 1, 2).flatten(0, 1)


def read_settings(arguments: dict[str, Any], kernel: torch.Size) -> Settings:
    """The arguments of any of the convolution ops, in the form of `torch.convolution`."""
    n = len(kernel)

    def each(value: Any) -> tuple[int, ...]:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * n if len(values) == 1 else values

    dilation, sides, padding = each(arguments["dilation"]), (), arguments["padding"]
    if padding == "same":
        spans = [gap * (k - 1) for gap, k in zip(dilation, kernel, strict=True)]
        padding = [span // 2 for span in spans]
        if any(span % 2 for span in spans):  # torch.convolution pads both sides alike; the op, one more on the far side
            sides, padding = tuple(p for s in reversed(spans) for p in (s // 2, s - s // 2)), 0
    padding = each(0 if padding == "valid" else padding)
    spare = each(arguments.get("output_padding", 0))
    return sides, each(arguments["stride"]), padding, dilation, arguments["transposed"], spare, arguments["groups"]
