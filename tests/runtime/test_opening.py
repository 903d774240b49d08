"""Sessions over files that their frameworks refuse: one sentence with the version that refuses."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

import kvgraph
from kvgraph.errors import ArtifactError, MissingDependencyError
from kvgraph.runtime.sessions import onnxruntime as sessions
from kvgraph.runtime.sessions.opening import opening
from kvgraph.runtime.sessions.program_file import _of_program, require_no_code
from tests.bad_input.damage import edit_manifest
from tests.support.artifacts import rehash

Compiled = Callable[..., Path]

ORT = f"onnxruntime {onnxruntime.__version__}"


@pytest.fixture
def artifact(tmp_path: Path, compiled: Compiled) -> Path:
    return Path(shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact"))


def refusal(folder: Path, kind: str | None = None) -> str:
    rehash(folder)
    with pytest.raises(ArtifactError) as caught:
        kvgraph.load(folder).session(kind)
    (sentence,) = str(caught.value).splitlines()
    return sentence


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


def set_page_size(model: Any) -> None:
    for pool in (model.graph.input[3], model.graph.output[1]):
        assert pool.name.startswith("kv_blocks")
        pool.type.tensor_type.shape.dim[3].dim_value = 8


def set_token_dtype(model: Any) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64


def set_opset(model: Any) -> None:
    next(o for o in model.opset_import if not o.domain).version = 99


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a newer IR": (
        lambda m: setattr(m, "ir_version", 99),
        "IR version: expected at most {ir} from",
    ),
    "a newer opset": (set_opset, "Opset: expected at most {} of ai.onnx from"),
    "another op": (
        lambda m: setattr(m.graph.node[0], "op_type", "Nope"),
        "expected a model that {ort} takes, got one that it refuses: This is an invalid model.",
    ),
    "another input": (
        lambda m: setattr(m.graph.input[0], "name", "nope"),
        "expected a model that {ort} takes, got one that it refuses: Invalid model.",
    ),
    "one input more": (
        lambda m: m.graph.input.append(
            onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [1])
        ),
        "inputs: expected ['cache_lengths', 'input_row_offsets', ",
    ),
    "another page size": (
        set_page_size,
        "kv_blocks: expected float32 ['num_page_slots', 2, 4, 16, 4, 16] from the manifest, got "
        "float32 ['num_page_slots', 2, 4, 8, 4, 16]",
    ),
    "another dtype": (
        set_token_dtype,
        "tokens: expected int32 ['total_seq_len'] from the manifest, got int64 ['total_seq_len']",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_model_that_onnx_runtime_refuses(artifact: Path, case: str) -> None:
    change, message = CHANGES[case]
    edit(artifact, change)
    text = refusal(artifact)
    assert text.startswith(f"{artifact}/model.onnx: {message.split('{')[0]}")
    assert text.count("[ONNXRuntimeError]") == text.count("/onnxruntime_src/") == 0
    if "newer" in case:
        assert f"from {ORT}, got 99; pip install --upgrade 'kvgraph[onnx]'" in text


@pytest.mark.parametrize("case", ["one input more", "another page size", "another dtype"])
def test_a_model_that_the_reference_refuses(artifact: Path, case: str) -> None:
    change, message = CHANGES[case]
    edit(artifact, change)
    assert refusal(artifact, "reference").startswith(f"{artifact}/model.onnx: {message}")


def test_a_step_that_does_not_fit_is_told_with_its_dims() -> None:
    """ONNX Runtime's own words, on several lines; other messages are in the last one."""
    said = (
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: kv_blocks "
        "for the following indices\n index: 3 Got: 8 Expected: 4\n index: 5 Got: 1 Expected: 2\n "
        "Please fix either the inputs/outputs or the model."
    )
    assert sessions.last_sentence(RuntimeError(said)) == (
        "Got invalid dimensions for input: kv_blocks for the following indices "
        "index: 3 Got: 8 Expected: 4 index: 5 Got: 1 Expected: 2"
    )
    assert sessions.last_sentence(RuntimeError("a\nb\n")) == "b"
    assert sessions.last_sentence(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : Load model from a failed:/src/model.cc:1 void f() "
            "Unsupported model IR version: 10, max supported IR version: 9\n",
            "IR version: expected at most 9 from onnxruntime 1.2.3, got 10; pip install",
        ),
        (
            "[ONNXRuntimeError] : 1 : FAIL : Load model from a failed:/src/x.h:46 void g() ONNX "
            "Runtime only *guarantees* support for models stamped with official released onnx "
            "opset versions. Opset 23 is under development and support for this is limited. The "
            "operator schemas may change. Current official support for domain ai.onnx is till "
            "opset 22.\n",
            "Opset: expected at most 22 of ai.onnx from onnxruntime 1.2.3, got 23; pip install",
        ),
    ],
)
def test_an_older_onnx_runtime_is_named_with_what_it_lacks(said: str, message: str) -> None:
    """Its own words, of 1.17 and 1.22."""
    older: Any = type("Older", (), {"__version__": "1.2.3"})
    error = sessions._refusal(older, Path("model.onnx"), RuntimeError(said))
    assert str(error).startswith(f"model.onnx: {message}")


