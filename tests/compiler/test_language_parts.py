"""The language part of a larger model: its text is that of the whole, and so are its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import ModelError, UnsupportedError
from kvgraph.compiler import pipeline
from kvgraph.compiler.check.reference import eager, transformers_logits
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.folder import checkpoint_dtype
from tests.support import quantized
from tests.support.models import COMMON, greedy_tokens, make_model

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

# Model -> its language part and its other part; then what the whole is called.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"} | VISION, {}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"} | VISION, {}),
    "gemma3": ({"model_type": "gemma3_text"}, VISION, {"mm_tokens_per_image": 4}),
    "qwen2_5_vl": ({"rope_parameters": AXES}, QWEN_VISION, {}),
    "qwen3_vl": ({"rope_parameters": AXES}, QWEN_VISION, {}),
    "glm4v_moe": (
        {
            "rope_parameters": AXES | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        QWEN_VISION | {"out_hidden_size": 64, "image_size": 16, "patch_size": 8},
        {},
    ),
}


def make(name: str, folder: Path, *, tied: bool = False) -> Any:
    """Save a random model and return it."""
    text, vision, others = MODELS[name]
    config = transformers.AutoConfig.for_model(
        name, text_config=COMMON | text, vision_config=vision, **others
    )
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def filled(folder: Path) -> Any:
    """The language part, with its values in memory."""
    loaded = huggingface.load(folder, "float32", weightless=True)
    assert loaded.checkpoint is not None, loaded.loaded
    loaded.checkpoint.fill(loaded.module)
    return loaded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_whole_model(name: str, tied: bool, tmp_path: Path) -> None:
    whole = make(name, tmp_path / "model", tied=tied)
    loaded = filled(tmp_path / "model")
    ids = torch.arange(3, 33)
    with torch.no_grad(), eager(loaded.module.model):
        found = torch.from_numpy(transformers_logits(loaded.module.model, ids.numpy()))
        expected = whole(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def changed(folder: Path, **fields: Any) -> None:
    """config.json with other fields at its top; no generation_config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (folder / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", MODELS)
def test_end_and_begin_tokens_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    changed(tmp_path, eos_token_id=[1, 9], bos_token_id=7)
    loaded = huggingface.load(tmp_path, "float32", weightless=True)
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((1, 9), 7)


@pytest.mark.parametrize(
    ("text", "whole", "found"),
    [
        ({"dtype": "float16", "torch_dtype": "float32"}, {"dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, "float16"),
        ({"dtype": None}, {"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({}, {"torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, "float32"),
        (None, {"torch_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_where_a_dtype_is_named(text: object, whole: dict[str, Any], found: str) -> None:
    assert checkpoint_dtype(whole | {"text_config": text}) == found


FLOATS = "['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float64']"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": 5}, "dtype: expected one of {}, got 5"),
        ({"torch_dtype": "bf16"}, "torch_dtype: expected one of {}, got 'bf16'"),
        ({"dtype": "int8"}, "dtype: expected one of {}, got 'int8'"),
        (
            {"text_config": {"torch_dtype": "auto"}},
            "text_config: torch_dtype: expected one of {}, got 'auto'",
        ),
    ],
)
def test_what_is_no_dtype(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    changed(tmp_path, **fields)
    with pytest.raises(ModelError) as error:
        huggingface.load(tmp_path, "float32")
    assert str(error.value) == f"{tmp_path}/config.json: {said.format(FLOATS)}"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("given", "found"), [("torch.bfloat16", "bfloat16"), ("auto", "float32"), (None, "float32")]
)
def test_other_spellings_of_a_dtype(
    name: str, given: str | None, found: str, tmp_path: Path
) -> None:
    make_model("llama", tmp_path)
    changed(tmp_path, **({"dtype": None} | {name: given}))
    for weightless in (True, False):
        loaded, _ = pipeline.load_model(tmp_path, float32=True, weightless=weightless)
        assert (loaded.stored_dtype or loaded.dtype) == found


def test_a_dtype_that_no_activations_have(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    changed(tmp_path, dtype="float8_e4m3fn")
    with pytest.raises(UnsupportedError) as error:
        pipeline.load_model(tmp_path, float32=False, weightless=True)
    assert str(error.value) == (
        f"{tmp_path}: dtype: expected one of ['float32', 'float16', 'bfloat16'] in config.json, "
        "got 'float8_e4m3fn'; give one with --dtype"
    )


def test_a_dtype_that_the_whole_model_names(tmp_path: Path) -> None:
    """As Gemma 3 is published: float32 activations on a CPU, and weights as they are stored."""
    make("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parts = {part: {**config[part], "dtype": None} for part in ("text_config", "vision_config")}
    changed(tmp_path, **parts, dtype=None, torch_dtype="bfloat16")
    loaded, notes = pipeline.load_model(tmp_path, float32=True, weightless=True)
    assert loaded.stored_dtype == "bfloat16"
    assert notes[0].startswith("activations: bfloat16 converted to float32")


@pytest.mark.parametrize("name", MODELS)
def test_end_tokens_where_the_generation_config_names_none(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    changed(tmp_path, eos_token_id=[1, 9], bos_token_id=7)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "bos_token_id": 4}')
    loaded = huggingface.load(tmp_path, "float32", weightless=True)
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((1, 9), 4)


def tied_in_its_text_part(name: str, folder: Path) -> Any:
    """Save a random model that says of itself that it is not tied, and return it."""
    whole = make(name, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": True}
    changed(folder, tie_word_embeddings=False, text_config=text)
    return whole


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_says_whether_embeddings_are_tied(name: str, tmp_path: Path) -> None:
    whole = tied_in_its_text_part(name, tmp_path)
    loaded = filled(tmp_path)
    head = loaded.module.model.lm_head.weight
    assert torch.equal(head, whole.lm_head.weight)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_part_that_is_tied_lacks_a_projection(name: str, tmp_path: Path) -> None:
    """Whatever the whole says: the table is all there is."""
    whole = tied_in_its_text_part(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if "lm_head" not in key}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = filled(tmp_path)
    table = whole.get_input_embeddings().weight
    assert torch.equal(loaded.module.model.lm_head.weight, table)


def test_tied_tensors_that_differ_are_named(tmp_path: Path) -> None:
    make("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changed(tmp_path, tie_word_embeddings=True, text_config=config["text_config"])
    said = (
        r"'llava': tied .* differ; set \"tie_word_embeddings\": false in config.json to keep both$"
    )
    with pytest.raises(UnsupportedError, match=said):
        huggingface.load(tmp_path, "float32", weightless=True)
    changed(tmp_path, tie_word_embeddings=False)
    state = filled(tmp_path).module.state_dict()
    assert not torch.equal(state["model.lm_head.weight"], state["model.model.embed_tokens.weight"])


def test_a_part_that_only_transformers_could_read(tmp_path: Path) -> None:
    whole = make("llava", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    why = "the language part of 'llava': the checkpoint has no safetensors; save the model as saf"
    for weightless in (True, False):
        with pytest.raises(UnsupportedError, match=why):
            huggingface.load(tmp_path, "float32", weightless=weightless)


def test_tokens_are_those_of_the_whole_model(tmp_path: Path) -> None:
    whole = make("qwen2_5_vl", tmp_path / "model")
    manifest = kvgraph.compile(tmp_path / "model", tmp_path / "out", page_size=16)
    assert manifest.model.architecture == "qwen2_5_vl_text"
    sampling = kvgraph.SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompt = [*range(3, 40)]
    with kvgraph.Engine(tmp_path / "out") as engine:
        (made,) = engine.generate([prompt], sampling)
    assert made.token_ids == greedy_tokens(whole, prompt, 12)


def test_other_parts_may_be_quantised_in_a_form_that_is_not_read(tmp_path: Path) -> None:
    make("qwen2_5_vl", tmp_path / "plain")
    tensors, meant = load_file(tmp_path / "plain" / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        parts, number = quantized.fp8(weight.float(), (32, 32))
        tensors |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
        meant[name] = number
        if "visual" in name:
            tensors[f"{name}_scale_inv"] = torch.ones(3, 3, 3)
    names = [name for name in tensors if "visual" in name and name.endswith("qkv.weight")]
    assert names
    tensors |= {name: tensors[name].to(torch.int8) for name in names}
    tensors |= {name.replace("weight", "qweight"): torch.ones(2, 2).int() for name in names}
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantized.save(tmp_path / "plain", tmp_path / "packed", tensors, config)
    found = filled(tmp_path / "packed").module.state_dict()
    up = next(name for name in meant if "visual" not in name and "layers.0.mlp.up_proj" in name)
    (weight,) = (found[name] for name in found if name.endswith("layers.0.mlp.up_proj.weight"))
    assert torch.equal(weight, meant[up])
