"""Every error that kvgraph raises on purpose.

    KVGraphError
    |- ParamsError (ValueError)
    |- RequestError (ValueError)
    |- BindingError (ValueError)
    |- ModelError (ValueError)
    |- ArtifactError (ValueError)
    |- StoreError (ValueError)
    |- UnsupportedError (ValueError)
    |- CapacityError (RuntimeError)
    |  `- InsufficientPagesError
    |- GenerationError (RuntimeError)
    |- TransferError (RuntimeError)
    |- CheckError (RuntimeError)
    |- KernelError (RuntimeError)
    |  `- KernelFaultError
    |- DeviceError (RuntimeError)
    |  `- DeviceLostError
    |- RankError (RuntimeError)
    `- MissingDependencyError (ImportError)

A message is one sentence: the object, the expected value and its source, and the actual value.
"""

from __future__ import annotations


class KVGraphError(Exception):
    """Root of all kvgraph errors."""


class ParamsError(KVGraphError, ValueError):
    """Cache parameters contradict each other."""


class RequestError(KVGraphError, ValueError):
    """A request was used out of order (before claim, twice) or beyond its limits."""


class BindingError(KVGraphError, ValueError):
    """A runtime value does not fit the symbol that it is bound to."""


class ModelError(KVGraphError, ValueError):
    """A model folder is missing, truncated or not a model."""


class ArtifactError(KVGraphError, ValueError):
    """An artifact is incomplete, damaged, or does not fit this machine or manager."""


class StoreError(KVGraphError, ValueError):
    """A tier's folder, address, credentials or size limit cannot be used."""


class UnsupportedError(KVGraphError, ValueError):
    """No kernel, backend or frontend supports what was asked for."""


class CapacityError(KVGraphError, RuntimeError):
    """The system or a device refuses memory or a thread, or a manager lacks a row or pages."""


class InsufficientPagesError(CapacityError):
    """The pool has too few free pages; manager and request are unchanged.

    `needed`, `free`, `used` and `total` are page counts of one replica.
    """

    # Unpickling in another process calls the class with the message alone: hence the defaults.
    def __init__(
        self, message: str, *, needed: int = 0, free: int = 0, used: int = 0, total: int = 0
    ) -> None:
        super().__init__(message)
        self.needed, self.free, self.used, self.total = needed, free, used, total


class GenerationError(KVGraphError, RuntimeError):
    """A request ended with finish_reason "error", and the caller would receive only its text."""


class TransferError(KVGraphError, RuntimeError):
    """Another engine refused pages, or the connection to it broke; both caches are as before."""


class CheckError(KVGraphError, RuntimeError):
    """The compiled graph does not compute the same as its model; nothing was written."""


class KernelError(KVGraphError, RuntimeError):
    """An op refused its operands: its kernel at a step, or its fake where a model is traced."""


class KernelFaultError(KernelError):
    """A kernel that was executed as PTX misused memory, registers or barriers."""


class DeviceError(KVGraphError, RuntimeError):
    """A device cannot do what was asked, such as memory on a virtual device."""


class DeviceLostError(DeviceError):
    """A failed step destroyed this process's context on a device: restart the process."""


class RankError(KVGraphError, RuntimeError):
    """A rank of a tensor-parallel artifact is missing, differs from the others, or has failed."""


class MissingDependencyError(KVGraphError, ImportError):
    """An optional package is needed and not installed; the message names the install command."""
