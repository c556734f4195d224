"""A headless Chromium, driven through its pipe, so that no port is opened and no package is needed."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page in a window of 1400 x 1000. `with Page(file) as page` closes the browser at the end.

    Attributes:
        requests: What the page has asked for.
        errors: Exceptions of its scripts, and what it wrote to the console.
    """

    def __init__(self, file: Path, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs, self._to = os.pipe()
        self._from, other = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{other}', "bash", CHROMIUM, "--headless=new", "--no-sandbox",
             "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            pass_fds=(theirs, other), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(other)
        self._number, self._read, self._session = 0, b"", None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1400, height=1000, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=f"file://{file.resolve()}")
        self.wait("Page.loadEventFired")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def wait(self, event: str) -> None:
        while self._next().get("method") != event:
            pass

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        held = 0 if kind == "mouseReleased" else 1
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=held, clickCount=clicks)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        parameters = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled"):
            self.errors.append(json.dumps(parameters))
        return message
