"""Find the line of a module's own code that caused an error, so that its author can act on it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary

import torch
from torch.fx import Node

LIBRARIES = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[1]))
"""Folders whose frames are not a module's own code."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def own_frame(stack: Iterable[FrameSummary]) -> FrameSummary | None:
    """The innermost frame of the module's own code; None if there is none.

    `stack`: frames from the outermost to the innermost. Frames before the first one of a library
    belong to the caller of compile, and are skipped.
    """
    frames = [frame for frame in stack if Path(frame.filename).is_file()]
    inside = [i for i, frame in enumerate(frames) if frame.filename.startswith(LIBRARIES)]
    own = [
        frame
        for frame in frames[inside[0] if inside else 0 :]
        if not frame.filename.startswith(LIBRARIES)
    ]
    return own[-1] if own else None


def line(frame: FrameSummary) -> str:
    """Text for a frame: `file:line: code`."""
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def place(node: Node) -> str:
    """Text for a node: its operator, its module, and the line of code that calls it."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = modules[-1] if modules else ("", "")
    name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    called = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    inside = f" in {path or 'the module'} ({name})" if modules else ""
    found = list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    own = [match for match in found if not match["file"].startswith(LIBRARIES)]
    where = f" at {own[-1]['file']}:{own[-1]['line']}: {own[-1]['code']}" if own else ""
    return f"{called}{inside}{where}"
