"""The counts of the survey, and why families fail, grouped by reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
WHICH = {"last": "last block random", "all": "everything random"}


def summary(records: dict[str, Record], examples: int = 6) -> str:
    """Counts by group, reasons by family, then what deserves a look although it works."""
    parts = [counts(records.values())]
    for which, title in WHICH.items():
        parts.append(f"Failures, {title}\n\n{_reasons(_exportable(records.values()), which, examples)}")
    parts.append(f"Standard deviation off by more than 3\n\n{_off(records.values())}")
    parts.append(f"Not traced by torch.export itself\n\n{_not_exported(records.values())}")
    return "\n\n".join(parts)


def _built(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.get("build") == "ok"]


def _exportable(records: Iterable[Record]) -> list[Record]:
    """Built, and traced by torch.export; what ran out of time before that was known counts as exportable."""
    return [r for r in _built(records) if r.get("export", "ok") in ("ok", "out of time")]


def status(record: Record, which: str) -> str:
    return record.get(which, {}).get("status", "not reached")


def counts(records: Iterable[Record]) -> str:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["name"].split("/")[0]].append(record)
    groups["all"] = [r for members in list(groups.values()) for r in members]
    rows = [("group", "tried", "built", "exportable", *WHICH.values()), ("---",) * 6]
    for group, members in groups.items():
        exportable = _exportable(members)
        works = [sum(status(r, which) == "ok" for r in exportable) for which in WHICH]
        shares = [f"{n} ({n / max(len(exportable), 1):.0%})" for n in works]
        rows.append((group, str(len(members)), str(len(_built(members))), str(len(exportable)), *shares))
    return _table(rows)


def _reasons(records: Iterable[Record], which: str, examples: int) -> str:
    """One row per reason; a family that lacks rules for several ops is in several rows."""
    found: dict[str, list[str]] = defaultdict(list)
    alone: Counter[str] = Counter()
    for record in records:
        if status(record, which) == "ok":
            continue
        reasons = reasons_of(record.get(which, {"status": "not reached"}))
        for reason in reasons:
            found[reason].append(record["name"])
            alone[reason] += len(reasons) == 1
    rows = [("families", "alone", "reason", "for example"), ("---",) * 4]
    for reason, names in sorted(found.items(), key=lambda item: -len(item[1])):
        rows.append((str(len(names)), str(alone[reason]), reason, ", ".join(names[:examples])))
    return _table(rows)


def reasons_of(result: dict[str, Any]) -> list[str]:
    """Ops without a rule, or the status with the error reduced to what repeats."""
    if result.get("ops"):
        return sorted({f"{op} {why}" for op, _, why in result["ops"]})
    error = result.get("error", "")
    first = error.strip().splitlines()[0] if error.strip() else ""
    where = result.get("where", "")
    at = f" [{where.split(' < ')[-1]}]" if where else ""
    return [f"{result['status']}: {_plain(first)}{at}"]


def _plain(text: str) -> str:
    text = re.sub(r"'[^']*\.[^']*'", "'...'", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)[:140].replace("|", "/")


def _off(records: Iterable[Record]) -> str:
    rows = [("family", *WHICH.values()), ("---",) * 3]
    for record in records:
        ratios = {which: ratio(record, which) for which in WHICH}
        if any(r is not None and not 1 / 3 < r < 3 for r in ratios.values()):
            rows.append((record["name"], *("–" if r is None else f"{r:.2f}" for r in ratios.values())))
    return _table(rows)


def ratio(record: Record, which: str) -> float | None:
    """Streamlined over true first-order standard deviation."""
    sd, truth = record.get(which, {}).get("sd"), record.get(f"truth_{which}")
    return sd / truth if isinstance(sd, float) and isinstance(truth, float) and truth > 0 else None


def _not_exported(records: Iterable[Record]) -> str:
    rows = [("family", "torch.export says"), ("---",) * 2]
    for record in _built(records):
        error = record.get("export", "ok")
        if error not in ("ok", "out of time"):
            rows.append((record["name"], _plain(error.strip().splitlines()[0])))
    return _table(rows)


def _table(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
