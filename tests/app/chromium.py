"""A headless Chromium, driven over its debugging pipe: the protocol is JSON messages that end in a zero byte."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One page in one browser; ``with Chromium(folder) as page``."""

    def __init__(self, folder: Path) -> None:
        pipes = *os.pipe(), *os.pipe()
        # High numbers, so that none of them is 3 or 4, where the browser reads commands and answers.
        to_browser, from_us, from_browser, to_us = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in pipes)
        for each in pipes:
            os.close(each)
        self._out, self._in = os.fdopen(from_us, "wb", buffering=0), os.fdopen(from_browser, "rb", buffering=0)
        start = f"import os, sys; os.dup2({to_browser}, 3); os.dup2({to_us}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
             "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_browser, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(to_us)
        self._next, self._left = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None

    def __enter__(self) -> "Chromium":
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        self._out.close()
        self._in.close()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._in.read(1 << 16)
            assert more, "the browser has gone"
            self._left += more
        message, self._left = self._left.split(b"\0", 1)
        return json.loads(message)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are kept."""
        self._next += 1
        command: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        self._out.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._next:
                assert "error" not in message, message["error"]
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Show a file in a window of this size, CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            message = self._receive()
            if "method" in message:
                self.events.append(message)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
