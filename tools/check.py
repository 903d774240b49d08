"""`make check`: every gate, a line each with its seconds; stops at the first that fails."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

GATES: dict[str, list[str]] = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "uses of Any": ["tools.count_any"],
    "floors, public API, docs": [
        "pytest",
        "-q",
        "tests/test_floors.py",
        "tests/test_public_api.py",
        "tests/test_docs.py",
    ],
    "tests and examples": [
        "pytest",
        "-q",
        "-n",
        "auto",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "-m",
        "not slow",
        "--deselect=tests/test_floors.py",
        "--deselect=tests/test_public_api.py",
        "--deselect=tests/test_docs.py",
    ],
}


def main() -> int:
    root = Path(__file__).parents[1]
    for name, command in GATES.items():
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=root, capture_output=True, text=True
        )
        verdict = "FAILED" if done.returncode else "ok"
        print(f"{verdict:6} {name}: {time.perf_counter() - start:.1f} s", flush=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n")
            return 1
        if command[0] in ("pytest", "tools.count_any"):
            print("      ", done.stdout.strip().splitlines()[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
