"""Makes docs/images/terminal.svg: a real compile and a real answer, as a terminal shows them.

python docs/terminal.py
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
WIDTH = 92

FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Left out, since they would be loaded from the network: any monospaced font does."""

COMMANDS = (
    "kvgraph compile examples/tiny-llama -o tiny.kvg --weights int8 --cache-dtype int8",
    'kvgraph generate tiny.kvg "The import statement" --max-new-tokens 48',
)


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for command in COMMANDS:
            console.print(f"[bold green]$[/] [bold]{command}[/]", highlight=False)
            console.print(_output(command, folder), markup=False)
    svg = console.export_svg(title="kvgraph")
    PICTURE.write_text(FONTS.sub("", svg))


def _output(command: str, folder: str) -> str:
    """What the command writes to both streams, in order."""
    script = Path(sys.executable).with_name("kvgraph")
    done = subprocess.run(
        [script, *shlex.split(command)[1:]],
        cwd=folder,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


if __name__ == "__main__":
    main()
