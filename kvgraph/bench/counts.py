"""The least bytes and flops of a step, counted from the manifest and the weights file.

    decode bytes of a step  = W + experts(B) + B * kv(context)     W: weights, no lookup tables
    prefill flops           = 2 * M * B * P + 2 * H * B    M, H: elements of matrices, of the head
    share of the read limit = decode bytes / seconds / (read GB/s * 1e9)
    share of the GEMM limit = prefill flops / seconds / (GFLOP/s * 1e9)

B rows of P tokens; only the last token of a row is multiplied by the head. All other matrices are
counted for every token, as most engines multiply them. kvgraph multiplies those behind the last
attention for the last token only (`select_rows_early`), so its shares are too high by up to one
layer's part. kv(context): bytes of the pool for `context` tokens (in a window, at most its length).
experts(B): bytes of experts by `Mixture.read`; a token computes with its active experts. Lookup
tables (the embedding, rotary tables) are read by rows and not counted; a tied embedding is the head
and is counted. Attention's flops, activations, the sampler and small tensors in the graph's own
file are not counted, so shares are too low. A mixture without packed experts counts all of them, so
its shares are too high. Packed weights count with their padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvgraph.contract.dtypes import ALL
from kvgraph.contract.file_names import WEIGHTS_NAME
from kvgraph.contract.manifest import Manifest
from kvgraph.contract.mixtures import Mixture
from kvgraph.contract.safetensors import TensorAt, read_layout
from kvgraph.contract.trees import params_from_layout
from kvgraph.ops.packed import panel_count

CLASSES = {dtype.name: dtype.short for dtype in ALL if dtype.short}
"""Class of precision by `weights` of a manifest, if its name is not the class already."""

PACKED = ".packed"
"""Suffix of the names of packed weights (`kvgraph.linear`, `kvgraph.experts`)."""

STACKED = 4
"""Rank of packed weights of all experts; the weights of a linear layer have one dim fewer."""

GEMM_DTYPES = {dtype.short: dtype.name for dtype in ALL if dtype.short} | {"int4": "int8"}
"""The dtype in which matrix products can run, by class of precision."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of an artifact. `precision`: class of the weights. `weight_bytes`, `matrices`,
    `head`: W, M and H of the module's formulas; M counts only a token's active experts."""

    precision: str
    file_bytes: int
    weight_bytes: int
    matrices: float
    head: int
    kv_bytes: dict[int, float]
    """Bytes of the pool for one token of one row, scales included, by window (0: none)."""
    mixtures: tuple[Mixture, ...] = ()

    def decode_bytes(self, batch: int, context: float) -> float:
        """Least bytes that one step of `batch` rows with `context` tokens each reads."""
        kv = sum(
            each * (min(context, window) if window else context)
            for window, each in self.kv_bytes.items()
        )
        experts = sum(mixture.read(batch) for mixture in self.mixtures)
        return self.weight_bytes + experts + batch * kv

    def prefill_flops(self, batch: int, prompt: float) -> float:
        """Flops of `batch` prompts of `prompt` tokens; a multiply and an add are two."""
        return 2.0 * self.matrices * batch * prompt + 2.0 * self.head * batch


def count(folder: Path, manifest: Manifest) -> Counts:
    """Counts of an artifact; only the header of its weights file is read."""
    path = folder / WEIGHTS_NAME
    vocab = manifest.model.vocab_size
    tensors = read_layout(path)
    with_vocab = [name for name, at in tensors.items() if _has_vocab(name, at, vocab)]
    read = {name: at for name, at in tensors.items() if not _is_table(name, with_vocab)}
    elements = {n: _elements(n, at, tensors) for n, at in read.items() if _is_matrix(n, at)}
    at_work = {mixture.experts: mixture.active / mixture.experts for mixture in manifest.mixtures}
    used = {n: count * _used(n, read[n], at_work) for n, count in elements.items()}
    head = sum(number for name, number in elements.items() if name in with_vocab)
    return Counts(
        _class(manifest, elements, tensors),
        path.stat().st_size,
        sum(at.nbytes for at in read.values()) - sum(m.bytes for m in manifest.mixtures),
        sum(used.values()) - head,
        head,
        _kv_bytes(manifest),
        tuple(manifest.mixtures),
    )


def _class(manifest: Manifest, elements: Mapping[str, int], tensors: Mapping[str, TensorAt]) -> str:
    """Class of precision; for weights as stored, the class of most weights."""
    if manifest.weights != "stored":
        return CLASSES.get(manifest.weights, manifest.weights)
    kinds = {"int4": 0, "int8": 0, "bf16": 0}
    for name, count in elements.items():
        is_int8 = name.endswith(PACKED) and tensors[name].dtype == "I8"
        kinds["int4" if _has_nibbles(name, tensors) else "int8" if is_int8 else "bf16"] += count
    return max(kinds, key=lambda kind: kinds[kind])


def _used(name: str, at: TensorAt, at_work: dict[int, float]) -> float:
    """Share of a matrix that a token uses: for stacked experts, the share of active experts."""
    is_stacked = name.endswith(PACKED) and len(at.shape) == STACKED
    return at_work.get(at.shape[0], 1.0) if is_stacked else 1.0


def _has_vocab(name: str, at: TensorAt, vocab: int) -> bool:
    """Whether a matrix has a row or column for every token: an embedding or a head."""
    if name.endswith(PACKED):
        return len(at.shape) != STACKED and at.shape[0] == panel_count(vocab)
    return vocab in at.shape and len(at.shape) > 1


def _is_table(name: str, with_vocab: list[str]) -> bool:
    """Whether steps read only a few rows: a rotary table, or an embedding that is not the head."""
    if "cos_sin" in name:
        return True
    if name not in with_vocab or name.endswith(PACKED) or len(with_vocab) < 2:
        return False
    return "embed" in name or any(other.endswith(PACKED) for other in with_vocab)


def _is_matrix(name: str, at: TensorAt) -> bool:
    return len(at.shape) > 1 and not name.endswith((".scales", ".group_bytes", ".packed_bias"))


def _elements(name: str, at: TensorAt, tensors: Mapping[str, TensorAt]) -> int:
    """Number of weights of a matrix, padding included; a packed byte may hold two."""
    return math.prod(at.shape) * (2 if _has_nibbles(name, tensors) else 1)


def _has_nibbles(name: str, tensors: Mapping[str, TensorAt]) -> bool:
    """Whether a matrix is packed in 4 bits: it has bytes of groups, or int8 with scales of groups;
    without groups, scales have two rows: scales of columns and sums."""
    if not name.endswith(PACKED):
        return False
    stem = name.removesuffix(PACKED)
    scales = tensors.get(f"{stem}.scales")
    is_grouped = scales is not None and scales.shape[-2] != 2
    return f"{stem}.group_bytes" in tensors or (is_grouped and tensors[name].dtype == "I8")


def _kv_bytes(manifest: Manifest) -> dict[int, float]:
    found: dict[int, float] = {}
    for leaf in params_from_layout(manifest.layout).leaves.values():
        window = leaf.window_size or 0
        found[window] = found.get(window, 0.0) + leaf.bytes_per_page / leaf.page_size
    return found
