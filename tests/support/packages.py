"""Installed packages for tests: one module, and the entry point that leads to it."""

from __future__ import annotations

from pathlib import Path

from kvgraph.contract.backends import GROUP


def install_backend(folder: Path, name: str, source: str, package: str = "") -> None:
    """Write a distribution `package` (default: `name`) into `folder`: its backend `name` is the
    `BACKEND` of its one module, which has this source."""
    package = package or name
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {package}:BACKEND\n")
    (folder / f"{package}.py").write_text(source)
