"""Tables of a report: on the terminal, in the documentation, and the short one of the README."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from benchmarks.case import PLAIN
from benchmarks.results import Report, Row

HEADER = ("method", "ratio", "10 to 90 %", "rounds × repeats", "memory", "limit", "met")
ERROR = "error of sd"
MET = {True: "yes", False: "NO", None: ""}


def table(title: str, rows: list[Row]) -> str:
    """For the terminal."""
    header, lines = _table(rows)
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    aligned = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in [header, *lines]
    ]
    notes = [f"  {r.method}: {r.note}" for r in rows if r.note]
    return "\n".join([f"{title} ({_plain_time(rows)})", aligned[0], "-" * len(aligned[0]), *aligned[1:], *notes, ""])


def markdown(report: Report) -> str:
    """All of a report but the growth of cost, which is plotted."""
    env, settings = report.environment, report.settings
    packages = ", ".join(f"{name} {number}" for name, number in env["packages"].items())
    parts = [
        f"Measured {env['date']} on one thread of {env['cpu']} ({env['cores']} cores, load {env['load']} at the "
        f"start), {env['system']}, Python {env['python']}, {packages}; up to {settings['rounds']} rounds, blocks of "
        f"{1000 * settings['block']:g} ms{', quick run' if settings['quick'] else ''}.",
        summary(report),
        limits(report),
    ]
    for case, group in groupby(report.rows, key=lambda r: r.case):
        if not case.startswith("growth/"):
            rows = list(group)
            parts += [f"### {report.titles[case]}", f"The {_plain_time(rows)}.", markdown_table(*_table(rows))]
            parts += ["\n".join(f"- {r.method}: {r.note}" for r in rows if r.note)]
    return "\n\n".join(filter(None, parts))


def limits(report: Report) -> str:
    """Every limit and what was measured against it, and the comparisons without one."""
    lines = []
    for row in report.rows:
        title = report.titles[row.case]
        if row.limit is not None and row.timing:
            kept = MET[row.timing.ratio <= row.limit]
            lines.append((title, row.method, "plain forward", times(row.timing.ratio), f"≤ {times(row.limit)}", kept))
        if row.error_limit is not None and row.error is not None:
            kept = MET[row.error <= row.error_limit]
            error, limit = percent(row.error), f"≤ {percent(row.error_limit)}"
            lines.append((title, row.method, "exact standard deviation", f"{error} off", limit, kept))
    for c in report.comparisons:
        wanted = "" if c.at_least is None else f"≥ {times(c.at_least)} faster"
        found = f"{times(c.times)} faster" if c.times >= 1 else f"{times(1 / c.times)} slower"
        lines.append((report.titles[c.case], c.method, c.other, found, wanted, MET[c.met]))
    if not lines:
        return ""
    header = ("model", "method", "against", "measured", "limit", "met")
    return "### Limits and comparisons\n\n" + markdown_table(header, lines, left=3)


def summary(report: Report) -> str:
    """One line: how many of the limits hold."""
    limited = [r for r in report.rows if r.limit is not None or r.error_limit is not None]
    promised = [c for c in report.comparisons if c.at_least is not None]
    if not limited and not promised:
        return "No row of this run has a limit."
    failed = [f"{r.case}/{r.method}" for r in limited if r.met is False]
    failed += [f"{c.case}/{c.method} against {c.other}" for c in promised if c.met is False]
    missing = [f"{r.case}/{r.method}" for r in limited if r.met is None]
    total = len(limited) + len(promised)
    text = f"Limits met: {total - len(failed) - len(missing)} of {total}."
    if failed:
        text += f" Not met: {', '.join(failed)}."
    return text + (f" Not measured: {', '.join(missing)}." if missing else "")


def headline(report: Report) -> str:
    """The short tables of the README."""
    parts = _mlp(report), _large(report)
    return "\n\n".join(filter(None, parts))


def _mlp(report: Report) -> str:
    """One row per method, one column per case."""
    wanted = [case for case in report.titles if case.startswith(("mlp/diagonal/", "mlp/kronecker"))]
    methods = dict.fromkeys(r.method for r in report.rows if r.case in wanted and r.ratio is not None)
    header = ["", *(case.removeprefix("mlp/").replace("/", ", batch ") for case in wanted)]
    found = [[report.find(case, method) for case in wanted] for method in methods]
    lines = [
        [method, *("" if r is None or r.ratio is None else times(r.ratio) for r in rows)]
        for method, rows in zip(methods, found, strict=True)
    ]
    return markdown_table(header, lines) if lines else ""


def _large(report: Report) -> str:
    """One row per part of a large model that is Bayesian."""
    models = {
        "resnet/": "ResNet-18, 32 px",
        "transformers/vit": "ViT-base",
        "transformers/gpt": "GPT-2",
        "language/minilm": "MiniLM",
        "language/smollm2": "SmolLM2-135M",
    }
    lines = []
    for case, model in models.items():
        rows = [r for r in report.rows if r.case.startswith(case) and r.method != PLAIN and r.timing]
        lines += [(f"{model}: {r.method}", times(r.timing.ratio), _memory(r)) for r in rows if r.timing]
    return markdown_table(("large models: what is Bayesian", "time", "memory"), lines) if lines else ""


ENGINES = {
    "`streamline`": ("streamlined", 'streamlined, covariance="diagonal"'),
    "`linearise`": ('linearised, covariance="full"', "linearised"),
    "its memory": (),
    "Jacobians (`baselines.GLM`)": ("our GLM baseline",),
    "laplace-torch GLM": ("laplace-torch GLM",),
    "100 samples": ("our 100 samples",),
}


def engines(report: Report) -> str:
    """The two engines and their rivals beside each other: one line per model and what is random in it."""
    lines = []
    for case, title in report.titles.items():
        for part in dict.fromkeys(r.method.rpartition(": ")[0] for r in report.rows if r.case == case):
            rows = [_one_of(report, case, part, methods) for methods in ENGINES.values()]
            if rows[1] is None:
                continue
            rows[0] = rows[0] or report.find(case, part)
            cells = ["" if r is None or r.ratio is None else times(r.ratio) for r in rows]
            cells[2] = _memory(rows[1])
            lines.append([title.removesuffix("; Bayesian:") + (f": {part}" if part else ""), *cells])
    return markdown_table(["", *ENGINES], lines) if lines else ""


def _one_of(report: Report, case: str, part: str, methods: Iterable[str]) -> Row | None:
    names = [f"{part}: {method}" if part else method for method in methods]
    return next((row for name in names if (row := report.find(case, name))), None)


# -- cells


def _table(rows: list[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and lines; with a column for errors if there are any."""
    lines = [_cells(r) for r in rows]
    if all(r.error is None for r in rows):
        return HEADER, lines
    errors = ["" if r.error is None else percent(r.error) for r in rows]
    header = (*HEADER[:-2], ERROR, *HEADER[-2:])
    return header, [(*line[:-2], error, *line[-2:]) for line, error in zip(lines, errors, strict=True)]


