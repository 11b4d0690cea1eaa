"""A headless Chromium spoken to over a pipe: keys, mouse, screenshots, downloads; stdlib only."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
]  # fmt: skip
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}


class Page:
    """One tab. `requests` are the addresses it asked for, `errors` what its scripts threw."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._buffer, self._count = to, back, b"", 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._session = None
        made = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer, filing events that come before it."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._back, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(text)
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["params"]["request"]["url"])
        if found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(found["params"]["exceptionDetails"]))
        return found

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 20) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key where the focus is."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=KEYS[key])  # fmt: skip

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches, with the mouse."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{place}.scrollIntoView({{block: 'center', inline: 'center'}})")
        box = f"{place}.getBoundingClientRect()"
        x, y = self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """The window in px, as a phone's below 600, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """The window as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def downloads_to(self, folder: Path) -> None:
        """Where saved files go."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))


@contextmanager
def browser_page() -> Iterator[Page]:
    """A fresh browser with one tab; it ends with the block."""
    assert PROGRAM is not None
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()

    def wire() -> None:  # Chromium reads commands from 3 and writes to 4
        low, high = os.dup(to_read), os.dup(back_write)
        os.dup2(low, 3)
        os.dup2(high, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [PROGRAM, *QUIET, f"--user-data-dir={profile}"],
            preexec_fn=wire, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(back_write)
        try:
            yield Page(to_write, back_read)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(to_write)
            os.close(back_read)
