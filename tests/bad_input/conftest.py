"""A checkpoint and an artifact to damage, and one that is loaded and not written to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph.runtime.artifact import Artifact
from tests.support.artifacts import Compiled

ModelFolder = Callable[[str], Path]


@pytest.fixture
def model(tmp_path: Path, model_folder: ModelFolder) -> Path:
    """A copy of tiny-llama's checkpoint to damage."""
    return Path(shutil.copytree(model_folder("tiny-llama"), tmp_path / "model"))


@pytest.fixture
def artifact(tmp_path: Path, compiled: Compiled) -> Path:
    """A copy of tiny-llama's artifact to damage."""
    return Path(shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact"))


@pytest.fixture(scope="module")
def loaded(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))
