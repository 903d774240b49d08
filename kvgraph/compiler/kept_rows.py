"""Stored rows as nodes keep them: in their groups, with scales under which no number overflows."""

from __future__ import annotations

import numpy as np
import torch

from kvgraph.compiler.frontends.found_instead import damaged
from kvgraph.compiler.values import Coded, CodedRows, Values
from kvgraph.ops.packed import E2M1, EIGHTHS, INT8, LEVELS, NVFP4, Form

LARGEST = {codes: float(np.nanmax(np.abs(levels))) for codes, levels in LEVELS.items()}


def in_groups(source: Values, group: int) -> CodedRows:
    """Open the stored rows of `source`, with groups of `group` inputs.

    `group` must divide the group size of the source's form; 0: keep that size. The function that is
    returned raises ModelError for a scale under which a number may overflow float32.
    """
    read, form = source.open_coded(), source.form
    assert form is not None
    times = form.group // group if group else 1

    def rows(start: int, stop: int) -> Coded:
        found = read(start, stop)
        _require_finite(source.where, form, found, start)
        return found if times == 1 else found.spread(times)

    return rows


def _require_finite(where: str, form: Form, coded: Coded, first: int) -> None:
    scales = coded.scales
    if form.codes == E2M1:
        scales = torch.exp2(scales.float() - 127)
    elif form.codes == NVFP4:
        assert coded.factors is not None
        scales = scales.view(torch.float8_e4m3fn).float() * coded.factors
    largest = LARGEST[form.codes if form.group else INT8]
    if coded.offsets is not None:  # at most as large as a number; of eighths twice as large
        largest *= 3 if form.codes == EIGHTHS else 2
    is_finite = (scales.float() * largest).isfinite()
    if not is_finite.all():
        at = tuple(int(i) for i in (~is_finite).nonzero()[0])
        place = f"{where}{[first + at[0], *at[1:-1]]}: group {at[-1]}"
        got = f"{float(scales[at]):g}: a damaged file"
        raise damaged(place, "a scale that keeps numbers finite in float32", got)
