"""Frequencies that depend on a context's length are those of --max-seq-len, whatever a batch holds.

The reference is transformers with a configuration that has no other frequencies.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvgraph
from kvgraph import ModelError, ParamsError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.lengths import with_current_name
from tests.support.models import greedy_tokens, make_model, sizes_of

BASE, OWN, ORIGINAL, FACTOR = 10000.0, 128, 32, 4.0
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.5 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": BASE,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": BASE,
    "factor": FACTOR,
    "original_max_position_embeddings": OWN,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": BASE, "factor": FACTOR}
OF_MODEL: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"original_max_position_embeddings": ORIGINAL},
    "phimoe": {"sliding_window": None, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
SCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
PROMPTS = [[3 + (7 * i + 5 * j) % 150 for j in range(n)] for i, n in enumerate((1, 9, 60))]
GREEDY = kvgraph.SamplingParams(max_new_tokens=12, ignore_eos=True)


def only(factors: str) -> dict[str, Any]:
    """LongRoPE with these factors at every length."""
    every = LONG if factors == "long" else SHORT
    scale = SCALES[f"{factors}_mscale"]
    same = {"short_factor": every, "long_factor": every}
    return LONGROPE | same | {"short_mscale": scale, "long_mscale": scale}


def stretched(length: int) -> dict[str, Any]:
    """A plain embedding whose base is the dynamic one's at `length`, of heads of 16."""
    grown = FACTOR * max(length, OWN) / OWN - (FACTOR - 1)
    return {"rope_type": "default", "rope_theta": BASE * grown ** (16 / 14)}


CASES = [
    *[(model, LONGROPE | SCALES, None, only("long")) for model in OF_MODEL],
    *[(model, LONGROPE | SCALES, ORIGINAL * 2, only("long")) for model in OF_MODEL],
    *[(model, LONGROPE | SCALES, ORIGINAL, only("short")) for model in OF_MODEL],
    ("llama", DYNAMIC, None, stretched(OWN)),
    ("llama", DYNAMIC, 2 * OWN, stretched(2 * OWN)),
]


