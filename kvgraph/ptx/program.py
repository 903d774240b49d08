"""A decoded kernel: each instruction is a function over all lanes of a batch.

FAMILIES has the decoder of each opcode; the machine itself executes branches and barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.errors import KernelError
from kvgraph.ptx import access, arithmetic, bits, convert, matrix, moves, warpgroup
from kvgraph.ptx.assigned import unassigned_reads
from kvgraph.ptx.operands import TYPES, Decoder, Kind
from kvgraph.ptx.parser import Instruction, Kernel
from kvgraph.ptx.state import Step

FAMILIES = {
    name: (part.__name__.rpartition(".")[2], decode)
    for part in (arithmetic, bits, convert, moves, access, matrix, warpgroup)
    for name, decode in part.FAMILY.items()
}
"""Family and decoder of an opcode, by its first part."""

KEPT = 64
"""Most programs that are cached."""


@dataclass(slots=True)
class Operation:
    """A decoded instruction. `step`: None for control flow; `kind` is then its kind."""

    said: Instruction
    family: str
    step: Step | None = None
    kind: str = ""
    target: int = -1
    guard: int = -1
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Program:
    operations: list[Operation]
    kinds: list[Kind]
    """Dtype of each register."""
    granule: int
    unit: int
    """Warps that run together in a random schedule: 4 if there are products of four warps."""
    doubtful: frozenset[int]
    """Registers that may be read before they are written."""


_KNOWN: dict[int, tuple[Kernel, Program]] = {}


def program_of(kernel: Kernel) -> Program:
    """The program of a kernel; each kernel is decoded once while it is cached."""
    found = _KNOWN.get(id(kernel))
    if found is None or found[0] is not kernel:
        if len(_KNOWN) >= KEPT:
            _KNOWN.pop(next(iter(_KNOWN)))
        found = _KNOWN[id(kernel)] = kernel, _decode(kernel)
    return found[1]


def _decode(kernel: Kernel) -> Program:
    slots = {name: place for place, name in enumerate(kernel.registers)}
    for name, kind in kernel.registers.items():
        if kind not in TYPES:
            raise KernelError(
                f"{kernel.name}: {name}: expected a register of a type that is modelled, got "
                f"{kind!r}"
            )
    operations = [_operation(kernel, slots, said) for said in kernel.code]
    kinds = [TYPES[kind] for kind in kernel.registers.values()]
    _guard_products(kernel, slots, operations)
    doubtful = unassigned_reads(operations)
    return Program(
        operations,
        kinds,
        _granule(kernel),
        warpgroup.GROUP if any(op.family == "warpgroup" and op.writes for op in operations) else 1,
        doubtful,
    )


def _operation(kernel: Kernel, slots: dict[str, int], said: Instruction) -> Operation:
    decoder = Decoder(kernel, slots, said)
    name = decoder.parts[0]
    made = Operation(said, "control")
    try:
        if name in ("bra", "ret", "exit", "bar", "barrier"):
            _control(decoder, made)
        elif name in FAMILIES:
            made.family, decode = FAMILIES[name]
            made.step = decode(decoder)
        else:
            raise decoder.refuse()
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:  # parts that it lacks
        raise decoder.refuse() from error
    if said.guard is not None:
        made.guard = decoder.slot(said.guard)
        if kernel.registers[said.guard] != "pred":
            raise decoder.refuse(f"{said.guard} to hold pred")
        decoder.reads.add(made.guard)
    made.reads, made.writes = frozenset(decoder.reads), frozenset(decoder.writes)
    return made


def _control(decoder: Decoder, made: Operation) -> None:
    """Decode branches and barriers (PTX ISA 9.7.12 and 9.7.13)."""
    name, parts = decoder.parts[0], decoder.parts[1:]
    if name == "bra":
        decoder.expect_parts("uni")
        decoder.expect_operands(1)
        made.kind = "bra"
        if decoder.operands[0] not in decoder.kernel.labels:
            raise decoder.refuse("a label of the kernel")
        made.target = decoder.kernel.labels[decoder.operands[0]]
    elif name in ("ret", "exit"):
        made.kind = "ret"
    elif parts == ["warp", "sync"]:
        made.kind, made.family = "step", "barrier"
        members = decoder.read(decoder.operands[0], "u32")
        made.step = lambda s, m: moves.require_members(s, m, members)
    elif parts in (["sync"], ["sync", "aligned"], ["cta", "sync"]):
        decoder.expect_operands(1)
        made.kind, made.family = "bar", "barrier"
        made.target = int(decoder.number(decoder.operands[0], "u32"))
    else:
        raise decoder.refuse()


def _granule(kernel: Kernel) -> int:
    """Bytes of the narrowest store to shared memory, at most 4."""
    widths = [4]
    for said in kernel.code:
        parts = said.opcode.split(".")
        if parts[0] == "st" and "shared" in "".join(parts):
            widths.append(TYPES[parts[-1]].itemsize)
    return min(widths)


def _guard_products(kernel: Kernel, slots: dict[str, int], operations: list[Operation]) -> None:
    """Check, in all other instructions, the use of registers of products of four warps."""
    products = [op for op in operations if op.said.opcode.startswith("wgmma.mma_async")]
    accumulators = frozenset().union(*(op.writes for op in products)) if products else frozenset()
    inputs = (
        frozenset().union(
            *(
                frozenset(
                    slots[n] for n in op.said.operands[1].strip("{}").replace(" ", "").split(",")
                )
                for op in products
                if op.said.operands[1].startswith("{")
            )
        )
        - accumulators
        if products
        else frozenset()
    )
    for op in operations:
        if op.step is None or op in products:
            continue
        read = tuple(op.reads & accumulators)
        written, fed = tuple(op.writes & accumulators), tuple(op.writes & inputs)
        if read or written or fed:
            op.step = warpgroup.guarded(op.step, read, written, fed)
