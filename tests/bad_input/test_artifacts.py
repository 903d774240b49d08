"""Artifacts whose files or manifest were changed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.contract.manifest import listed_names, read_manifest
from kvgraph.errors import ArtifactError
from tests.bad_input.damage import edit_manifest, sentence
from tests.support.command_line import run
from tests.support.outputs import another_user

# -- artifacts: their files


FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "model.onnx",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "weights.safetensors",
)


def test_these_are_all_files(artifact: Path) -> None:
    manifest = kvgraph.load(artifact).manifest
    assert tuple(manifest.files) == FILES
    assert sorted(os.listdir(artifact)) == sorted([*FILES, "manifest.json"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_changed_byte(artifact: Path, name: str, place: float) -> None:
    path = artifact / name
    content = bytearray(path.read_bytes())
    before = hashlib.sha256(content).hexdigest()
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)
    after = hashlib.sha256(content).hexdigest()
    assert sentence(run("verify", artifact)) == (
        f"{path}: chunk 0: expected SHA-256 {before} from the manifest, got {after}: "
        "the file was changed"
    )
    with pytest.raises(ArtifactError, match="the file was changed"):
        kvgraph.Engine(artifact)
    assert kvgraph.load(artifact, verify=False).folder == artifact


@pytest.mark.parametrize("bit", [0x01, 0x20, 0x80])
def test_a_changed_byte_of_the_manifest(artifact: Path, bit: int) -> None:
    """Wherever it is, unless it is white space between fields and stays that."""
    path = artifact / "manifest.json"
    content = path.read_bytes()
    intact = read_manifest(artifact)
    unnoticed = 0
    for at, byte in enumerate(content):
        path.write_bytes(content[:at] + bytes([byte ^ bit]) + content[at + 1 :])
        try:
            assert read_manifest(artifact) == intact
            unnoticed += 1
            assert chr(byte).isspace()
        except ArtifactError as error:
            assert str(error).startswith(f"{path}: ")
    assert unnoticed < 0.02 * len(content)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(artifact: Path, name: str) -> None:
    size = (artifact / name).stat().st_size
    (artifact / name).unlink()
    expected = f"{artifact / name}: expected {size} bytes from the manifest, got none"
    assert sentence(run("verify", artifact)) == expected


def test_something_else_in_place_of_a_file(artifact: Path) -> None:
    path = artifact / "weights.safetensors"
    size = path.stat().st_size
    path.unlink()
    os.mkfifo(path)
    expected = f"{path}: expected {size} bytes from the manifest, got "
    assert sentence(run("verify", artifact)) == f"{expected}a pipe"
    path.unlink()
    path.mkdir()
    assert sentence(run("verify", artifact)) == f"{expected}a folder"


@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_a_file_of_another_size(artifact: Path, change: int) -> None:
    path = artifact / "weights.safetensors"
    size = path.stat().st_size
    os.truncate(path, size + change)
    expected = f"{path}: expected {size} bytes from the manifest, got {size + change}"
    assert sentence(run("verify", artifact)) == expected


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("name", ["../outside", "{tmp_path}/outside", "link", "folder/outside"])
def test_a_path_that_leaves_the_folder(
    artifact: Path, tmp_path: Path, name: str, command: str
) -> None:
    """By its name, or by a link; although the file is there and its hash is right."""
    name = name.format(tmp_path=tmp_path)
    (tmp_path / "outside").write_text("secret")
    (artifact / "link").symlink_to(tmp_path / "outside")
    (artifact / "folder").symlink_to(tmp_path)
    entry = {"size": 6, "chunks": [hashlib.sha256(b"secret").hexdigest()]}
    edit_manifest(artifact, lambda fields: fields["files"].update({name: entry}))
    how = (
        ""
        if "outside" in name and "folder" not in name
        else ", a link that leads out or in a circle"
    )
    expected = f"{artifact}: expected files inside the folder, got {name!r}{how}"
    assert sentence(run(command, artifact)) == expected


def test_a_file_replaced_by_a_link_to_the_outside(artifact: Path, tmp_path: Path) -> None:
    path = artifact / "weights.safetensors"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert sentence(run("verify", artifact)) == (
        f"{artifact}: expected files inside the folder, got 'weights.safetensors', a link that "
        "leads out or in a circle"
    )


def test_a_manifest_with_a_key_twice(artifact: Path) -> None:
    """Another reader of JSON would take the other value, which no hash covers."""
    path = artifact / "manifest.json"
    path.write_text(path.read_text().replace('"backend":', '"backend": "torch", "backend":', 1))
    said = f"{path}: expected a manifest, got a damaged one (expected each key once in an object, "
    for command in ("verify", "inspect"):
        assert sentence(run(command, artifact)) == said + "got 'backend' twice)"


# -- artifacts: the manifest


@pytest.mark.parametrize("command", [("verify",), ("inspect",), ("generate",)])
def test_no_artifact(tmp_path: Path, command: tuple[str]) -> None:
    rest = ("text",) if command == ("generate",) else ()
    nowhere = tmp_path / "nowhere"
    expected = f"{nowhere}: expected an artifact folder, got nothing there"
    assert sentence(run(*command, nowhere, *rest)) == expected
    expected = f"{tmp_path}: expected manifest.json in an artifact, got none"
    assert sentence(run(*command, tmp_path, *rest)).startswith(expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"{}", b'{"schema_version": "one"}', b"\xff\xfe", b'{"a": "\xff"}'],
)
def test_a_damaged_manifest(artifact: Path, content: bytes) -> None:
    (artifact / "manifest.json").write_bytes(content)
    text = sentence(run("verify", artifact))
    assert text.startswith(f"{artifact}/manifest.json: expected a manifest, got a damaged one (")


@pytest.mark.parametrize("name", ["manifest.json", "."])
def test_a_manifest_that_cannot_be_read(artifact: Path, name: str) -> None:
    """It is not called damaged."""
    path = artifact / name
    path.chmod(0)
    message = r"artifact/manifest\.json: expected a file that can be read, got 'Permission denied'"
    for read in (read_manifest, listed_names):
        with another_user(artifact), pytest.raises(ArtifactError, match=message):
            read(artifact)
    path.chmod(0o755)


def test_a_truncated_manifest(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert "got a damaged one" in sentence(run("verify", artifact))


MIXTURE = {"layers": 1, "experts": 4, "active": 1, "parameters": 1, "bytes": 1}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields.pop("model"), r"model: expected ModelInfo, got none"),
        (
            lambda fields: fields["model"].update(vocab_size="many"),
            r"model\.vocab_size: expected int, got 'many'",
        ),
        (lambda fields: fields.update(files=[]), r"files: expected dict, got \[\]"),
        (
            lambda fields: fields["model"].update(architecture="x\x1b[2J"),
            r"expected text without control characters, in UTF-8, got 'x\\x1b\[2J'",
        ),
        (
            lambda fields: fields["outputs"][0].update(dtype="float32\nkvgraph: all is well"),
            r"expected text without control characters, in UTF-8, got 'float32\\nkvgraph: all",
        ),
        (
            lambda fields: fields.update(layers=[{"leaf": "", "index": 99}]),
            r"layers: expected layers of the layout, got '' 99",
        ),
        (
            lambda fields: fields["layers"].pop(),
            r"layers: expected 4 places in cache '' from the layout, got 3",
        ),
        (
            lambda fields: fields.update(flavour=1),
            r"flavour: expected no field of this name, got one",
        ),
        (
            lambda fields: fields["layers"][1].update(flavour=1),
            r"layers\[1\]\.flavour: expected no field of this name, got one",
        ),
        (
            lambda fields: fields.update(weights="zz"),
            r"weights: expected one of \['fp32', .*'float32'\], got 'zz'",
        ),
        (
            lambda fields: fields.update(dtype="zz"),
            r"dtype: expected one of \['float32', .*\], got 'zz'",
        ),
        (
            lambda fields: fields["ops"].update(Add=0),
            r"ops\.Add: expected >= 1, got 0",
        ),
        (
            lambda fields: fields.update(mixtures=[MIXTURE | {"experts": 0}]),
            r"mixtures\[0\]\.experts: expected 1 to 2\*\*63 - 1, got 0",
        ),
        (
            lambda fields: fields.update(mixtures=[MIXTURE | {"bytes": 1 << 63}]),
            r"mixtures\[0\]\.bytes: expected 1 to 2\*\*63 - 1, got 9223372036854775808",
        ),
    ],
)
def test_a_manifest_of_other_fields(
    artifact: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit_manifest(artifact, edit)
    text = sentence(run("verify", artifact))
    assert re.search(f"expected a manifest, got a damaged one .*{message}", text), text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "cpu:avx2", "target: expected 'cpu' from this machine's .*'cpu:avx2'"),
        (
            "op_abi_version",
            77,
            r"op_abi_version: expected \d+ from this kvgraph, got 77; compile the model again .*",
        ),
    ],
)
def test_an_artifact_for_another_machine(
    artifact: Path, field: str, value: Any, message: str
) -> None:
    edit_manifest(artifact, lambda fields: fields.update({field: value}))
    text = sentence(run("generate", artifact, "The"))
    assert re.fullmatch(f"{artifact}/manifest.json: {message}", text)
    with pytest.raises(ArtifactError, match=message):
        kvgraph.load(artifact, verify=False)
    assert run("inspect", artifact).code == 0


def test_an_artifact_of_an_unknown_backend(artifact: Path) -> None:
    edit_manifest(artifact, lambda fields: fields.update(backend="neuron"))
    text = sentence(run("generate", artifact, "The"))
    assert text == (
        f"{artifact}/manifest.json: backend: expected one of ['onnx', 'torch', 'tensorrt', "
        "'torch-tensorrt'], got 'neuron'; the package that adds it must be installed here"
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["files"].pop("model.onnx"), "files: expected model.onnx for backend 'onnx'"),
        (
            lambda m: m["model"].update(vocab_size=7),
            r"outputs\[0\]: expected logits float32 \['num_logits', 7\]",
        ),
        (lambda m: m["layout"].update(page_size="16"), "layout.page_size: expected int, got '16'"),
        (lambda m: m["layout"].update(flavour=1), "layout: expected fields of a cache.*flavour"),
        (
            lambda m: m["inputs"][3].update(device="cpu:x"),
            r"inputs\[3\]: expected .* got .* on cpu:x",
        ),
        (
            lambda m: [each.update(device="cuda:0") for each in m["inputs"] + m["outputs"]],
            r"inputs\[0\]: expected tokens .* on cpu:0 from the layout, got tokens .* on cuda:0$",
        ),
        (
            lambda m: m["outputs"][1].update(alias=None),
            r"expected kv_blocks .* \(buffer\) with the address of kv_blocks from the layout, "
            r"got kv_blocks .* \(buffer\)$",
        ),
        (
            lambda m: m["outputs"][1].update(alias="tokens"),
            r"got kv_blocks .* with the address of tokens$",
        ),
        (
            lambda m: m["inputs"][0].update(kind="zz"),
            r"inputs\[0\]: expected tokens .* on cpu:0 from the layout, got tokens .* \(zz\)$",
        ),
        (
            lambda m: m["layout"].update(window_size=4),
            r"layers\[0\]\.window: expected 4 from the layout, got 0 from the graph's attention$",
        ),
        (
            lambda m: m["layout"].update(v_head_dim=8),
            r"layers\[0\]\.v_head_dim: expected 8 from the layout, got 16 from the graph's att",
        ),
        (
            lambda m: m["layers"][1].update(window=-5),
            r"layers\[1\]\.window: expected 0 to 2\*\*63 - 1, got -5\)$",
        ),
        (
            lambda m: m.update(ops={"x": 1}),
            r"ops: expected 4 of kvgraph\.update_and_attend, one for each of `layers`, got 0$",
        ),
        (
            lambda m: m["layers"].append(m["layers"][0]),
            r"ops: expected 5 of kvgraph\.update_and_attend, one for each of `layers`, got 4$",
        ),
        (
            lambda m: m["inputs"].pop(),
            r"inputs\[6\]: expected max_lengths int32 .* from the layout, got none$",
        ),
        (
            lambda m: m["inputs"].append(m["inputs"][0] | {"name": "more"}),
            r"inputs\[7\]: expected no more from the layout, got more int32 .* on cpu:0$",
        ),
        (
            lambda m: m["outputs"].pop(),
            r"outputs\[1\]: expected kv_blocks .* from the layout, got none$",
        ),
        (lambda m: m["inputs"][3].update(dims=[1]), r"inputs\[3\]: expected .*kv_blocks"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    artifact: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit_manifest(artifact, edit)
    text = sentence(run("verify", artifact))
    assert re.search(message, text), text


def test_a_manifest_of_before_is_read(artifact: Path) -> None:
    """It does not say what the attention of each layer sees."""

    def edit(fields: dict[str, Any]) -> None:
        for layer in fields["layers"]:
            assert (layer.pop("window"), layer.pop("v_head_dim")) == (0, 16)

    edit_manifest(artifact, edit)
    assert run("verify", artifact).code in (0, None)
