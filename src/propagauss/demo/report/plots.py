"""The figures of the report, as SVG that follows the light or dark scheme of the reader."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from propagauss import metrics
from propagauss.demo.methods import EXACT, OURS, Result
from propagauss.demo.opening import Opening
from propagauss.demo.regression import Band

BINS = 15
# told apart by readers with any kind of colour vision (after Okabe and Ito), on white and on black
COLOURS = {
    "MAP": "#8a8f98",
    "temperature scaling": "#c86da2",
    "sampling": "#e08e0b",
    EXACT: "#1fa87f",
    OURS: "#2f7fd1",
}
MARKERS = {"": "s", "diagonal": "o", "kronecker": "D", "full": "^"}
_INK = "#123456"  # stands for the colour of the page's text until the figure is written
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": _INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "propagauss",  # the same numbers give the same file
}
_THEME = "<style>svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#d5d9de}}</style>"


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, Callable[[], str]]]:
    """A figure in the style of the reports, and the call that gives its SVG."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, lambda: _svg(figure)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(_INK, "currentColor")
    start = text.index(">") + 1
    return text[:start] + _THEME + text[start:]


def opening(found: Opening) -> str:
    """The plain model beside the linearised predictive: mean and two standard deviations."""
    x, mean = found.grid[:, 0].numpy(), found.mean[:, 0].numpy()
    panels = (("plain model", found.plain, COLOURS["MAP"]), ("propagauss", found.stddev, COLOURS[OURS]))
    with drawing(7.8, 2.7) as (figure, svg):
        axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
        for axis, (title, stddev, colour) in zip(axes, panels, strict=True):
            width = 2 * stddev[:, 0].numpy()
            axis.fill_between(x, mean - width, mean + width, color=colour, alpha=0.3, linewidth=0)
            axis.plot(x, mean, color=colour, linewidth=1.8)
            axis.plot(found.train[0][:, 0], found.train[1][:, 0], "o", ms=2.2, mfc=_INK, mec="none", alpha=0.6)
            axis.set_title(title)
        axes[0].set(xlim=(x[0], x[-1]), ylim=(-6, 6), yticks=[-4, -2, 0, 2, 4])
        return svg()


def reliability(results: Sequence[Result], labels: Tensor) -> str:
    """Accuracy against confidence of each result, side by side; below, how many predictions have that confidence."""
    with drawing(2.05 * len(results), 2.8) as (figure, svg):
        axes = figure.subplots(2, len(results), sharex=True, sharey="row", height_ratios=[3, 1], squeeze=False)
        for (top, below), result in zip(axes.T, results, strict=True):
            _reliability_panel(top, below, result, labels)
        axes[0, 0].set_ylabel("accuracy")
        axes[1, 0].set_ylabel("share")
        figure.supxlabel("confidence", fontsize=9, color=_INK)
        return svg()


