"""`python -m tools.constraints EXTRA,...`: write constraints.txt, of each package that the project
or one of these extras names the version installed here."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"kvgraph", "torch", "triton"}
"""torch: the Makefile pins its build. triton: a CUDA build of torch needs a version of its own."""
HEAD = """\
# What the tests ran with last. `make constraints` takes the newest of all and writes this file.
"""


def names(extras: list[str]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    found = {re.split(r"[^\w.-]", line)[0] for own in lists for line in own}
    return found - ELSEWHERE


def pinned(name: str) -> str | None:
    try:
        return f"{name}=={version(name)}"
    except PackageNotFoundError:  # of another platform
        return None


def main() -> None:
    lines = [line for name in sorted(names(sys.argv[1].split(","))) if (line := pinned(name))]
    (ROOT / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
