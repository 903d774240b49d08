"""Parse PTX text into kernels: statements, operands and labels (PTX ISA, sections 4 and 5).

It reads PTX as compilers write it for entry points: no functions, and no module variables except
shared memory and unused constant bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvgraph.errors import KernelError

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
HEAD = re.compile(r"\.version\s+(\d+)\.(\d+)\s+\.target\s+(\w+)[^\n]*\s+\.address_size\s+64\s")
ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{")
PARAMETER = re.compile(r"\.param\s+\.([bsuf])(8|16|32|64)\s+(?:\.ptr[\s.\w]*?\s+)?(\w+)\s*$")
STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
LABEL = re.compile(r"([$\w]+):(?!:)\s*")
MOST_DIGITS = 6
"""Most digits of the number of registers in one declaration."""
DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter. `type`: PTX type such as "u64". `size`: bytes."""

    name: str
    type: str
    size: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `guard`: predicate register of `@p`; `negated`: for `@!p`. `line`: line of
    the text, from 1."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int
    text: str


@dataclass(frozen=True)
class Kernel:
    """An entry point. `threads`: threads of a block, if `.reqntid` sets them. `shared`: bytes of
    static shared memory. `registers`: type (pred, b16, b32, b64) by name. `symbols`: offset in
    shared memory by name.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    threads: int | None
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]
    symbols: dict[str, int]
    shared: int = 0


@dataclass(frozen=True)
class Module:
    version: tuple[int, int]
    target: str
    kernels: dict[str, Kernel] = field(default_factory=dict)


def parse(text: str) -> Module:
    """Parse a module; KernelError if the text is cut or has unsupported statements."""
    text = re.sub(r"//[^\n]*", "", text)
    head = HEAD.search(text)
    if head is None:
        raise KernelError("PTX: expected .version, .target and .address_size 64, got none of them")
    module = Module((int(head[1]), int(head[2])), head[3])
    symbols, shared = _shared(text)
    at = head.end()
    while entry := ENTRY.search(text, at):
        at = _end(text, entry.end(), entry[1])
        parameters = tuple(_parameters(entry[2], entry[1]))
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry[3])
        body = _Body(text, entry.end(), at - 1)
        module.kernels[entry[1]] = Kernel(
            entry[1],
            module.target,
            parameters,
            int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1) if threads else None,
            tuple(body.code),
            body.labels,
            body.registers,
            symbols,
            shared,
        )
    if not module.kernels:
        raise KernelError("PTX: expected an entry point, got none")
    return module


def _end(text: str, start: int, name: str) -> int:
    """Position after the brace that closes the brace before `start`."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return start + brace.end()
    raise KernelError(f"PTX of {name}: expected a closing brace, got the end of the text")


def _parameters(text: str, kernel: str) -> list[Parameter]:
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = PARAMETER.match(part)
        if match is None:
            raise KernelError(f"PTX of {kernel}: expected a scalar parameter, got {part!r}")
        found.append(Parameter(match[3], match[1] + match[2], SIZES[match[2]]))
    return found


def _shared(text: str) -> tuple[dict[str, int], int]:
    """Offsets of the module's shared arrays, and the bytes of all arrays with a size.

    The dynamic array, which has no size, begins after them.
    """
    symbols: dict[str, int] = {}
    dynamic, end = [], 0
    pattern = r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]"
    for align, name, size in re.findall(pattern, text):
        if not size:
            dynamic.append(name)
            continue
        if not int(align):
            raise KernelError(f"PTX: {name}: expected an alignment of 1 or more, got {align}")
        end = -(-end // int(align)) * int(align)
        symbols[name] = end
        end += int(size)
    end = -(-end // 16) * 16
    return symbols | dict.fromkeys(dynamic, end), end


class _Body:
    """Statements between the braces of a kernel; names of inner scopes become unique."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, str] = {}
        self._scopes: list[dict[str, str]] = [{}]
        self._num_scopes = 0
        at = start
        while at < end:
            at = self._statement(text, at, end)

    def _statement(self, text: str, at: int, end: int) -> int:
        """Read one statement; return the position after it."""
        if text[at].isspace() or text[at] == ";":
            return at + 1
        if text[at] == "{":
            self._num_scopes += 1
            self._scopes.append({})
            return at + 1
        if text[at] == "}":
            self._scopes.pop()
            return at + 1
        if label := LABEL.match(text, at, end):
            self.labels[self._label(label[1])] = len(self.code)
            return label.end()
        line = text.count("\n", 0, at) + 1
        stop = text.find(";", at, end)
        if stop < 0:
            raise KernelError(
                f"PTX, line {line}: expected a statement, got {text[at:end].strip()[:40]!r}"
            )
        said = " ".join(text[at:stop].split())
        if said.startswith("."):
            self._declare(said, line)
        else:
            self.code.append(self._instruction(said, line))
        return stop + 1

    def _label(self, name: str) -> str:
        """Unique name of a label; labels that begin with `$`, as compilers write, are unique."""
        is_outer = len(self._scopes) == 1 or name.startswith("$")
        return name if is_outer else f"{name}#{self._num_scopes}"

    def _declare(self, said: str, line: int) -> None:
        match = DECLARED.fullmatch(said)
        if match is None:
            if said.startswith((".pragma", ".loc", ".file")):
                return
            raise KernelError(f"PTX, line {line}: expected registers, got {said!r}")
        for name in (part.strip() for part in match[2].split(",")):
            many = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            if many and len(many[2]) > MOST_DIGITS:
                raise KernelError(
                    f"PTX, line {line}: expected fewer than {10**MOST_DIGITS} registers, got "
                    f"{many[2][:40]}"
                )
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            for one in names:
                known = one if len(self._scopes) == 1 else f"{one}#{self._num_scopes}"
                self._scopes[-1][one] = known
                self.registers[known] = match[1]

    def _instruction(self, said: str, line: int) -> Instruction:
        match = STATEMENT.fullmatch(said)
        if match is None:
            raise KernelError(f"PTX, line {line}: expected an instruction, got {said!r}")
        operands = [self._named(part) for part in split(match[4])]
        guard = None if match[2] is None else self._known(match[2])
        return Instruction(match[3], tuple(operands), guard, match[1] == "!", line, said)

    def _named(self, operand: str) -> str:
        """An operand with the unique names of this scope's registers and labels."""
        if len(self._scopes) > 1 and re.fullmatch(r"[A-Za-z_]\w*", operand):
            found = self._known(operand)
            return self._label(operand) if found == operand and operand != "_" else found
        return re.sub(r"%[\w.$]+|\b[A-Za-z_]\w*\b", lambda name: self._known(name[0]), operand)

    def _known(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return name


def split(text: str) -> list[str]:
    """Split operands at commas, but not inside braces and brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts
