"""Check of machine code for sm_90: registers that asynchronous products read must not be written.

A product of tensor cores may take its first factor from registers. It reads them until a wait for
it ends, but the assembler may reuse them before: if a loop's next step converts numbers before
that wait, it may write to registers that are still read. PTX has unlimited registers and cannot
show this. It was found on an H100, where results were sometimes wrong.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator

from kvgraph.errors import KernelError
from kvgraph.signal_handlers import reraise_if_signalled

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
PRODUCT = re.compile(r"GMMA\S*\s+R\d+, (?:R(\d+)|gdesc)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
JUMP = re.compile(r"BRA(?:\.\S+)? (?:\S+, )?0x([0-9a-f]+)")
GUARD = re.compile(r"^@!?U?P\w+\s+")
FACTOR = 4
"""Number of registers of a thread that hold the first factor of a product."""
WRITES_NOTHING = (
    "ST", "RED", "LDGSTS", "BAR", "BRA", "EXIT", "NOP", "DEPBAR", "LDGDEPBAR", "WARP", "MEMBAR",
    "FENCE", "FCHK", "SYNCS", "CCTL", "ERRBAR", "BSYNC", "BSSY", "R2UR", "R2P", "VOTEU", "RET",
    "CALL", "U",
)  # fmt: skip
"""Prefixes of instructions that write no register."""
WIDTHS = (
    (r"^LDSM.*\.4|\.128|^HMMA.*\.F32|^IMMA", 4),
    (r"^LDSM.*\.2|\.64\b|\.WIDE|^CS2R(?!\.32)|^D(ADD|MUL|FMA)|\.F64", 2),
)
"""Number of registers that instructions of a pattern write; all others write one."""

Instruction = tuple[int, str]


def require_kept(cubin: bytes, disassembler: str, kernel: str) -> None:
    """Raise KernelError if `kernel` writes registers that a product still reads, or if the
    `disassembler`, a cuobjdump, does not show its products."""
    code = parse(_disassembled(cubin, disassembler, kernel))
    if not any(PRODUCT.search(text) for _, text in code):
        raise KernelError(
            f"{kernel}: expected products in its machine code, from {disassembler}, got none in "
            f"{len(code)} instructions; take a supported version of Triton"
        )
    if written := written_while_read(code):
        raise KernelError(
            f"{kernel}: expected registers that stay as they are while a product reads them, got "
            f"{written[0]!r} before the wait for it; report the model and Triton's version"
        )


def _disassembled(cubin: bytes, disassembler: str, kernel: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler, "-sass", file.name]
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.SubprocessError) as error:
            reraise_if_signalled(error)
            said = getattr(error, "stderr", None) or error
            why = str(said).strip().partition("\n")[0]
            raise KernelError(
                f"{kernel}: expected its machine code from Triton's disassembler, got an error "
                f"({why}); install Triton again"
            ) from error
    return done.stdout


def parse(text: str) -> list[Instruction]:
    found = (LINE.match(line) for line in text.splitlines())
    return [(int(match[1], 16), match[2]) for match in found if match]


def written_while_read(code: list[Instruction]) -> list[str]:
    """Instructions that write registers that a product still reads. Each loop is walked twice,
    without repeating its inner loops; forward branches are not followed."""
    places = {address: number for number, (address, _) in enumerate(code)}
    return list(_walk(code, places, 0, len(code), [set()]))


def _walk(
    code: list[Instruction], places: dict[int, int], start: int, end: int, groups: list[set[int]]
) -> Iterator[str]:
    """Walk `code[start:end]` and yield wrong writes. `groups`: registers of the products that were
    not waited for; the last group is not committed yet."""
    for number in range(start, end):
        _, text = code[number]
        if match := PRODUCT.search(text):
            if match[1]:
                groups[-1] |= set(range(int(match[1]), int(match[1]) + FACTOR))
            if "gsb0" in text:
                groups.append(set())
        elif match := WAIT.search(text):
            kept = int(match[1], 16)
            groups[:] = [*groups[-1 - kept : -1], groups[-1]]
        elif set().union(*groups) & set(_results(text)):
            yield text
        if end == len(code) and (match := JUMP.search(text)):
            target = places.get(int(match[1], 16), number + 1)
            if target < number:
                yield from _walk(code, places, target, number, [set(each) for each in groups])


def _results(text: str) -> range:
    operation, _, rest = GUARD.sub("", text).partition(" ")
    if operation.startswith(WRITES_NOTHING):
        return range(0)
    operands = [operand.strip() for operand in rest.split(",")]
    first = next((operand for operand in operands[:2] if operand.startswith("R")), "")
    match = re.match(r"R(\d+)\b", first if operands[0][:1] in "RP" else "")
    if match is None:
        return range(0)
    width = next((n for pattern, n in WIDTHS if re.search(pattern, operation)), 1)
    return range(int(match[1]), int(match[1]) + width)
