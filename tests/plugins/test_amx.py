"""Linear layers on AMX tiles: the processor's, and those that a build with KVG_EMULATE_AMX has.

Emulated, each tile instruction is a loop and the kernel is the same: that shows what is loaded,
multiplied and stored where, and no more: nothing of speed, and nothing of a processor that does
otherwise than its description says.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from kvgraph.ops import LINEAR, native
from kvgraph.ops._linear import linear
from tests.ops.test_linear import SHAPES, call_of, outputs
from tests.support import artifacts
from tests.support.isa import isa_of, load, load_copy

PLUGINS = Path(__file__).parents[2] / "plugins"
ROWS = [1, 15, 16, 17, 31, 32, 33, 48, 49, 64, 400]
"""Below a tile, one and two of every kind of height, more than two, and two blocks of rows."""

Run = Callable[[str], native.Library]
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def built() -> Path:
    if not (shutil.which("cmake") and shutil.which("ninja")):
        pytest.skip("needs cmake and ninja to build the emulation with")
    return artifacts.made({"name": "amx"}, build) / "libkvgraph_cpu.so"


def build(folder: Path) -> None:
    options = ["-DKVG_EMULATE_AMX=ON", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -DNDEBUG"]
    for command in (
        ["cmake", "-S", str(PLUGINS), "-B", str(folder), "-G", "Ninja", *options],
        ["ninja", "-C", str(folder), "kvgraph_cpu"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=["processor", "emulated"])
def tiles(request: pytest.FixtureRequest) -> Run:
    """Instruction set, or "" -> a library that has chosen under it (each file chooses once)."""
    if request.param == "processor":
        if isa_of(load("amx")) != "amx":
            pytest.skip("this processor has no amx")
        return load
    built: Path = request.getfixturevalue("built")

    @cache
    def emulated(name: str) -> native.Library:
        return load_copy(built, name)

    if isa_of(emulated("avx512_bf16")) != "avx512_bf16":
        pytest.skip("needs a processor with AVX512-BF16: only tiles are emulated")
    return emulated


def run(library: native.Library, given: list[Array | None], **attributes: float) -> Any:
    with mock.patch.object(native, "library", return_value=library):
        return native.run(LINEAR, *given, **attributes)


def test_it_is_chosen(tiles: Run) -> None:
    assert isa_of(tiles("")) == isa_of(tiles("amx")) == "amx"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_is_the_reference(tiles: Run, bits: int, shape: str) -> None:
    for rows in ROWS:
        given, attributes, _ = call_of(shape, bits, rows)
        expected = outputs(linear(*given, **attributes))  # type: ignore[arg-type]
        found = outputs(run(tiles("amx"), given, **attributes))
        assert len(found) == len(expected)
        close = 2e-5 if bits == 16 else 2e-6
        for mine, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=close, atol=close * 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_integers_are_the_same_bits_as_without_tiles(tiles: Run, bits: int, rows: int) -> None:
    given, attributes, _ = call_of("ragged edges", bits, rows)
    found = run(tiles("amx"), given, **attributes)
    assert found.tobytes() == run(tiles("avx512_bf16"), given, **attributes).tobytes()


@pytest.mark.parametrize(("rows", "same"), [(1, True), (15, True), (16, False), (33, False)])
def test_tiles_are_used_from_sixteen_rows_on(tiles: Run, rows: int, same: bool) -> None:
    """They add bfloat16 in another order, which shows in the last bits."""
    given, attributes, _ = call_of("q, k and v", 16, rows)
    for mine, vector in zip(
        run(tiles("amx"), given, **attributes),
        run(tiles("avx512_bf16"), given, **attributes),
        strict=True,
    ):
        assert (mine.tobytes() == vector.tobytes()) == same


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_threads_do_not_change_a_bit(tiles: Run, bits: int) -> None:
    given, attributes, _ = call_of("SwiGLU", bits, 400)
    library = tiles("amx")
    results = []
    for threads in (1, 3):
        library.dll.kvg_cpu_set_num_threads(threads)
        results.append(run(library, given, **attributes).tobytes())
    library.dll.kvg_cpu_set_num_threads(0)
    assert results[0] == results[1]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_row_with_a_nan_is_nan_and_others_are_not(tiles: Run, bits: int) -> None:
    given, attributes, _ = call_of("one panel", bits, 40)
    x = given[0]
    assert x is not None
    clean = run(tiles("amx"), given, **attributes)
    x[35, 5] = np.nan
    dirty = run(tiles("amx"), given, **attributes)
    assert np.isnan(dirty[35]).all()
    np.testing.assert_array_equal(np.delete(dirty, 35, 0), np.delete(clean, 35, 0))
