"""Write constraints.txt: of each package that `make test` names, the version installed here.

python -m tools.constraints
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNNAMED = {"docs", "bench", "nixl", "onnx-gpu", "torch-tensorrt"}
"""Extras that `make test` does not install."""
ELSEWHERE = {"kvgraph", "torch"}
"""torch: the Makefile pins its build."""
HEAD = """\
# What the tests ran with last. `make constraints` takes the newest of all and writes this file.
"""


def names() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"]]
    lists += [
        own for extra, own in project["optional-dependencies"].items() if extra not in UNNAMED
    ]
    found = {re.split(r"[^\w.-]", line)[0] for own in lists for line in own}
    return found - ELSEWHERE


def pinned(name: str) -> str | None:
    try:
        return f"{name}=={version(name)}"
    except PackageNotFoundError:  # of another platform
        return None


def main() -> None:
    lines = [line for name in sorted(names()) if (line := pinned(name))]
    (ROOT / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
