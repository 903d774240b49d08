"""The command line where all is well: compile, inspect, verify, generate."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvgraph
from tests.support.artifacts import CHECKED
from tests.support.command_line import COMMAND, Outcome, run, wait_until_it_writes

PROMPT = "The import statement"


def succeed(*arguments: Any) -> Outcome:
    outcome = run(*arguments)
    assert outcome.code in (0, None), outcome
    return outcome


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]
) -> tuple[Path, Outcome]:
    """tiny-llama compiled by the command, in a folder that has to be made and looks like markup."""
    out = tmp_path_factory.mktemp("cli") / "new" / "tiny [red]:cat:.kvg"
    command = ("compile", model_folder("tiny-llama"), "-o", out, "--page-size", 32)
    return out, succeed(*command, "--cache-dtype", "bfloat16", "--json")


@pytest.fixture(scope="module")
def artifact(made: tuple[Path, Outcome]) -> Path:
    return made[0]


def generate(artifact: Path, *options: Any) -> str:
    return succeed("generate", artifact, PROMPT, *options).out


# -- compile


def test_compile(made: tuple[Path, Outcome]) -> None:
    """JSON on stdout; stages with their seconds, and what was made, on stderr."""
    out, outcome = made
    assert os.listdir(out.parent) == [out.name]
    summary = json.loads(outcome.out)
    manifest = kvgraph.load(out).manifest
    assert summary == {
        "artifact": str(out),
        "architecture": "llama",
        "backend": "onnx",
        "target": "cpu",
        "weights": "fp32",
        "identity": manifest.identity.hex(),
        "bytes": sum((out / name).stat().st_size for name in manifest.files),
        "files": sorted(manifest.files),
        "notes": [CHECKED],
    }
    *stages, note, last = outcome.err.splitlines()
    assert note == f"note: {summary['notes'][0]}"
    assert [re.sub(r"^ *\d+\.\d s  ", "", line) for line in stages] == [
        "reading the model",
        "describing the cache",
        "lowering to onnx, the default for cpu: it starts soonest, and runs without torch",
        "writing the artifact",
        "checking",
    ]
    assert re.fullmatch(rf"compiled llama for cpu \(onnx\): {re.escape(str(out))}, .* MiB", last)


def test_compile_options_reach_the_artifact(artifact: Path) -> None:
    manifest = kvgraph.load(artifact).manifest
    assert manifest.layout["page_size"] == 32
    assert manifest.layout["dtype"] == "bfloat16"
    assert manifest.dtype == "float32"


def test_others_may_read_an_artifact(artifact: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in artifact.iterdir()} == {0o644}
    assert artifact.stat().st_mode & 0o777 == 0o755


# -- inspect and verify


def test_inspect(artifact: Path) -> None:
    """All bindings, ops, files and hashes; nothing on stderr, and nothing cut off."""
    outcome = succeed("inspect", artifact)
    assert outcome.err == ""
    assert "…" not in outcome.out
    manifest = kvgraph.load(artifact).manifest
    rows = [line.split() for line in outcome.out.splitlines()]
    for way, bindings in (("in", manifest.inputs), ("out", manifest.outputs)):
        for binding in bindings:
            (row,) = (r for r in rows if r[:2] == [way, binding.name])
            assert ("*" in row) == (binding.kind == "buffer")
            assert binding.dtype in row
            assert row[-1] == binding.device
    assert [r for r in rows if r[:1] == ["kvgraph.update_and_attend"]] == [
        ["kvgraph.update_and_attend", "4"]
    ]
    for name, entry in manifest.files.items():
        assert [name, f"{entry.size:,}", entry.chunks[0][:16], "yes"] in rows
    assert manifest.identity.hex() in outcome.out
    for text in ("32 tokens a page", "bfloat16 paged: 4 layers"):
        assert text in outcome.out
    assert "num_page_slots x 2 x 4" in outcome.out


def test_the_experts_of_a_mixture(
    model_folder: Callable[[str], Path], compiled: Callable[..., Path]
) -> None:
    """8 experts of 128 are at work on a token, and are read by a step of one."""
    (mixture,) = kvgraph.load(compiled("qwen3_moe")).manifest.mixtures
    said = succeed("inspect", compiled("qwen3_moe")).out
    line = " ".join(said.split())
    assert (
        f"{mixture.layers} layers of {mixture.experts}, {mixture.active} for a token: "
        f"{mixture.parameters:,} parameters, {mixture.active_parameters:,} at work on a token"
        in line
    )
    assert mixture.active_parameters == mixture.parameters * 8 // 128
    assert "a step reads 9.0 MiB of their 144.0 MiB with 1 row, about 141.7 MiB with 64" in line
    plan = succeed("plan", model_folder("qwen3_moe"), "--memory", "1GiB").out
    made = json.loads(succeed("plan", model_folder("qwen3_moe"), "--memory", "1GiB", "--json").out)
    rest = made["parameters"] - mixture.parameters
    assert made["active_parameters"] == rest + mixture.active_parameters
    assert f"{made['parameters']:,}; {made['active_parameters']:,}" in plan
    read = made["read_by_step"]
    assert read["1"] < read["64"] <= made["weights"]
    assert "weights read by a step of 1 and 64 rows" in plan


def test_inspect_json(artifact: Path) -> None:
    outcome = succeed("inspect", artifact, "--json")
    assert outcome.err == ""
    manifest = json.loads(outcome.out)
    on_disk = json.loads((artifact / "manifest.json").read_text())
    del on_disk["sha256"]
    assert manifest == on_disk
    assert [binding["name"] for binding in manifest["inputs"]] == [
        "tokens",
        "input_row_offsets",
        "logits_indices",
        "kv_blocks",
        "cache_lengths",
        "lookup_table",
        "max_lengths",
    ]
    assert [(b["name"], b["alias"]) for b in manifest["outputs"]] == [
        ("logits", None),
        ("kv_blocks", "kv_blocks"),
    ]


def test_verify(artifact: Path) -> None:
    outcome = succeed("verify", artifact)
    assert outcome.err == ""
    assert re.fullmatch(rf"{re.escape(str(artifact))}: intact: 7 files, .* MiB\n", outcome.out)
    summary = json.loads(succeed("verify", artifact, "--json").out)
    assert summary["artifact"] == str(artifact)
    assert summary["architecture"] == "llama"


# -- generate


def test_generate_streams_the_text_alone(artifact: Path) -> None:
    outcome = succeed("generate", artifact, PROMPT, "--max-new-tokens", 20)
    engine = kvgraph.Engine(artifact)
    completion = engine.generate([PROMPT], kvgraph.SamplingParams(max_new_tokens=20))[0]
    assert outcome.out == completion.text + "\n"
    figures = r"\d+\.\d\d s \(\d+\.\d tokens/s\)\n"
    prompt = rf"prompt: 4 tokens, 0 cached, {figures}"
    assert re.fullmatch(prompt + rf"generated: 20 tokens, {figures}", outcome.err)


def test_generate_json(artifact: Path) -> None:
    completion = json.loads(generate(artifact, "--max-new-tokens", 8, "--json"))
    assert list(completion) == [field.name for field in fields(kvgraph.Completion)]
    assert completion["error"] is None
    assert completion["finish_reason"] == "length"
    assert len(completion["token_ids"]) == 8
    assert completion["text"] + "\n" == generate(artifact, "--max-new-tokens", 8)


def test_generate_json_of_a_request_that_failed(artifact: Path) -> None:
    """What came before it failed is printed; the sentence and the exit code are as without."""
    done = kvgraph.Completion("1", [5], "a", "error", error="request 1: logits: not numbers")
    with mock.patch("kvgraph.runtime.engine.Engine.generate", return_value=[done]):
        outcome = run("generate", artifact, PROMPT, "--json")
    assert (outcome.code, outcome.err) == (2, "kvgraph: request 1: logits: not numbers\n")
    assert json.loads(outcome.out)["finish_reason"] == "error"


def test_generate_stops(artifact: Path) -> None:
    whole = generate(artifact, "--max-new-tokens", 8).strip("\n")
    asked = ("--max-new-tokens", 8, "--stop", "never this", "--stop", whole[5:8])
    assert generate(artifact, *asked) == whole[:5] + "\n"
    assert json.loads(generate(artifact, *asked, "--json"))["stop_reason"] == whole[5:8]


def test_a_seed_repeats(artifact: Path) -> None:
    hot = ("--temperature", 1.2, "--top-k", 50, "--top-p", 0.95, "--max-new-tokens", 24)
    first = generate(artifact, *hot, "--seed", 1)
    assert generate(artifact, *hot, "--seed", 1) == first
    assert generate(artifact, *hot, "--seed", 2) != first
    assert generate(artifact, *hot, "--top-k", 1) == generate(artifact, "--max-new-tokens", 24)


@pytest.mark.parametrize(
    "options",
    [
        ("--session", "reference"),
        ("--session", "onnxruntime", "--threads", 1),
        ("--num-pages", 2),
        ("--ignore-eos",),
    ],
)
def test_options_that_leave_the_text_as_it_is(artifact: Path, options: Sequence[Any]) -> None:
    short = ("--max-new-tokens", 6)
    assert generate(artifact, *short, *options) == generate(artifact, *short)


def test_a_server_names_its_model_by_the_folder(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact)
    with mock.patch("kvgraph.serve.server.serve") as listen:
        succeed("serve", ".")
    assert listen.call_args.args[0] == "tiny [red]:cat:"


# -- the shape of it, from outside


def process(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_a_process_writes_text_to_stdout_and_all_else_to_stderr(artifact: Path) -> None:
    done = process("generate", artifact, PROMPT, "--max-new-tokens", 12, check=True)
    assert done.stdout == generate(artifact, "--max-new-tokens", 12)
    assert re.fullmatch(r"prompt: .*\ngenerated: 12 tokens, .* tokens/s\)\n", done.stderr)


def test_a_reader_that_leaves_early_sees_no_traceback(artifact: Path) -> None:
    command = [*COMMAND, "generate", str(artifact), PROMPT, "--max-new-tokens", "1900"]
    with subprocess.Popen(
        [*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        wait_until_it_writes(running)
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait() not in (0, 2)


def plain(text: str) -> str:
    """Without the colours that some CI services ask for."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "memory: expected enough for this command on this machine, got too little"),
        (MemoryError("memory: expected 3, got 2"), "memory: expected 3, got 2"),
        (OSError(), "OSError"),
        (OSError("a/b: expected 3, got 2"), "a/b: expected 3, got 2"),
        (
            PermissionError(1, "Operation not permitted"),
            "system: expected a call of this command to succeed, got 'Operation not permitted'; ",
        ),
        (
            OSError(24, "Too many open files"),
            "system: expected a call of this command to succeed, got 'Too many open files'; raise ",
        ),
        (
            ImportError("a.so: failed to map segment from shared object"),
            "a.so: failed to map segment from shared object; raise the limit of memory",
        ),
        (
            FileExistsError(17, "File exists", "a/b"),
            "a/b: expected a path that can be used, got 'File exists'\n",
        ),
        (
            OSError(24, "Too many open files", "a/b"),
            "a/b: expected a path that can be used, got 'Too many open files'; raise the limit",
        ),
    ],
)
def test_an_error_without_a_text_is_a_sentence_too(
    error: Exception, text: str, artifact: Path
) -> None:
    with mock.patch("kvgraph.runtime.artifact.verify", side_effect=error):
        outcome = run("verify", artifact)
    assert outcome.code == 2
    assert outcome.err.startswith(f"kvgraph: {text}")


