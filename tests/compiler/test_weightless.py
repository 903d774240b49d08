"""Weights that stay in the checkpoint: streamed files equal loaded ones; what has to be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

import kvgraph
from kvgraph import ModelError
from kvgraph.compiler import values
from kvgraph.compiler.cache import plan_cache
from kvgraph.compiler.export import export
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.model import Model
from kvgraph.compiler.targets.weights import save_weights
from kvgraph.compiler.weights import Weights
from kvgraph.contract.devices import virtual_devices
from kvgraph.contract.signature import GraphSignature
from kvgraph.kernels import aot
from tests.support import quantized
from tests.support.models import OVERRIDES, make_model

EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
UNCHECKED = "check: left out (--no-check)"
NO_TEXT = "tokenizer: the artifact takes token ids alone: there is no tokenizer.json"
NOTES = [NO_TEXT, UNCHECKED]


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights do not depend on them."""
    monkeypatch.setattr(aot, "compile_all", lambda variants, arch: [])


def exported(model: Model) -> ExportedProgram:
    plan = plan_cache(
        model.layers,
        dtype=model.dtype,
        quantization=None,
        page_size=16,
        devices=virtual_devices("cuda:sm_90"),
    )
    model.place(plan)
    signature = GraphSignature.of(plan.params.get_symbolic_inputs()[0], model.vocab_size)
    return export(model, signature, return_buffers=False)


