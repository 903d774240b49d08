"""Weights packed for the CPU (packed.py): operands of ops, and their rules. The gate of experts."""

from __future__ import annotations

from collections.abc import Callable

from kvgraph.ops import spec
from kvgraph.ops.packed import (
    ACTIVATIONS,
    CODE_BITS,
    COLUMNS,
    E2M1,
    INTEGERS,
    IQ4_NL,
    LINE_BYTES,
    MOST_INPUTS,
    MOST_SUMMED,
    PER_LINE,
    SILU,
    WITHOUT_BYTES,
    Form,
    least_group,
    num_groups,
    num_scales,
    padded_depth,
    stored_dtype,
)


def operands(
    name: str, stem: str = "", leading: tuple[str, ...] = (), variable: str | None = None
) -> tuple[spec.Operand, ...]:
    """Operands of a weight: the weight, and its scales, bytes of groups and bias, named by `stem`.

    scales: without groups, a scale per column and the sum of its stored numbers; with groups, a
    scale per group; for NVFP4, a factor per column.
    group_bytes: for two levels, multipliers less one, two columns in a byte; for integers in
    groups, the offset that is added to each number; for E2M1, the exponent of a scale (bias 127);
    for NVFP4, a scale in E4M3; for EIGHTHS, the offset in eighths.
    variable: type variable of the weight, if it is not that of all weights.
    """
    rows = (*leading, f"num_{stem}panels")
    return (
        spec.Operand(
            name, (*rows, f"num_{stem}lines", f"{stem}line"), spec.WEIGHT, variable=variable
        ),
        spec.Operand(
            f"{stem}scales", (*rows, f"num_{stem}scales", COLUMNS), spec.FLOAT32, optional=True
        ),
        spec.Operand(
            f"{stem}group_bytes",
            (*rows, f"num_{stem}groups", f"num_{stem}bytes"),
            ("int8",),
            optional=True,
        ),
        spec.Operand(f"{stem}bias", (*rows, COLUMNS), spec.FLOAT32, optional=True),
    )


FORM = ("bits", "group", "codes")
"""Attributes of the form of a weight, without the weight's stem."""


def form_of(stem: str) -> tuple[str, ...]:
    """FORM of the weight with this stem."""
    return tuple(f"{stem}{name}" for name in FORM)


def attributes(stem: str = "", default_bits: int | None = None) -> tuple[spec.Attribute, ...]:
    """The attributes that `form_of` names."""
    bits, group, codes = form_of(stem)
    return (
        spec.Attribute(bits, "int", default_bits),
        spec.Attribute(group, "int", 0),
        spec.Attribute(codes, "int", INTEGERS),
    )


GATE_ATTRIBUTES = (
    spec.Attribute("activation", "int", SILU),
    spec.Attribute("alpha", "float", 1.0),
    spec.Attribute("limit", "float", 0.0),
    spec.Attribute("up_offset", "float", 0.0),
)
"""Attributes of the gate of experts (`packed.joined`)."""

GATE_RULES = (
    spec.Rule("activation", lambda activation: activation not in ACTIVATIONS and "0, 1 or 2"),
    spec.finite("alpha"),
    spec.at_least_0("limit"),
    spec.finite("up_offset"),
)
"""Rules of GATE_ATTRIBUTES."""


def known_codes(*without: int, of_rows: tuple[int, ...] = (), stem: str = "") -> spec.Rule:
    """Rule that `codes` fit the bits. `without`: codes that the op does not support. `of_rows`:
    codes, besides integers, that may have one scale per row."""
    bits, group, codes = form_of(stem)

    def fault(codes: int, group: int, bits: int) -> bool | str:
        known = [INTEGERS, *(c for c in of_rows if CODE_BITS[c] == bits)]
        if group:
            known = [c for c, size in CODE_BITS.items() if size == bits and c not in without]
        *rest, last = map(str, known)
        said = f"{', '.join(rest)} or {last}" if rest else last
        end = "" if group else " without groups"
        return codes not in known and f"{said} for {bits} bits{end}"

    return spec.Rule(codes, fault, names=(codes, group, bits))


def _group_fault(group: int, codes: int) -> bool | str:
    least = least_group(codes)
    return (group < 0 or group % least > 0) and f"a multiple of {least}"


def form_rules(stem: str = "") -> tuple[spec.Rule, ...]:
    """Rules of the form in which the weight with this stem is stored."""
    bits, group, codes = form_of(stem)
    return (
        spec.Rule(bits, lambda bits: bits not in PER_LINE and "32, 16, 8 or 4", names=(bits,)),
        spec.Rule(group, _group_fault, names=(group, codes)),
        spec.Rule(
            group, lambda group: group > MOST_INPUTS and f"at most {MOST_INPUTS}", names=(group,)
        ),
        spec.Rule(
            group,
            lambda group, bits: group and bits > 8 and f"0 for {bits} bits",
            names=(group, bits),
        ),
        known_codes(stem=stem),
    )


