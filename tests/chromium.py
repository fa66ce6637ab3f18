"""Headless Chromium over its debugging pipe: open a page, run scripts in it, move the mouse.

The protocol is JSON messages that end with a zero byte, on file descriptors 3 and 4 of the
browser, so only the browser is needed. Console messages and uncaught errors are collected.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

TIMEOUT_SECONDS = 120.0
"""Limit of one answer; generous, as machines that run tests are busy."""


def find_chromium() -> str | None:
    """Return the path of a Chromium; None without one."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that puts the ends of two pipes where the browser expects them, and becomes it."""


class ChromiumError(Exception):
    """The browser ended, did not answer, or a script failed."""


class Chromium:
    """One browser with one page, as a context manager."""

    def __init__(
        self, executable: str, *, width: int = 1200, height: int = 900, dark: bool = False
    ):
        self._executable, self._size, self._dark = executable, (width, height), dark
        self._ids, self._buffer = 0, b""
        self._session: str | None = None
        self.messages: list[str] = []
        """Console messages of the page and its uncaught errors."""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-SEc",
                LAUNCHER,
                str(commands),
                str(answers),
                self._executable,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _attach(self) -> None:
        """Attach to the page that the browser opens first."""
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(*self._size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window, in CSS pixels; a narrow window emulates a phone."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def open(self, path: Path, ready: str = "document.readyState === 'complete'") -> None:
        """Open a file and wait until a condition in the page holds."""
        self.messages.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(f"location.href !== 'about:blank' && {ready}")

    def wait_for(self, condition: str) -> None:
        """Wait until a condition in the page holds."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        # While a page loads, parts of its document are missing, which is not an error.
        attempt = (
            f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"
        )
        while not self.evaluate(attempt):
            if time.monotonic() > deadline:
                raise ChromiumError(f"never: {condition}; messages: {self.messages}")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise ChromiumError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def center(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return its center in the window."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = self.center(selector)
        self.mouse("mouseMoved", x, y)

    def click(self, selector: str) -> None:
        """Click an element."""
        x, y = self.center(selector)
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """Send a mouse event at a position in the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def press(self, key: str) -> None:
        """Press and release a key, such as `Tab`, `ArrowDown` or `Enter`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38}
        codes |= {"ArrowRight": 39, "ArrowDown": 40}
        options: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        if key == "Enter":
            options["text"] = "\r"
        self.send("Input.dispatchKeyEvent", type="keyDown", **options)
        self.send("Input.dispatchKeyEvent", type="keyUp", **options)

    def screenshot(self, path: Path, *, full_page: bool = False) -> None:
        """Write a picture of the window, or of the whole page, as PNG."""
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=full_page)
        path.write_bytes(base64.b64decode(picture["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self._ids += 1
        message: dict[str, Any] = {"id": self._ids, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._ids:
                if "error" in answer:
                    raise ChromiumError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                values = [str(each.get("value")) for each in parameters["args"]]
                self.messages.append(f"console.{parameters['type']}: {' '.join(values)}")
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.messages.append(f"uncaught: {details.get('exception', details)}")
            case "Log.entryAdded":
                self.messages.append(f"log: {parameters['entry']['text']}")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise ChromiumError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ChromiumError("the browser has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