def parts(path: Path) -> tuple[dict[str, str], bytes]:
    """A file's metadata, and everything else: safetensors' own writer gives that any order."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return metadata, json.dumps(header).encode() + content[8 + size :]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((name, "bfloat16") for name in OVERRIDES),
        ("llama", "float32"),
        ("gemma2", "float16"),
        ("gpt_oss", "float16"),  # its norms stay in float32
    ],
)
def test_a_streamed_file_is_the_loaded_one(
    architecture: str,
    dtype: str,
    tmp_path: Path,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "PIECE_BYTES", 1 << 10)  # rows of an embedding in many pieces
    folder = model_folder(architecture)
    loaded = huggingface.load(folder, dtype)
    weightless = huggingface.load(folder, dtype, weightless=True)
    assert weightless.checkpoint is not None
    assert all(isinstance(p, FakeTensor) for p in weightless.module.parameters())
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = exported(loaded), exported(weightless)
    assert str(first.graph) == str(second.graph)
    save_weights(first, tmp_path / "a")
    save_weights(second, tmp_path / "b", Weights(weightless.checkpoint))
    files = [tmp_path / name / "weights.safetensors" for name in "ab"]
    assert parts(files[0]) == parts(files[1])
    facts = ("layers", "vocab_size", "max_seq_len", "eos_token_ids", "bos_token_id", "files")
    for fact in facts:
        assert getattr(loaded, fact) == getattr(weightless, fact)


def test_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = make_model("llama", tmp_path / "whole")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    made = [compiled(folder, tmp_path / f"{folder.name}.kvg") for folder in (whole, sharded)]
    assert made[0].files["weights.safetensors"] == made[1].files["weights.safetensors"]
    assert made[1].notes == NOTES

    index = sharded / "model.safetensors.index.json"
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.rename(tmp_path / "away")
    assert refused(sharded, tmp_path).startswith(
        f"{sharded}: cannot read the weights: {shard.name}: "
    )
    index.write_text('{"weight_map": 3}')
    assert "index.json: expected a weight_map, got a damaged file" in refused(sharded, tmp_path)


def compiled(folder: Path, out: Path, dtype: str = "float32") -> Any:
    return kvgraph.compile(folder, out, target="cuda:sm_90", dtype=dtype, page_size=16, check=False)


def refused(folder: Path, tmp_path: Path, dtype: str = "float32") -> str:
    with pytest.raises(ModelError) as error:
        compiled(folder, tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.fixture
def llama(tmp_path: Path, model_folder: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "llama"))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), f"got none for some, such as {NORM}"),
        (
            lambda t: t.update({NORM: t[NORM][:3].clone()}),
            f"got other shapes than its config.json says, such as {NORM} [3] for [64]",
        ),
    ],
)
def test_incomplete_weights(llama: Path, tmp_path: Path, edit: Any, message: str) -> None:
    change(llama, edit)
    step = "take all files of the checkpoint from its publisher again"
    said = f"{llama}: expected weights for every parameter, {message}; {step}"
    assert refused(llama, tmp_path) == said


@pytest.mark.parametrize("keep", [0, 5, 1000, 100_000])
def test_truncated_weights(llama: Path, tmp_path: Path, keep: int) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert refused(llama, tmp_path).startswith(f"{llama}: cannot read the weights: model.safe")


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_named(llama: Path, tmp_path: Path, number: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING][150, 7] = float(number)

    change(llama, edit)
    where = f"{llama}/model.safetensors: {EMBEDDING}[150, 7]"
    assert refused(llama, tmp_path) == (
        f"{where}: expected a finite number in float32, got {number}"
    )


def test_numbers_that_the_dtype_does_not_hold_are_named(llama: Path, tmp_path: Path) -> None:
    change(llama, lambda t: t[NORM].__setitem__(5, 70000.0))
    assert refused(llama, tmp_path, "float16").endswith(
        f"{NORM}[5]: expected a finite number in float16, got 70000"
    )


def test_a_sum_that_is_too_large_is_no_error(llama: Path, tmp_path: Path) -> None:
    change(llama, lambda t: t[NORM].__setitem__(slice(0, 4), 2e38))
    assert compiled(llama, tmp_path / "out").notes == NOTES


def test_tensors_of_no_parameter_are_left(llama: Path, tmp_path: Path) -> None:
    change(llama, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(8)}))
    assert compiled(llama, tmp_path / "out").notes == NOTES
    stored = load_file(tmp_path / "out" / "weights.safetensors")
    assert not torch.equal(stored["model.model.rotary_emb.inv_freq"], torch.ones(8))


LORA = "model.layers.0.self_attn.q_proj.lora_A.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_tensors_that_a_user_would_miss_are_counted(form: str, llama: Path, tmp_path: Path) -> None:
    """Not a bias of zeros, which AutoGPTQ stores where a layer has none, nor layers that guess
    ahead."""
    config = llama / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    layers = json.loads(config.read_text())["num_hidden_layers"]
    ahead = {f"model.layers.{layers}.eh_proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3)}
    extra = {LORA: torch.ones(8, 64), BIAS: torch.zeros(64), **ahead}
    change(llama, lambda t: t.update(extra))
    if form == "bin":
        tensors = load_file(llama / "model.safetensors")
        torch.save(tensors, llama / "pytorch_model.bin")
        (llama / "model.safetensors").unlink()
    notes = compiled(llama, tmp_path / "out").notes
    count = "1 tensor" if form == "safetensors" else "2 tensors"  # whose numbers are not looked at
    said = f"weights: no place in the model for {count} of the checkpoint, such as {LORA}"
    assert [note for note in notes if "no place" in note] == [said]
    change_back = extra | {BIAS: torch.ones(64)}
    if form == "safetensors":
        change(llama, lambda t: t.update(change_back))
        notes = compiled(llama, tmp_path / "again").notes
        assert [
            note for note in notes if "no place for 2 tensors" in note.replace("in the model ", "")
        ]


def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """transformers makes one parameter of them, and its own file is the same as a streamed one."""
    folder = make_model("mixtral", tmp_path / "mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in load_file(
        folder / "model.safetensors"
    )
    assert compiled(folder, tmp_path / "out").notes == NOTES
    stored = load_file(tmp_path / "out" / "weights.safetensors")
    loaded = huggingface.load(folder, "float32").module.state_dict()
    made = {name.removesuffix(".packed"): tensor for name, tensor in stored.items()}
    for name, tensor in loaded.items():
        if name.endswith("gate_up_proj"):  # gate and up, row by row in turn
            half = tensor.shape[1] // 2
            tensor = torch.stack([tensor[:, :half], tensor[:, half:]], 2).reshape(tensor.shape)
        assert torch.equal(made[name], tensor)


ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
ROUTED |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4}


def test_buffers_that_are_stored(tmp_path: Path) -> None:
    """A router's correction is no parameter, and decides which experts a token takes."""
    folder = make_model("deepseek_v3", tmp_path / "model", **ROUTED, **LATENT)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    wanted = torch.tensor([3.0, -2.0, 1.0, 0.5])
    change(folder, lambda t: t[name].copy_(wanted))
    compiled(folder, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "weights.safetensors")[f"model.{name}"], wanted)
    manifest = kvgraph.compile(folder, tmp_path / "cpu", page_size=16)  # with its check
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    model = huggingface.load(folder, "float32", weightless=True).module
    assert torch.equal(dict(model.named_buffers())[f"model.{name}"], wanted)


