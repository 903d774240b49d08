"""What the tests of the compiler share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import make_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"num_local_experts": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints in plain floats, with few experts where they have any."""
    made: dict[str, Path] = {}

    def of(architecture: str) -> Path:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("plain") / architecture
            made[architecture] = make_model(architecture, folder, **EXPERTS)
        return made[architecture]

    return of
