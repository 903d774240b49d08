"""The documents tell the truth: Python blocks run, commands and files exist, no machine shows."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

import kvgraph
from kvgraph import cli
from kvgraph.compiler.passes.lists import PASSES, TRACE
from kvgraph.ops.native import library_path
from tests.support.artifacts import Compiled

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
TEXTS = [
    *PAGES,
    *(
        path
        for pattern in ("docs/*.py", "examples/**/*.md", "examples/**/*.py", "kvgraph/**/*.py")
        for path in ROOT.glob(pattern)
    ),
]
PYTHON = [path for path in ROOT.glob("docs/**/*.md") if "```python\n" in path.read_text()]

COMMAND = typer.main.get_command(cli.app)
README_WORDS = 700


def test_the_passes_of_each_target_are_those_that_run() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = {}
    for target, cell in re.findall(r"^\| (all|`\w+`, `[\w-]+`) \| (`.*) \|$", text, re.MULTILINE):
        named[tuple(re.findall(r"[\w-]+", target))] = re.findall(
            r"`(\w+)`",
            cell.partition(";")[0],  # behind it: what runs later
        )
    trace = [each.name for each in TRACE]
    assert named.pop(("all",)) == trace
    assert named == {
        target: [each.name for each in passes][len(trace) :] for target, passes in PASSES.items()
    }


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for code in blocks(ROOT / "README.md", "python"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_python_of_a_page_runs(
    path: Path, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page are one program; "model.kvg" is what the page on deploying compiles."""
    code = "\n".join(blocks(path, "python"))
    if "model.kvg" in code:
        (tmp_path / "model.kvg").symlink_to(compiled("tiny-llama"))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name_of(path), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("fault", [None, OSError("no disk")], ids=["miss", "error"])
def test_the_loop_of_a_page_computes_what_a_store_misses(fault: Exception | None) -> None:
    code = "\n".join(blocks(ROOT / "docs/adding/store.md", "python"))
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "store.md", "exec"), page)
    page["DictStore"].read = mock.Mock(side_effect=fault, return_value=False)
    assert page["run"]([1, 2, 3, 4, 7]) == 0
    assert page["DictStore"].read.called


def test_the_host_of_a_page_binds_what_a_graph_has(compiled: Compiled) -> None:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    library = str(library_path("onnxruntime"))
    options.register_custom_ops_library(library)
    graph = ort.InferenceSession(str(compiled("tiny-llama") / "model.onnx"), options)
    (code,) = blocks(ROOT / "docs/guides/own-host.md", "cpp")
    for kind, nodes in (("inputs", graph.get_inputs()), ("outputs", graph.get_outputs())):
        (listed,) = re.findall(rf"const {kind}\[\] = {{(.*?)}};", code, re.DOTALL)
        assert re.findall(r'"(\w+)"', listed) == [node.name for node in nodes]
    assert f'"{Path(library).stem}.so"' in code


def test_one_onnx_runtime_is_the_oldest() -> None:
    """What is installed, what a page asks for, what the library takes."""
    extras = re.findall(r'"onnxruntime(?:-gpu)?>=([^"]+)"', (ROOT / "pyproject.toml").read_text())
    (oldest,) = set(extras)
    page = (ROOT / "docs/guides/own-host.md").read_text()
    assert f"ONNX Runtime, {oldest} or newer" in page
    header = (ROOT / "plugins/abi/onnxruntime.h").read_text()
    assert re.findall(r"kOldestMinor = (\d+);", header) == [oldest.removeprefix("1.")]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_make_targets_and_commands_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(blocks(path, "console") + re.findall(r"`(make [^`]+)`", path.read_text()))
    for target in re.findall(r"^make (?!TORCH)([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for line in re.findall(r"^kvgraph (.*)", text, re.MULTILINE):
        parse(COMMAND, shlex.split(line, comments=True))


def parse(command: Any, arguments: list[str]) -> None:
    """UsageError for an option or a value that the command line does not have."""
    if hasattr(command, "commands"):
        assert arguments[0] in command.commands, arguments[0]
        parse(command.commands[arguments[0]], arguments[1:])
    else:
        command.parse_args(command.context_class(command), list(arguments))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        assert link.startswith("https://") or (path.parent / link).exists(), link


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_exist(path: Path) -> None:
    """What a page names by a path from the root is there, but for what it says is new."""
    pattern = r"`((?:kvgraph|plugins|tests|benchmarks|tools|examples|docs)/[\w./*-]+)`(?! \| new)"
    for name in re.findall(pattern, path.read_text()):
        if path.name != "CHANGELOG.md":
            assert list(ROOT.glob(name.rstrip("/"))), name


def test_every_public_name_is_on_an_api_page() -> None:
    pages = "".join(path.read_text() for path in ROOT.glob("docs/api/*.md"))
    found = re.findall(r"^::: kvgraph\.(\w+)$", pages, re.MULTILINE)
    assert sorted(found) == kvgraph.__all__


def test_every_page_is_in_the_navigation() -> None:
    """As mkdocs's strict mode asks, which `make docs` runs."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = {path for name in re.findall(r"\S+\.md|\S+/\*", nav) for path in pages_of(name)}
    assert listed == set(ROOT.glob("docs/**/*.md"))


def pages_of(name: str) -> list[Path]:
    return list(ROOT.glob(f"docs/{name.replace('/*', '/2*.md')}"))


def test_the_docs_read_the_table_of_public_names() -> None:
    tree = ast.parse((ROOT / "docs" / "hooks.py").read_text())
    hooks: dict[str, Any] = {"__file__": str(ROOT / "docs" / "hooks.py")}
    exec(compile(tree, "hooks.py", "exec"), hooks)
    assert sorted(hooks["public_names"]()) == kvgraph.__all__


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_no_machine_path(path: Path) -> None:
    text = path.read_text()
    assert str(ROOT) + "/" not in text
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp)/", text)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/0*.py")), ids=lambda p: p.name)
def test_examples_run(
    path: Path, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has torch already; but for the first, and for one that sets it up."""
    assert len(path.read_text().splitlines()) <= 60
    artifact = tmp_path / "example.kvg"
    if path.name.startswith(("02", "05")):  # they take the artifact of the first
        artifact.symlink_to(compiled("tiny-llama", None, page_size=32))
    monkeypatch.chdir(tmp_path)
    noisy = path.name.startswith(("07", "08"))  # torch's exporter and compiler warn of themselves
    if path.name.startswith(("01", "08")):
        kinds = ("DeprecationWarning", "FutureWarning", "RuntimeWarning")
        allowed = [each for kind in kinds for each in ("-W", f"ignore::{kind}")]
        options = ["-W", "error", *(allowed if noisy else [])]
        command = [sys.executable, *options, str(path), str(artifact)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    monkeypatch.setattr(sys, "argv", [str(path), str(artifact)])
    monkeypatch.syspath_prepend(str(path.parent))
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "AnnAssign", DeprecationWarning)  # Triton, Python 3.13
        if noisy:
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
        runpy.run_path(str(path), run_name="__main__")
    assert printed.getvalue().strip()