@pytest.mark.parametrize(("architecture", "rope", "length", "same"), CASES)
def test_tokens_are_those_of_one_length(
    architecture: str,
    rope: dict[str, Any],
    length: int | None,
    same: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Short rows beside long ones, in one batch."""
    sizes = OF_MODEL[architecture] | {"max_position_embeddings": OWN, "head_dim": 16}
    folder = make_model(architecture, tmp_path / "model", **sizes, rope_parameters=rope)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"rope_parameters": same}))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16, max_seq_len=length)
    assert manifest.model.max_seq_len == (length or OWN)
    kind = rope["rope_type"]
    note = f"rotary embedding: {kind}, settled for contexts of {length or OWN} tokens"
    assert sum(note in said for said in manifest.notes) == 1
    fused = next(entry for entry in manifest.passes if entry.name == "fuse_rope")
    assert fused.applied > 0
    prompts = [prompt for prompt in PROMPTS if len(prompt) + 12 <= (length or OWN)]
    with kvgraph.Engine(tmp_path / "out", num_pages=32) as engine:
        for prompt, done in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert done.token_ids == greedy_tokens(model, prompt, 12)


@pytest.mark.parametrize("length", [ORIGINAL, None])
@pytest.mark.parametrize("field", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [*[(model, "su") for model in OF_MODEL], ("phi3", "yarn")],
)
def test_former_names_of_longrope(
    architecture: str, name: str, field: str, length: int | None, tmp_path: Path
) -> None:
    """As Phi-3's first checkpoints have them, within the original length and above it."""
    sizes = OF_MODEL[architecture] | {"max_position_embeddings": OWN, "head_dim": 16}
    folder = make_model(architecture, tmp_path / "model", **sizes)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    given = LONGROPE | SCALES
    del given["rope_type"]
    if architecture == "phi3":
        del given["original_max_position_embeddings"]
    found, settings = [], {"max_seq_len": length, "weightless": True}
    for each in ("longrope", name):
        scaling = {"rope_scaling": {field: each, **given}, "rope_theta": BASE}
        (folder / "config.json").write_text(json.dumps(config | scaling))
        model = huggingface.load(folder, "float32", **settings)
        rotary = model.module.model.model.rotary_emb
        scale = getattr(rotary, "attention_scaling", None)
        buffers = {at: each.tolist() for at, each in rotary.named_buffers()}
        found.append((model.max_seq_len, model.notes, scale, buffers))
        assert sizes_of(folder).max_seq_len == OWN
    assert found[0] == found[1]
    factors = torch.tensor(LONG if length is None else SHORT)
    plain = torch.tensor(BASE) ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(torch.tensor(found[1][-1]["inv_freq"]), plain / factors)


def test_a_former_name_of_longrope_in_a_language_part() -> None:
    given = {"text_config": {"rope_scaling": {"type": "su", "short_factor": SHORT}}}
    renamed = with_current_name(given)
    assert renamed == {"text_config": {"rope_scaling": {"type": "longrope", "short_factor": SHORT}}}
    assert given["text_config"]["rope_scaling"]["type"] == "su"
    assert with_current_name(renamed) is None


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        (LONGROPE, OWN),
        (DYNAMIC, OWN * 4),
        ({"rope_type": "linear", "rope_theta": BASE, "factor": 2.0}, OWN * 2),
        (YARN, OWN * 4),
        (YARN | {"original_max_position_embeddings": OWN // 8}, OWN),
        (YARN | {"factor": None}, OWN),
    ],
)
@pytest.mark.parametrize("over", [0, -1, None])
def test_a_length_that_the_model_does_not_have(
    rope: dict[str, Any], most: int, over: int | None, tmp_path: Path
) -> None:
    folder = make_model(
        "llama", tmp_path / "model", max_position_embeddings=OWN, head_dim=16, rope_parameters=rope
    )
    asked = most + 1 if over is None else over
    wanted = f"max_seq_len: expected 1 to {most} tokens from the model's config.json, got {asked}"
    with pytest.raises(ParamsError, match=wanted):
        kvgraph.compile(folder, tmp_path / "out", max_seq_len=asked)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"original_max_position_embeddings": 32},
        {"rope_type": "linear", "rope_theta": BASE, "factor": 4.0},
    ],
)
def test_scaling_next_to_the_shorter_length(rope: dict[str, Any], tmp_path: Path) -> None:
    """As Qwen2.5 and Vicuna write it: the length is the one before the scaling."""
    sizes = {"max_position_embeddings": 32, "head_dim": 16}
    folder = make_model("qwen3", tmp_path / "model", **sizes, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16, max_seq_len=128)
    assert manifest.model.max_seq_len == 128
    with kvgraph.Engine(tmp_path / "out", num_pages=32) as engine:
        for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert done.token_ids == greedy_tokens(model, prompt, 12)
    assert huggingface.load(folder, "float32", weightless=True).max_seq_len == 32


@pytest.mark.parametrize("weightless", [True, False])
@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (LONGROPE | {"long_factor": LONG[:3]}, "expected values that frequencies are made of, got"),
        (DYNAMIC | {"factor": "2"}, "factor: expected a number, got '2'"),
        (YARN | {"factor": float("inf")}, "factor: expected a finite number, got inf"),
    ],
)
def test_parameters_that_transformers_does_not_validate(
    rope: dict[str, Any], said: str, weightless: bool, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path, max_position_embeddings=OWN, head_dim=16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    with pytest.raises(ModelError, match=f"config.json: rope_parameters: {said}"):
        huggingface.load(folder, "float32", max_seq_len=64, weightless=weightless)


def test_a_shorter_context_of_any_model(tmp_path: Path) -> None:
    """Requests are held to it, and the rotary table has as many rows."""
    folder = make_model("llama", tmp_path / "model", max_position_embeddings=OWN)
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16, max_seq_len=24)
    assert manifest.model.max_seq_len == 24
    with kvgraph.Engine(tmp_path / "out", num_pages=8) as engine:
        assert len(engine.generate([[5] * 20], GREEDY)[0].token_ids) == 4


def test_a_plan_counts_their_table(tmp_path: Path) -> None:
    folder = make_model(
        "llama", tmp_path / "m", max_position_embeddings=OWN, head_dim=16, rope_parameters=LONGROPE
    )
    assert sizes_of(folder).rotary_dims == (16,)
