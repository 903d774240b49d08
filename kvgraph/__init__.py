"""kvgraph: language models compiled ahead of time around a paged KV cache outside the graph.

Names are imported when they are first used, so that the deployment side never loads the
compiler's frameworks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvgraph._torch import register_with_torch

_EXPORTS = {
    "ArtifactError": "kvgraph.errors",
    "BatchCharacteristics": "kvgraph.contract.inputs",
    "BindingError": "kvgraph.errors",
    "Buffer": "kvgraph.contract.inputs",
    "CapacityError": "kvgraph.errors",
    "CheckError": "kvgraph.errors",
    "ContinuousBatchingKVCacheCollection": "kvgraph.kv.collection",
    "ContinuousBatchingKVCacheInputSymbols": "kvgraph.contract.symbols",
    "ContinuousBatchingKVCacheManager": "kvgraph.kv.continuous",
    "Device": "kvgraph.contract.devices",
    "DeviceError": "kvgraph.errors",
    "Engine": "kvgraph.runtime.engine",
    "GenerationError": "kvgraph.errors",
    "GraphSignature": "kvgraph.contract.signature",
    "InsufficientPagesError": "kvgraph.errors",
    "KVCacheBufferInterface": "kvgraph.contract.inputs",
    "KVCacheInputSymbols": "kvgraph.contract.symbols",
    "KVCacheInputs": "kvgraph.contract.inputs",
    "KVCacheInputsInterface": "kvgraph.contract.inputs",
    "KVCacheInputsSequence": "kvgraph.contract.inputs",
    "KVCacheManager": "kvgraph.kv.manager",
    "KVCacheMetrics": "kvgraph.kv.metrics",
    "KVCacheParamInterface": "kvgraph.contract.params",
    "KVCacheParams": "kvgraph.contract.params",
    "KVCacheQuantization": "kvgraph.contract.params",
    "KVCacheStrategy": "kvgraph.contract.params",
    "KVGraphError": "kvgraph.errors",
    "KernelError": "kvgraph.errors",
    "MissingDependencyError": "kvgraph.errors",
    "ModelError": "kvgraph.errors",
    "ModelInputs": "kvgraph.contract.inputs",
    "MultiKVCacheInputSymbols": "kvgraph.contract.symbols",
    "MultiKVCacheInputs": "kvgraph.contract.inputs",
    "MultiKVCacheParams": "kvgraph.contract.trees",
    "NullKVCacheManager": "kvgraph.kv.null",
    "PaddedKVCacheInputSymbols": "kvgraph.contract.symbols",
    "PaddedKVCacheInputs": "kvgraph.contract.inputs",
    "PaddedKVCacheManager": "kvgraph.kv.padded",
    "PagedCacheInputSymbols": "kvgraph.contract.symbols",
    "PagedKVCacheManager": "kvgraph.kv.paged",
    "ParamsError": "kvgraph.errors",
    "RaggedKVCacheInputs": "kvgraph.contract.inputs",
    "RequestError": "kvgraph.errors",
    "SamplingParams": "kvgraph.runtime.sampling",
    "StoreError": "kvgraph.errors",
    "Target": "kvgraph.contract.devices",
    "TensorType": "kvgraph.contract.dims",
    "TextContext": "kvgraph.kv.requests",
    "TransferError": "kvgraph.errors",
    "UnsupportedError": "kvgraph.errors",
    "compile": "kvgraph.build",
    "load": "kvgraph.runtime.artifact",
    "plan_memory": "kvgraph.kv.memory",
    "virtual_devices": "kvgraph.contract.devices",
}
"""Public name -> the private module that defines it."""

if TYPE_CHECKING:
    from kvgraph.build import compile as compile
    from kvgraph.contract.devices import Device as Device
    from kvgraph.contract.devices import Target as Target
    from kvgraph.contract.devices import virtual_devices as virtual_devices
    from kvgraph.contract.params import KVCacheParams as KVCacheParams
    from kvgraph.runtime.artifact import load as load
    from kvgraph.runtime.engine import Engine as Engine
    from kvgraph.runtime.sampling import SamplingParams as SamplingParams

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvgraph' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


register_with_torch()
