"""The ops for a plain `torch.onnx.export` and a plain ONNX Runtime session.

    program = torch.export.export(module, args, dynamic_shapes=shapes)
    torch.onnx.export(
        kvgraph.onnx.lower_caches(program),
        f="model.onnx",
        dynamo=True,
        custom_translation_table=kvgraph.onnx.translation_table(),
    )

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(kvgraph.onnx.library_path())

A pool is an input and an output of the graph: bind one buffer to both (`IOBinding`), since the ops
write in place and refuse two. Frameworks are imported by the function that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["library_path", "lower_caches", "register_schemas", "translation_table"]


def lower_caches(program: ExportedProgram) -> ExportedProgram:
    """`program` with its cache ops in the form that ONNX graphs carry; `program` is not changed.

    Each `store_kv` and the `paged_attention` behind it become an `update_and_attend` that takes
    the pool and hands it on. Pools `[num_page_slots, 2, L, S, K, D]`, and their `kv_scales`, become
    outputs behind the program's own, in the order of the inputs. Tensors of indices become int64,
    as ONNX asks. `program` comes from `torch.export.export`, without decompositions.
    Writes in place into values of its own become new values.
    UnsupportedError: it has no cache ops, a store without its attention or the other way round, a
    pool that is not one of its inputs or that another operator uses, or it changes another input or
    a tensor of the module.
    """
    from kvgraph.compiler.lower_caches import lower_caches

    return lower_caches(program)


def translation_table() -> dict[Callable[..., object], Callable[..., object]]:
    """`custom_translation_table` of `torch.onnx.export` for what `lower_caches` returns.

    Registers the schemas too, which the exporter asks for.
    """
    from kvgraph.ops.onnx_ops import translation_table

    return translation_table()


def register_schemas() -> None:
    """Make the ops known to onnx's checker and shape inference; more than once is harmless."""
    from kvgraph.ops.onnx_ops import register_schemas

    register_schemas()


def library_path() -> str:
    """What `SessionOptions.register_custom_ops_library` loads: the ops for ONNX Runtime on a CPU.

    KernelError where the package was installed without its native libraries, DeviceError where this
    processor cannot run them.
    """
    from kvgraph.ops.native import library_path

    return str(library_path("onnxruntime"))
