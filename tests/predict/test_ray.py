"""The engine ray gives what the local one gives, also when a worker dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from predict.disk import full_disk
from propagauss.errors import InputError
from propagauss.predict import predict, ray_engine
from propagauss.predict.options import Options
from propagauss.predict.plan import divide
from propagauss.predict.run import _prepare

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
FEW = {"part_rows": 100, "batch": 40, "threads": 1, "progress": False}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster that is there already, and Ray's own processes as important as the tests beside this one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")


# every Python process that finds it on its path imports it first
DIE_ONCE = """
import os
replace = os.replace

def die_once(source, target, **options):
    if str(target).endswith(".arrow"):
        try:
            os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os._exit(1)
    replace(source, target, **options)

os.replace = die_once
"""


@pytest.mark.slow
def test_worker_that_dies(exported: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two, the first time that it has a part to put in its place; some parts are there from a local run."""
    pq.write_table(table, tmp_path / "data.parquet")
    model, data, out = exported["classifier"].onnx, tmp_path / "data.parquet", tmp_path / "out.parquet"
    predict(model, data, tmp_path / "expected.parquet", id="key", **FEW)
    with full_disk(4), pytest.raises(OSError, match="3 of 10 parts"):
        predict(model, data, out, id="key", **FEW)
    (tmp_path / "path").mkdir()
    marker = tmp_path / "died"
    (tmp_path / "path" / "sitecustomize.py").write_text(DIE_ONCE.format(marker=str(marker)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "path"), *filter(None, sys.path)]))
    summary = predict(model, data, out, id="key", engine="ray", workers=2, **FEW)
    assert marker.exists() and (summary.rows, summary.resumed) == (1000, 300)
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "expected.parquet"))
    assert not (tmp_path / ".out.parquet.parts").exists()

    import ray

    assert not ray.is_initialized()


@pytest.mark.slow
def test_cluster_of_its_own(exported: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started by another process, and found by its address on the command line."""
    pq.write_table(table, tmp_path / "data.parquet")
    model, data = exported["classifier"].onnx, tmp_path / "data.parquet"
    predict(model, data, tmp_path / "expected.parquet", id="key", **FEW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with cluster(tmp_path) as address:
        arguments = ["predict", str(model), str(data), "--id", "key", "--part-rows", "100", "--batch", "40"]
        options = ["--engine", "ray", "--workers", "1", "--address", address, "--out", str(tmp_path / "out.parquet")]
        script = f"import sys\nfrom propagauss import cli\nsys.exit(cli.main({arguments + options!r}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "expected.parquet"))


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The address of a head node with a process group of its own, ended with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    options = ["--num-cpus=1", "--include-dashboard=false", f"--object-store-memory={1 << 27}"]
    with (folder / "ray.log").open("w") as log:
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", *options],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        for _ in range(240):
            if head.poll() is not None or "Ray runtime started" in (folder / "ray.log").read_text():
                break
            time.sleep(0.5)
        assert head.poll() is None, (folder / "ray.log").read_text()
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # asked to end, it may take half a minute
        head.wait()


@pytest.fixture
def actor(exported: Any, table: Any, tmp_path: Path) -> ray_engine.Actor:
    """What runs in a worker, here."""
    values = table.to_pandas()
    values.loc[250, "a"] = np.nan
    values.to_parquet(tmp_path / "data.parquet")
    options = Options(exported["classifier"].onnx, tmp_path / "data.parquet", tmp_path / "out.parquet", part_rows=100)
    worker, _ = _prepare(options)
    worker.task.folder.mkdir()
    return ray_engine.Actor(worker.task, 1)


def batch(actor: ray_engine.Actor, *indices: int) -> dict[str, Any]:
    parts = divide(actor.worker.task.paths, 100)
    return {"parts": [json.dumps([parts[i].to_json() for i in indices])]}


def test_actor(actor: ray_engine.Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    store = actor.worker.store
    assert actor(batch(actor, 0, 1)) == {"rows": [200], "error": [""]}
    assert {i: rows for i, (_, rows) in store.finished().items()} == {0: 100, 1: 100}
    (first, _), (second, _) = store.finished()[0], store.finished()[1]
    written = second.stat().st_mtime_ns
    first.unlink()
    assert actor(batch(actor, 0, 1)) == {"rows": [200], "error": [""]}
    assert store.finished()[0][1] == 100 and second.stat().st_mtime_ns == written  # what is finished is left
    (found,) = actor(batch(actor, 2))["error"]
    error = ray_engine._error(json.loads(found))
    assert isinstance(error, InputError) and "row 250, column 'a' is nan" in str(error)

    def replace(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    (found,) = actor(batch(actor, 3))["error"]
    error = ray_engine._error(json.loads(found))
    assert isinstance(error, OSError) and error.errno == 28


def test_work_that_kills_every_worker_is_given_up(actor: ray_engine.Actor) -> None:
    for _ in range(ray_engine.TRIES):
        actor.worker.store.tried(4)
    (found,) = actor(batch(actor, 4, 5))["error"]
    assert "5 workers died at rows 400 to 599: finished parts are kept" in json.loads(found)[1]


class Cluster:
    """What the engine asks of Ray to get a cluster."""

    def __init__(self, running: bool = False, reachable: bool = True):
        self.running, self.reachable, self.calls = running, reachable, []
        self.data = SimpleNamespace(DataContext=SimpleNamespace(get_current=lambda: self))
        self.enable_progress_bars = True

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: Any) -> None:
        self.calls.append(options)
        if not self.reachable:
            raise ConnectionError

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(address: str | None, **state: bool) -> list[Any]:
        cluster = Cluster(**state)
        with ray_engine._cluster(cluster, 2, 3, address):
            assert not cluster.enable_progress_bars
        assert cluster.enable_progress_bars
        return cluster.calls

    own, end = calls(None)
    assert (own["address"], own["num_cpus"], own["include_dashboard"], end) == ("local", 6, False, "shutdown")
    assert calls(None, running=True) == []  # one that the caller has, and keeps
    there, _ = calls("head:6379")
    assert there["address"] == "head:6379" and "num_cpus" not in there
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert calls(None)[0]["address"] == "other:6379"
    with pytest.raises(InputError, match="no connection to a Ray cluster at head:6379"):
        calls("head:6379", reachable=False)


def test_without_ray(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 4)))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install propagauss\[ray\]"):
        predict(exported["classifier"].onnx, tmp_path / "x.npy", tmp_path / "out.csv", engine="ray", progress=False)
