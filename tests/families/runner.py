"""Each family in a process of its own, with limits on time and memory; the records as JSON lines."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.family import Family
from families.measure import measure

Record = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """For one family. The time is that of the processor, since the machine may be busy; five times that is the end."""

    seconds: float = 60.0
    gigabytes: float = 6.0
    quick: bool = False


def read(path: Path) -> dict[str, Record]:
    """Records by name; a later line replaces an earlier one."""
    if not path.exists():
        return {}
    return {r["name"]: r for r in map(json.loads, path.read_text().splitlines())}


def run(families: Iterable[Family], path: Path, limits: Limits) -> None:
    """Survey them one after another, and append a line for each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # a collection in a child would copy all that it shares with this process
    for family in families:
        record = survey(family, limits)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{record['seconds']:6.1f} s  {family.name}: {verdict(record)}", flush=True)


def survey(family: Family, limits: Limits) -> Record:
    """Fork, measure there, and take over what it says until it ends or the time is up."""
    start = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _measure_and_leave(family, writer, limits)
    os.close(writer)
    record: Record = {"name": family.name}
    in_time = _collect(reader, record, start + 5 * limits.seconds)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    in_time = in_time and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    stage = record.pop("stage", "build")
    if stage != "done":
        why = "out of time" if not in_time else f"the process ended with status {status}"
        record["ended"] = f"{why} at stage {stage}"
        if stage in ("last", "all"):
            record[stage] = {"status": "out of time" if not in_time else "crash (process)"}
        record.setdefault(stage, why)
    record["seconds"] = round(time.monotonic() - start, 1)
    return record


def _collect(reader: int, record: Record, deadline: float) -> bool:
    """Read fields until the end of the file; False if the deadline comes first."""
    text = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            os.close(reader)
            return False
        data = os.read(reader, 65536)
        if not data:
            os.close(reader)
            return True
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            name, value = json.loads(line)
            record[name] = value


def _measure_and_leave(family: Family, writer: int, limits: Limits) -> None:
    memory = int(limits.gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limits.seconds), int(limits.seconds) + 5))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)

    def say(name: str, value: Any) -> None:
        os.write(writer, (json.dumps([name, value]) + "\n").encode())

    try:
        measure(family, say, limits.quick)
    except BaseException:  # of the survey itself: nothing of it may reach the parent's code
        say("error", traceback.format_exc()[-1500:])
    finally:
        os._exit(0)


def verdict(record: Record) -> str:
    if record.get("build") != "ok":
        return f"not built: {record.get('build', '')[:160]}"
    parts = ["exported" if record.get("export", "ok") == "ok" else "NOT exported"]
    parts += [f"{which}: {record[which]['status']}" for which in ("last", "all") if which in record]
    return ", ".join(parts)
