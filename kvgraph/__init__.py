"""kvgraph: language models compiled ahead of time around a paged KV cache outside the graph.

Names are imported when they are first used, so that the deployment side never loads the
compiler's frameworks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvgraph._torch import register_with_torch

_EXPORTS = {
    "Artifact": "kvgraph.runtime.artifact",
    "ArtifactError": "kvgraph.errors",
    "AsyncEngine": "kvgraph.runtime.async_engine",
    "BatchCharacteristics": "kvgraph.contract.inputs",
    "BatchConfig": "kvgraph.runtime.config",
    "BindingError": "kvgraph.errors",
    "Buffer": "kvgraph.contract.inputs",
    "CacheConfig": "kvgraph.runtime.config",
    "CapacityError": "kvgraph.errors",
    "CheckError": "kvgraph.errors",
    "Completion": "kvgraph.runtime.text",
    "ContinuousBatchingKVCacheCollection": "kvgraph.kv.collection",
    "ContinuousBatchingKVCacheInputSymbols": "kvgraph.contract.symbols",
    "ContinuousBatchingKVCacheManager": "kvgraph.kv.continuous",
    "Device": "kvgraph.contract.devices",
    "DeviceError": "kvgraph.errors",
    "DeviceLostError": "kvgraph.errors",
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
    "Logprob": "kvgraph.runtime.logprobs",
    "Manifest": "kvgraph.contract.manifest",
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
    "PageStore": "kvgraph.kv.tiers.store",
    "PagedCacheInputSymbols": "kvgraph.contract.symbols",
    "PagedKVCacheManager": "kvgraph.kv.paged",
    "ParamsError": "kvgraph.errors",
    "RaggedKVCacheInputs": "kvgraph.contract.inputs",
    "RankError": "kvgraph.errors",
    "RequestError": "kvgraph.errors",
    "SamplingParams": "kvgraph.runtime.sampling_params",
    "Session": "kvgraph.runtime.sessions.base",
    "SessionInterface": "kvgraph.contract.inputs",
    "StoreError": "kvgraph.errors",
    "Target": "kvgraph.contract.devices",
    "TensorType": "kvgraph.contract.dims",
    "TextContext": "kvgraph.kv.requests",
    "TierConfig": "kvgraph.runtime.config",
    "Token": "kvgraph.runtime.sampling",
    "TokenLogprobs": "kvgraph.runtime.logprobs",
    "TransferError": "kvgraph.errors",
    "UnsupportedError": "kvgraph.errors",
    "compile": "kvgraph.build",
    "load": "kvgraph.runtime.artifact",
    "plan_memory": "kvgraph.kv.memory",
    "show_progress": "kvgraph.bars",
    "virtual_devices": "kvgraph.contract.devices",
}
"""Public name -> the private module that defines it."""

# generated: names
if TYPE_CHECKING:
    from kvgraph.bars import show_progress as show_progress
    from kvgraph.build import compile as compile
    from kvgraph.contract.devices import Device as Device
    from kvgraph.contract.devices import Target as Target
    from kvgraph.contract.devices import virtual_devices as virtual_devices
    from kvgraph.contract.dims import TensorType as TensorType
    from kvgraph.contract.inputs import BatchCharacteristics as BatchCharacteristics
    from kvgraph.contract.inputs import Buffer as Buffer
    from kvgraph.contract.inputs import KVCacheBufferInterface as KVCacheBufferInterface
    from kvgraph.contract.inputs import KVCacheInputs as KVCacheInputs
    from kvgraph.contract.inputs import KVCacheInputsInterface as KVCacheInputsInterface
    from kvgraph.contract.inputs import KVCacheInputsSequence as KVCacheInputsSequence
    from kvgraph.contract.inputs import ModelInputs as ModelInputs
    from kvgraph.contract.inputs import MultiKVCacheInputs as MultiKVCacheInputs
    from kvgraph.contract.inputs import PaddedKVCacheInputs as PaddedKVCacheInputs
    from kvgraph.contract.inputs import RaggedKVCacheInputs as RaggedKVCacheInputs
    from kvgraph.contract.inputs import SessionInterface as SessionInterface
    from kvgraph.contract.manifest import Manifest as Manifest
    from kvgraph.contract.params import KVCacheParamInterface as KVCacheParamInterface
    from kvgraph.contract.params import KVCacheParams as KVCacheParams
    from kvgraph.contract.params import KVCacheQuantization as KVCacheQuantization
    from kvgraph.contract.params import KVCacheStrategy as KVCacheStrategy
    from kvgraph.contract.signature import GraphSignature as GraphSignature
    from kvgraph.contract.symbols import (
        ContinuousBatchingKVCacheInputSymbols as ContinuousBatchingKVCacheInputSymbols,
    )
    from kvgraph.contract.symbols import KVCacheInputSymbols as KVCacheInputSymbols
    from kvgraph.contract.symbols import MultiKVCacheInputSymbols as MultiKVCacheInputSymbols
    from kvgraph.contract.symbols import PaddedKVCacheInputSymbols as PaddedKVCacheInputSymbols
    from kvgraph.contract.symbols import PagedCacheInputSymbols as PagedCacheInputSymbols
    from kvgraph.contract.trees import MultiKVCacheParams as MultiKVCacheParams
    from kvgraph.errors import ArtifactError as ArtifactError
    from kvgraph.errors import BindingError as BindingError
    from kvgraph.errors import CapacityError as CapacityError
    from kvgraph.errors import CheckError as CheckError
    from kvgraph.errors import DeviceError as DeviceError
    from kvgraph.errors import DeviceLostError as DeviceLostError
    from kvgraph.errors import GenerationError as GenerationError
    from kvgraph.errors import InsufficientPagesError as InsufficientPagesError
    from kvgraph.errors import KernelError as KernelError
    from kvgraph.errors import KVGraphError as KVGraphError
    from kvgraph.errors import MissingDependencyError as MissingDependencyError
    from kvgraph.errors import ModelError as ModelError
    from kvgraph.errors import ParamsError as ParamsError
    from kvgraph.errors import RankError as RankError
    from kvgraph.errors import RequestError as RequestError
    from kvgraph.errors import StoreError as StoreError
    from kvgraph.errors import TransferError as TransferError
    from kvgraph.errors import UnsupportedError as UnsupportedError
    from kvgraph.kv.collection import (
        ContinuousBatchingKVCacheCollection as ContinuousBatchingKVCacheCollection,
    )
    from kvgraph.kv.continuous import (
        ContinuousBatchingKVCacheManager as ContinuousBatchingKVCacheManager,
    )
    from kvgraph.kv.manager import KVCacheManager as KVCacheManager
    from kvgraph.kv.memory import plan_memory as plan_memory
    from kvgraph.kv.metrics import KVCacheMetrics as KVCacheMetrics
    from kvgraph.kv.null import NullKVCacheManager as NullKVCacheManager
    from kvgraph.kv.padded import PaddedKVCacheManager as PaddedKVCacheManager
    from kvgraph.kv.paged import PagedKVCacheManager as PagedKVCacheManager
    from kvgraph.kv.requests import TextContext as TextContext
    from kvgraph.kv.tiers.store import PageStore as PageStore
    from kvgraph.runtime.artifact import Artifact as Artifact
    from kvgraph.runtime.artifact import load as load
    from kvgraph.runtime.async_engine import AsyncEngine as AsyncEngine
    from kvgraph.runtime.config import BatchConfig as BatchConfig
    from kvgraph.runtime.config import CacheConfig as CacheConfig
    from kvgraph.runtime.config import TierConfig as TierConfig
    from kvgraph.runtime.engine import Engine as Engine
    from kvgraph.runtime.logprobs import Logprob as Logprob
    from kvgraph.runtime.logprobs import TokenLogprobs as TokenLogprobs
    from kvgraph.runtime.sampling import Token as Token
    from kvgraph.runtime.sampling_params import SamplingParams as SamplingParams
    from kvgraph.runtime.sessions.base import Session as Session
    from kvgraph.runtime.text import Completion as Completion
# end of generated

__all__ = sorted(_EXPORTS)

__version__: str
"""Version of the installed package, read on first use; "unknown" without its metadata."""


if not TYPE_CHECKING:  # a type checker takes a name that does not exist for an error

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from kvgraph.contract.versions import version_of

            value = version_of()
        elif name in _EXPORTS:
            value = getattr(import_module(_EXPORTS[name]), name)
        else:
            raise AttributeError(f"module 'kvgraph' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__


register_with_torch()