def test_help_lists_the_commands() -> None:
    text = plain(succeed("--help").out)
    for command in ("chat", "compile", "generate", "inspect", "plan", "verify"):
        assert re.search(rf"^ +{command} +[A-Z]", text, re.MULTILINE)
        assert f"kvgraph {command} [OPTIONS]" in plain(succeed(command, "--help").out)


@pytest.mark.parametrize("group", [(), ("cache",)])
def test_no_command_shows_the_help(group: Sequence[str]) -> None:
    outcome = run(*group)
    assert outcome.code == 2
    assert "Commands" in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "m", "x", "--threads", 0), "--threads: .*1.*"),
        (("generate", "m", "x", "--threads", "abc"), "--threads: .*integer.*"),
        (("generate", "m", "x", "--collective-timeout", "nan"), "--collective-timeout: .*0.001.*"),
        (("serve", "m", "--nice", 30), "--nice: .*19.*"),
        (("compile", "m", "-o", "x", "--cache", "foo"), "--cache: 'foo' is not one of .*"),
        (("generate", "m", "x", "--bogus"), "no such option.*; kvgraph generate --help .*"),
        (("generate", "m"), "missing argument 'prompt'; kvgraph generate --help .*"),
        (("bogus",), "no such command 'bogus'; kvgraph --help shows what it takes"),
    ],
)
def test_a_call_that_is_refused_gets_a_sentence(arguments: Sequence[Any], message: str) -> None:
    """It names what was given, what was expected and what came."""
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    said = plain(outcome.err)
    assert re.fullmatch(f"kvgraph: {message}\n", said), said
    if message.startswith("--"):
        assert str(arguments[-1]) in said


def test_one_token_is_no_tokens(artifact: Path) -> None:
    outcome = succeed("generate", artifact, "x", "--max-new-tokens", 1)
    assert re.fullmatch(r"prompt: 2 tokens, .*\ngenerated: 1 token, .*\n", outcome.err)