def test_an_onnx_runtime_that_is_too_old_for_our_ops() -> None:
    class Options:
        def register_custom_ops_library(self, path: str) -> None:
            raise RuntimeError(
                "[ONNXRuntimeError] : 1 : FAIL : kvgraph: expected ONNX Runtime 1.28 or newer, got "
                "1.27.1"
            )

    message = (
        r"^onnxruntime: expected ONNX Runtime 1.28 or newer, got 1.27.1; pip install --upgrade"
    )
    with pytest.raises(MissingDependencyError, match=message):
        sessions.register_ops(Options())


def test_a_limit_that_a_framework_meets_is_named() -> None:
    with (
        pytest.raises(
            ArtifactError, match=r"refuses \(RuntimeError: .*; raise .* \(`ulimit -n`\)$"
        ),
        opening(Path("model.pt2"), "torch"),
    ):
        raise RuntimeError("filesystem error: Too many open files")


def test_an_onnx_runtime_that_cannot_be_imported(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('built for another NumPy')")
    code = f"import kvgraph; kvgraph.load({str(artifact)!r}).session()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert (
        "MissingDependencyError: onnxruntime: needed to run this artifact, installed, and" in last
    )
    assert "built for another NumPy" in last
    assert last.endswith("pip install --upgrade 'kvgraph[onnx]'")


GARBAGE = b"garbage " * 99


@pytest.mark.parametrize("content", [b"", GARBAGE, b"PK\x03\x04" + GARBAGE])
@pytest.mark.parametrize(
    ("backend", "kind", "name"),
    [
        ("onnx", None, "model.onnx"),
        ("onnx", None, "weights.safetensors"),
        ("onnx", "reference", "model.onnx"),
        ("torch", None, "model.pt2"),
        ("torch", None, "weights.safetensors"),
    ],
)
def test_files_that_are_something_else(
    backend: str, kind: str | None, name: str, content: bytes, compiled: Compiled, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(compiled("tiny-llama", backend), tmp_path / "artifact"))
    (folder / name).write_bytes(content)
    text = refusal(folder, kind)
    assert text.startswith(f"{folder}/{name}: ")
    versions = (
        "from the manifest",
        ORT,
        f"onnx {onnx.__version__}",
        f"torch {torch.__version__}",
        "safetensors",
    )
    assert any(version in text for version in versions)


