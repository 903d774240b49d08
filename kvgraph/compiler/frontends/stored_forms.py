"""Find the forms in which a quantised checkpoint stores its layers, from its configuration.

Plans use them to compute bytes of weights whose tensors are not at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvgraph.compiler.frontends.folder import Config, block_of, first_of, quantization
from kvgraph.compiler.frontends.left_plain import (
    CLASS,
    Group,
    groups_for,
    is_start,
    spellings,
    targets_of,
)
from kvgraph.ops.packed import (
    E2M1,
    E4M3,
    EIGHTHS,
    GROUP,
    INT8,
    IQ4_NL,
    MXFP4_GROUP,
    NVFP4,
    NVFP4_GROUP,
    Form,
)

GGUF_BLOCKS = {
    "Q4_0": Form(4, 32),
    "Q8_0": Form(8, 32, INT8),
    "MXFP4": Form(4, MXFP4_GROUP, E2M1),
    "Q4_1": Form(4, 32, EIGHTHS, has_offsets=True),
    "Q4_K": Form(4, 32, EIGHTHS, has_offsets=True),
    "IQ4_NL": Form(4, 32, IQ4_NL),
    "IQ4_XS": Form(4, 32, IQ4_NL),
}
"""Types of GGUF blocks that can be kept -> form."""

ROW = 1 << 30
"""Group size that means a whole row."""


PLAIN = Form(16)

UNPACKED = ("int-quantized", "naive-quantized")
"""Formats of compressed-tensors that store each number in a byte, whatever its bits."""

BY_INPUT = ("group", "dynamic", "true")
"""Values of compressed-tensors' `actorder` that reorder inputs; "weight" keeps their order."""

MODELOPT = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), Form(8, ROW, E4M3)),
    **dict.fromkeys(("FP8_PB_WO", "FP8_PB_REAL"), Form(8, 128, E4M3)),
    "MXFP8": Form(8, 32, E4M3),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), Form(4, MXFP4_GROUP, E2M1)),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), Form(4, NVFP4_GROUP, NVFP4)),
}
"""modelopt's `quant_algo` -> form."""


@dataclass(frozen=True)
class StoredForms:
    """The stored forms of linear layers, of experts and of the output projection."""

    linears: Form
    experts: Form
    head: Form = PLAIN


def stored_forms(config: Config, names: Sequence[str] = ()) -> StoredForms:
    """The stored forms of a quantised checkpoint. If its configuration names several forms, the one
    with the most bits is taken.

    `names`: names of a layer, or of parts of it; forms that the configuration gives to other layers
    alone do not count.
    """
    given = quantization(config) or {}
    if given.get("quant_method") == "mxfp4":
        return StoredForms(PLAIN, Form(4, MXFP4_GROUP, E2M1))
    if str(given.get("quant_method")).endswith("fp8"):
        forms = [_of_float8(one.get("weight_block_size")) for one in _settings(given, names)]
        widest = max(forms, key=lambda form: form.bits)
        return StoredForms(widest, widest)
    if str(given.get("quant_method")).startswith("modelopt"):
        forms = [_of_modelopt(one) for one in _each_of_modelopt(given, names)]
        widest = max(forms, key=lambda form: form.bits, default=PLAIN)
        return StoredForms(widest, widest)
    packing = given.get("format")
    if given.get("config_groups"):
        forms = [_of_group(one, packing) for one in _groups(given, names)]
    else:
        forms = [_form(one, str(packing)) for one in _settings(given, names)]
    widest = max(forms, key=lambda form: form.bits, default=PLAIN)
    return StoredForms(widest, widest)


def doubts_of(config: Config, *, has_experts: bool) -> Iterator[str]:
    """Sentences that say why layers of a quantised checkpoint are counted as plain; often none."""
    given = quantization(config) or {}
    method = str(given.get("quant_method"))
    if method == "mxfp4" and not has_experts:
        yield (
            "quantization_config: quant_method: expected a model with experts for 'mxfp4', got "
            "one without; its weights are counted as plain"
        )
    if method.startswith("modelopt"):
        said = [one.get("quant_algo") for one in _each_of_modelopt(given)]
        named = [str(each) for each in said if each is not None]  # None: of a cache alone
        for algorithm in dict.fromkeys(each for each in named if each.upper() not in MODELOPT):
            yield (
                f"quantization_config: quant_algo: expected one of {list(MODELOPT)}, got "
                f"{algorithm!r}; its weights are counted as plain, and compile may refuse them"
            )
    for name, group in (given.get("config_groups") or {}).items():
        if isinstance(group, list):
            yield (
                "quantization_config: config_groups: expected groups that say what their weights "
                f"are, got the scheme {name!r} by its name; all weights are counted as plain"
            )


