"""Read what an artifact's folder says of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraph.contract.file_names import PLUGINS_NAME
from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError


@contextmanager
def describing(kernels: Path) -> Iterator[Path]:
    """The file in folder `kernels` that describes them. ArtifactError if what is done with its
    contents finds them damaged."""
    path = kernels / PLUGINS_NAME
    try:
        yield path
    except ArtifactError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ArtifactError(
            f"{kernels.name}/{path.name}: expected what compile writes of its kernels, got a "
            f"damaged file ({in_short(error)})"
        ) from error
