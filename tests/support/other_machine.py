"""The environment of another machine: Python packages of its own, and a GPU of the fake driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.fake_driver import build as build_driver


def other_machine(
    folder: Path, modules: Mapping[str, str], distribution: str, version: str
) -> dict[str, str]:
    """`modules`: name -> source, of one distribution. The driver is in `folder / "driver"`."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    described = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(described)
    build_driver(folder / "driver")
    searched = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder / "driver")}
    return {**os.environ, **searched}
