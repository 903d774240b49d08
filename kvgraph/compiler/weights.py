"""Weights of a program under compile: in memory, in a checkpoint, or made from these when written.

Decision: passes decide what a weight becomes. Its numbers are read and packed only while the file
is written. So a compile has one layer's weights in memory at a time, for a model of any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.joined_forms import PLAIN_BITS, KeptAs, Takes, joined_form, nearest_form
from kvgraph.compiler.values import Converted, Values
from kvgraph.contract.dtypes import AS_STORED, WEIGHT_BITS
from kvgraph.ops.packed import EIGHTHS, MOST_SUMMED, Form
from kvgraph.plural import plural

NAMES = {bits: name for name, bits in WEIGHT_BITS.items()}
"""Bits of packed weights -> name for the user."""

HALVES = (torch.bfloat16, torch.float16)

Piece = tuple[str, torch.Tensor]
"""A parameter's name, and its next rows after those of earlier pieces."""

Make = Callable[[], Iterable[Piece]]


@dataclass
class Weights:
    """Sources of the values of a program's parameters, by the program's names."""

    checkpoint: Checkpoint | None = None
    made: dict[str, Make] = field(default_factory=dict)
    """Name of a parameter -> function that makes it, perhaps together with others."""
    placeholders: dict[Hashable, dict[str, Node]] = field(default_factory=dict)
    """Key of a packed weight's content -> operands of its node, for a layer that is called again.
    """
    rounded: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Bits -> `where` of layers that are rounded to them, as they could not be kept as stored."""

    widened: set[str] = field(default_factory=set)
    """`where` of layers stored in FP8 that could not be kept so, and are widened."""
    narrowed: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Name of a dtype -> `where` of layers that the checkpoint has in it, and that are rounded to
    PLAIN_BITS."""
    mixtures: set[str] = field(default_factory=set)
    """`where` of weights of all experts of a layer."""
    wide: set[str] = field(default_factory=set)
    """`where` of layers with more inputs than kernels can sum in the bits that they would have."""
    inputs_rounded: set[str] = field(default_factory=set)
    """`where` of layers with inputs that are rounded to 8 bits too."""
    in_eighths: set[str] = field(default_factory=set)
    """`where` of layers that are kept as stored, but with minima in eighths of their scales."""
    tables: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Name of a dtype -> token tables with it that the checkpoint has in fewer bits."""

    plain: str = NAMES[PLAIN_BITS]
    """Name, for notes, of the dtype of layers with PLAIN_BITS."""

    def values(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Values:
        """The source of parameter `name`, which is `tensor` in the program.

        `dtype`: dtype in which a checkpoint's numbers are read; None: that of `tensor`. To round
        them to fewer bits, ask for a wider dtype, so that they are rounded only once.
        """
        if isinstance(tensor, FakeTensor):
            assert self.checkpoint is not None, (
                "a program without weights comes with where they are"
            )
            return self.checkpoint.get(name, dtype or tensor.dtype)
        held = tensor.detach()
        return Converted(name, held.shape, held.dtype, lambda: held)

    def half_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """The 16-bit dtype for the token table `name`, which is `tensor` in the program: the
        checkpoint's own, or else the one that rounds its numbers least, for which they are read
        once."""
        stored = self.checkpoint.values.get(name) if self.checkpoint is not None else None
        if stored is not None and stored.dtype in HALVES:
            return stored.dtype
        half = _least_rounding(self.values(name, tensor).pieces())
        if stored is not None and stored.is_packed:
            self.tables[str(half).removeprefix("torch.")].add(name)
        return half

    def form_of(
        self,
        sources: Sequence[Values],
        bits: int,
        *,
        can_keep: bool = True,
        takes: Takes = lambda form: True,
    ) -> tuple[Form, bool]:
        """The form in which layers that become one node are packed, and whether it is as stored.

        `bits`: bits of the form. AS_STORED: what `joined_form` says of all layers.
        `can_keep`: whether stored forms may be used. `takes`: whether kernels support a form.
        """
        self.mixtures |= {each.where for each in sources if len(each.shape) > 2}
        if bits != AS_STORED:
            return self._rounded_to(bits, sources, takes), False
        kept = [source if can_keep else KeptAs(None, source.bits) for source in sources]
        form, is_kept = joined_form(kept, takes)
        if is_kept:
            own = [each for each in sources if each.form and each.form.codes == EIGHTHS]
            self.in_eighths |= {each.where for each in own}
            return form, True
        nearest = self._rounded_to(max(source.bits for source in sources), sources, takes)
        self.rounded[nearest.bits] |= {each.where for each in sources if each.bits < PLAIN_BITS}
        self.note_plain(sources)
        return nearest, False

    def _rounded_to(self, bits: int, sources: Iterable[Values], takes: Takes) -> Form:
        """The form of `bits`, or of PLAIN_BITS for layers that kernels do not support in `bits`."""
        form = nearest_form(bits, takes)
        if form.bits != bits:
            self.wide |= {each.where for each in sources}
        return form

    def note_plain(self, sources: Iterable[Values]) -> None:
        """Record the layers of `sources` that become plain, though the checkpoint has them in fewer
        bits: in FP8, or a part of their tensors. Record those too that lose bits, as packed weights
        in 16 bits are bfloat16."""
        plain = [each for each in sources if each.bits >= PLAIN_BITS]
        self.widened |= {each.where for each in plain if each.stored_bits < PLAIN_BITS}
        self.rounded[PLAIN_BITS] |= {each.where for each in plain if each.least_bits < PLAIN_BITS}
        for each in plain if self.plain == NAMES[PLAIN_BITS] else ():
            if each.plain_dtype in (torch.float16, torch.float32):
                self.narrowed[str(each.plain_dtype).removeprefix("torch.")].add(each.where)

    def notes(self) -> list[str]:
        """Notes for the manifest on layers that were rounded or widened, and on rounded inputs."""
        names = NAMES | {PLAIN_BITS: self.plain}
        notes = [
            f"weights: {len(layers)} of the layers that the checkpoint has in fewer bits are "
            f"rounded to {names[bits]}, since no kernel takes their form, or that of a layer "
            f"beside them{self._count_of_experts(layers)}"
            for bits, layers in sorted(self.rounded.items())
            if layers
        ]
        if self.widened:
            notes.append(
                f"weights: {len(self.widened)} of the layers that the checkpoint has in FP8 have "
                f"{self.plain}, since no kernel takes their form, or that of a layer of their "
                f"input{self._count_of_experts(self.widened)}"
            )
        notes += [
            f"weights: {self.plain} for {len(layers)} {plural('layer', len(layers))} that the "
            f"checkpoint has in {dtype}, whose numbers lose bits{self._count_of_experts(layers)}"
            for dtype, layers in sorted(self.narrowed.items())
        ]
        if count := len(self.in_eighths):
            notes.append(
                f"weights: minima of {count} stored {plural('layer', count)} are rounded to an "
                f"eighth of their scale{self._count_of_experts(self.in_eighths)}"
            )
        if self.wide:
            notes.append(
                f"weights: {self.plain} for {len(self.wide)} {plural('layer', len(self.wide))}, "
                f"since kernels sum at most {MOST_SUMMED} inputs in int8 or int4 without "
                f"groups{self._count_of_experts(self.wide)}"
            )
        notes += [
            f"weights: {dtype} for {len(names)} token {plural('table', len(names))} that the "
            "checkpoint has in fewer bits"
            for dtype, names in sorted(self.tables.items())
        ]
        if count := len(self.inputs_rounded):
            notes.append(
                f"weights: inputs of {count} linear {plural('layer', count)} are rounded to 8 "
                "bits, a scale for each row, since the checkpoint was made for rounded inputs"
            )
        return notes

    def _count_of_experts(self, layers: set[str]) -> str:
        """The end of a note that counts `layers`: how it counts those of experts, if any."""
        if layers.isdisjoint(self.mixtures):
            return ""
        return "; all experts of a layer count as two: gate with up, and down"

    def later(self, names: Iterable[str], make: Make) -> None:
        """Register `make`, which yields all of `names` when they are written."""
        self.made |= dict.fromkeys(names, make)

    def has(self, name: str) -> bool:
        """Whether the values of parameter `name` are not in the program but made or read here."""
        return name in self.made or (self.checkpoint is not None and self.checkpoint.has(name))

    def is_stored(self, name: str) -> bool:
        """Whether the values of parameter `name` are read from the checkpoint as they are."""
        return name not in self.made and self.checkpoint is not None and self.checkpoint.has(name)

    def pieces(self, wanted: Mapping[str, torch.dtype]) -> Iterator[Piece]:
        """Yield the pieces of every parameter in `wanted` (name -> dtype).

        Parameters that are made together come together. ModelError for a number that is not finite.
        """
        done: set[int] = set()
        for name, dtype in wanted.items():
            if name not in self.made:
                assert self.checkpoint is not None
                for piece in self.checkpoint.get(name, dtype).pieces():
                    yield name, piece
            elif id(self.made[name]) not in done:
                done.add(id(self.made[name]))
                yield from (each for each in self.made[name]() if each[0] in wanted)

    def read(self, name: str, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
        """Read or make one whole parameter."""
        parts = [piece.reshape(-1) for _, piece in self.pieces({name: dtype})]
        return torch.cat(parts).reshape(tuple(shape))

    def fill(self, program: ExportedProgram) -> None:
        """Replace a program's fake parameters by real ones with their values."""
        fakes = {
            name: tensor
            for name, tensor in program.state_dict.items()
            if isinstance(tensor, FakeTensor)
        }
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in fakes}
        for name, piece in self.pieces({name: fake.dtype for name, fake in fakes.items()}):
            parts[name].append(piece.reshape(-1))
        for name, fake in fakes.items():
            whole = torch.cat(parts.pop(name)).reshape(fake.shape)
            program.state_dict[name] = torch.nn.Parameter(whole, requires_grad=False)


def _least_rounding(pieces: Iterable[torch.Tensor]) -> torch.dtype:
    """bfloat16 if it holds all numbers, or if the largest is too large for float16; else float16,
    which has 3 more bits of fraction."""
    is_exact, largest = True, 0.0
    for piece in pieces:
        is_exact = is_exact and torch.equal(piece, piece.bfloat16().to(piece.dtype))
        largest = max(largest, float(piece.abs().max()))
    fits = largest <= torch.finfo(torch.float16).max
    return torch.float16 if fits and not is_exact else torch.bfloat16
