"""What tests of sessions share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runtime.tensorrt_machine import Machine


@pytest.fixture
def gpu(compiled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with TensorRT, whose driver and library are fakes."""
    from tests.runtime.tensorrt_machine import fake_machine  # quick tests do without torch

    return fake_machine(compiled, tmp_path, monkeypatch)
