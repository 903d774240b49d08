"""Serves with options that `kvgraph serve` has no flags for: ARTIFACT, and JSON of what differs.

    python -m tests.serve.limited ARTIFACT '{"send_seconds": 0.5, "engine": {"num_pages": 20}}'

With `"waits": true` the artifact loads once a line comes on stdin. `closing_seconds` is how long
connections have that are open when the last request has ended.
"""

from __future__ import annotations

import json
import sys

from kvgraph import Engine
from kvgraph.serve import server
from kvgraph.serve.options import ServeOptions


def main() -> None:
    folder, text = sys.argv[1:]
    given = json.loads(text)
    settings = given.pop("engine", {})
    waits = given.pop("waits", False)
    server.CLOSING_SECONDS = given.pop("closing_seconds", server.CLOSING_SECONDS)

    def make() -> Engine:
        if waits:
            sys.stdin.readline()
        return Engine(folder, num_threads=1, **settings)

    server.serve("tiny", make, ServeOptions(**given), port=0)


if __name__ == "__main__":
    main()
