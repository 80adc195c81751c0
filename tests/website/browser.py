"""Headless Chromium, driven over its DevTools protocol by a pair of pipes; no other package is needed."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60.0  # seconds
# No name is looked up, so that a page that needs another server fails. (0.0.0.0 would be this machine.)
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
# Nor does the browser do anything by itself, such as looking for updates.
IDLE = ("background-networking", "component-update", "default-apps", "extensions", "sync")


class Browser:
    """One tab. Messages are JSON, each ended by a zero byte: to fd 3 of the browser, from its fd 4."""

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # high numbers first: 3 and 4 may be taken by these very pipes
        inputs, outputs = (_high(end) for end in (theirs_in, theirs_out))
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", OFFLINE]
        command += ["--no-first-run", *(f"--disable-{service}" for service in IDLE)]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars=false"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", f'exec "$@" 3<&{inputs} 4>&{outputs} {inputs}<&- {outputs}>&-', "chromium", *command],
            pass_fds=(inputs, outputs),
            stderr=subprocess.DEVNULL,
        )
        for end in (inputs, outputs):
            os.close(end)
        self._buffer, self._count, self.events = b"", 0, []
        self._session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Send a command and wait for its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            found = os.read(self._from, 2**20) if ready else b""
            if not found:
                self._process.kill()  # so that whatever is asked next fails at once
                self._process.wait()
                raise AssertionError(f"Chromium gave no answer in {PATIENCE:.0f} seconds")
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, address: str, width: int = 1280, height: int = 900) -> None:
        """Go to a page and wait until it is loaded; `events` are then those of this page."""
        self.resize(width, height)
        self.events.clear()
        self("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    @contextmanager
    def without_workers(self) -> Iterator[None]:
        """Pages that are opened within it start no work beside their own."""
        nothing = "window.Worker = class extends EventTarget { postMessage() {} terminate() {} }"
        script = self("Page.addScriptToEvaluateOnNewDocument", source=nothing)["identifier"]
        yield
        self("Page.removeScriptToEvaluateOnNewDocument", identifier=script)

    def resize(self, width: int, height: int = 900) -> None:
        """As a window of this size; as a phone with a touch screen if it is narrow."""
        phone = width < 600
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self("Emulation.setTouchEmulationEnabled", enabled=phone)

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        given = {"expression": code, "awaitPromise": True, "returnByValue": True}
        found = self("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, code: str) -> Any:
        """The value of an expression, as soon as it is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = self.run(code)
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true: {code}")

    def draw(self, points: Sequence[tuple[float, float]], touch: bool = False) -> None:
        """Press the mouse, or a finger, at the first point, move it over the others, and let go."""
        if touch:
            kinds = ["touchStart", *["touchMove"] * (len(points) - 1)]
            for kind, (x, y) in zip(kinds, points, strict=True):
                self("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
            self("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            return
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def picture(self, path: Path) -> None:
        """A screenshot, for whoever wants to look."""
        found = self("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def problems(self) -> list[str]:
        """What went wrong since the page was opened: exceptions, and files that were not there."""
        found = []
        for event in self.events:
            given = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"].get("exception", {}).get("description")))
            entry = given.get("entry", {})
            # browsers ask for the icon of a page by themselves
            if entry.get("level") == "error" and not entry.get("url", "").endswith("/favicon.ico"):
                found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def close(self) -> None:
        self._session = None
        if self._process.poll() is None:
            self("Browser.close")
        self._process.wait(PATIENCE)
        for end in (self._to, self._from):
            os.close(end)


def _high(end: int) -> int:
    """The same end of a pipe, with a number of two digits that is inherited."""
    import fcntl

    moved = fcntl.fcntl(end, fcntl.F_DUPFD, 10)
    os.close(end)
    return moved


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which the files of a folder are served."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass
