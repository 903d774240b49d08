"""Tables and printed samples of the documents are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from kvgraph import BatchConfig, CacheConfig, SamplingParams, TierConfig, ops
from kvgraph.compiler.refusals import PROVEN
from kvgraph.contract.backends import OURS, default_backend
from tests.support.artifacts import TINY_LLAMA
from tests.support.command_line import run
from tests.support.models import OVERRIDES
from tools import commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ADDING = sorted((DOCS / "adding").glob("*.md"))


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    text = (DOCS / page).read_text()
    return text.partition(f"# {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of each row of each table, heads too."""
    return [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_of_commands_has_every_option() -> None:
    assert commands.PAGE.read_text() == commands.page(), "make generate"


# -- ops, backends, extras


def test_every_op_with_a_kernel_is_in_the_contract() -> None:
    table = {quoted(row[0])[0]: row[1] for row in rows(section("contract.md", "Ops"))[1:]}
    assert list(table) == [spec.name for spec in ops.ALL_SPECS]
    for spec in ops.SPECS:
        assert inputs_of(table[spec.name]) == [(x.name, x.optional) for x in spec.inputs]


def inputs_of(cell: str) -> list[tuple[str, bool]]:
    """Names, and whether they are in brackets; dims are quoted."""
    found = re.findall(r"(\[?)(\w+)", re.sub(r"`[^`]*`", "", cell))
    return [(name, bracket == "[") for bracket, name in found]


def test_every_backend_is_named() -> None:
    words = {row[0]: row[1] for row in rows(section("contract.md", "Words"))}
    assert quoted(words["backend"]) == [each.name for each in OURS]
    targets, backends = section("support.md", "Targets").split("\n\nCUDA targets ")
    for kind, row in zip(("cpu", "cuda"), rows(targets)[1:], strict=False):
        found = quoted(row[1])
        assert found[0] == default_backend(kind).name
        assert set(found) == {each.name for each in OURS if kind in each.targets}
    assert quoted(rows(targets)[3][1]) == [each.name for each in OURS if each.portable]
    described = {quoted(row[0])[0] for row in rows(backends)[1:]}
    assert described == {each.name for each in OURS}


def test_extras_bring_what_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"(base)": project["dependencies"]}
    wanted |= {f"`{name}`": given for name, given in project["optional-dependencies"].items()}
    del wanted["`test`"]  # what `make test` needs, not a user
    table = {row[0]: row[1] for row in rows(section("guides/install.md", "Extras"))[1:]}
    assert table.keys() == wanted.keys()
    for extra, given in wanted.items():
        brought = [re.split(r"[\[>=<;]", each)[0] for each in given]
        listed = re.split(r", (?:and|with) ", table[extra])[0].split(", ")
        assert listed == [name for name in brought if name != "kvgraph"], extra


@pytest.mark.parametrize("record", [SamplingParams, CacheConfig, BatchConfig, TierConfig])
def test_every_field_of_a_setting_is_in_a_table(record: type) -> None:
    named = {name for row in rows((DOCS / "guides/deploy.md").read_text()) for name in fields(row)}
    assert {field.name for field in dataclasses.fields(record)} <= named


def fields(row: list[str]) -> list[str]:
    """Names in the first two cells: a table of settings has the record or the field first."""
    return [name for cell in row[:2] for name in quoted(cell)]


# -- pages on adding something


EXAMPLES = [
    ("pass", r"\bhalf_tables\b", "kvgraph docs/*.md tests/golden", "half_"),
    ("op", r"\b(kvg_cpu_linear|LINEAR)\b|\blinear\.cpp", "kvgraph/ops plugins", "linear"),
    (
        "store",
        r"RemoteStore|RemoteServer|\bremote: |--remote\b",
        "kvgraph tests/test_public_api.py docs/guides/tiers.md",
        "remote.py",
    ),
    ("backend", '"torch-tensorrt"', "kvgraph/compiler kvgraph/contract", "torch_program"),
    ("model", '"mxfp4"', "kvgraph", "mxfp4.py"),
]
"""A page, how one that was added is named, where that is looked for, and files of its own."""


@pytest.mark.parametrize(("page", "named", "where", "own"), EXAMPLES, ids=[x[0] for x in EXAMPLES])
def test_every_file_that_names_one_is_in_the_table(
    page: str, named: str, where: str, own: str
) -> None:
    places = [path for pattern in where.split() for path in ROOT.glob(pattern)]
    files = {each for path in places for each in (path.rglob("*.*") if path.is_dir() else [path])}
    texts = {".cpp", ".h", ".json", ".md", ".py", ".txt"}
    found = {
        path
        for path in files
        if path.suffix in texts and own not in path.name and re.search(named, path.read_text())
    }
    text = (DOCS / "adding" / f"{page}.md").read_text()
    listed = {path for row in rows(text) for name in quoted(row[0]) for path in glob(name)}
    assert found <= listed, sorted(str(path.relative_to(ROOT)) for path in found - listed)


def glob(name: str) -> list[Path]:
    return [] if "<" in name else list(ROOT.glob(name))


@pytest.mark.parametrize("page", ADDING, ids=lambda path: path.name)
def test_tables_that_files_have_are_named_as_they_are(page: Path) -> None:
    """What a row of files says in capitals, such as `PROVEN`, is in one of them."""
    for row in rows(page.read_text()):
        files = [path for name in quoted(row[0]) for path in glob(name)]
        for name in re.findall(r"`([A-Z_]{3,})\b[^`]*`", " ".join(row[1:])):
            if files:
                assert any(name in path.read_text() for path in files), name


def test_the_file_of_a_pass_says_what_it_does() -> None:
    """`Pass.summary` is the first paragraph of its docstring."""
    text = (DOCS / "adding/pass.md").read_text()
    file = text.partition("```python\n")[2].partition("```")[0]
    assert ast.get_docstring(ast.parse(file))


def test_the_models_of_the_ladder_are_those_that_are_proven() -> None:
    assert tuple(OVERRIDES) == PROVEN


# -- what commands print


def test_a_plan_prints_what_the_page_says() -> None:
    page = (DOCS / "guides/plan.md").read_text()
    prints, refuses = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^kvgraph plan MODEL_DIR ([^#\n]*)", page, re.MULTILINE)
    plan = run("plan", TINY_LLAMA, *commands[1].split())
    assert [line.rstrip() for line in plan.out.splitlines()] == prints.splitlines()
    refused = run("plan", TINY_LLAMA, *commands[2].split())
    assert refused.err.splitlines()[-1:] == refuses.splitlines()
