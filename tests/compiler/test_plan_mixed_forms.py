"""What a plan counts where a checkpoint stores its layers in several forms, against a compile's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import kvgraph
from kvgraph.compiler.described import MATRICES, Experts, Linear, ModelSizes
from kvgraph.compiler.joined_forms import KeptAs, joined_form, kept_in
from kvgraph.contract.dtypes import AS_STORED
from kvgraph.contract.safetensors import read_layout
from kvgraph.ops import matrices
from kvgraph.ops.packed import E2M1, E4M3, INT8, NVFP4, Form
from tests.compiler.conftest import EXPERTS
from tests.compiler.test_stored_weights import arrays_of
from tests.support import gguf_files, quantized
from tests.support.models import make_model
from tests.support.plans import plan

GROUPS, NUMBERS = Form(4, 32), Form(4, 16, NVFP4)
GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))


@pytest.mark.parametrize(
    ("stored", "on_cpu", "expected"),
    [
        ([GROUPS, GROUPS], True, GROUPS),
        ([GROUPS, Form(4, 128)], True, GROUPS),
        ([GROUPS, Form(4, 32, has_offsets=True)], True, Form(4, 32, has_offsets=True)),
        ([GROUPS, Form(16)], True, Form(16)),
        ([GROUPS, NUMBERS], True, Form(8)),
        ([GROUPS, Form(8, 32, INT8)], True, Form(8)),
        ([GROUPS, Form(8, 128, E4M3)], True, Form(16)),
        ([Form(4, 32, E2M1)], True, Form(4, 32, E2M1)),
        ([NUMBERS], True, NUMBERS),
        ([NUMBERS], False, Form(8)),
        ([Form(4)], True, Form(4)),
    ],
)
def test_the_form_of_layers_that_become_one(
    stored: list[Form], on_cpu: bool, expected: Form
) -> None:
    takes = (lambda form: form.sums(64)) if on_cpu else matrices.takes
    assert joined_form([kept_in(form) for form in stored], takes)[0] == expected


def sizes(tensors: Mapping[str, KeptAs]) -> ModelSizes:
    layers = (
        Linear(128, 64, has_bias=False, name=GATE, joined_with=UP),
        Linear(128, 64, has_bias=False, name=UP, joined_with=GATE),
        Linear(64, 128, has_bias=False, name=DOWN),
    )
    mixture = Experts(4, 2, 64, 32, has_bias=False, name="model.layers.0.mlp.experts")
    model = ModelSizes("", (), 1, 1, 1, 1, layers, 0, 0, (), experts=(mixture,))
    names = [*(f"{each.name}.weight" for each in layers)]
    names += [f"{mixture.name}.{matrix}" for matrix in MATRICES]
    return model.kept_as(dict.fromkeys(names, kept_in(GROUPS)) | tensors)


def test_a_layer_takes_the_one_beside_it_to_its_form_on_a_cpu_alone() -> None:
    def more(name: str, on_cpu: bool) -> int:
        plain = sizes({f"{name}.weight": KeptAs(None, 16)})
        packed = sizes({})
        return plain.weight_bytes("bfloat16", AS_STORED, on_cpu) - packed.weight_bytes(
            "bfloat16", AS_STORED, on_cpu
        )

    assert more(GATE, on_cpu=True) == more(UP, on_cpu=True) == 2 * more(DOWN, on_cpu=True)
    assert more(GATE, on_cpu=False) == more(UP, on_cpu=False) == more(DOWN, on_cpu=False)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_each_layer_of_experts_has_its_own_form(on_cpu: bool) -> None:
    def nbytes(tensors: Mapping[str, KeptAs]) -> int:
        named = {f"model.layers.0.mlp.experts.{name}": each for name, each in tensors.items()}
        return sizes(named).mixtures("bfloat16", AS_STORED, on_cpu)[0].bytes

    groups = dict.fromkeys(("gate_up_proj", "down_proj"), kept_in(GROUPS))
    plain = dict.fromkeys(groups, KeptAs(None, 16))
    assert nbytes(groups) == nbytes({}) < nbytes(plain)
    more = [nbytes(groups | {matrix: plain[matrix]}) - nbytes(groups) for matrix in plain]
    assert min(more) > 0
    assert sum(more) == nbytes(plain) - nbytes(groups)


def held(artifact: Path) -> int:
    return sum(array.nbytes for array in arrays_of(artifact).values())


def counted(path: Path, tp: int = 1) -> int:
    return plan(path, target="cpu", memory=1 << 30, max_seq_len=None, tp=tp).weights


def as_compiled(path: Path, out: Path) -> int:
    kvgraph.compile(path, out, page_size=16, check=False)
    return held(out)


def test_a_plain_gate_beside_an_up_projection_in_groups(tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    folder = quantized.make("w4a16", plain, tmp_path / "packed")
    before = counted(folder)
    quantized.mixed(folder, plain, f"{GATE}.")
    assert counted(folder) > 1.1 * before
    assert counted(folder) == pytest.approx(as_compiled(folder, tmp_path / "a.kvg"), rel=0.02)


def test_one_expert_that_is_plain(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("nvfp4", plain("qwen3_moe"), tmp_path / "packed")
    before = counted(folder)
    for layer in (0, 1):
        quantized.mixed(folder, plain("qwen3_moe"), f"model.layers.{layer}.mlp.experts.2.")
    assert counted(folder) > 1.5 * before
    assert counted(folder) == pytest.approx(as_compiled(folder, tmp_path / "a.kvg"), rel=0.02)


def test_an_order_of_inputs_that_the_configuration_does_not_say(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("gptq", plain("llama"), tmp_path / "in-order")
    other = quantized.make("gptq-act-order", plain("llama"), tmp_path / "shuffled")
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    eight = counted(quantized.make("w8a16-channel", plain("llama"), tmp_path / "eight"))
    assert counted(folder) < counted(other) == eight


def test_a_gguf_file_counts_each_tensor_by_its_own_type(tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    kinds = {"ffn_up": "BF16", "attn_v": "Q8_0", "ffn_down": "BF16", "output": "Q8_0"}
    whole = gguf_files.make(plain, tmp_path / "a.gguf", "Q4_0")
    mixed = gguf_files.make(plain, tmp_path / "b.gguf", "Q4_0", kinds=kinds)
    assert counted(mixed) > 1.3 * counted(whole)
    assert counted(mixed) == pytest.approx(as_compiled(mixed, tmp_path / "a.kvg"), rel=0.02)


def test_gate_and_up_of_k_quants_stay_small_beside_down_in_more_bits(tmp_path: Path) -> None:
    """As in half of the layers of a Q4_K_M file. Compile's own check runs it."""
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
    folder = make_model("qwen3_moe", tmp_path / "plain", num_hidden_layers=1, **EXPERTS | sizes)
    files = {
        down: gguf_files.make(
            folder, tmp_path / f"{down}.gguf", "Q4_K", kinds={"ffn_down_exps": down}
        )
        for down in ("Q4_K", "Q6_K", "BF16")
    }
    found = {}
    for down, path in files.items():
        out = tmp_path / f"{down}.kvg"
        manifest = kvgraph.compile(path, out, page_size=16)
        assert manifest.notes[-1].startswith("check: logits of two ragged rows")
        found[down] = held(out)
        assert counted(path) == pytest.approx(found[down], rel=0.02)
    matrix = 4 * 256 * 256  # of all experts
    assert found["Q6_K"] - found["Q4_K"] < matrix
    assert 1.2 * matrix < found["BF16"] - found["Q4_K"] < 1.6 * matrix


@pytest.mark.parametrize("form", ["w4a16", "w4a16-128", "w8a16", "fp8"])
def test_a_share_that_ends_within_a_group(form: str, tmp_path: Path) -> None:
    """Its groups are smaller, or it has none."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    shape = sizes | {"intermediate_size": 320 if form == "fp8" else 384}
    folder = make_model("llama", tmp_path / "plain", num_hidden_layers=1, **shape)
    folder = quantized.make(form, folder, tmp_path / "packed")
    for ranks in (2, 4):
        out = tmp_path / f"{ranks}.kvg"
        kvgraph.compile(folder, out, page_size=16, tp=ranks, check=False)
        files = (out / "weights.safetensors", out / "rank0" / "weights.safetensors")
        layouts = [read_layout(file) for file in files if file.is_file()]
        own = sum(at.nbytes for layout in layouts for at in layout.values())
        assert counted(folder, tp=ranks) == pytest.approx(own, rel=0.02)
