"""Both engines on the networks of `mnist`, with `calibrate`, over three seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.datasets import batches
from experiments.frame.experiment import Context, Record, Unit
from experiments.methods.classify import Predictor, plain, sampling, score
from experiments.methods.engines import AS_IT_IS, CALIBRATED, FITTED, LINEARISED, STREAMLINED, both
from experiments.mnist.networks import IVON, MAP, ivon_network, laplace, map_network
from experiments.report import html

SEEDS, SAMPLES, FEWER = 3, 100, 5  # the last in a quick run
SUFFIX = "-engines-"
TEMPERATURE = "temperature scaling"
METRICS = ("accuracy", "nlpd", "ece")


def units(context: Context, name: str) -> list[Unit]:
    samples = FEWER if context.quick else SAMPLES
    config = {"map": MAP, "ivon": IVON, "samples": samples}
    return [
        Unit(f"{name}{SUFFIX}{seed}", config | {"seed": seed}, partial(measure, name=name, seed=seed, samples=samples))
        for seed in range(SEEDS)
    ]


def measure(context: Context, name: str, seed: int, samples: int) -> Record:
    """Scores on the test images, and the NLPD minus that of temperature scaling of the plain model."""
    context = replace(context, seed=context.seed + seed)
    scores = [score(p.label, p(x.split(500)), y) for group, (x, y) in predictors(context, name, samples) for p in group]
    base = next(s for s in scores if s.label.method == TEMPERATURE)
    rows = []
    for s in scores:
        gap = s.losses - base.losses
        against = [gap.mean().item(), gap.std().item() / math.sqrt(len(gap))]
        rows.append(s.as_dict() | {"against": against})
    return {"set": name, "engines": seed, "rows": rows}


def predictors(context: Context, name: str, samples: int) -> Iterator[tuple[list[Predictor], Any]]:
    trained, posterior = map_network(context, name), laplace(context, name, "kronecker")
    validation, test = batches(trained.data.validation), trained.data.test
    yield plain(trained.model, validation), test
    yield sampling(trained.model, posterior, "LA", validation, samples, context.seed), test
    for group in both(trained.model, posterior, "LA", validation, covariance="full"):
        yield group, test
    trained, posterior = ivon_network(context, name)
    yield sampling(trained.model, posterior, "MFVI", validation, samples, context.seed), test
    for group in both(trained.model, posterior, "MFVI", validation):
        yield group, test


# -- the report


def of_set(records: Mapping[str, Record], name: str) -> list[Record]:
    return [r for key, r in records.items() if key.startswith(f"{name}{SUFFIX}")]


def table(title: str, found: Sequence[Record], at_map: float) -> str:
    """`at_map` is the NLPD of the plain model in the tables above."""
    if not found:
        return html.paragraph(f"{title}, both engines over three seeds: not run.")
    lines, before = [], ""
    for row in found[0]["rows"]:
        same = _same(found, row["name"])
        cells = [_text([s[m] for s in same]) for m in METRICS]
        cells.append("" if row["method"] == TEMPERATURE else _text([s["against"][0] for s in same], "+"))
        scale = statistics.median(s["scale"] for s in same) if row["scale"] is not None else None
        cells.append("" if scale is None else f"{scale:.2g}")
        ours = row["method"] in (STREAMLINED, LINEARISED)
        lines.append(html.Line([_title(row), *cells], ours=ours, start=row["posterior"] != before))
        before = row["posterior"]
    caption = (
        f"{title}, both engines: mean ± standard error over {len(found)} of {SEEDS} seeds of training ({SAMPLES} "
        "samples). "
        "Streamlined has the probit link, linearised the mean-field one. Calibrated: scale and temperature by "
        "`calibrate`. Scale: the median, or the temperature. All numbers are fitted on validation images. "
        f"{_network(found[0]['rows'][0]['nlpd'], at_map)}"
    )
    return html.table(["", "ACC", "NLPD", "ECE", "NLPD - temperature scaling", "scale"], lines, caption)


def headline(by_set: Mapping[str, Sequence[Record]]) -> str:
    """NLPD and ECE as a Markdown table, means over seeds, sets in columns; nothing if none was run."""
    known = {title: found for title, found in by_set.items() if found}
    if not known:
        return ""
    seeds = min(len(found) for found in known.values())
    lines = [f"| NLPD / ECE, means over {seeds} seeds | {' | '.join(known)} |", "|---|" + "--:|" * len(known)]
    for row in next(iter(known.values()))[0]["rows"]:
        cells = []
        for found in known.values():
            same = _same(found, row["name"])
            cells.append(" / ".join(f"{statistics.fmean(s[m] for s in same):.3f}" for m in ("nlpd", "ece")))
        title = f"**{_title(row)}**" if row["method"] in (STREAMLINED, LINEARISED) else _title(row)
        lines.append(f"| {title.replace('sampling', f'{SAMPLES} samples')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _network(here: float, above: float) -> str:
    if abs(here - above) < 1e-6:
        return "The first network is that of the tables above."
    return (
        f"The first network was trained again with the settings of that above, and differs a little: NLPD of MAP "
        f"{here:.4f}, above {above:.4f}. Compare rows within a table."
    )


def _same(found: Sequence[Record], name: str) -> list[dict[str, Any]]:
    return [next(row for row in record["rows"] if row["name"] == name) for record in found]


def _title(row: Mapping[str, Any]) -> str:
    if row["method"] == "sampling":
        return f"{row['posterior']} sampling, {FITTED if row['fitted'] else AS_IT_IS}"
    return ", ".join(p for p in (f"{row['posterior']} {row['method']}".strip(), row["form"]) if p)


def _text(values: Sequence[float], sign: str = "") -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return f"{statistics.fmean(values):{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def reading(title: str, found: Sequence[Record]) -> list[str]:
    """Both engines, calibrated, against temperature scaling; and the one against the other."""
    if not found:
        return []
    lines = []
    for kind in ("LA", "MFVI"):
        gaps = {}
        for method in (STREAMLINED, LINEARISED):
            rows = [
                next(
                    r for r in record["rows"] if (r["posterior"], r["method"], r["form"]) == (kind, method, CALIBRATED)
                )
                for record in found
            ]
            gaps[method] = [row["against"][0] for row in rows]
        told = ", ".join(f"{method} {_text(values, '+')}" for method, values in gaps.items())
        between = [a - b for a, b in zip(gaps[LINEARISED], gaps[STREAMLINED], strict=True)]
        lines.append(
            f"{title}, {kind}, calibrated, {len(found)} seeds: NLPD minus that of temperature scaling, {told}; "
            f"linearised minus streamlined {_text(between, '+')}."
        )
    return lines