BY_SOFTMAX = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("fp8", ROUTED | LATENT),
    "glm4_moe": ("awq", ROUTED),
    "dots1": ("fp8-block", ROUTED),
    "ernie4_5_moe": ("gptq", BY_SOFTMAX | {"moe_intermediate_size": 32}),
    "gpt_oss": ("mxfp4", {}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", KEPT)
def test_quantised_routers_and_norms_stay_in_float32(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    """Weights, their dtypes and logits are those that transformers has of the same numbers."""
    from transformers import AutoModelForCausalLM

    form, sizes = KEPT[architecture]
    folder, meant = tmp_path / "packed", tmp_path / "meant"
    quantized.make(form, make_model(architecture, tmp_path / "plain", **sizes), folder, meant)
    model: Any = huggingface.load(folder, dtype).module.model
    theirs = AutoModelForCausalLM.from_pretrained(
        meant,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="batched_mm",
    )
    found, expected = model.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    kept = [name for name, tensor in found.items() if tensor.dtype == torch.float32]
    assert kept or (architecture, dtype) == ("gpt_oss", "bfloat16")
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)


def test_a_quantised_router_on_a_gpu(tmp_path: Path) -> None:
    """Compile's own check of the program in bfloat16; no layer is passed through memory."""
    plain = make_model("deepseek_v3", tmp_path / "plain", **ROUTED, **LATENT)
    folder = quantized.make("fp8", plain, tmp_path / "packed")
    out = tmp_path / "out"
    manifest = kvgraph.compile(folder, out, target="cuda:sm_80", dtype="bfloat16", page_size=16)
    assert manifest.dtype == "bfloat16"
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    stored = load_file(out / "weights.safetensors")
    assert stored["model.model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert compiled(plain, tmp_path / "whole", "bfloat16").notes[-1] == UNCHECKED


def test_a_base_model_s_names(llama: Path, tmp_path: Path) -> None:
    """transformers finds `layers.0...` of a checkpoint that was saved without the head."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    made = compiled(llama, tmp_path / "first")
    change(llama, edit)
    again = compiled(llama, tmp_path / "second")
    assert again.notes == NOTES
    assert again.files["weights.safetensors"] == made.files["weights.safetensors"]


def test_tied_tensors_that_differ_are_two(tmp_path: Path) -> None:
    folder = make_model("gemma2", tmp_path / "gemma2")
    change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING] * 2}))
    manifest = compiled(folder, tmp_path / "out")
    assert manifest.notes == [
        f"weights: passed through memory: tied {EMBEDDING} and lm_head.weight differ",
        *NOTES,
    ]
    stored = load_file(tmp_path / "out" / "weights.safetensors")
    head = stored["model.lm_head.weight"]
    assert torch.equal(head, stored[f"model.{EMBEDDING}"] * 2)


def test_a_tied_tensor_may_be_stored_twice(tmp_path: Path) -> None:
    folder = make_model("gemma2", tmp_path / "gemma2")
    made = compiled(folder, tmp_path / "first")
    change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    again = compiled(folder, tmp_path / "second")
    assert again.notes == NOTES
    assert again.files["weights.safetensors"] == made.files["weights.safetensors"]


def test_a_type_that_is_no_weight_s_passes_through_memory(llama: Path, tmp_path: Path) -> None:
    change(llama, lambda t: t.update({NORM: torch.ones(64, dtype=torch.float8_e5m2)}))
    notes = compiled(llama, tmp_path / "out").notes
    assert notes == [f"weights: passed through memory: {NORM} is stored as F8_E5M2", *NOTES]


@pytest.mark.parametrize("table", [torch.float16, torch.float32])
@pytest.mark.parametrize("head", [torch.float16, torch.float32])
def test_a_tied_tensor_stored_twice_in_another_dtype(
    table: torch.dtype, head: torch.dtype, tmp_path: Path
) -> None:
    """What the model has of both is compared."""
    plain = make_model("llama", tmp_path / "plain", tie_word_embeddings=True)
    folder = quantized.make("fp8", plain, tmp_path / "packed")
    change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone().to(head)}))
    change(folder, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(table)}))
    model = huggingface.load(folder, "float16").module.state_dict()
    assert torch.equal(model["model.lm_head.weight"], model[f"model.{EMBEDDING}"])


def test_quantised_weights_whose_tied_tensors_differ(tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain", tie_word_embeddings=True)
    folder = quantized.make("fp8", plain, tmp_path / "packed")
    change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING] * 2}))
    assert quantized.refused(folder) == (
        f"{folder}: quantised weights: tied {EMBEDDING} and lm_head.weight differ; set "
        '"tie_word_embeddings": false in config.json to keep both, or compile the checkpoint that '
        "it was made from, with --weights int4 or int8"
    )
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    model = huggingface.load(folder, "float32").module.state_dict()
    assert torch.equal(model["model.lm_head.weight"], model[f"model.{EMBEDDING}"] * 2)
