"""The figure of docs/fidelity.md: standard deviations of each input, predicted against sampled."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fidelity.cases import LAPLACE, OWN_SCALE, Case
from fidelity.measure import measure
from propagauss.demo.report import plots

POINTS = Path(__file__).parents[2] / "results" / "fidelity" / "points.json"
SAMPLES = 2000  # a standard deviation is then off by 1.6%, less than a mark is wide
COLUMNS = 3
LOOKS = {"diagonal": ("streamlined", plots.COLOURS[plots.OURS], "o"), "linearised": ("linearised", "#e08e0b", "x")}
Points = dict[str, dict[str, list[float]]]  # case -> "sampled" or an engine -> mean over outputs of each input


def shown() -> list[Case]:
    """Four networks with narrow Laplace posteriors; then the MLP with IVON's middle posterior, and with a wide one."""
    narrow = [c for c in LAPLACE if c.posterior == "diagonal" and not c.network.startswith("MiniLM")]
    own = ("IVON, temperature 1, first Hessian 0.5", "Laplace as fitted")
    return narrow + [c for c in OWN_SCALE if c.network == "MLP" and c.posterior in own]


def points() -> Points:
    """From the file; what is missing there is measured and added."""
    found: Points = json.loads(POINTS.read_text()) if POINTS.exists() else {}
    for case in shown():
        if case.key not in found:
            start = time.perf_counter()
            found[case.key] = measure(case, SAMPLES)["points"]
            _store(found)
            print(f"{case.key}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def _store(found: Points) -> None:
    """Four digits: samples know no more."""
    short = {
        key: {name: [float(f"{v:.4g}") for v in values] for name, values in each.items()} for key, each in found.items()
    }
    POINTS.parent.mkdir(parents=True, exist_ok=True)
    temporary = POINTS.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(short, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    os.replace(temporary, POINTS)


def draw(found: Points) -> str:
    """SVG: a panel for each case; on the diagonal line predictions are right."""
    cases = shown()
    rows = -(-len(cases) // COLUMNS)
    with plots.drawing(2.7 * COLUMNS, 2.6 * rows) as (figure, svg):
        axes = figure.subplots(rows, COLUMNS, squeeze=False)
        for axis, case in zip(axes.flat, cases, strict=True):
            _panel(axis, case, found[case.key])
        axes[0][0].legend(loc="upper left", handletextpad=0.2)
        figure.supxlabel("sampled", fontsize=9)
        figure.supylabel("predicted", fontsize=9)
        return svg()


def _panel(axis: Any, case: Case, values: dict[str, list[float]]) -> None:
    truth = values["sampled"]
    for name, (label, colour, marker) in LOOKS.items():
        axis.scatter(truth, values[name], s=9, marker=marker, linewidths=0.8, alpha=0.7, color=colour, label=label)
    ends = [0.0, 1.05 * max(truth)]
    axis.plot(ends, ends, linewidth=0.8, color=plots._INK, alpha=0.6)
    posterior = "Laplace, narrow" if case.scale != 1 else case.posterior.split(", first")[0]
    axis.set(title=f"{case.network}, {posterior}", xlim=(0, None), ylim=(0, None))
    axis.ticklabel_format(axis="both", style="sci", scilimits=(-2, 3))
    axis.tick_params(labelsize=7)