def _settings(given: Config, names: Sequence[str]) -> Iterator[Config]:
    """The settings of all layers, and those that rules of GPTQModel's `dynamic` give to some; with
    `names` those of that layer."""
    rules = {
        pattern.removeprefix("+:"): rule
        for pattern, rule in (given.get("dynamic") or {}).items()
        if isinstance(rule, dict) and not pattern.startswith("-:")
    }
    spelled = [each for name in names for each in spellings(name)]
    for pattern, rule in rules.items():
        if not names:
            yield {**given, **rule}
        elif any(is_start(pattern, name) for name in spelled):
            yield {**given, **rule}
            return
    yield given


def _each_of_modelopt(given: Config, names: Sequence[str] = ()) -> list[Config]:
    """The objects that name an algorithm: one for all layers, or one for each layer, or with
    `names` those of that layer."""
    mixed = given.get("quantized_layers")
    if not isinstance(mixed, dict):
        return [given]
    named = [mixed[each] for name in names for each in spellings(name) if each in mixed]
    return [one for one in named or mixed.values() if isinstance(one, dict)]


def _of_modelopt(given: Config) -> Form:
    return MODELOPT.get(str(given.get("quant_algo")).upper(), PLAIN)


def _groups(given: Config, names: Sequence[str]) -> list[Group]:
    """Groups of compressed-tensors with weights; with `names` those that name the layer or, if
    there are none, those for all linear layers, if there are any."""
    groups = [group for _, group in groups_for(given)]
    named = [group for _, group in groups_for(given, *names)]
    if len(named) < len(groups):
        return named
    return (names and [each for each in groups if CLASS in targets_of(each)]) or groups


def _of_group(group: Group, packing: object) -> Form:
    """The form of a compressed-tensors group. `packing`: format of groups that name none."""
    if isinstance(group, list):
        return PLAIN
    return _form(group["weights"], str(group.get("format") or packing))


def _form(given: Config, packing: str) -> Form:
    if packing.startswith("mxfp4"):
        return Form(4, MXFP4_GROUP, E2M1)
    if packing.startswith("nvfp4"):
        return Form(4, NVFP4_GROUP, NVFP4)
    if given.get("type") == "float":
        bits = given.get("num_bits")
        if bits == 4:  # FP4 in other forms is rounded to int8
            return Form(8)
        return _float8(given) if bits == 8 else PLAIN
    bits = first_of(given, "num_bits", "bits", "w_bit")
    if not isinstance(bits, int):
        return PLAIN
    group = first_of(given, "group_size", "q_group_size")
    if bits > 8:
        return PLAIN
    rounded = 4 if bits <= 4 and packing not in UNPACKED else 8
    has_order = given.get("desc_act") or str(given.get("actorder")).lower() in BY_INPUT
    if not isinstance(group, int) or group <= 0:
        return Form(rounded)
    if group % GROUP or has_order:
        return Form(8)
    symmetric = given.get("symmetric", given.get("sym", not given.get("zero_point", True)))
    if rounded == 8:
        return Form(8, group, INT8) if symmetric else Form(8)
    return Form(4, group, has_offsets=not symmetric)


def _float8(given: Config) -> Form:
    group = given.get("group_size") if given.get("strategy") == "group" else None
    return _of_float8([1, group] if group else given.get("block_structure"))


def _of_float8(given: object) -> Form:
    """The form of float8 weights. `given`: a block as `block_of` reads it, else each row or the
    whole weight has one scale."""
    block = block_of(given)
    if block is None:
        return Form(8, ROW, E4M3)
    width = block[1]
    return PLAIN if width % GROUP else Form(8, width, E4M3)
