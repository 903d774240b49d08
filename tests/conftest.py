"""Fixtures that tests share: models and artifacts, each made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import make_model

import kvgraph

ROOT = Path(__file__).parents[1]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"

Compiled = Callable[..., Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing"
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of an architecture, or "tiny-llama" -> checkpoint folder."""
    made: dict[str, Path] = {"tiny-llama": TINY_LLAMA}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]
) -> Compiled:
    """`compiled(model, backend="onnx", **options)` -> artifact folder; never written to.

    Not checked where it is made: what is made of it is compared with the model by the tests.
    """
    made: dict[tuple[Any, ...], Path] = {}

    def artifact(
        model: str, backend: str | None = "onnx", page_size: int = 16, **options: Any
    ) -> Path:
        key = (model, backend, page_size, *sorted(options.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("artifacts") / f"{model}-{backend}"
            settings = {"backend": backend, "page_size": page_size, "check": False} | options
            kvgraph.compile(model_folder(model), out, **settings)
            made[key] = out
        return made[key]

    return artifact
