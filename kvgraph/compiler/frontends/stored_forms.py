"""How a checkpoint in fewer bits stores its layers, as far as its configuration says: for plans."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.compiler.frontends.folder import Config, quantization
from kvgraph.ops.packed import E2M1, GROUP, Form

MXFP4_GROUP = 32


@dataclass(frozen=True)
class StoredForms:
    """Of linear layers, the head left out, and of experts."""

    linears: Form
    experts: Form


PLAIN = Form(16)


def stored_forms(config: Config) -> StoredForms:
    """Of a checkpoint in fewer bits. Integers stay in as few bits as they are, in the largest form
    where there are several; numbers with exponents, but for experts in MXFP4, fit bfloat16."""
    given = quantization(config) or {}
    if given.get("quant_method") == "mxfp4":
        return StoredForms(PLAIN, Form(4, MXFP4_GROUP, E2M1))
    groups = given.get("config_groups")
    each = [g.get("weights") or {} for g in groups.values()] if groups else [given]
    forms = [_form(one, str(given.get("format"))) for one in each]
    widest = max(forms, key=lambda form: form.bits, default=PLAIN)
    return StoredForms(widest, widest)


def _form(given: Config, packing: str) -> Form:
    if given.get("type") == "float":
        return Form(4, MXFP4_GROUP, E2M1) if packing.startswith("mxfp4") else PLAIN
    bits = given.get("num_bits", given.get("bits", given.get("w_bit")))
    if not isinstance(bits, int):
        return PLAIN
    group = given.get("group_size", given.get("q_group_size"))
    if bits > 4:
        return Form(8) if bits == 8 else PLAIN
    if not isinstance(group, int) or group % GROUP or group <= 0 or given.get("desc_act"):
        return Form(4)
    symmetric = given.get("symmetric", given.get("sym", not given.get("zero_point", True)))
    return Form(4, group, has_offsets=not symmetric)
