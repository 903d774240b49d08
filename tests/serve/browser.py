"""Headless Chromium, driven over its DevTools pipe: one JSON message after another, each ended by a
zero byte (https://chromedevtools.github.io/devtools-protocol).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from base64 import b64decode
from types import TracebackType
from typing import Any

from tests.serve.running import wait_for

NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMAND = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # which root has not
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--window-size=1100,700",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser."""

    def __init__(self) -> None:
        assert COMMAND is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, mine = os.pipe(), os.pipe()
        # Chromium reads at descriptor 3 and writes to 4, so none of ours has these numbers.
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs[0], mine[1])]
        script = f'exec "$@" 3<&{kept[0]} 4>&{kept[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", COMMAND, *OPTIONS, f"--user-data-dir={self._profile.name}"],
            pass_fds=kept,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": self._profile.name},
        )
        for fd in (*kept, theirs[0], mine[1]):
            os.close(fd)
        self._to = os.fdopen(theirs[1], "wb")
        self._from = os.fdopen(mine[0], "rb")
        self._count = 0
        self._session: str | None = None

    def __enter__(self) -> Browser:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # its renderers write files too
        self._process.wait()
        self._to.close()
        while self._from.read(1 << 16):  # until all of them have ended
            pass
        self._from.close()
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Sizes in pixels, of the page."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._call("Emulation.setDeviceMetricsOverride", **sizes)

    def value(self, expression: str) -> Any:
        """What a script gives in the page."""
        found = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a script gives true in the page."""
        wait_for(lambda: self.value(condition), f"the page is never so: {condition}")

    def picture(self) -> bytes:
        """PNG."""
        return b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._next()).get("id") != self._count:
            pass  # events that were not asked for
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        parts = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts += byte
        message: dict[str, Any] = json.loads(parts)
        return message