def _cells(row: Row) -> tuple[str, ...]:
    t = row.timing
    return (
        row.method,
        "" if row.ratio is None else times(row.ratio),
        "" if t is None else f"{number(t.low)} to {number(t.high)}",
        "computed" if row.computed is not None else "" if t is None else f"{t.rounds} × {t.repeats}",
        _memory(row),
        "" if row.limit is None else times(row.limit),
        MET[row.met],
    )


def _memory(row: Row) -> str:
    if row.extra_bytes is not None:
        return f"{'+' if row.extra_bytes >= 0 else '-'}{size(abs(row.extra_bytes))}"
    return "" if row.peak_bytes is None else size(row.peak_bytes)


def markdown_table(header: Iterable[str], lines: Iterable[Iterable[str]], left: int = 1) -> str:
    """The first `left` columns aligned to the left, the others to the right."""
    names = list(header)
    rule = f"|{'---|' * left}{'--:|' * (len(names) - left)}"
    return "\n".join([markdown_row(names), rule, *map(markdown_row, lines)])


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain_time(rows: list[Row]) -> str:
    timing = next((r.timing for r in rows if r.method == PLAIN), None)
    return f"{PLAIN} takes {duration(timing.seconds)}" if timing else f"{PLAIN} not timed"


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:,.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def times(ratio: float) -> str:
    return f"{number(ratio)}x"


def number(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 99.5 else f"{ratio:.1f}" if ratio >= 9.95 else f"{ratio:.2f}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"


def size(count: float) -> str:
    if count < 2**20:
        return f"{count / 2**10:,.1f} KiB"
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"
