"""DriverSession: base of the sessions whose pools are memory of the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.contract.dims import TensorType
from kvgraph.contract.inputs import Buffer
from kvgraph.errors import BindingError, CapacityError
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.cuda_driver import CudaDevice, DeviceArray


class DriverSession(Session):
    """A session on one GPU; a subclass sets `_device` when it is made."""

    memory = DeviceArray
    _device: CudaDevice

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
        """Allocate zeroed device memory. CapacityError if the device has too little memory."""
        self._require_known(symbol)
        shape = symbol.extents(sizes)
        try:
            with self._device.current():
                pool = self._device.zeros(symbol.dtype, shape)
        except CapacityError as error:
            raise CapacityError(f"{symbol.name} {list(shape)}: {error}") from error
        return Buffer(symbol.dtype, shape, symbol.device, pool)

    def free_memory(self) -> int | None:
        return self._device.free_memory

    def _address_of(self, array: Any) -> int:
        address: int = array.address
        return address

    def _synchronize(self) -> None:
        with self._device.current():
            self._device.synchronize()

    def _pool(self, symbol: TensorType, array: Any) -> DeviceArray:
        """The memory of a pool; BindingError if this session did not allocate it."""
        if isinstance(array, DeviceArray) and array.device is self._device:
            return array
        raise BindingError(
            f"{symbol.name}: expected memory that this session allocated, "
            f"got {type(array).__name__}"
        )
