"""GGUF files: the model and the text that transformers reads from them, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch

import kvgraph
from kvgraph import KVGraphError
from kvgraph.cli import app
from kvgraph.compiler.frontends import gguf as gguf_frontend
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.gguf import as_folder, is_decoded
from tests.support import gguf_files
from tests.support.artifacts import TINY_LLAMA
from tests.support.models import make_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""A row of the larger types is a block of 256."""


Read = tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Any]]


def theirs(path: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of a file's tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    return {name: tensor.float() for name, tensor in read["tensors"].items()}


def ours(path: Path) -> dict[str, torch.Tensor]:
    with as_folder(path) as folder:
        module = huggingface.load(folder, "float32").module
    return {name.removeprefix("model."): each for name, each in module.state_dict().items()}


TYPES = [kind.name for kind in gguf.GGMLQuantizationType if is_decoded(kind)]
CASES = [("llama", kind) for kind in TYPES]
CASES += [(name, "Q8_0") for name in gguf_files.ARCHITECTURES if name != "llama"]


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_weights_are_those_that_transformers_reads(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """To the last bit: by the plain decoder of the gguf package, and the same permutations."""
    elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    sizes = (WIDE if elements > 32 else {}) | (EXPERTS if "moe" in architecture else {})
    folder = make_model(architecture, tmp_path / "model", **sizes)
    path = gguf_files.make(folder, tmp_path / "model.gguf", kind)
    found, expected = ours(path), theirs(path)
    assert found.keys() - expected.keys() <= {"lm_head.weight"}  # tied
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_file_is_compiled_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    path = gguf_files.make(TINY_LLAMA, tmp_path / "tiny.gguf", "F32")
    sampling = kvgraph.SamplingParams(max_new_tokens=12)
    text = []
    for source in (path, TINY_LLAMA):
        out = tmp_path / f"{source.name}.kvg"
        manifest = kvgraph.compile(source, out, weights="fp32", page_size=16)
        with kvgraph.Engine(out) as engine:
            text.append(engine.generate(["The import statement"], sampling)[0].text)
    assert text[0] == text[1]
    manifest = kvgraph.load(tmp_path / "tiny.gguf.kvg").manifest
    assert manifest.notes[1] == "weights: the checkpoint's are gguf, F32"
    assert manifest.model.eos_token_ids == [1]
    assert str(tmp_path) not in json.dumps([*manifest.notes, manifest.tools])
    with kvgraph.Engine(tmp_path / "tiny.gguf.kvg") as engine:
        said = engine.apply_chat_template([{"role": "user", "content": "Hi"}])
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tiny.gguf.kvg" / "tokenizer.json"))
    assert tokenizer.decode(said) == "Hi"


def test_the_command_states_what_it_cost(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    path = gguf_files.make(TINY_LLAMA, tmp_path / "tiny.gguf", "Q4_0")
    done = CliRunner().invoke(app, ["compile", str(path), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert kvgraph.load(tmp_path / "out").manifest.weights == "stored"
    assert "quality: perplexity" in done.output
    done = CliRunner().invoke(app, ["plan", str(path), "--memory", "1GiB"])
    assert done.exit_code == 0, done.output
    assert "weights (stored)" in done.output


def test_frequencies_of_llama_3(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    folder = make_model("llama", tmp_path / "model", head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(folder), "cpu")
    factors = (1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)) / scaled.numpy()
    path = gguf_files.make(folder, tmp_path / "model.gguf", factors=factors)
    with as_folder(path) as found:
        config = json.loads((found / "config.json").read_text())
    assert config["rope_parameters"] == rope
    gguf_files.make(folder, tmp_path / "other.gguf", factors=factors * 2)
    assert refused(tmp_path / "other.gguf").startswith(
        f"{tmp_path}/other.gguf: rope_freqs.weight: expected the factors of Llama 3.1, got others"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split__count": 3}, "expected a whole GGUF file, got a part of one; join the parts"),
        (
            {"llama__rope__scaling__type": "yarn"},
            "llama.rope.scaling.type: expected none, got 'yarn'",
        ),
        (
            {"llama__expert_count": 8},
            "llama.expert_count: expected none, got 8; compile the checkp",
        ),
        ({"llama__block_count_": 8, "extra": "blk.0.attn_q.bias"}, "alone, got blk.0.attn_q.bias"),
        (
            {"llama__rope__dimension_count": 8},
            "llama.rope.dimension_count: expected 16, got 8; com",
        ),
        ({"llama__rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor: expected 1, got 2"),
        (
            {"llama__attention__scale": 0.5},
            "llama.attention.scale: expected 0.25, got 0.5; compile",
        ),
        ({"llama__embedding_scale": 12.0}, "llama.embedding_scale: expected 1, got 12.0; compile"),
        ({"llama__residual_scale": 0.5}, "llama.residual_scale: expected 1, got 0.5; compile the"),
        ({"llama__logit_scale": 8.0}, "llama.logit_scale: expected 1, got 8.0; compile the check"),
        ({"llama__attention__sliding_window": 8}, "sliding_window: expected none, got 8; compile"),
    ],
)
def test_files_that_say_more_than_is_read(
    fields: dict[str, object], message: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    assert message in refused(path)


def test_metadata_that_changes_nothing(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    fields = {"llama__rope__dimension_count": 16, "llama__rope__scaling__attn_factor": 1.0}
    fields |= {"llama__attention__scale": 0.0, "llama__logit_scale": 1.0}
    fields |= {"llama__attention__sliding_window": 1 << 20}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    with as_folder(path) as folder:
        assert json.loads((folder / "config.json").read_text())["head_dim"] == 16


def test_a_name_is_no_architecture(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers takes a Llama whose name is "mistral" for one, with a sliding window."""
    made = {
        name: gguf_files.make(
            model_folder("llama"), tmp_path / f"{name}.gguf", "Q8_0", general__name=name
        )
        for name in ("llama", "mistral")
    }
    configs = []
    for path in made.values():
        with as_folder(path) as folder:
            configs.append(json.loads((folder / "config.json").read_text()))
    for config in configs:
        del config["quantization_config"]["file"], config["_name_or_path"]
        config.pop("_model_name_or_path", None)
    assert configs[0] == configs[1]
    found, expected = (ours(made[name]) for name in ("mistral", "llama"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def read(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> Callable[[dict[str, object]], Read]:
    """What becomes of a tokenizer's metadata: a tokenizer, its settings and the configuration."""

    def read(said: dict[str, object]) -> Read:
        path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
        with as_folder(path) as folder:
            names = ("tokenizer_config.json", "config.json")
            settings, config = (json.loads((folder / name).read_text()) for name in names)
            file = folder / "tokenizer.json"
            return tokenizers.Tokenizer.from_file(str(file)), settings, config

    return read


BEGIN, END, USER = (
    f"<\uff5c{name}\uff5c>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User")
)


@pytest.mark.parametrize("pre", ["deepseek-r1-qwen", "llama-bpe", "gpt-2"])
def test_tokens_keep_their_places(pre: str, read: Callable[..., Read]) -> None:
    """Those that are not ASCII, and those of spaces, which a word of two spaces is beside."""
    added = {BEGIN: 3, END: 3, USER: 4, "  ": 4, "\n\n": 4}
    said = gguf_files.byte_level(
        pre, added, bos_token_id=257, eos_token_id=258, padding_token_id=258, add_bos_token=True
    )
    tokenizer, settings, config = read(said)
    assert tokenizer.get_vocab_size() == len(said["tokens"])
    for place, token in enumerate(said["tokens"]):
        assert tokenizer.token_to_id(token) == place, token
    found = tokenizer.encode(f"{USER}  {END}\n\n")
    assert found.ids == [257, 259, 260, 258, 261]
    assert tokenizer.decode(found.ids) == f"{USER}  \n\n"
    assert [settings[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == [
        BEGIN, END, END, None
    ]  # fmt: skip
    assert (config["bos_token_id"], config["eos_token_id"]) == (257, [258])


def test_a_token_at_two_places(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    said = gguf_files.byte_level("gpt-2", {"<s>": 3, "</s>": 3})
    said["tokens"][-1] = "<s>"
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    assert "tokenizer.ggml.tokens: expected '<s>' at 257 alone, got it at 258; " in refused(path)


def test_a_role_without_a_token(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    said = gguf_files.byte_level("gpt-2", {"<s>": 3, "</s>": 3}) | {"bos_token_id": 5000}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    assert "tokenizer.ggml.bos_token_id: expected one of 259 tokens, got 5000; " in refused(path)


@pytest.mark.parametrize(
    ("said", "ids", "text"),
    [
        ({}, [1, 259], "hi"),
        ({"add_space_prefix": True}, [1, 259], "hi"),
        ({"add_space_prefix": False}, [1, 260], "hi"),
        ({"add_space_prefix": False, "add_bos_token": False}, [260], "hi"),
        ({"add_space_prefix": False}, [1, 259], " hi"),
    ],
)
def test_the_space_before_a_text(
    said: dict[str, object], ids: list[int], text: str, read: Callable[..., Read]
) -> None:
    tokenizer, _, _ = read(gguf_files.sentencepiece(**said))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids) == text


def test_a_space_that_another_step_adds(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(path: Path, folder: Path, adds_bos: bool) -> None:
        own(path, folder, adds_bos)
        file = folder / "tokenizer.json"
        prepend = {"type": "Prepend", "prepend": "▁"}
        data = json.loads(file.read_text()) | {"pre_tokenizer": None, "normalizer": prepend}
        file.write_text(json.dumps(data))

    own = gguf_frontend._convert
    monkeypatch.setattr(gguf_frontend, "_convert", convert)
    said = gguf_files.sentencepiece(add_space_prefix=False)
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    wanted = "tokenizer.ggml.add_space_prefix: expected true of its tokenizer, got false; compile"
    assert wanted in refused(path)


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("llama-v3", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_who_adds_the_first_token(
    pre: str, said: dict[str, object], adds: bool, read: Callable[..., Read]
) -> None:
    tokenizer, _, _ = read(gguf_files.byte_level(pre, {BEGIN: 3}, bos_token_id=257, **said))
    assert tokenizer.encode(BEGIN).ids == [257] * (1 + adds)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({}, None),
        ({"eos_token_id": 258}, [258]),
        ({"eos_token_id": 258, "eot_token_id": 259, "eom_token_id": 258}, [258, 259]),
        ({"eom_token_id": 258}, [258]),
    ],
)
def test_end_tokens(
    said: dict[str, object], ends: list[int] | None, read: Callable[..., Read]
) -> None:
    added = {"<a>": 3, "<b>": 3, "<c>": 3}
    _, _, config = read(gguf_files.byte_level("gpt-2", added, **said))
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] == ends


@pytest.mark.parametrize("pre", [None, "default", "deepseek-coder"])
def test_ways_to_split_that_are_not_known(
    pre: str | None, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    said = gguf_files.byte_level(pre, {"<s>": 3})
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    got = "none" if pre is None else repr(pre)
    assert (
        "tokenizer.ggml.pre: expected a way to split text that transformers knows, got "
        f"{got}; compile the checkpoint"
    ) in refused(path)


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("llama-bpe", " xyz", ["Ġxyz"]),  # though no merges make it
        ("qwen2", " xyz", ["Ġ", "x", "y", "z"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("gpt-2", "a  1", ["a", "Ġ", "Ġ", "1"]),
        ("smollm", "a  1", ["a", "ĠĠ", "1"]),
    ],
)
def test_what_a_way_to_split_implies(
    pre: str, text: str, tokens: list[str], read: Callable[..., Read]
) -> None:
    tokenizer, _, _ = read(gguf_files.byte_level(pre, {"<s>": 3}, ["Ġxyz"], add_bos_token=False))
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize("keep", [4, 100, 20_000])
def test_damaged_files(keep: int, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    assert refused(path) == f"{path}: expected a GGUF file, got a damaged one"


def refused(path: Path) -> str:
    with pytest.raises(KVGraphError) as error:
        kvgraph.compile(path, path.with_name("out"), check=False)
    assert not path.with_name("out").exists()
    return str(error.value)
