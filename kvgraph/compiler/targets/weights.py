"""Write a program's `weights.safetensors`, from memory or while values are read and made.

Decision: the file is written here piece by piece, because safetensors' own writer needs all tensors
in memory. Data begins at a multiple of 64 bytes, and tensors with a size that is a multiple of 64
bytes come first, so kernels get whole cache lines from a file mapped into memory. Within these two
groups tensors are sorted by dtype and name.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import ALL
from kvgraph.contract.file_names import WEIGHTS_NAME, WEIGHTS_TABLE
from kvgraph.contract.plain import to_json
from kvgraph.progress import task

STORED_DTYPES = {
    getattr(torch, dtype.name): dtype.safetensors
    for dtype in sorted(ALL, key=lambda d: (-d.itemsize, d.kind == "bool", d.safetensors))
}
"""torch dtype -> safetensors' name, in the order in which a file has them."""

LINE_BYTES = 64


def save_weights(program: ExportedProgram, folder: Path, weights: Weights | None = None) -> None:
    """Write parameters and buffers by the program's names; fake ones come from `weights`.

    ModelError for a number that is not finite in the parameter's dtype.
    """
    state, weights = _state(program), weights or Weights()
    held = {name: tensor for name, tensor in state.items() if not _is_elsewhere(tensor)}
    tensors, aliases = dense_weights(held)
    owners: dict[int, str] = {}
    for name in sorted(state.keys() - held.keys()):
        owner = owners.setdefault(id(state[name]), name)
        if owner == name:
            tensors[name] = state[name]
        else:
            aliases[name] = owner
    write_safetensors(folder / WEIGHTS_NAME, tensors, aliases, weights)


def add_table(program: ExportedProgram, package: Path) -> None:
    """Append a table of the tensors that `save_weights` writes to the archive `package`.

    A session and `kvgraph verify` compare the weights' header with it: an AOTInductor package does
    not tell shapes.
    """
    table = {n: [STORED_DTYPES[t.dtype], list(t.shape)] for n, t in _state(program).items()}
    with zipfile.ZipFile(package, "a") as archive:
        archive.writestr(
            zipfile.ZipInfo(WEIGHTS_TABLE, (1980, 1, 1, 0, 0, 0)), to_json(table, sort=True)
        )


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _state(program: ExportedProgram) -> dict[str, torch.Tensor]:
    constants = {k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}
    return dict(program.state_dict) | constants


def dense_weights(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor once, row-major and without shared memory; and tied names -> their owners."""
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in sorted(state.items()):
        owner = owners.setdefault(_view(tensor), name)
        if owner != name:
            aliases[name] = owner
            continue
        storage = tensor.untyped_storage().data_ptr()
        dense = tensor.detach().contiguous()
        # A second view of the same memory is copied, because the file has no overlaps.
        tensors[name] = dense.clone() if storage in storages else dense
        storages.add(storage)
    return tensors, aliases


def dense_in_place(program: ExportedProgram) -> None:
    """Make the program's weights row-major, as in the file; tied weights stay tied."""
    dense: dict[tuple[object, ...], torch.Tensor] = {}
    for held in (program.state_dict, program.constants):
        for name, tensor in held.items():
            if not isinstance(tensor, torch.Tensor) or _is_elsewhere(tensor):
                continue
            if not tensor.is_contiguous():
                if (made := dense.get(_view(tensor))) is None:
                    made = dense[_view(tensor)] = tensor.detach().contiguous()
                is_parameter = isinstance(tensor, nn.Parameter)
                held[name] = nn.Parameter(made, requires_grad=False) if is_parameter else made


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors that view the same memory in the same way."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    weights: Weights,
) -> None:
    """Write `tensors` as a safetensors file. `weights` provides values of fake or meta tensors."""
    ranks = list(STORED_DTYPES)

    def nbytes(name: str) -> int:
        return tensors[name].numel() * tensors[name].element_size()

    def place(name: str) -> tuple[bool, int, str]:
        return nbytes(name) % LINE_BYTES != 0, ranks.index(tensors[name].dtype), name

    order = sorted(tensors, key=place)
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    starts: dict[str, int] = {}
    for name in order:
        tensor, starts[name] = tensors[name], end
        end += nbytes(name)
        header[name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % LINE_BYTES)
    elsewhere = {name: tensors[name].dtype for name in order if _is_elsewhere(tensors[name])}
    held = ((name, tensors[name]) for name in order if name not in elsewhere)
    advancing = task("writing weights", end, "bytes")
    with one_torch_thread(), path.open("wb") as file, advancing as advance:
        file.write(len(text).to_bytes(8, "little") + text)
        data, written = file.tell(), dict.fromkeys(order, 0)
        for name, piece in chain(held, weights.pieces(elsewhere)):
            raw = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.seek(data + starts[name] + written[name])
            file.write(raw)
            written[name] += raw.nbytes
            advance(raw.nbytes)
    short = [name for name in order if written[name] != nbytes(name)]
    assert not short, f"{path.name}: {short[0]} came short"


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Make torch's operators run on the calling thread only while this context is active.

    torch's own threads wait in a busy loop, and would take processors from the packing threads.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
