"""The survey of model families runs by hand; this holds its parts together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from families import hand, report, runner
from families.family import Family
from families.measure import measure


def _measured(family: Family) -> dict[str, Any]:
    record: dict[str, Any] = {"name": family.name}
    measure(family, record.__setitem__)
    return record


def test_names_are_unique() -> None:
    names = [f.name for f in hand.families()]
    assert len(set(names)) == len(names)


def test_a_family_that_works() -> None:
    family = next(f for f in hand.families() if f.name == "science/SIREN")
    record = _measured(family)
    assert record["export"] == "ok"
    assert record["last"]["status"] == record["all"]["status"] == "ok"
    assert record["last"]["random"] < record["all"]["random"]
    ratio = report.ratio(record, "last")
    assert ratio is not None and 0.5 < ratio < 2


def test_the_later_record_counts(tmp_path: Path) -> None:
    works = {"status": "ok"}
    lines = [
        {"name": "a/b", "build": "ok", "export": "ok", "last": works, "all": {"status": "refused", "error": "E: no 3"}},
        {"name": "a/b", "build": "ok", "export": "ok", "last": works, "all": works},
        {"name": "a/c", "build": "ok", "export": "no", "last": {"status": "refused"}, "all": {"status": "refused"}},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = runner.read(path)
    assert "| all | 2 | 2 | 1 | 1 (100%) | 1 (100%) |" in report.counts(records.values())
    assert "a/c" in report.summary(records)
