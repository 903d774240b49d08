"""What type checkers see of the package: a user's file, and the blocks that are generated."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvgraph
from kvgraph import ops
from tools import count_any, generate

ROOT = Path(__file__).parents[1]
USER_FILE = ROOT / "tests" / "typed" / "user_file.py"


def checked(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_takes_a_users_file() -> None:
    checked([sys.executable, "-m", "mypy", str(USER_FILE)])


def test_mypy_takes_the_code_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    text = (ROOT / "docs" / "contract.md").read_text()
    page.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    checked([sys.executable, "-m", "mypy", "--strict", str(page)])


def test_pyright_takes_a_users_file(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("basedpyright", path=path) or shutil.which("pyright", path=path)
    if found is None:
        pytest.skip("no pyright; pip install basedpyright brings one")
    settings = {
        "include": [str(USER_FILE)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    checked([found, "--project", str(project), "--pythonpath", sys.executable])


@pytest.mark.parametrize("path", generate.BLOCKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_generated_blocks_are_up_to_date(path: Path) -> None:
    assert path.read_text() == generate.generated(path), "make generate"


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kvgraph.__file__).parent / "py.typed").is_file()


def test_ops_show_their_signatures() -> None:
    assert {spec.name for spec in ops.ALL_SPECS} <= set(dir(ops))
    for spec in ops.ALL_SPECS:
        function = getattr(ops, spec.name)
        operands = [operand.name for operand in spec.inputs]
        attributes = [attribute.name for attribute in spec.attributes]
        assert list(inspect.signature(function).parameters) == operands + attributes
        assert function.__doc__.startswith(spec.doc)
    assert "- `cache_lengths` [batch_size] int32" in ops.store_kv.__doc__
    assert "`kv_blocks` [num_page_slots" in ops.store_kv.__doc__
    shown = str(inspect.signature(ops.store_kv))
    assert shown.endswith("kv_scales: torch.Tensor | None = None, *, layer: int) -> None")


def test_uses_of_any_are_counted_through_aliases_and_quotes() -> None:
    source = (
        '"""Any prose, [Any]."""\n'
        "import typing\nfrom typing import Any\nExtent = Any\n"
        'def f(a: Extent, b: "list[Any]", c: typing.Any) -> dict[str, Any]: ...\n'
    )
    assert count_any.count([source]) == 6
    assert count_any.count(["from x import Extent\ny: Extent = 1\n", "Extent = Any\n"]) == 3
