"""`python -m tools.models [NAME ...]`: judge cases, a line each; `--write` makes docs/models.md and
tests/golden/models.json of all of them, in about ten minutes on two cores. It writes nothing if a
case has other tokens."""

from __future__ import annotations

import argparse
import sys

from tools.models import cases
from tools.models.judge import Verdict
from tools.models.processes import judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found: dict[str, Verdict] = {}
    for name, verdict in judged(given.names or cases.names()):
        found[name] = verdict
        print(f"{name:28} {verdict.result:12} {verdict.why}", flush=True)
    is_right = all(verdict.result != "other tokens" for verdict in found.values())
    if given.write and is_right:
        from tools.models import page

        page.write(found)
    elif given.write:
        print("nothing was written: a model must make the tokens of transformers")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
