"""docs/adding/op.md does what it says: its files and edits make an op in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding" / "op.md"

BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)

COPY = """
import sys
sys.path.insert(0, {package!r})
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
import kvgraph
assert kvgraph.__file__.startswith({package!r})
kvgraph.__path__.append({libraries!r})
"""
"""What a process runs first to import the copy, and not the package that is installed."""

FORMS = """
import numpy as np, onnx, torch
from onnx.reference import ReferenceEvaluator
from kvgraph import ops
from kvgraph.errors import KernelError
from kvgraph.ops._normalize_heads import NORMALIZE_HEADS
from kvgraph.ops.onnx_ops import reference_ops, translation_table

q = np.random.default_rng(0).normal(size=(5, 3, 16)).astype(np.float32)
expected = NORMALIZE_HEADS.reference(q)
np.testing.assert_allclose(np.linalg.norm(expected, axis=-1), 1, rtol=1e-5)

class Heads(torch.nn.Module):
    def forward(self, q):
        return ops.normalize_heads(q, eps=1e-6)

tokens = torch.export.Dim("total_seq_len", min=1)
given = (torch.from_numpy(q),)
program = torch.export.export(Heads(), given, dynamic_shapes=({0: tokens},))
table = translation_table()
exported = torch.onnx.export(program, dynamo=True, custom_translation_table=table, verbose=False)
model = exported.model_proto
onnx.checker.check_model(model, full_check=True)
assert [node.op_type for node in model.graph.node] == ["normalize_heads"]
evaluator = ReferenceEvaluator(model, new_ops=reference_ops())
found, = evaluator.run(None, {evaluator.input_names[0]: q})
np.testing.assert_array_equal(found, expected)

try:
    torch.export.export(Heads(), (torch.zeros(2, 3),))
except Exception as error:
    assert "normalize_heads: q: expected rank 3, got 2" in str(error), error
else:
    raise AssertionError("expected a refusal of a q of rank 2")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's sources with everything on the page done to them."""
    copy = tmp_path_factory.mktemp("adding") / "kvgraph"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kvgraph", "plugins"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for language, name, text in BLOCK.findall(PAGE.read_text()):
        path = copy / name
        if language == "diff":
            if not path.exists():  # a page of docs/
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, path)
            path.write_text(changed(path, text))
        else:
            assert not path.exists(), f"{name}: expected a new file"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return copy


def changed(path: Path, diff: str) -> str:
    """The file after a diff whose hunks are separated by `@@`; each is found exactly once."""
    text = path.read_text()
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{path.name}: expected once:\n{old}"
        text = text.replace(old, new)
    return text


def run(copy: Path, code: str, libraries: Path = ROOT) -> None:
    prelude = COPY.format(package=str(copy), libraries=str(libraries))
    done = subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, cwd=copy
    )
    assert done.returncode == 0, done.stderr


def test_every_file_of_the_table_is_on_the_page() -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \| (?:new|changed)", PAGE.read_text(), re.MULTILINE))
    assert listed == {name for _, name, _ in BLOCK.findall(PAGE.read_text())}


def test_reference_torch_and_onnx_forms(copy: Path) -> None:
    run(copy, FORMS)


def test_the_table_of_ops(copy: Path) -> None:
    """The documents' own test passes in the copy."""
    run(
        copy,
        f"""
import sys
sys.path.append({str(ROOT)!r})
from pathlib import Path
from tests import test_doc_tables
test_doc_tables.DOCS = Path({str(copy)!r}, "docs")
test_doc_tables.test_every_op_with_a_kernel_is_in_the_contract()
""",
    )


@pytest.mark.slow  # builds the native libraries
def test_kernel(copy: Path, tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([sys.prefix + "/bin", *os.get_exec_path()]))
    if cmake is None:
        pytest.skip("needs cmake")
    generate = "runpy.run_module('kvgraph.ops.header', run_name='__main__')"
    run(copy, f"import runpy\nsys.argv[1:] = ['plugins/include/kvgraph/contract.h']\n{generate}")
    out = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={tmp_path}/_native"
    build([cmake, "-S", str(copy / "plugins"), "-B", str(tmp_path / "build"), out])
    targets = ("--target", "kvgraph_cpu", "kvgraph_onnxruntime")
    build([cmake, "--build", str(tmp_path / "build"), "--parallel", "2", *targets])
    own = "'-q', '-p', 'no:cacheprovider', 'tests/ops/test_normalize_heads.py'"
    run(copy, f"import pytest\nsys.exit(pytest.main([{own}]))", tmp_path)


def build(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
