"""Session: the base of all sessions. It owns memory, checks bindings, and runs steps."""

from __future__ import annotations

import operator
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array, TensorType
from kvgraph.contract.files import reading
from kvgraph.contract.hashes import is_intact
from kvgraph.contract.host_memory import host_zeros
from kvgraph.contract.inputs import Buffer, KVCacheInputs, KVCacheInputsInterface, ModelInputs
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.params import KVCacheParamInterface, KVCacheStrategy
from kvgraph.contract.signature import LOGITS_INDICES, OWN_INPUTS, Typed
from kvgraph.errors import ArtifactError, BindingError
from kvgraph.kv.memory import DEFAULT_BATCH_TOKENS
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.native_calls import RUNNING, Ending, refuse
from kvgraph.runtime.turns import Turns
from kvgraph.signal_handlers import reraise_if_signalled

FEW = 32
"""Up to this many numbers are compared one by one: NumPy takes 28 us with cold CPU caches."""


class Session(NotCopyable, ABC):
    """A loaded artifact that runs one step at a time; RequestError for overlapping calls."""

    host_pools = True
    """Whether pools are host memory, which processes can share."""

    memory: type = np.ndarray
    """Type of the handles of buffers that `allocate` returns."""

    runs_in_one_call = False
    """Whether a step is one native call, so that an interrupt comes before it or after it."""

    captures = False
    """Whether `run(..., capture=True)` is faster: the engine then pads decode steps to buckets."""

    step_tokens = DEFAULT_BATCH_TOKENS
    """Default of an engine's `max_batch_tokens`: most new tokens of a step."""

    limits: Mapping[str, int] = {}
    """Largest extent of each dim that the compiled graph bounds, by name."""

    mapped: Sequence[str] = ()
    """Names of files that the session reads, through a map, as long as it is open."""

    _watched: Sequence[MappedFile] = ()

    def __init__(self, artifact: ArtifactFolder) -> None:
        leaves = artifact.params().leaves.values()
        for leaf in leaves:
            leaf.require_kernels()
        self._is_padded = any(leaf.cache_strategy is KVCacheStrategy.PADDED for leaf in leaves)
        self.artifact = artifact
        self.signature = artifact.signature
        self._buffers = [i for i, s in enumerate(self.signature.inputs) if s.kind == "buffer"]
        self._vocab = artifact.manifest.model.vocab_size
        self._checked: list[tuple[object, ...]] = []  # what `_require_fitting` found last
        self._pools: list[weakref.ref[object]] = []  # the memory of the buffers then
        self._turns = Turns("Session")
        self._watched = [MappedFile(artifact, name) for name in self.mapped]
        self._last_run_completed = True  # False if the last run raised

    @property
    def identity(self) -> bytes:
        """Identity of everything that decides a page's content; the root of the prefix cache."""
        return self.artifact.manifest.identity

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
        """Allocate zeroed memory for `symbol` under `sizes` (dim -> extent); touched lazily.

        BindingError if the artifact has no such symbol, as its layout parameters differ.
        CapacityError if the system has too little memory.
        """
        self._require_known(symbol)
        shape = symbol.extents(sizes)
        memory = host_zeros(symbol.name, shape, symbol.dtype)
        return Buffer(symbol.dtype, shape, symbol.device, memory)

    def require_ranks(self) -> None:  # most sessions have no other ranks
        """Raise RankError if a rank has ended, so that no step can run. Call it between steps."""

    def require_unchanged(self) -> None:
        """Raise ArtifactError if a mapped file was written to since it was opened. A file that was
        removed, or replaced by rename, is unchanged: the session keeps its own."""
        for file in self._watched:
            file.require_unchanged()

    def close(self) -> None:
        """End the other ranks, which wait for steps. Idempotent."""

    def free_memory(self) -> int | None:
        """Free bytes of the device's memory for a pool; None for a pool in host memory."""
        return None

    def _require_known(self, symbol: TensorType) -> None:
        expected = {s.name: s for s in self.signature.inputs}.get(symbol.name)
        if expected != symbol:
            raise BindingError(
                f"{symbol.name}: expected {expected or 'no such input'} from the artifact, "
                f"got {symbol}"
            )

    def require_params(self, params: KVCacheParamInterface) -> None:
        """ParamsError at the first layout field of a manager that is not the artifact's."""
        params.require_layout(self.artifact.manifest.layout, source="the artifact")

    def require_symbols(self, record: Iterable[TensorType]) -> None:
        """Raise BindingError unless a manager's record has the artifact's inputs, in order."""
        own = len(OWN_INPUTS)
        expected = self.signature.inputs[own:]
        for position, (mine, theirs) in enumerate(zip_longest(expected, record), start=own):
            if mine != theirs:
                raise BindingError(
                    f"input {position}: expected {mine or 'no such input'} from the artifact, "
                    f"got {theirs or 'no such input'} from the cache manager"
                )

    def run(
        self, inputs: ModelInputs, kv: KVCacheInputs, *, capture: bool = False
    ) -> npt.NDArray[np.float32]:
        """Run one step of this shard's graph: logits `[num_logits, vocab]`; the pools are mutated.

        `kv`: one device's record. `capture`: steps of exactly these sizes will come again; a
        session that can capture a step does so, and replays it. The logits are valid until the
        next call but one; without logits_indices there are no logits. BindingError names the first
        value that does not fit. ArtifactError as in `require_unchanged`.
        """
        call = ("run", get_ident())
        try:
            RUNNING.add(call)
            if Ending.thread is not None:
                refuse(call)
            if (running := self._turns.take(call)) is not call:
                raise self._turns.overlap(call, running)
            arrays = self._arrays(inputs, kv)
            self.synchronize()
            self._last_run_completed = False
            tokens = arrays[0]
            if not len(tokens):  # an empty batch is legal, but graphs need a token
                logits = self._no_logits(arrays[LOGITS_INDICES], arrays[1])
            else:
                _require_within("tokens", tokens, self._vocab)
                _require_within("logits_indices", arrays[LOGITS_INDICES], len(tokens))
                if self._is_padded:
                    _require_in_rectangle(arrays)
                num_logits = len(arrays[LOGITS_INDICES])
                if not num_logits:  # a prompt's chunk: graphs need at least one row of logits
                    arrays[LOGITS_INDICES] = np.zeros(1, np.int32)
                logits = self.run_arrays(arrays, capture=capture)[:num_logits]
            self._last_run_completed = True
            return logits
        finally:
            if self._turns.running is call:
                del self._turns.running
            RUNNING.discard(call)

    def _no_logits(self, indices: Array, offsets: Array) -> npt.NDArray[np.float32]:
        if len(indices) or offsets.any():
            raise BindingError(
                f"tokens: expected some for {len(indices)} logits_indices and input_row_offsets "
                f"up to {int(offsets[-1])}, got none"
            )
        return np.empty((0, self._vocab), np.float32)

    def run_arrays(
        self, arrays: Sequence[Any], *, capture: bool = False
    ) -> npt.NDArray[np.float32]:
        """Do as `run`, over checked arrays in the signature's order, on the host or the device."""
        logits = self._run_captured(arrays) if capture else self._run(arrays)
        self.require_unchanged()  # a step of other weights has not happened
        return logits

    def _arrays(self, inputs: ModelInputs, kv: KVCacheInputs) -> list[Any]:
        """Dense host arrays, or a device's own, in the signature's order, checked against it."""
        if not isinstance(inputs, ModelInputs):
            raise BindingError(f"inputs: expected ModelInputs, got {type(inputs).__name__}")
        values: list[Any] = [inputs.tokens, inputs.input_row_offsets, inputs.logits_indices]
        if not isinstance(kv, KVCacheInputs | KVCacheInputsInterface) or isinstance(kv, type):
            raise BindingError(
                f"cache: expected one device's runtime inputs of a manager, got {type(kv).__name__}"
            )
        values += kv.flatten()
        if len(values) != len(self.signature.inputs):
            raise BindingError(
                f"inputs: expected {len(self.signature.inputs)} values "
                f"({', '.join(s.name for s in self.signature.inputs)}), got {len(values)}"
            )
        arrays = [getattr(value, "handle", value) for value in values]
        self._require_fitting(values, arrays)
        return list(map(_dense, self.signature.inputs, arrays))

    def _require_fitting(self, values: list[Any], arrays: Sequence[Any]) -> None:
        """Raise BindingError unless dtypes and shapes of `values`, and of their memory `arrays`,
        fit, and each buffer has memory of its own. Skip all if nothing changed since a step."""
        try:
            kinds: list[tuple[object, ...]] = [
                (x.dtype, x.shape, getattr(x, "device", None)) for x in values
            ]
            kinds += [(x.dtype, x.shape, type(x)) for x in arrays]
        except AttributeError:
            kinds = []
        pools = [arrays[i] for i in self._buffers]
        last = [pool() for pool in self._pools]
        if not kinds or kinds != self._checked or not all(map(operator.is_, pools, last)):
            self._checked = []
            for symbol, value, array in zip(self.signature.inputs, values, arrays, strict=True):
                self._require_array(symbol, value, array)
            self.signature.bind(values)
            for symbol, value, array in zip(self.signature.inputs, values, arrays, strict=True):
                _require_said(symbol, value, array)
            self._require_apart(arrays)
            self._pools = [weakref.ref(pool) for pool in pools]
            self._checked = kinds

    def _address_of(self, array: Any) -> int:
        """Address of a buffer's memory."""
        address: int = array.__array_interface__["data"][0]  # quicker than array.ctypes.data
        return address

    def _require_apart(self, arrays: Sequence[Any]) -> None:
        """Raise BindingError if two buffers share memory: a step writes to each of them."""
        held = [i for i in self._buffers if arrays[i].nbytes]
        found = [(self._address_of(arrays[i]), arrays[i].nbytes, i) for i in held]
        for (start, nbytes, one), (following, _, other) in pairwise(sorted(found)):
            if following < start + nbytes:
                first, second = (self.signature.inputs[i].name for i in sorted((one, other)))
                raise BindingError(
                    f"{second}: expected memory of its own, got memory that {first} has too"
                )

    def _require_array(self, symbol: TensorType, value: object, array: object) -> None:
        if not (hasattr(value, "dtype") and hasattr(value, "shape")):
            raise _no_array(symbol, value)
        if array is None:
            raise _no_memory(symbol)
        if isinstance(array, self.memory):
            return
        if not isinstance(array, np.ndarray):
            raise _no_array(symbol, array)
        if symbol.kind == "buffer":  # on a device
            raise BindingError(
                f"{symbol.name}: expected memory that this session allocated, got ndarray"
            )

    def synchronize(self) -> None:
        """After a run that raised, wait until the device has finished all of it.

        Otherwise memory that its copies and kernels still use would be reused.
        """
        if not self._last_run_completed:
            self._synchronize()
            self._last_run_completed = True

    def _synchronize(self) -> None:
        """Wait for the device, where there is one."""
        return

    @abstractmethod
    def _run(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        """Run over dense host arrays, or a device's own, in the signature's order."""

    def _run_captured(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        """Run like `_run`, for sizes that come again."""
        return self._run(arrays)


class MappedFile(NotCopyable):
    """A file that a session maps, held open: `name` of the artifact's rank."""

    def __init__(self, artifact: ArtifactFolder, name: str) -> None:
        self._path, self._entry = artifact.file(name), artifact.entry(name)
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            reraise_if_signalled(error)
            raise ArtifactError(
                f"{self._path}: expected a file that can be read, got {error.strerror!r}"
            ) from error
        # At exit another thread may still run a step; the system closes the file then.
        weakref.finalize(self, os.close, self._file).atexit = False
        self._known, _ = self._state()

    def require_unchanged(self) -> None:
        """Raise ArtifactError if the file was written to. A new change time alone may come from a
        rename, a link or a chmod, or from a write that kept the other time, as `cp -p` may."""
        state, links = self._state()
        if state == self._known:
            return
        if state[:2] == self._known[:2] and self._entry is not None:
            # A file that was removed or replaced by rename has no name to be written to by. Others
            # are hashed in a step, by one thread: seconds for some GB, in which other ranks wait.
            with reading(self._path, ArtifactError):
                if not links or is_intact(self._file, self._entry):
                    self._known = state  # of before the hash: a write during it is a new change
                    return
            self._entry = None  # not hashed again, and refused from now on
        raise ArtifactError(
            f"{self._path}: expected the file as the session opened it, got one that was "
            "written to; start again, and replace artifacts by rename"
        )

    def _state(self) -> tuple[tuple[int, int, int], int]:
        """The file's size and times, and its number of names."""
        stat = os.fstat(self._file)
        return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns), stat.st_nlink


def _require_within(name: str, array: Array, end: int) -> None:
    """Raise BindingError for a number outside [0, end): a negative index reads a table's end."""
    if len(array) > FEW:
        most = np.asarray(array).view(np.uint32).max(initial=0)  # as uint32, negatives exceed `end`
        wrong = [most.view(np.int32)] if most >= end else []
    else:
        wrong = [number for number in np.asarray(array).tolist() if not 0 <= number < end]
    if wrong:
        raise BindingError(f"{name}: expected numbers in [0, {end}), got {wrong[0]}")


def _require_in_rectangle(arrays: Sequence[Array]) -> None:
    """Raise BindingError unless a padded cache has room for the new tokens of each row. Plain
    operators check nothing, where the kernels of other caches do."""
    tokens, offsets, _, k_cache, _, start_pos, _ = arrays
    offsets, start, reach = np.asarray(offsets), int(np.asarray(start_pos)[0]), k_cache.shape[2]
    new = offsets[1:].astype(np.int64) - offsets[:-1]
    name = "input_row_offsets"
    if offsets[0] != 0:
        raise BindingError(f"{name}: expected 0 first, got {offsets[0]}")
    if (new < 0).any():
        row = int((new < 0).argmax())
        raise BindingError(
            f"{name}: expected none below its predecessor, got {offsets[row + 1]} after "
            f"{offsets[row]}"
        )
    if offsets[-1] != len(tokens):
        raise BindingError(f"{name}: expected total_seq_len {len(tokens)} last, got {offsets[-1]}")
    most = reach - int(new.max(initial=0))
    if not 0 <= start <= most:
        raise BindingError(
            f"start_pos: expected a number in [0, {most}], so that {reach - most} new tokens fit "
            f"in a row of {reach}, got {start}"
        )


def _require_said(symbol: TensorType, value: Typed, array: Typed) -> None:
    """Raise BindingError if a buffer's device kind, dtype or shape differs from its memory's."""
    if isinstance(value, Buffer) and value.device.kind != symbol.device.kind:
        raise BindingError(
            f"{symbol.name}: expected memory on {symbol.device}, got a buffer on {value.device}"
        )
    said, held = ((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in (value, array))
    if said != held:
        raise BindingError(
            f"{symbol.name}: expected memory of {said[0]} {list(said[1])} from its buffer, "
            f"got {held[0]} {list(held[1])}"
        )


def _no_array(symbol: TensorType, found: object) -> BindingError:
    return BindingError(
        f"{symbol.name}: expected an array of {symbol.dtype} {list(symbol.shape)}, "
        f"got {type(found).__name__}"
    )


def _no_memory(symbol: TensorType) -> BindingError:
    return BindingError(
        f"{symbol.name}: expected a value with memory, got a dummy of a manager that allocates "
        "nothing"
    )


def _dense(symbol: TensorType, array: Array) -> Array:
    """An aligned row-major array: the graph takes its address. A buffer is never copied."""
    if not isinstance(array, np.ndarray):
        return array  # memory that a session allocated on its device
    flags = array.flags
    if flags.c_contiguous and flags.aligned and (flags.writeable or symbol.kind == "tensor"):
        return array
    if symbol.kind == "tensor":
        return array.copy()
    raise BindingError(
        f"{symbol.name}: expected writeable, aligned, row-major memory for a buffer, got strides "
        f"{array.strides}, writeable={flags.writeable} and aligned={flags.aligned}"
    )
