"""Readers and writers of lanes for operands, decoded once (PTX ISA 6: operands and types)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from kvgraph.errors import KernelError
from kvgraph.ptx.parser import Instruction, Kernel, split
from kvgraph.ptx.state import FaultError, Lanes, Mask, State

Kind: TypeAlias = np.dtype[Any]

TYPES: dict[str, Kind] = {
    "pred": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
"""Dtype of a lane, by PTX type."""

ADDRESS = re.compile(r"\[\s*([%$\w.#]+)\s*(?:\+\s*(-?\w+))?\s*\]")
SPECIAL = re.compile(r"%(laneid|n?(tid|ctaid)\.[xyz])")
FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)")

Reader: TypeAlias = Callable[[State], Lanes]
Writer: TypeAlias = Callable[[State, Lanes, Mask], None]


class Decoder:
    """Makes readers and writers of one instruction; records the registers it reads and writes."""

    def __init__(self, kernel: Kernel, slots: dict[str, int], instruction: Instruction) -> None:
        self.kernel = kernel
        self.instruction = instruction
        self.parts = instruction.opcode.split(".")
        self.operands = instruction.operands
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self._slots = slots

    @property
    def type(self) -> str:
        """The instruction's type: the last part of the opcode."""
        return self.parts[-1]

    def refuse(self, what: str = "an instruction that is modelled") -> KernelError:
        said = self.instruction
        return KernelError(
            f"{self.kernel.name}, line {said.line}: expected {what}, got {said.text!r}"
        )

    def expect_parts(self, *known: str) -> None:
        """Raise KernelError for a modifier that is not among `known`."""
        for part in self.parts[1:]:
            if part not in known:
                raise self.refuse(f"modifiers of {self.parts[0]} that are modelled")

    def expect_operands(self, *counts: int) -> None:
        if len(self.operands) not in counts:
            raise self.refuse(f"{' or '.join(map(str, counts))} operands")

    def is_register(self, operand: str) -> bool:
        return operand in self._slots

    def slot(self, operand: str) -> int:
        if operand not in self._slots:
            raise self.refuse(f"a register instead of {operand!r}")
        return self._slots[operand]

    def kind(self, register: str) -> Kind:
        """Dtype of a register's lanes; KernelError if it is not declared."""
        self.slot(register)
        return TYPES[self.kernel.registers[register]]

    def read(self, operand: str, type_: str) -> Reader:
        """Reader of the lanes of `operand` as `type_`, which is at most as wide as the register."""
        kind = TYPES.get(type_)
        if kind is None:
            raise self.refuse("a type that is modelled")
        negated = operand.startswith("!")
        operand = operand.removeprefix("!")
        if operand not in self._slots:
            return self._constant(operand, type_, kind)
        slot = self._slots[operand]
        self.reads.add(slot)
        stored = self.kind(operand)
        if type_ == "pred":
            if stored != kind:
                raise self.refuse(f"{operand} to hold {type_}")
            if negated:
                return lambda s: ~s.registers[slot]
            return lambda s: s.registers[slot]
        if stored == kind:
            return lambda s: s.registers[slot]
        if stored.itemsize == kind.itemsize:
            return lambda s: s.registers[slot].view(kind)
        if stored.kind == "b" or stored.itemsize < kind.itemsize:
            raise self.refuse(f"{operand} to hold {type_}")
        narrow = np.dtype(f"u{kind.itemsize}")
        return lambda s: s.registers[slot].astype(narrow).view(kind)

    def _constant(self, operand: str, type_: str, kind: Kind) -> Reader:
        if operand.startswith("%"):
            return self._special(operand, kind)
        if operand in self.kernel.symbols:
            value = np.array(self.kernel.symbols[operand], kind)
            return lambda s: value
        number = self.number(operand, type_)
        return lambda s: number

    def _special(self, name: str, kind: Kind) -> Reader:
        def read(state: State) -> Lanes:
            found = state.special(name)
            assert found is not None
            return found.astype(kind)

        if not SPECIAL.fullmatch(name):
            raise self.refuse(f"a special register that is modelled instead of {name}")
        return read

    def number(self, text: str, type_: str) -> Lanes:
        """The constant `text` as `type_`; integers wrap (PTX ISA 4.5)."""
        kind = TYPES[type_]
        if match := FLOAT.fullmatch(text):
            code = "f" if match[1] in "fF" else "d"
            raw = bytes.fromhex(match[2])
            if type_[0] in "bus":  # bits
                return np.frombuffer(raw[::-1], kind).reshape(())
            return np.array(struct.unpack(f">{code}", raw)[0], kind)
        try:
            number = int(text.rstrip("U"), 0)
        except ValueError:
            raise self.refuse(f"a register or a number instead of {text!r}") from None
        if type_ == "pred":
            return np.array(number != 0)
        bits = np.array(number & (1 << 8 * kind.itemsize) - 1, f"u{kind.itemsize}")
        return bits.view(kind)

    def write(self, operand: str) -> Writer:
        """Writer of lanes to register `operand`; a value of one lane is stored in all lanes."""
        if operand == "_":
            return lambda s, value, mask: None
        slot = self.slot(operand)
        self.writes.add(slot)
        kind = self.kind(operand)

        def put(state: State, value: Lanes, mask: Mask) -> None:
            if value.dtype != kind:
                if value.dtype.itemsize != kind.itemsize:
                    raise FaultError(f"expected {kind} for {operand}, got {value.dtype}")
                value = value.view(kind)
            if mask is not None:
                value = np.where(mask, value, state.registers[slot])
            elif value.shape != state.shape:
                value = np.broadcast_to(value, state.shape)
            state.registers[slot] = value

        return put

    def vector(self, operand: str) -> list[str]:
        """Parts of the operand `{a, b}`; any other operand is one part."""
        inner = operand.strip()
        return split(inner[1:-1]) if inner.startswith("{") else [inner]

    def address(self, operand: str, type_: str) -> Reader:
        """Reader of the addresses `[register + number]`: int64 for shared memory (u32), uint64 for
        u64."""
        match = ADDRESS.fullmatch(operand)
        if match is None:
            raise self.refuse(f"an address instead of {operand!r}")
        offset = int(match[2] or "0", 0)
        base = self.read(match[1], type_)
        if type_ == "u32":
            return lambda s: np.add(base(s).astype(np.int64), offset)
        step = np.uint64(offset & (1 << 64) - 1)
        if not offset:
            return base
        return lambda s: base(s) + step
