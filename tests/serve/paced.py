"""`kvgraph` whose engine generates no more tokens than a file says, while the file is there.

python -m tests.serve.paced FILE serve ARTIFACT --port 0
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvgraph.cli import main
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import Token


def pace(file: Path) -> None:
    step = Engine.step

    def paced(engine: Engine) -> list[Token]:
        if engine.generated_tokens < most(file):
            return step(engine)
        time.sleep(0.001)
        return []

    Engine.step = paced  # type: ignore[method-assign]


def most(file: Path) -> float:
    try:
        return int(file.read_text() or 0)
    except FileNotFoundError:
        return float("inf")


if __name__ == "__main__":
    pace(Path(sys.argv.pop(1)))
    main()
