"""A real browser for tests: headless Chromium, driven by the DevTools protocol over two pipes.

`--remote-debugging-pipe` needs neither a WebSocket nor a driver program: messages are JSON with a
NUL byte after each, read on file descriptor 3 and written on 4 by the browser.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # its sandbox refuses root, and containers refuse its sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--autoplay-policy=no-user-gesture-required",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. `errors` holds console errors, uncaught exceptions and failed requests, in order;
    `requested` the address of everything that was loaded."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._read_fd, self._write_fd = read_fd, write_fd
        self._buffer = b""
        self._calls = 0
        self._loaded = False
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str | Path) -> None:
        """Load a page or a local file and wait for its load event."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self._loaded = False
        answer = self._call("Page.navigate", url=url)
        assert not answer.get("errorText"), f"{url}: {answer['errorText']}"
        deadline_s = time.monotonic() + WAIT_S
        while not self._loaded:
            self._note(self._receive(deadline_s))

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window's inside in pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self) -> None:
        """Ask the browser to end."""
        self._session = ""
        self._call("Browser.close")

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + WAIT_S
        while True:
            answer = self._receive(deadline_s)
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what tests look at of an event of the page."""
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Network.loadingFailed" and not params.get("canceled"):
            self.errors.append(f"request failed: {params['errorText']}")
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(argument.get("value")) for argument in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            wait_s = max(0.0, deadline_s - time.monotonic())
            ready, _, _ = select.select([self._read_fd], [], [], wait_s)
            assert ready, f"the browser said nothing for {WAIT_S:g} s"
            data = os.read(self._read_fd, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose user data is below `folder`; its whole process group ends with it."""
    program = shutil.which("chromium")
    assert program, "chromium is missing: apt-get install chromium"
    command = (program, *FLAGS, f"--user-data-dir={folder / 'chromium'}", "about:blank")
    child_read, write_fd = os.pipe()
    read_fd, child_write = os.pipe()
    # bash moves the pipes to 3 and 4. pipe() gives ascending numbers, so child_write is not 3.
    moved = f'exec "$@" 3<&{child_read} 4>&{child_write}'
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", moved, "browser", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(child_read, child_write),
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
    os.close(child_read)
    os.close(child_write)
    try:
        browser = Browser(read_fd, write_fd)
        yield browser
        browser.close()
        process.wait(WAIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)
        os.close(read_fd)
        os.close(write_fd)