def _reliability_panel(top: Axes, below: Axes, result: Result, labels: Tensor) -> None:
    confidence, guess = result.probs.double().max(-1)
    right = (guess == labels).double().numpy()
    sure = confidence.numpy()
    edges = np.linspace(0, 1, BINS + 1)
    index = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    used = [b for b in range(BINS) if (index == b).any()]
    x = np.array([sure[index == b].mean() for b in used])
    y = np.array([right[index == b].mean() for b in used])
    count = np.array([(index == b).sum() for b in used])
    colour = COLOURS[result.method]
    top.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, alpha=0.45)
    # how far accuracy may be from confidence by chance: two standard errors, were the predictions calibrated
    error = 2 * np.sqrt(x * (1 - x) / count)
    top.vlines(x, np.maximum(x - error, 0), np.minimum(x + error, 1), color=_INK, alpha=0.22, linewidth=2.2)
    top.plot(x, y, "o-", color=colour, markersize=4, linewidth=1)
    top.set(xlim=(0, 1.02), ylim=(-0.02, 1.04), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    top.set_title(result.method)
    top.text(0.98, 0.04, f"ECE {100 * result.metrics['ece']:.1f}%", ha="right", transform=top.transAxes)
    below.hist(sure, bins=edges.tolist(), weights=np.full(len(sure), 1 / len(sure)), color=colour, alpha=0.8)
    below.set(yscale="log", ylim=(5e-4, 1.5), yticks=[1e-2, 1], yticklabels=["1%", "100%"])
    below.minorticks_off()


def rejection(results: Sequence[Result], labels: Tensor) -> str:
    """Accuracy on what is left when the least certain predictions (largest entropy) are handed to someone else."""
    with drawing(5.2, 3.1) as (figure, svg):
        axes = figure.subplots()
        for result in results:
            order = metrics.predictive_entropy(result.probs).argsort().numpy()
            right = (result.probs.argmax(-1) == labels).double().numpy()[order]
            kept = np.arange(len(right) * 7 // 10, len(right) + 1)
            accuracy = right.cumsum()[kept - 1] / kept
            wide = 2.0 if result.method == OURS else 1.3
            style = {"color": COLOURS[result.method], "linewidth": wide, "label": result.method}
            axes.plot(100 * (1 - kept / len(right)), 100 * accuracy, **style)
        axes.set(xlabel="rejected, % of test points", ylabel="accuracy of the rest, %", xlim=(0, 30))
        axes.grid(axis="y")
        axes.legend(loc="lower right")
        return svg()


def cost(results: Sequence[Result]) -> str:
    """NLPD against time, for what was fitted on the validation part; the band is MAP with its standard error."""
    with drawing(5.2, 3.1) as (figure, svg):
        axes = figure.subplots()
        shown = [r for r in results if r.time and (r.fitted or r.method == "MAP")]
        error = results[0].losses.double().std().item() / len(results[0].losses) ** 0.5
        axes.axhspan(results[0].nlpd - error, results[0].nlpd + error, color=_INK, alpha=0.06, linewidth=0)
        for r in shown:
            assert r.time is not None
            hollow = r.link == "probit"
            face = "none" if hollow else COLOURS[r.method]
            axes.plot(
                [r.time.median],
                [r.nlpd],
                MARKERS[r.posterior],
                color=COLOURS[r.method],
                markerfacecolor=face,
                alpha=0.9,
            )
        axes.set(xscale="log", xlabel="time relative to a plain forward pass", ylabel="NLPD on test points")
        axes.grid()
        handles = [axes.plot([], [], "s", color=c, label=m)[0] for m, c in COLOURS.items()]
        handles += [
            axes.plot([], [], m, color=_INK, alpha=0.6, label=p.replace("kronecker", "Kronecker"))[0]
            for p, m in MARKERS.items()
            if p
        ]
        axes.legend(handles=handles, ncols=2, loc="upper right", columnspacing=1.0, handletextpad=0.3)
        return svg()


def bands(found: Sequence[Band], grid: Tensor, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> str:
    """Means with two standard deviations, without and with noise: a column for each method."""
    x = grid[:, 0].numpy()
    rows = [found[i : i + 4] for i in range(0, len(found), 4)]
    with drawing(10.2, 2.05 * len(rows)) as (figure, svg):
        axes = figure.subplots(len(rows), 4, sharex=True, sharey=True, squeeze=False)
        for axis, band in zip(axes.flat, found, strict=True):
            _band_panel(axis, band, x)
            for (inputs, targets), face in ((held_out, "none"), (train, _INK)):
                axis.plot(inputs[:, 0], targets[:, 0], "o", ms=1.9, mfc=face, mec=_INK, mew=0.4, alpha=0.5)
        axes[0, 0].set(xlim=(x[0], x[-1]), ylim=(-4.5, 4.5), yticks=[-4, -2, 0, 2, 4])
        for axis, row in zip(axes[:, 0], rows, strict=True):
            name = "Kronecker" if row[0].posterior == "kronecker" else row[0].posterior
            axis.set_ylabel(f"{name}, {'fitted' if row[0].fitted else 'as it is'}")
        return svg()


def _band_panel(axis: Axes, band: Band, x: np.ndarray) -> None:
    colour, mean = COLOURS[band.method], band.mean.numpy()
    for stddev, alpha in ((band.total, 0.2), (band.latent, 0.4)):
        width = 2 * stddev.numpy()
        axis.fill_between(x, mean - width, mean + width, color=colour, alpha=alpha, linewidth=0)
    axis.plot(x, mean, color=colour, linewidth=1.8, zorder=3)
    axis.set_title(band.method if band.scale is None else f"{band.method}, scale {band.scale:.2g}")
