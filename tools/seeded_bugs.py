"""Whether the tests catch 20 small bugs: `python -m tools.seeded_bugs [NAME ...]`, minutes in all.

Each bug is put into a copy of the tree, where the tests named for it must fail; the tree itself is
not changed. Bugs in plugins/ need cmake and a C++ compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table

ROOT = Path(__file__).parents[1]
CONFORMS = "tests/test_conformance.py::test_equals_the_reference"


class Bug(NamedTuple):
    """`wrong` replaces `right`, which `file` holds exactly once; `test` must fail then."""

    name: str
    part: str
    file: str
    right: str
    wrong: str
    test: str


BUGS = (
    Bug(
        "dtype-number",
        "contract",
        "kvgraph/contract/dtypes.py",
        '2, 10, "F16"',
        '2, 11, "F16"',
        "tests/contract/test_dtypes.py::test_names_agree_with_the_frameworks",
    ),
    Bug(
        "replicas-share-tables",
        "contract",
        "kvgraph/contract/symbols.py",
        "replica + dims + MAX_NUM_PAGES",
        "dims + MAX_NUM_PAGES",
        "tests/kv/test_kv_symbols.py::test_runtime_values_bind",
    ),
    Bug(
        "hash-of-old-bytes",
        "contract",
        "kvgraph/contract/hashes.py",
        "digest.update(piece[:count])",
        "digest.update(piece)",
        "tests/contract/test_hashes.py::test_chunks_of_a_file",
    ),
    Bug(
        "rotated-backwards",
        "ops",
        "plugins/cpu/heads.cpp",
        "y * cosines[i] + x * sines[i]",
        "y * cosines[i] - x * sines[i]",
        f"{CONFORMS}[update_and_attend-float32-float32-6x2x16-p16-softcap-rope0-mixed-native]",
    ),
    Bug(
        "signed-scale",
        "ops",
        "kvgraph/ops/_store_kv.py",
        "np.abs(x_g).max(-1)",
        "x_g.max(-1)",
        f"{CONFORMS}[store_kv-bfloat16-int8-6x2x64-p3-decode-native]",
    ),
    Bug(
        "tiles-left-out",
        "kernels",
        "plugins/launch/plan.cpp",
        "sizes.total_seq_len / block + sizes.batch_size",
        "sizes.total_seq_len / block + 1",
        "tests/kernels/test_launch.py::test_every_new_token_has_one_tile",
    ),
    Bug(
        "rope-style-lost",
        "passes",
        "kvgraph/compiler/passes/fuse_rope.py",
        '{**node.kwargs, **({"rope_style": style} if style != ROPE_HALVES else {})}',
        "{**node.kwargs}",
        "tests/compiler/test_fuse_rope.py::test_another_spelling",
    ),
    Bug(
        "gate-for-up",
        "passes",
        "kvgraph/compiler/passes/linears.py",
        "[replace(both, half=gate), replace(both, half=up)]",
        "[replace(both, half=up), replace(both, half=gate)]",
        "tests/compiler/test_pack_linear.py::test_halves_of_one_layer",
    ),
    Bug(
        "earlier-tokens-pass",
        "passes",
        "kvgraph/compiler/passes/require_tokens_apart.py",
        "((found.low == expected.low) & (found.high == expected.low))",
        "(found.high == expected.low)",
        "tests/compiler/test_tokens_apart.py::test_tokens_that_are_mixed",
    ),
    Bug(
        "not-a-number-fits",
        "check",
        "kvgraph/compiler/check/compare.py",
        "apart_T / scale_T, np.inf)",
        "apart_T / scale_T, 0)",
        "tests/compiler/test_check.py::test_logits_that_are_not_finite",
    ),
    Bug(
        "transposed-is-tied",
        "targets",
        "kvgraph/compiler/targets/weights.py",
        "tensor.shape, tensor.stride())",
        "tensor.shape)",
        "tests/compiler/test_torch_target.py::test_tied_weights_have_one_owner_and_views_no_overlap",
    ),
    Bug(
        "cached-pages-first",
        "kv",
        "kvgraph/kv/pool/pages.py",
        "end if digests[page] is None else before[end]",
        "end",
        "tests/kv/test_kv_pages.py::test_cached_pages_join_the_tail_and_others_the_head",
    ),
    Bug(
        "one-turn",
        "kv",
        "kvgraph/kv/paged.py",
        "self._turn = turn = 1 - self._turn",
        "turn = self._turn",
        "tests/kv/test_kv_lifecycle.py::test_index_tensors_keep_their_addresses_and_the_record_before_stays_valid",
    ),
    Bug(
        "last-token-hashed",
        "kv",
        "kvgraph/kv/pool/identity.py",
        "(ctx.current_length - 1) // self.page_size",
        "ctx.current_length // self.page_size",
        "tests/kv/test_kv_prefix.py::test_the_last_token_is_never_hashed",
    ),
    Bug(
        "newest-evicted",
        "tiers",
        "kvgraph/kv/tiers/disk/index.py",
        '"ORDER BY used LIMIT 1"',
        '"ORDER BY used DESC LIMIT 1"',
        "tests/kv/test_tier_disk.py::test_the_least_recently_used_pages_make_room",
    ),
    Bug(
        "models-mixed",
        "tiers",
        "kvgraph/kv/tiers/transfer.py",
        '_require("model and layout (fingerprint)", mine, header.get("fingerprint"))',
        '_require("model and layout (fingerprint)", mine, mine)',
        "tests/kv/test_tier_transfer.py::test_what_does_not_fit_is_refused_by_name",
    ),
    Bug(
        "preempted-goes-last",
        "runtime",
        "kvgraph/runtime/scheduler.py",
        "insort(self.waiting, victim, key=_ARRIVAL)",
        "self.waiting.append(victim)",
        "tests/runtime/test_scheduler.py::test_several_preempted_keep_their_order",
    ),
    Bug(
        "numbers-start-again",
        "runtime",
        "kvgraph/runtime/sampling.py",
        "numbers.advance(count)",
        "numbers.advance(0)",
        "tests/runtime/test_sampling.py::test_a_source_rewinds_to_any_of_its_numbers",
    ),
    Bug(
        "pool-not-written",
        "runtime",
        "kvgraph/runtime/sessions/reference.py",
        "feeds[symbol.name][...] = buffer",
        "feeds[symbol.name] = buffer",
        "tests/runtime/test_reference_session.py::test_tokens_are_those_of_onnx_runtime[padded]",
    ),
    Bug(
        "first-token-counted",
        "bench",
        "kvgraph/bench/figures.py",
        "return seconds, case.batch * (case.new_tokens - case.lead)",
        "return seconds, case.batch * case.new_tokens",
        "tests/test_bench_figures.py::test_figures",
    ),
)


def main(names: Sequence[str]) -> int:
    unknown = set(names) - {bug.name for bug in BUGS}
    if unknown:
        sys.exit(f"NAME: expected one of the table in {__file__}, got {', '.join(sorted(unknown))}")
    bugs = [bug for bug in BUGS if not names or bug.name in names]
    if any(map(is_native, bugs)) and shutil.which("cmake") is None:
        sys.exit("cmake: needed by the bugs in plugins/, not found; pip install cmake")
    table = Table("bug", "part", Column("caught by", overflow="fold"), "seconds")
    missed = 0
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
        status.update("the tests without a bug")
        copy = Copy(Path(folder))
        copy.require_passing(sorted({bug.test for bug in bugs}))
        for bug in bugs:
            status.update(bug.name)
            start = time.perf_counter()
            failed, why = copy.try_bug(bug)
            missed += failed is None
            seconds = f"{time.perf_counter() - start:.0f}"
            table.add_row(bug.name, bug.part, failed or f"NOT CAUGHT: {why}", seconds)
    Console().print(table)
    return int(missed > 0)


def is_native(bug: Bug) -> bool:
    return bug.file.startswith("plugins/")


class Copy:
    """The tracked files of the tree with the built libraries, and a Python that imports them."""

    def __init__(self, folder: Path) -> None:
        from kvgraph.ops.native import library_path

        self._root, self._build = folder / "tree", folder / "build"
        self._native = self._root / "kvgraph" / "_native"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
        )
        for name in listed.stdout.decode().split("\0"):
            if (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self._root / name)
        shutil.copytree(library_path("cpu").parent, self._native)
        self._python = self._make_python(folder / "venv")

    def _make_python(self, folder: Path) -> Path:
        """An environment over the packages of this one; an editable install would be the tree's."""
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        paths = [str(self._root), *(path for path in sys.path if "site-packages" in path)]
        (packages / "copy.pth").write_text("\n".join(paths))
        return folder / "bin" / "python"

    def require_passing(self, tests: Sequence[str]) -> None:
        """Exits where `tests` fail without a bug: then they say nothing of one."""
        done = self._test(tests)
        if done.returncode:
            sys.exit(f"{done.stdout}\nexpected these tests to pass without a bug, got the above")

    def try_bug(self, bug: Bug) -> tuple[str | None, str]:
        """The first test that fails with `bug`; None where none does, and why."""
        path = self._root / bug.file
        text = path.read_text()
        if (found := text.count(bug.right)) != 1:
            return None, f"expected its text once in {bug.file}, got it {found} times"
        try:
            path.write_text(text.replace(bug.right, bug.wrong))
            with self._built() if is_native(bug) else nullcontext():
                done = self._test([bug.test])
        finally:
            path.write_text(text)
        failed = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.MULTILINE)
        if done.returncode == 1 and failed:
            return failed[1], ""
        return None, f"expected a failure of {bug.test}, got exit code {done.returncode}"

    def _test(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
        # An edit of the same size in the same second looks like no edit to a cache of bytecode.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [self._python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=self._root,
            env=environment,
            capture_output=True,
            text=True,
        )

    @contextmanager
    def _built(self) -> Iterator[None]:
        """The libraries of what plugins/ holds now; those from before come back afterwards."""
        kept = self._native.rename(self._native.with_name("kept"))
        out = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self._native}"
        plugins = self._root / "plugins"
        try:
            for command in (
                ["-S", str(plugins), "-B", str(self._build), out],
                ["--build", self._build, "-j2"],
            ):
                subprocess.run(["cmake", *command], check=True, stdout=subprocess.DEVNULL)
            yield
        finally:
            shutil.rmtree(self._native, ignore_errors=True)
            kept.rename(self._native)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