def summed(subject: str, stem: str = "") -> spec.Rule:
    """Rule that the inputs, named last in `subject`, are few enough for exact sums."""
    bits, group, _ = form_of(stem)

    def fault(in_features: int, bits: int, group: int) -> bool | str:
        fits = Form(bits, group).sums(in_features)
        return not fits and f"at most {MOST_SUMMED} for {bits} bits without groups"

    return spec.Rule(subject, fault, names=(subject.rpartition(" ")[2], bits, group))


def rules(
    weight: tuple[spec.Operand, ...], in_features: str, of: str, stem: str = ""
) -> tuple[spec.Rule, ...]:
    """Rules of the operands that `operands` made, for a weight with dim `in_features`; `of`
    describes its inputs in errors."""
    name, scales, group_bytes, _ = (operand.name for operand in weight)
    lines, line = map(str, weight[0].dims[-2:])
    num_scales = str(weight[1].dims[-2])
    groups, num_bytes = map(str, weight[2].dims[-2:])
    bits, group, codes = form = form_of(stem)
    return (
        spec.Rule(name, _weight_fault, names=(name, *form)),
        spec.Rule(f"{name}: dim {line}", _line_fault, names=(line, bits)),
        spec.Rule(f"{name}: dim {lines}", _lines_fault(of), names=(lines, in_features, bits)),
        spec.Rule(scales, _missing_scales, names=(scales, *form)),
        spec.Rule(scales, _unwanted_scales, names=(scales, *form), got="some"),
        spec.Rule(
            f"{scales}: dim {num_scales}",
            _scales_fault,
            names=(num_scales, in_features, group, codes),
        ),
        spec.Rule(group_bytes, _missing_bytes, names=(group_bytes, *form)),
        spec.Rule(group_bytes, _unwanted_bytes, names=(group_bytes, *form), got="some"),
        spec.Rule(
            f"{group_bytes}: dim {groups}", _groups_fault, names=(groups, in_features, group)
        ),
        spec.Rule(f"{group_bytes}: dim {num_bytes}", _bytes_fault, names=(num_bytes, group)),
    )


def _weight_fault(weight: str, bits: int, group: int, codes: int) -> bool | str:
    expected = stored_dtype(bits, codes if group else INTEGERS)
    return weight != expected and f"{expected} for {bits} bits"


def _line_fault(line: int, bits: int) -> bool | str:
    expected = COLUMNS * PER_LINE[bits] if bits >= 16 else LINE_BYTES
    return line != expected and str(expected)


def _lines_fault(of: str) -> Callable[..., bool | str]:
    def fault(num_lines: int, in_features: int, bits: int) -> bool | str:
        expected = padded_depth(in_features) // PER_LINE[bits]
        return num_lines != expected and f"{expected} for {in_features} {of}"

    return fault


def _has_scales(bits: int, group: int, codes: int) -> bool:
    return bits < 16 and not (group and codes == E2M1)


def _missing_scales(scales: str | None, bits: int, group: int, codes: int) -> bool | str:
    return scales is None and _has_scales(bits, group, codes) and f"some for {bits} bits"


def _unwanted_scales(scales: str | None, bits: int, group: int, codes: int) -> bool | str:
    unwanted = scales is not None and not _has_scales(bits, group, codes)
    return unwanted and f"none for {bits} bits"


def _scales_fault(found: int, in_features: int, group: int, codes: int) -> bool | str:
    expected = num_scales(in_features, group, codes)
    return found != expected and str(expected)


def _missing_bytes(group_bytes: str | None, bits: int, group: int, codes: int) -> bool | str:
    needed = bits == 4 and not (group and codes in WITHOUT_BYTES)
    return group_bytes is None and needed and f"some for {bits} bits"


def _unwanted_bytes(group_bytes: str | None, bits: int, group: int, codes: int) -> bool | str:
    unwanted = bits != 4 or (group > 0 and codes == IQ4_NL)
    return group_bytes is not None and unwanted and f"none for {bits} bits"


def _groups_fault(groups: int, in_features: int, group: int) -> bool | str:
    expected = num_groups(in_features, group)
    return groups != expected and str(expected)


def _bytes_fault(num_bytes: int, group: int) -> bool | str:
    expected = COLUMNS if group else COLUMNS // 2
    return num_bytes != expected and str(expected)
