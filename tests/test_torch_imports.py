"""torch knows our ops and records in every process that imports kvgraph, in either order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kvgraph import ops

USE = """
import sys
program = torch.export.load(sys.argv[1])
pool = torch.zeros(3, 2, 1, 4, 2, 8)
index = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [0], [[1]])]
with torch.no_grad():
    program.module()(pool, torch.ones(3, 2, 8), *index)
    assert pool[1].sum() == 2 * 3 * 2 * 8
    store = torch.compile(
        lambda x: torch.ops.kvgraph.store_kv(pool, x, x, *index, layer=0), fullgraph=True,
        backend="aot_eager",
    )
    store(torch.zeros(3, 2, 8))
assert not pool.any()
assert torch.ops.kvgraph.rms_norm and torch.ops.kvgraph.silu_mul and torch.ops.kvgraph.linear
record = kvgraph.KVCacheParams("float32", 2, 8, 1).get_symbolic_inputs()[0]
assert len(torch.utils._pytree.tree_leaves(record)) == 4
"""


class Store(nn.Module):
    def forward(self, pool: torch.Tensor, x: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        ops.store_kv(pool, x, x, *index, layer=0)
        return pool + 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    index = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [0], [[1]])]
    example = (torch.zeros(3, 2, 1, 4, 2, 8), torch.ones(3, 2, 8), *index)
    path = tmp_path_factory.mktemp("programs") / "store.pt2"
    torch.export.save(torch.export.export(Store(), example), path)
    return path


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error:kvgraph", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, kvgraph",
        "import kvgraph, torch",
        "import kvgraph, kvgraph.ops\nkvgraph.ops.linear\nimport torch",
        "import kvgraph, importlib.util\nimportlib.util.find_spec('torch')\nimport torch",
    ],
    ids=["torch first", "kvgraph first", "an op first", "torch looked up"],
)
def test_a_saved_program_loads_and_runs(imports: str, program: Path) -> None:
    done = run(imports + USE, program)
    assert done.returncode == 0, done.stderr


def test_torch_keeps_its_own_loader_and_path() -> None:
    done = run(
        "import sys, kvgraph, torch\n"
        "assert torch.__spec__.loader is torch.__loader__\n"
        "assert type(torch.__loader__).__module__.startswith(('importlib', '_frozen_importlib'))\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('kvgraph')]\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_torch_that_lacks_what_the_ops_need_stays_importable(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '1.0'")
    done = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import warnings, kvgraph\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "print(torch.__version__, caught[0].message)"
    )
    assert done.stdout.startswith("1.0 kvgraph: its ops are not registered with torch 1.0: "), done
