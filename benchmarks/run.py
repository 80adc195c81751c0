"""Runs one case: builds its methods, checks that those which should agree do, times them, and measures their memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.case import PLAIN, Case, Method, SkipMethod, moments
from benchmarks.harness import Settings, Subject, measure
from benchmarks.memory import peak_bytes
from benchmarks.results import Row

AGREE = 1e-4  # largest difference between methods that compute the same numbers, relative to the largest variance
PATIENCE = 10.0  # seconds per call beyond which peak memory is not measured; a tenth of that with --quick


def run(case: Case, methods: Iterable[Method], settings: Settings, quick: bool) -> list[Row]:
    """One row for each method, in the order given, after one for the plain model."""
    try:
        x = case.inputs()
        subjects = {PLAIN: Subject(case.plain(), x)}
    except Exception as error:  # a case that cannot run must not cost us the others
        return [Row(case.name, PLAIN, note=_reason(error))]
    notes: dict[str, str] = {}
    computed: dict[str, float] = {}
    methods = list(methods)
    for method in methods:
        try:
            if method.heavy and quick:
                raise SkipMethod("too slow for --quick")
            if method.computed is not None:
                computed[method.name] = method.computed()
            else:
                subjects[method.name] = _built(method, x)
        except Exception as error:  # a peer that breaks must not cost us the other rows
            notes[method.name] = _reason(error)
    notes |= _disagreements([m.name for m in methods if m.same and m.name in subjects], subjects)
    errors = {m.name: m.error(subjects[m.name].predict) for m in methods if m.error and m.name in subjects}
    timings = measure(subjects, PLAIN, replace(settings, budget=settings.budget * case.patience), case.name)
    patience = PATIENCE / 10 if quick else PATIENCE
    peaks = {}
    if _is_torch(subjects[PLAIN]):  # others are compared with it
        peaks = {n: peak_bytes(s) for n, s in subjects.items() if timings[n].seconds < patience}
    return [
        Row(
            case=case.name,
            method=m.name,
            timing=timings.get(m.name),
            computed=computed.get(m.name),
            limit=m.limit,
            error=errors.get(m.name),
            error_limit=m.error_limit,
            peak_bytes=peaks.get(m.name),
            extra_bytes=None if m.name == PLAIN or not {m.name, PLAIN} <= set(peaks) else peaks[m.name] - peaks[PLAIN],
            note="; ".join(filter(None, (m.note, notes.get(m.name), _own_note(subjects.get(m.name))))),
        )
        for m in [Method(PLAIN), *methods]
    ]


def _reason(error: Exception) -> str:
    if isinstance(error, SkipMethod):
        return str(error)
    return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _is_torch(subject: Subject) -> bool:
    """Whether PyTorch's allocator knows of the memory it uses."""
    return not getattr(subject.predict, "outside_torch", False)


def _own_note(subject: Subject | None) -> str:
    """What a method found out while it was made, such as how long an export took."""
    return getattr(subject.predict, "note", "") if subject else ""


def _built(method: Method, x: Any) -> Subject:
    """The method, after a first call, so that one that cannot run is known before anything is timed."""
    assert method.make is not None
    with torch.set_grad_enabled(method.needs_grad):
        subject = Subject(method.make(), x, method.needs_grad)
        subject.once()
    return subject


def _disagreements(names: list[str], subjects: dict[str, Subject]) -> dict[str, str]:
    """A note for every method whose mean or variance differs from that of the first one named."""
    if len(names) < 2:
        return {}
    mean, variance = moments(subjects[names[0]].once())
    found = {}
    for name in names[1:]:
        other_mean, other_variance = moments(subjects[name].once())
        off = max(
            ((other_mean - mean).abs().max() / mean.abs().max()).item(),
            ((other_variance - variance).abs().max() / variance.abs().max()).item(),
        )
        if not off <= AGREE:
            found[name] = f"differs from {names[0]} by {off:.1e}"
    return found
