"""kvgraph's ops for a plain `torch.onnx.export` and a plain ONNX Runtime session.

    program = torch.export.export(module, args, dynamic_shapes=shapes)
    torch.onnx.export(
        kvgraph.onnx.lower_caches(program),
        f="model.onnx",
        dynamo=True,
        custom_translation_table=kvgraph.onnx.translation_table(),
        dynamic_shapes=shapes,
    )

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(kvgraph.onnx.library_path())

`dynamic_shapes` gives the graph's dims the names of the symbols' dims.

A pool is an input and an output of the graph. Bind one buffer to both (`IOBinding`): the ops write
in place and refuse two buffers. Frameworks are imported by the functions that need them, which
raise MissingDependencyError without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvgraph.contract.loading import require_package

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["library_path", "lower_caches", "register_schemas", "translation_table"]


def lower_caches(program: ExportedProgram) -> ExportedProgram:
    """A copy of `program` with its cache ops in the form of ONNX graphs; `program` is not changed.

    `program` comes from `torch.export.export`, without decompositions. Each `store_kv` and the
    `paged_attention` after it become an `update_and_attend` that takes the pool and returns it.
    Pools `[num_page_slots, 2, L, S, K, D]`, and their `kv_scales`, become outputs after the
    program's own, in the order of the inputs. Index tensors become int64, as ONNX requires.
    In-place writes into the program's own values become new values, and products of complex numbers
    those of real ones.
    UnsupportedError: the program has no cache ops, or a store without its attention or the other
    way round; a pool is no input, or another operator uses it; or the program changes another input
    or a tensor of the module.

    It waits while another thread compiles.
    """
    from kvgraph.compiler.alone import alone

    with alone():
        _require("torch", "lower_caches")
        from kvgraph.compiler.lower_caches import lower_caches

        return lower_caches(program)


def translation_table() -> dict[Callable[..., object], Callable[..., object]]:
    """The `custom_translation_table` of `torch.onnx.export` for programs from `lower_caches`.

    It also registers the schemas, which the exporter needs.
    """
    for package in ("torch", "onnx", "onnxscript"):
        _require(package, "translation_table")
    from kvgraph.ops.onnx_ops import translation_table

    return translation_table()


def register_schemas() -> None:
    """Register the ops with onnx's checker and shape inference; repeated calls are harmless."""
    _require("onnx", "register_schemas")
    from kvgraph.ops.onnx_ops import register_schemas

    register_schemas()


def library_path() -> str:
    """Path of the library for `SessionOptions.register_custom_ops_library`: kvgraph's CPU ops.

    KernelError: the library is missing, damaged or of another build. DeviceError: this processor
    cannot run it.
    """
    from kvgraph.ops.native import library_path, opened

    path = library_path("onnxruntime")
    opened(path)
    return str(path)


def _require(package: str, function: str) -> None:
    require_package(
        package, f"needed for kvgraph.onnx.{function}", "pip install 'kvgraph[compile]'"
    )
