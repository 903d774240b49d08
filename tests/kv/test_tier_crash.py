"""Processes that are killed while they use a disk store leave nothing wrong behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("crash_driver.py")


@pytest.mark.parametrize("runs", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_processes_leave_no_wrong_page(runs: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DRIVER, tmp_path / "store", str(runs), "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["left_early"] == 0, done.stderr
    assert found["wrong"] == 0
    assert found["served"] > runs, "or nothing was tested"
    assert found["refilled"] == found["fits"], "slots that the dead had claimed are free again"
    assert found["disk"] <= found["limit"]
