"""GGUF files of tiny checkpoints, written as llama.cpp's converter does."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # bfloat16 for load_file
import numpy as np
from safetensors.numpy import load_file, save_file

import kvgraph
from tests.support import gguf_fields

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "mistral": "mistral3",
    "ministral3": "mistral3",
    "smollm3": "smollm3",
    "granite": "granite",
    "llama4_text": "llama4",
    "starcoder2": "starcoder2",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "gpt2": "gpt2",
    "hunyuan_v1_moe": "hunyuan-moe",
    "granitemoeshared": "granitemoe",
    "granitemoe": "granitemoe",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "gemma": "gemma",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "dots1": "dots1",
    "olmoe": "olmoe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
}

RENAMED = {
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}
WITHOUT_SUFFIX = ("sinks", "layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")

DAMAGED = "got a damaged one; copy or download it again"
"""End of the sentence on a damaged file."""

PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")


def make(
    folder: Path,
    out: Path,
    kind: str = "F32",
    *,
    name: str = "",
    experts: str = "",
    kinds: Mapping[str, str] | None = None,
    factors: np.ndarray | None = None,
    more_layers: int = 0,
    is_old: bool = False,
    extra: str = "",
    without: str = "",
    vector: str = "",
    text: Mapping[str, Any] | None = None,
    byte_order: str = "LITTLE",
    most_tensors: int = 0,
    **fields: Any,
) -> Path:
    """The checkpoint in `folder` with matrices as blocks of `kind`; `fields` are more metadata.

    `name`: the architecture, if not the one of the model's type.
    `experts`: the kind of blocks of experts, if not `kind`. `kinds`: a part of tensors' names ->
    the kind of their blocks. `factors`: of rotary frequencies.
    `more_layers`: layers behind the model's. `is_old`: a latent's keys and values as older files
    have them. `extra`: a tensor more, `without`: one less. `vector`: a matrix of one row, written
    as a vector.
    `text`: what the file says of its tokenizer, instead of what `folder` does.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    config |= {to: config[own] for own, to in gguf_fields.GPT2.items() if own in config}
    name = name or ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(
        out, name, endianess=gguf.GGUFEndian[byte_order], split_max_tensors=most_tensors
    )
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + more_layers)
    if name != "gemma4":
        width = config.get("intermediate_size_mlp", config["intermediate_size"])
        writer.add_feed_forward_length(width)
    writer.add_head_count(config["num_attention_heads"])
    is_latent = name == "deepseek2" and not is_old
    if name == "gemma4":
        gguf_fields.add_gemma4(writer, config)
    elif name != "gpt2":
        writer.add_head_count_kv(1 if is_latent else config["num_key_value_heads"])
    if name == "deepseek2":
        gguf_fields.add_latent(writer, config, is_old=is_old)
    elif "head_dim" in config and name not in ("gemma4", "gpt2", "stablelm"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    gguf_fields.add_epsilon(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    gguf_fields.add_own(writer, name, config)
    for key, value in fields.items():
        _add(writer, key.replace("__", "."), value)
    for key, value in (text or {}).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    if text is None and (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    made = tensors(folder, config, name, kind, experts, is_old, kinds or {})
    for tensor, (data, blocks) in made.items():
        if tensor != without:
            writer.add_tensor(tensor, data[0] if tensor == vector else data, raw_dtype=blocks)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def tensors(
    folder: Path,
    config: dict[str, Any],
    name: str,
    kind: str,
    experts: str = "",
    is_old: bool = False,
    kinds: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Name -> blocks and their type."""
    import gguf

    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stored = _stacked(load_file(folder / "model.safetensors"))
    found = {}
    for full, weight in _as_stored(stored, name, config, is_old=is_old):
        stem, dot, end = full.rpartition(".")
        to = f"{names.get_name(stem)}{dot}{end}"
        if weight.ndim < 2 or to.endswith(("gate_inp.weight", "bias")):
            found[to] = weight, None
        else:
            usual = (experts or kind) if weight.ndim > 2 else kind
            own = next((each for part, each in kinds.items() if part in to), usual)
            found[to] = _blocks(weight, own), gguf.GGMLQuantizationType[own]
    return found


def _as_stored(
    stored: dict[str, np.ndarray], name: str, config: dict[str, Any], *, is_old: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors with llama.cpp's changes, in float32, by transformers' names of them."""
    for full, given in stored.items():
        weight = given.astype(np.float32)
        if name in PERMUTED and (".q_proj." in full or ".k_proj." in full):
            heads = config["num_attention_heads" if ".q_proj" in full else "num_key_value_heads"]
            weight = _permuted(weight, heads)
        if name == "gpt2" and ".h." in full and weight.ndim > 1:
            weight = np.ascontiguousarray(weight.T)
        if name in ("gemma", "gemma2", "gemma3", "nemotron") and full.endswith("norm.weight"):
            weight = weight + 1
        if name in ("gpt-oss", "llama4") and ".experts." in full:
            yield from _turned_experts(full, weight, do_alternate=name == "gpt-oss")
        elif full.endswith("kv_b_proj.weight") and not is_old:
            heads = weight.reshape(config["num_attention_heads"], -1, weight.shape[-1])
            keys, values = np.split(heads, [config["qk_nope_head_dim"]], 1)
            yield full.replace("kv_b", "k_b"), np.ascontiguousarray(keys.swapaxes(1, 2))
            yield full.replace("kv_b", "v_b"), np.ascontiguousarray(values)
        elif full.endswith("shared_mlp.input_linear.weight"):  # gate above up
            stem = full.removesuffix("shared_mlp.input_linear.weight")
            for part, rows in zip(("gate", "up"), np.split(weight, 2), strict=True):
                yield f"{stem}mlp.shared_mlp.{part}_proj.weight", rows
        elif full.endswith("input_linear.weight"):  # gate above up
            stem = full.removesuffix("input_linear.weight")
            for part, rows in zip(("w1", "w3"), np.split(weight, 2, 1), strict=True):
                yield f"{stem}experts.{part}.weight", rows
        else:
            to = full.replace("correction_bias", "correction.bias")
            for own, other in RENAMED.items():
                to = to.replace(own, other)
            yield f"{to}.weight" if full.endswith(WITHOUT_SUFFIX) else to, weight


def _turned_experts(
    full: str, weight: np.ndarray, *, do_alternate: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Gate and up apart, the latter first, and outputs in rows. `do_alternate`: theirs do."""
    stem, end = (full[:-5], "bias") if full.endswith("_bias") else (full, "weight")
    rows = weight if end == "bias" else weight.swapaxes(1, 2)
    if stem.endswith("gate_up_proj"):
        size = rows.shape[1] // 2
        for place, part in ((1, "up_proj"), (0, "gate_proj")):
            name = f"{stem.removesuffix('gate_up_proj')}{part}.{end}"
            own = slice(place, None, 2) if do_alternate else slice(place * size, (place + 1) * size)
            yield name, np.ascontiguousarray(rows[:, own])
    else:
        yield f"{stem}.{end}", np.ascontiguousarray(rows)


def meant(folder: Path, out: Path, kind: str, experts: str = "", down: str = "") -> Path:
    """A plain checkpoint of the numbers that blocks of `make` stand for, by the gguf package.

    Minima of Q4_1 are rounded to eighths of their scale, except in the table of tokens.

    `down`: kind of the experts' second layer, if it is another.
    """
    import gguf

    stored = load_file(folder / "model.safetensors")
    is_turned = json.loads((folder / "config.json").read_text())["model_type"] == "gpt_oss"
    for name, weight in stored.items():
        if weight.ndim < 2 or name.endswith(("gate.weight", "router.weight", "bias")):
            continue
        is_expert = ".experts." in name
        own = (experts or kind) if is_expert else kind
        if is_expert and (".w2." in name or "down_proj" in name):
            own = down or own
        rows = weight.swapaxes(1, 2) if is_expert and is_turned else weight
        blocks = _blocks(np.ascontiguousarray(rows, np.float32), own)
        made = gguf.dequantize(blocks, gguf.GGMLQuantizationType[own]).reshape(rows.shape)
        if own == "Q4_1" and not name.endswith("embed_tokens.weight"):
            made = in_eighths(blocks, made)
        stored[name] = np.ascontiguousarray(made.swapaxes(1, 2) if rows is not weight else made)
    shutil.copytree(folder, out)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return out


def in_eighths(blocks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The `numbers` of Q4_1, with minima that are rounded to eighths of their scale."""
    heads = np.ascontiguousarray(blocks.reshape(-1, 20)[:, :4]).view("<f2").astype(np.float32)
    scales, minima = np.split(heads, 2, 1)
    offsets = np.rint(8 * (8 + minima / scales))
    assert np.abs(offsets).max() <= 127, "an offset has a byte"
    q = np.rint((numbers.reshape(-1, 32) - minima) / scales)
    return ((q - 8 + offsets / 8) * scales).reshape(numbers.shape)


SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ1_M": (54,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Bytes of a block where its scales lie, where not at its start."""


def _blocks(weight: np.ndarray, kind: str) -> np.ndarray:
    """Of types that the package cannot write: random ones, whose scales are small."""
    import gguf

    blocks = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(weight, blocks)
    except NotImplementedError:
        elements, nbytes = gguf.GGML_QUANT_SIZES[blocks]
        shape = (*weight.shape[:-1], weight.shape[-1] // elements, nbytes)
        data = np.random.default_rng(5).integers(0, 256, shape).astype(np.uint8)
        halves = SCALES.get(kind, (0, 2))
        for at in halves:
            data[..., at : at + 2] = np.array([0.002], np.float16).view(np.uint8)
        return data.reshape(*weight.shape[:-1], -1)


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's rotary pairs in turn, as llama.cpp rotates them."""
    parts = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(weight.shape))


def _stacked(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer as one tensor, by their numbers: a file has them sorted by name."""
    found: dict[str, Any] = {}
    for name, tensor in stored.items():
        before, at, behind = name.partition(".experts.")
        if at and behind[0].isdigit():
            number, _, part = behind.partition(".")
            found.setdefault(f"{before}.experts.{part}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return {
        name: np.stack([each for _, each in sorted(t.items())]) if isinstance(t, dict) else t
        for name, t in found.items()
    }


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocab])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def byte_level(
    pre: str | None, added: Mapping[str, int], words: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """A tokenizer of bytes and of two spaces. `added`: tokens and their types, the last ones.

    `words`: tokens that no merges make.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    plain = [*sorted(ByteLevel.alphabet()), "ĠĠ", *words]
    said = {"model": "gpt2", "tokens": [*plain, *added], "merges": ["Ġ Ġ"]}
    said["token_type"] = [1] * len(plain) + [*added.values()]
    return said | ({} if pre is None else {"pre": pre}) | more


def sentencepiece(**more: Any) -> dict[str, Any]:
    """A tokenizer of bytes, "hi" and a space with it."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁hi", "hi", "▁", "h", "i"]
    said = {"model": "llama", "pre": "default", "tokens": [*tokens, *words]}
    said["scores"] = [0.0] * len(tokens) + [-float(n) for n in range(len(words))]
    said["token_type"] = types + [1] * len(words)
    said |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return said | more


def _add(writer: Any, key: str, value: Any) -> None:
    import gguf

    kinds = {str: "STRING", bytes: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def greedy_tokens_of(path: Path, out: Path, prompt: list[int], count: int) -> list[int]:
    """The first greedy tokens after a prompt, by an artifact `out` that is made of a file."""
    kvgraph.compile(path, out, weights="fp32", page_size=16, check=False)
    params = kvgraph.SamplingParams(max_new_tokens=count, ignore_eos=True)
    with kvgraph.Engine(out, num_pages=32) as engine:
        return engine.generate([prompt], params)[0].token_ids


def prefixed(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a file by their keywords of `make`: each begins with the file's architecture."""
    return {f"{ARCHITECTURES[architecture]}__{name}": value for name, value in fields.items()}
