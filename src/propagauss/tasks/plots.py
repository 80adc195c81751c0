"""Figures of the tasks, with matplotlib, which is imported here only and this file only when a figure is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from propagauss.errors import InputError

INSIDE, OUTSIDE = "#2f7fd1", "#d1493f"


def maps(
    rows: Sequence[tuple[str, Tensor]],
    names: Sequence[str],
    low: float = 0.5,
    x: Tensor | None = None,
    figure: Figure | None = None,
) -> Figure:
    """A grid: a column for each input, a row for each tensor of maps in [0, 1], drawn from `low` up; on top the inputs.

    `figure`, here and below, is one to draw into.
    """
    for title, values in rows:
        if len(values) != len(names):
            raise InputError(f"there are {len(names)} names for {len(values)} maps {title}".rstrip())
    count, top = len(names), 0 if x is None else 1
    figure = figure or new_figure(0.3 + 0.9 * count, 0.25 + 0.95 * (len(rows) + top))
    axes = figure.subplots(len(rows) + top, count, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name)
    if x is not None:
        for axis, image in zip(axes[0], images(x), strict=True):
            axis.imshow(image, cmap="gray")
    for line, (title, values) in zip(axes[top:], rows, strict=True):
        line[0].set_ylabel(title)
        for axis, image in zip(line, images(values), strict=True):
            axis.imshow(image, cmap="coolwarm", vmin=low, vmax=1)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


def densities(
    groups: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    label: str,
    names: tuple[str, str],
    figure: Figure | None = None,
    top: float | None = None,
) -> Figure:
    """A panel for each `title: (points, density inside, density outside)`; `top` is where the axis ends."""
    figure = figure or new_figure(2.1 * len(groups) + 0.4, 2.2)
    axes = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    for axis, (title, (points, inside, outside)) in zip(axes, groups.items(), strict=True):
        for values, colour, name in ((inside, INSIDE, names[0]), (outside, OUTSIDE, names[1])):
            axis.fill_between(points, values, color=colour, alpha=0.25, linewidth=0)
            axis.plot(points, values, color=colour, linewidth=1.3, label=name)
        axis.set(title=title, xlabel=label, ylim=(0, top), xlim=(points[0], points[-1]))
    axes[0].set_ylabel("density")
    axes[0].legend(frameon=False)
    return figure


def curves(epsilon: np.ndarray, errors: np.ndarray, label: str, figure: Figure | None = None) -> Figure:
    """`errors [K, outputs]` against `epsilon [K]`, both logarithmic."""
    figure = figure or new_figure(4.6, 3.0)
    axis = figure.subplots()
    axis.plot(epsilon, np.maximum(errors, 1e-300), color=INSIDE, linewidth=1, alpha=0.7)
    axis.set(xscale="log", yscale="log", xlabel="ε", ylabel=label)
    axis.grid(alpha=0.15)
    return figure


def steps(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]], across: str, up: str, figure: Figure | None = None
) -> Figure:
    """A line for each `name: (x, y)`, constant up to the next point."""
    figure = figure or new_figure(4.6, 3.0)
    axis = figure.subplots()
    for name, (x, y) in lines.items():
        axis.step(x, y, where="post", linewidth=1.3, label=name)
    axis.set(xlabel=across, ylabel=up, xlim=(0, 1), ylim=(0, None))
    axis.legend(frameon=False)
    axis.grid(alpha=0.15)
    return figure


def agreement(
    exact: np.ndarray, found: np.ndarray, rows: Sequence[tuple[str, float, float]], figure: Figure | None = None
) -> Figure:
    """`found` against `exact` standard deviations `[N]`; beside it, for each `(name, share, arrives)`, two bars."""
    figure = figure or new_figure(8.4 if rows else 3.4, max(3.2, 0.8 + 0.28 * len(rows)))
    axes = figure.subplots(1, 3 if rows else 1, squeeze=False, width_ratios=[1.4, 1, 1] if rows else None)[0]
    top = 1.05 * max(exact.max(), found.max())
    axes[0].plot([0, top], [0, top], color="0.6", linewidth=1)
    axes[0].plot(exact, found, "o", color=INSIDE, markersize=3.5, alpha=0.6)
    axes[0].set(xlabel="exact standard deviation", ylabel="standard deviation of the network")
    axes[0].set(xlim=(0, top), ylim=(0, top))
    for axis, at, title, colour in zip(
        axes[1:], (1, 2), ("share of the variance", "sd that arrives"), (INSIDE, OUTSIDE), strict=False
    ):
        axis.barh(range(len(rows)), np.nan_to_num([row[at] for row in rows]), color=colour, height=0.7)
        axis.set(title=title, yticks=range(len(rows)), yticklabels=[row[0] for row in rows] if at == 1 else [])
        axis.axvline(at - 1, color="0.6", linewidth=1)  # nothing, and all of it
        axis.invert_yaxis()
    return figure


def images(values: Tensor) -> list[np.ndarray]:
    """Each sample as `[height, width]`: channels averaged, square vectors folded, other vectors as a line."""
    values = values.detach().cpu().double()
    if values.dim() == 4:
        values = values.mean(1)
    elif values.dim() != 3:
        values = values.flatten(1)
        side = math.isqrt(values.shape[1])
        values = values.reshape(len(values), side if side * side == values.shape[1] else 1, -1)
    return list(values.numpy())


def new_figure(width: float, height: float) -> Figure:
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def as_numpy(values: Tensor) -> np.ndarray:
    return torch.as_tensor(values).detach().cpu().double().numpy()
