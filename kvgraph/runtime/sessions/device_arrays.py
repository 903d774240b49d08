"""Memory on host and device for the sessions over the CUDA driver: index tensors, and logits.

A manager's batch (kvgraph/kv/pool/batch.py) holds the values. An index tensor here is the memory
from which a graph reads them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES, itemsize
from kvgraph.runtime.sessions.cuda_driver import CudaDevice, DeviceArray, PinnedArray


class IndexTensor:
    """An index tensor in pinned memory and on the device, for shapes up to `largest`. Both
    addresses stay the same, unless a larger shape is requested."""

    def __init__(self, device: CudaDevice, dtype: str, largest: tuple[int, ...] = (0,)) -> None:
        self._device, self._dtype = device, dtype
        self._allocate(largest)

    def fill(self, array: Array, shape: tuple[int, ...]) -> None:
        """Write the values to pinned memory; fill the rest of `shape` (rows of padding) with 0."""
        count = int(np.prod(shape))
        if count > len(self._values):
            self._device.synchronize()  # enqueued work may still read the old addresses
            self._allocate((2 * count,))
        self._values[: array.size] = array.reshape(-1)
        self._values[array.size : count] = 0

    def upload(self, shape: tuple[int, ...]) -> None:
        """Enqueue the copy of the filled values to the device."""
        nbytes = int(np.prod(shape)) * itemsize(self._dtype)
        if nbytes:
            self._device.upload(self.device.address, self.host.address, nbytes)

    def _allocate(self, largest: tuple[int, ...]) -> None:
        self._values = np.empty(0, DTYPES[self._dtype].numpy)  # stays empty if allocation fails
        self.device = DeviceArray(self._device, self._dtype, largest)
        self.host = PinnedArray(self._device, self.device.nbytes)
        self._values = self.host.bytes.view(DTYPES[self._dtype].numpy)


class Logits:
    """Memory of logits: one device array for each power of two of rows, and two host copies in
    turn, so that a step's logits are valid until the next call but one."""

    def __init__(self, device: CudaDevice, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._arrays: dict[int, DeviceArray] = {}
        self._hosts: list[PinnedArray | None] = [None, None]
        self._turn = 0

    def at_least(self, rows: int) -> DeviceArray:
        capacity = 1 << max(rows - 1, 0).bit_length()
        if capacity not in self._arrays:
            shape = (capacity, self._vocab)
            self._arrays[capacity] = DeviceArray(self._device, "float32", shape)
        return self._arrays[capacity]

    def download(self, array: DeviceArray, rows: int) -> npt.NDArray[np.float32]:
        """Copy to the host and wait: the only wait of a step."""
        self._turn ^= 1
        nbytes = rows * self._vocab * itemsize("float32")
        host = self._hosts[self._turn]
        if host is None or len(host.bytes) < nbytes:
            host = self._hosts[self._turn] = PinnedArray(self._device, array.nbytes)
        if nbytes:
            self._device.download(host.address, array.address, nbytes)
        self._device.synchronize()
        return host.bytes[:nbytes].view(np.float32).reshape(rows, self._vocab)
