"""Groups of operators for which `token_labels.py` has a rule."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvgraph.compiler.passes.token_functions import CREATED, LAYOUT, VIEWS, packet
from kvgraph.ops import torch_ops

aten = torch.ops.aten

SAME = (
    *(aten.to, aten._to_copy, aten.type_as, aten.dropout, aten.clone, aten.contiguous),
    *(aten.alias, aten.detach, aten.lift_fresh_copy),
)
"""Operators that return the elements of their first operand at the same places."""

MOVED = (
    *(*LAYOUT, aten.view_as, aten.expand_as, aten.narrow, aten.movedim, aten.swapaxes, aten.concat),
    *(aten.roll, aten.flip, aten.tile, aten.unfold, aten.diagonal, aten.triu, aten.tril),
    *(aten.numpy_T, aten.mT, aten.adjoint, aten.diagonal_scatter),
)
ALONG_ONE = (aten.cat, aten.concat, aten.slice_scatter, aten.repeat_interleave, aten.copy)
"""Operators of MOVED that move elements along one dim, if any, to many places."""
OVERWRITES = (aten.copy, aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter)
"""Operators of MOVED whose result has no element of a part that is written over."""
RESHAPED = (*VIEWS, aten.view_as, aten.reshape, aten.flatten, aten.unflatten)
SIZES = (aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset)
ALONG = (
    *(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax, aten.cumsum, aten.cumprod),
    *(aten.sort, aten.argsort, aten.topk, torch_ops.all_gather),
)
NORMS = (aten.layer_norm, aten.rms_norm, aten.native_layer_norm, aten._fused_rms_norm)
GROUP_NORMS = (aten.group_norm, aten.native_group_norm)
ELEMENTWISE = (
    *(aten.__or__, aten.__and__, aten.__ior__, aten.__iand__, aten.logical_and, aten.logical_or),
    *(aten.multiply, aten.divide, aten.subtract, aten.floor_divide, aten.true_divide, aten.rsub),
    *(aten.where, aten.masked_fill, aten.masked_fill_, aten.isclose, aten.absolute, aten.negative),
    *(aten.hardswish, aten.log_sigmoid, aten.fill_, aten.copy_, aten.clamp, aten.complex),
    aten.polar,
)
"""Elementwise operators that torch does not tag as pointwise."""

MADE = (*CREATED, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.empty)
PADS = (aten.pad, aten.constant_pad_nd)


def is_pointwise(node: Node) -> bool:
    return packet(node) in ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
