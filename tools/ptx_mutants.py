"""`python -m tools.ptx_mutants [--every] [--seed N]`: small bugs in kernels' PTX that are found.

Each barrier, wait, fence and `.trans` is taken out by itself. At SAMPLED places of each kind (with
`--every`: at all) predicates are dropped, comparisons turned, operands of shuffles exchanged and
addresses shifted. A mutant is found when a step of the kernel faults or differs from its reference,
in step or in a random order of the warps. Of each survivor is said why.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvgraph import ptx
from kvgraph.errors import KernelError
from kvgraph.kernels import aot
from kvgraph.kernels.execute import MULTIPROCESSORS
from kvgraph.kernels.run_ptx import run_plan
from kvgraph.kernels.shapes import AttentionShape, PoolShape, Rope
from kvgraph.kernels.trials import Trial, attention_trial, rows_of
from kvgraph.ptx import Kernel
from kvgraph.ptx.parser import Instruction

SAMPLED = 10
ORDERS = (None, 1, 2)
HALF = PoolShape("float16", "float16", 2, 64, 16, 2)
WIDE = PoolShape("float16", "float16", 2, 128, 128, 2)
SHAPES = {
    "sm_80": AttentionShape(HALF, 8, 0.125, rope=Rope(64), window=170),
    "sm_90": AttentionShape(WIDE, 8, 0.09, sinks=True),
}

REMOVED = {
    "barrier": r"bar\.sync",
    "wait": r"cp\.async\.wait|wgmma\.wait",
    "commit": r"cp\.async\.commit|wgmma\.commit",
    "fence": r"wgmma\.fence|fence\.proxy",
}
TURNED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
ADDRESS = re.compile(r"\[\s*(%\w+)\s*(?:\+\s*(-?\w+))?\s*\]")


Kernels = dict[str, tuple[Kernel, int]]
"""By name of a variant: the kernel, and its dynamic shared memory in bytes."""


@dataclass(frozen=True)
class Mutant:
    """`kernel` with one instruction changed (None: it is gone)."""

    kind: str
    at: int
    change: Instruction | None

    def of(self, kernel: Kernel) -> Kernel:
        changed = self.change or replace(
            kernel.code[self.at], opcode="mov.b32", operands=("_", "0"), guard=None
        )
        code = (*kernel.code[: self.at], changed, *kernel.code[self.at + 1 :])
        return replace(kernel, code=code)


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    for at, said in enumerate(kernel.code):
        for kind, pattern in REMOVED.items():
            if re.match(pattern, said.opcode):
                yield Mutant(kind, at, None)
        if ".trans" in said.opcode:
            yield Mutant("trans", at, replace(said, opcode=said.opcode.replace(".trans", "")))
        if said.guard is not None and not said.opcode.startswith("bra"):
            yield Mutant("predicate", at, replace(said, guard=None))
        if turned := _turned(said):
            yield Mutant("comparison", at, turned)
        if said.opcode.startswith("shfl"):
            d, a, b, c, members = said.operands
            yield Mutant("shuffle", at, replace(said, operands=(d, a, c, b, members)))
        if shifted := _shifted(said):
            yield Mutant("address", at, shifted)


def _turned(said: Instruction) -> Instruction | None:
    parts = said.opcode.split(".")
    if parts[0] != "setp" or parts[1] not in TURNED:
        return None
    return replace(said, opcode=".".join([parts[0], TURNED[parts[1]], *parts[2:]]))


def _shifted(said: Instruction) -> Instruction | None:
    """Every address one element of the access further."""
    if not re.match(r"ld\.global|st\.|ld\.shared|cp\.async\.c[ag]|ldmatrix|stmatrix", said.opcode):
        return None
    return _moved(said, _width(said))


def _moved(said: Instruction, step: int) -> Instruction | None:
    """The first address `step` bytes further."""
    operands, is_changed = [], False
    for operand in said.operands:
        match = ADDRESS.fullmatch(operand)
        if match and not is_changed:
            operand = f"[{match[1]}+{int(match[2] or '0', 0) + step}]"
            is_changed = True
        operands.append(operand)
    return replace(said, operands=tuple(operands)) if is_changed else None


def _width(said: Instruction) -> int:
    if "matrix" in said.opcode or said.opcode.startswith("cp"):
        return 16
    size = int(re.findall(r"\d+$", said.opcode)[0]) // 8
    many = re.search(r"\.v([24])", said.opcode)
    return size * (int(many[1]) if many else 1)


def trial_of(arch: str, name: str) -> Trial:
    shape = SHAPES[arch]
    rows = rows_of(shape.cache.page_size)[name]
    return attention_trial(shape, arch, name, rows, MULTIPROCESSORS.get(name, 0))


STEPS = ("decode", "mixed", "prefill", "long")


def found_by(kernels: Kernels, arch: str, changed: str) -> bool:
    """Whether a step finds a fault of the kernels."""
    for name in STEPS:
        for order in ORDERS:
            trial = trial_of(arch, name)
            if changed not in {one.variant.name for one in trial.plan.launches}:
                break
            try:
                _run(trial, kernels, order)
            except KernelError:
                return True
    return False


UNSEEN = {
    "comparison": "the lanes whose result it turns are masked by another condition",
    "commit": "the copies join the next group, which is waited for in time",
    "barrier": "another barrier stands between the same two uses",
    "fence": "what the product reads was not written since the fence before",
    "shuffle": "the lanes that it reads hold the same value",
    "address": "the guard holds for no thread of these steps",
}
"""Why a mutant of a kind changes no bit of any step."""

FAR = 1 << 40


def why_unseen(kernels: Kernels, mutant: Mutant, arch: str, changed: str) -> str:
    """Why no step finds a mutant. Of a predicate it is tried out: threads that the guard keeps away
    are sent where no buffer is."""
    kernel, shared = kernels[changed]
    altered = kernels | {changed: (mutant.of(kernel), shared)}
    if _differs(kernels, altered, arch, changed):
        return "other bits, within the tolerance"
    said = kernel.code[mutant.at]
    if mutant.kind != "predicate" or not (away := _moved(said, FAR)):
        return UNSEEN.get(mutant.kind, "no bit differs")
    sent = Mutant("", mutant.at, replace(away, negated=not said.negated))
    if not found_by(kernels | {changed: (sent.of(kernel), shared)}, arch, changed):
        return "the guard holds for all threads of these steps"
    if said.opcode.startswith("st"):
        return "threads without the guard store what is there already"
    return "threads without the guard read inside of the buffer what they do not use"


def _differs(kernels: Kernels, altered: Kernels, arch: str, changed: str) -> bool:
    for name in STEPS:
        trials = [trial_of(arch, name) for _ in range(2)]
        if changed in {one.variant.name for one in trials[0].plan.launches}:
            for trial, each in zip(trials, (kernels, altered), strict=True):
                _run(trial, each, None)
            first, second = (trial.given for trial in trials)
            if any(first[key].tobytes() != second[key].tobytes() for key in first):
                return True
    return False


def _run(trial: Trial, kernels: Kernels, order: int | None) -> None:
    run_plan(trial.plan, trial.given, lambda variant: kernels[variant.name], order=order)
    where, error, limit = trial.error()
    if error > limit:
        raise KernelError(f"{where}: an error of {error:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("archs", nargs="*", default=sorted(SHAPES))
    given = parser.parse_args()
    rng = random.Random(given.seed)
    made, found = Counter[str](), Counter[str]()
    start = time.perf_counter()
    for arch in given.archs:
        compiled = aot.compile_attention(SHAPES[arch], arch)
        kernels = {
            m.variant.name: (ptx.parse(m.ptx).kernels[m.entry], m.resources.shared)
            for m in compiled
        }
        for one in compiled:
            name = one.variant.name
            title = f"{arch} {one.variant.kernel.name} {one.variant.role}".strip()
            kernel, shared = kernels[name]
            for mutant in chosen(list(mutants(kernel)), given.every, rng):
                made[mutant.kind] += 1
                altered = kernels | {name: (mutant.of(kernel), shared)}
                if found_by(altered, arch, name):
                    found[mutant.kind] += 1
                else:
                    said = kernel.code[mutant.at]
                    why = why_unseen(kernels, mutant, arch, name)
                    text = " ".join(said.text.split())[:60]
                    print(f"survives  {title}, line {said.line}: {mutant.kind}: {text}: {why}")
                    sys.stdout.flush()
            print(f"{title}: {sum(found.values())} of {sum(made.values())} so far", flush=True)
    for kind, count in made.items():
        print(f"{kind:12} {found[kind]:4} of {count:4}")
    total, share = sum(made.values()), sum(found.values()) / max(sum(made.values()), 1)
    seconds = time.perf_counter() - start
    print(f"{sum(found.values())} of {total} mutants found ({share:.0%}), {seconds:.0f} s")
    return int(share < 0.75)


def chosen(every: list[Mutant], keep_all: bool, rng: random.Random) -> list[Mutant]:
    """Those of each kind that are run: all, or SAMPLED of the many."""
    if keep_all:
        return every
    kept: list[Mutant] = []
    for kind in dict.fromkeys(mutant.kind for mutant in every):
        group = [mutant for mutant in every if mutant.kind == kind]
        kept += (
            group if kind in (*REMOVED, "trans") else rng.sample(group, min(SAMPLED, len(group)))
        )
    return kept


if __name__ == "__main__":
    sys.exit(main())
