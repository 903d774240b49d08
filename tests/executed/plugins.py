"""Attention of a CUDA program through a plugin library's own entry point, on CPU tensors.

Imported by processes that find the library's host at $HOST.
"""

from __future__ import annotations

import copy
import ctypes
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvgraph.contract.params import KVCacheParams
from kvgraph.kernels.aot import Compiled, Resources, all_attention_variants
from kvgraph.kernels.record import pack_images, pack_kernels
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import Parameter
from kvgraph.ops import UPDATE_AND_ATTEND
from kvgraph.runtime.sessions import launches
from tests.executed.gpu import ExecutingGpu, poisoned, require_written

OP = UPDATE_AND_ATTEND.name
Tensors = Mapping[str, torch.Tensor]
POOLS = ("kv_blocks", "kv_scales")


class PluginAttention(launches.Attention, ABC):
    """update_and_attend of one layer, planned and launched by a plugin."""

    def __init__(
        self, node: torch.fx.Node, module: nn.Module, gpu: ExecutingGpu, leaf: KVCacheParams
    ) -> None:
        super().__init__(node, module, gpu, leaf)
        given = self.given
        kernels = compiled(gpu.records / gpu.arch, self.shape, gpu.arch)
        self._executor = gpu.executor
        self._made: Any = None
        self._fields: dict[str, Any] = {
            attribute.name: given[attribute.name] for attribute in UPDATE_AND_ATTEND.attributes
        } | {
            "kernels": pack_kernels(self.shape, {gpu.arch: kernels}),
            "images": pack_images({kernel.cubin: None for kernel in kernels}),
        }

    def inputs(self, shared: object) -> tuple[torch.fx.Node, ...]:
        return tuple(node for name, node in self.nodes.items() if name not in self.bound)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        step = iter(inputs)
        given = {n: self.bound[n] if n in self.bound else next(step) for n in self.nodes}
        given = {n: a if n in launches.MUTATED else a.contiguous() for n, a in given.items()}
        q = given["q"]
        out = torch.full((*q.shape[:2], self.shape.cache.v_width), torch.nan, dtype=q.dtype)
        if self._made is None:
            self._made = self.make(given)
        self.enqueue(given, out)
        require_written({"out": out})
        return out

    @abstractmethod
    def make(self, given: Tensors) -> Any:
        """The node, for operands of these names."""

    @abstractmethod
    def enqueue(self, given: Tensors, out: torch.Tensor) -> None:
        """Run it. KernelFaultError, or AssertionError with the refusal."""


class TensorRTAttention(PluginAttention):
    """By `enqueue` of the TensorRT plugin; its workspace has as many bytes as it asked for."""

    def make(self, given: Tensors) -> Any:
        from tests.plugins import tensorrt_host as host

        fields = {**self._fields, "inputs": host.mask(OP, list(given))}
        plugin = host.Plugin.of(OP, fields, host.RUNTIME)
        assert plugin, host.said()
        return plugin.attach()

    def enqueue(self, given: Tensors, out: torch.Tensor) -> None:
        described = describe(given)
        workspace = poisoned(self._made.workspace(described) // 4)
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
        addresses["to out"] = out.data_ptr()
        addresses |= {f"to {name}": addresses[name] for name in POOLS if name in given}
        refusal = self._executor.run(
            lambda: self._made.enqueue(described, addresses, workspace.data_ptr()),
            lambda: on_device(given, out=out, workspace=workspace),
        )
        assert not refusal, refusal


class OnnxRuntimeAttention(PluginAttention):
    """By the CUDA op for ONNX Runtime; its scratch memory is the host's."""

    def make(self, given: Tensors) -> Any:
        from tests.plugins import onnxruntime_host as host

        fields = {name: value for name, value in self._fields.items() if value is not None}
        kernel = host.Kernel(OP, fields)
        assert kernel, host.said()
        return kernel

    def enqueue(self, given: Tensors, out: torch.Tensor) -> None:
        from tests.plugins import onnxruntime_host as host

        scratch = poisoned(SCRATCH_FLOATS)
        host.dll.o_scratch(ctypes.c_size_t(scratch.data_ptr()))
        at = {name: tensor.data_ptr() for name, tensor in given.items()} | {"out": out.data_ptr()}
        longest_new, longest = given["max_lengths"][0].tolist()
        refusal = self._executor.run(
            lambda: self._made.compute(describe(given), (longest_new, longest), at=at, stream=0),
            lambda: on_device(given, out=out, scratch=scratch[: _asked(host.log()) // 4]),
        )
        assert not refusal, refusal


def _asked(log: list[str]) -> int:
    """Bytes of the last scratch memory that the op asked its host for."""
    return next((int(line.split()[1]) for line in reversed(log) if line.startswith("scratch")), 0)


SCRATCH_FLOATS = 1 << 20
"""Of ONNX Runtime's allocator: more than any step here splits its contexts into."""

ATTENTION: dict[str, type[PluginAttention]] = {
    "tensorrt": TensorRTAttention,
    "onnxruntime": OnnxRuntimeAttention,
}


def compiled(folder: Path, shape: AttentionShape, arch: str) -> list[Compiled]:
    """The cubins of an artifact's `folder`, as it describes them."""
    entries = {e["file"]: e for e in json.loads((folder / "kernels.json").read_text())}
    made = []
    for variant in all_attention_variants(shape, arch):
        entry = entries[f"{variant.name}.cubin"]
        variant = copy.copy(variant)
        order = tuple(Parameter(*p) for p in entry["parameters"])
        object.__setattr__(variant, "parameters", order)  # frozen, and derived where it is made
        used = Resources(entry["registers"], entry["shared"], 0, 0, 0)
        cubin = (folder / entry["file"]).read_bytes()
        made.append(Compiled(variant, arch, entry["entry"], cubin, "", used, 0.0))
    return made


def describe(given: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in given.items()}


def on_device(given: Tensors, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """What kernels may reach: the bounds of a step are for the host alone."""
    return {name: t for name, t in given.items() if name != "max_lengths"} | more