class Touch:
    """What is unpickled of this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def with_pickle(archive: Path, where: str, touched: Path) -> None:
    """Write the program again, with a pickle in place of what is at `where`."""
    content = {}
    with zipfile.ZipFile(archive) as old:
        content = {entry.filename: old.read(entry) for entry in old.infolist()}
    pickled = io.BytesIO()
    torch.save(Touch(touched), pickled)
    (found,) = (name for name in content if where in name)
    if where.endswith(".json"):
        config = json.loads(content[found])
        payload = next(iter(config["config"].values()))
        payload["use_pickle"] = True
        content[found] = json.dumps(config).encode()
        content[f"{found.rpartition('/')[0]}/{payload['path_name']}"] = pickled.getvalue()
    else:
        content[found] = pickled.getvalue()
    with zipfile.ZipFile(archive, "w") as new:
        for name, data in content.items():
            new.writestr(name, data)


@pytest.mark.parametrize(
    "where", ["model_weights_config.json", "model_constants_config.json", "data/sample_inputs/"]
)
def test_a_program_that_holds_pickles_is_not_opened(
    where: str, compiled: Compiled, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    whole = compiled("tiny-llama", "torch", target="cuda:sm_90")
    require_no_code(whole / "model.pt2")
    path, touched = Path(shutil.copy(whole / "model.pt2", tmp_path)), tmp_path / "touched"
    with_pickle(path, where, touched)
    with pytest.raises(ArtifactError, match=r"model.pt2: expected a program without pickles"):
        require_no_code(path)
    assert not touched.exists()


CODE = "__import__('os').system('true')"
OTHERS = {
    "another case of a name that torch's reader takes": {"model/data/SAMPLE_INPUTS/model.PT": b"x"},
    "torch's older form": {"serialized_state_dict.json": b"x"},
    "a library": {"model/data/aotinductor/model/x.wrapper.so": b"x"},
    "a name in another case": {"model/Archive_version": b"0"},
}
EXPRESSIONS = [
    *(CODE, "exec(chr(49))", "Symbol('s1', x=open('a'))", "S('s1')", "s1.args", "9**9**9", 7),
    *("(lambda: 1)()", "[s1]", "Add(s1, 'x')", "Symbol('A b')", "s1 if s1 else s1"),
]


@pytest.mark.parametrize("entries", OTHERS.values(), ids=OTHERS)
def test_a_program_with_other_files_is_not_opened(
    entries: dict[str, bytes], compiled: Compiled, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    whole = compiled("tiny-llama", "torch", target="cuda:sm_90")
    path = Path(shutil.copy(whole / "model.pt2", tmp_path))
    with zipfile.ZipFile(path, "a") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(ArtifactError, match=r"model.pt2: expected a program without .* got '[ms]"):
        require_no_code(path)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_dims_that_are_code_are_not_read(expression: object) -> None:
    dim = {"as_int": 3, "as_expr": {"expr_str": expression, "hint": {"as_int": 2}}}
    assert list(_of_program({"nodes": [{"sizes": [dim]}]}))


def test_dims_that_compute_are_read() -> None:
    dims = ["Symbol('s21', positive=True)", "Mul(Integer(64), Symbol('s9', integer=True))"]
    dims += ["FloorDiv(s0, 2)", "-(2*s1 // 4) % 3 + Max(1, u0)", "true"]
    assert not list(_of_program([{"expr_str": dim} for dim in dims]))


def test_a_program_for_cuda_that_is_something_else(compiled: Compiled, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    from kvgraph.runtime.artifact import Artifact, verify
    from kvgraph.runtime.sessions.program import load_program

    whole = compiled("tiny-llama", "torch", target="cuda:sm_90")
    folder = Path(shutil.copytree(whole, tmp_path / "artifact"))
    (folder / "model.pt2").write_bytes(GARBAGE)
    rehash(folder)
    gpu: Any = type("Gpu", (), {"device": torch.device("cpu"), "arch": "sm_90"})
    with pytest.raises(
        ArtifactError, match=rf"model.pt2: expected a file that torch {torch.__version__[:3]}"
    ):
        load_program(Artifact(folder, verify(folder).manifest), gpu)


def test_a_program_for_cuda_of_another_page_size(compiled: Compiled, tmp_path: Path) -> None:
    """What the manifest says, in its layout and its bindings, is not what was compiled."""
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    from kvgraph.runtime.artifact import Artifact, verify
    from kvgraph.runtime.sessions.program import load_program

    whole = compiled("tiny-llama", "torch", target="cuda:sm_90")
    folder = Path(shutil.copytree(whole, tmp_path / "artifact"))

    def other(fields: dict[str, Any]) -> None:
        fields["layout"]["page_size"] = 32
        for pool in (fields["inputs"][3], fields["outputs"][1]):
            pool["dims"][3] = 32

    edit_manifest(folder, other)
    gpu: Any = type("Gpu", (), {"device": torch.device("cpu"), "arch": "sm_90"})
    message = r"kv_blocks: expected float32 \['num_page_slots', 2, 4, 32, .* got float32 \[.*, 16, "
    with pytest.raises(ArtifactError, match=f"model.pt2: {message}"):
        load_program(Artifact(folder, verify(folder).manifest), gpu)


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (errno.ENOSPC, "set TMPDIR to such a folder$"),
        (errno.EMFILE, r"raise .* \(`ulimit -n`\)$"),
        (errno.EFBIG, r"raise .* \(`ulimit -f`\)$"),
        (None, "set TMPDIR to such a folder, or raise the limit of memory"),
    ],
)
def test_a_temporary_folder_that_cannot_hold_a_program(
    compiled: Compiled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int | None,
    step: str,
) -> None:
    """It is named, and not the program; nothing is left there."""
    why = "failed to map segment" if error is None else os.strerror(error)

    def fail(*arguments: Any) -> None:
        raise RuntimeError(f"a.so: {why}") if error is None else OSError(error, why)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if error is None:
        monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", fail)
    else:
        monkeypatch.setattr(zipfile.ZipFile, "extractall", fail)
    message = rf"{tmp_path}: expected a temporary folder with room for .* got '{why}'; {step}"
    with pytest.raises(ArtifactError, match=message):
        kvgraph.load(compiled("tiny-llama", "torch")).session()
    assert list(tmp_path.iterdir()) == []


def test_an_unpacked_program_is_removed_once_it_is_loaded(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    session = kvgraph.load(compiled("tiny-llama", "torch")).session()
    assert list(tmp_path.iterdir()) == []
    del session
