"""Serves with options that `kvgraph serve` has no flags for: ARTIFACT, and JSON of what differs.

    python -m tests.serve.limited ARTIFACT '{"send_seconds": 0.5, "engine": {"num_pages": 20}}'

With `"waits": true` the artifact loads once a line comes on stdin.
"""

from __future__ import annotations

import json
import sys

from kvgraph import Engine
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.server import serve


def main() -> None:
    folder, text = sys.argv[1:]
    given = json.loads(text)
    settings = given.pop("engine", {})
    waits = given.pop("waits", False)

    def make() -> Engine:
        if waits:
            sys.stdin.readline()
        return Engine(folder, num_threads=1, **settings)

    serve("tiny", make, ServeOptions(**given), port=0)


if __name__ == "__main__":
    main()
