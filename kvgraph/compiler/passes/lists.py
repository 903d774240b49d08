"""The passes of each target, in order: the one list that compile runs and inspect and docs print.

Decision: a check is a pass of the same shape that changes nothing. It refuses the compile or holds,
so it has no report of its own, unless it counts what it proved (`require_tokens_apart`).

Nothing here imports a framework until a pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import getdoc, signature
from typing import Protocol

from kvgraph.compiler.passes import PassOptions, PassReport


class Rewritten(Protocol):
    """What passes run over: a Traced, or a program alone. They take more of its parts, by name."""

    passes: list[PassReport]

    @property
    def options(self) -> PassOptions: ...

    def changed(self, step: str) -> None: ...


@dataclass(frozen=True)
class Condition:
    """What a pass needs of the options, and what is so where that does not hold."""

    holds: Callable[[PassOptions], bool]
    otherwise: str


UNPADDED = Condition(lambda options: not options.is_padded, "the cache is padded")
RANKS = Condition(lambda options: options.ranks > 1, "there is one rank")
PACKED = Condition(lambda options: options.is_packed, "weights are not packed")


@dataclass(frozen=True)
class Pass:
    """A rewrite, or a check: a function of this package that is given the parts of what it runs
    over that its parameters name.

    `at` is "file.function" where these are not both `name`.
    """

    name: str
    at: str = ""
    needs: Condition | None = None
    is_check: bool = False

    @property
    def function(self) -> Callable[..., PassReport | None]:
        file, _, name = (self.at or f"{self.name}.{self.name}").partition(".")
        found: Callable[..., PassReport | None]
        found = getattr(import_module(f"{__package__}.{file}"), name)
        return found

    @property
    def summary(self) -> str:
        """What it does: of a check its function's first paragraph, of a rewrite its file's."""
        function = self.function
        text = getdoc(function if self.is_check else import_module(function.__module__))
        return " ".join((text or "").partition("\n\n")[0].split())

    def applies(self, options: PassOptions) -> bool:
        return self.needs is None or self.needs.holds(options)

    def run(self, subject: Rewritten) -> PassReport | None:
        """Rewrite or check `subject`. None: a check that holds and counts nothing."""
        function = self.function
        return function(*(getattr(subject, name) for name in signature(function).parameters))


def check(name: str, at: str = "", needs: Condition | None = None) -> Pass:
    return Pass(name, at, needs, is_check=True)


@dataclass(frozen=True)
class PassList:
    """Of one target: what runs over the program after the trace, then over the ONNX graph made of
    it, then over that graph as it is written."""

    program: tuple[Pass, ...] = ()
    onnx: tuple[Pass, ...] = ()
    written: tuple[Pass, ...] = ()

    def __iter__(self) -> Iterator[Pass]:
        """All, from the trace on."""
        return iter(TRACE + self.program + self.onnx + self.written)


TRACE = (
    check("require_whole_inputs", "require_stored.require_whole_inputs"),
    Pass("pair_complex"),
    Pass("fold_constants"),
    check("require_positions"),
    check("require_tokens_apart", "require_tokens_apart.require_model_tokens_apart"),
    Pass("fuse_update_and_attend"),
    check("require_fused", "fuse_update_and_attend.require_fused", UNPADDED),
    check("require_stored"),
    check("require_planned", "require_stored.require_planned"),
    Pass("fuse_rope"),
)
"""What every program passes, whatever its target."""

FUNCTIONAL = (Pass("wide_indices"), Pass("thread_pool"))
"""The last over a program on its way to ONNX."""

PASSES = {
    ("cpu", "onnx"): PassList(
        program=(
            Pass("drop_no_ops"),
            Pass("drop_batch_dim", needs=UNPADDED),
            Pass("join_all_reduces", needs=RANKS),
            Pass("fuse_all_reduce", needs=RANKS),
            Pass("pack_experts"),
            Pass("fuse_router"),
            Pass("pack_linear", needs=PACKED),
            *FUNCTIONAL,
        ),
        onnx=(Pass("tied_projection"), Pass("half_tables", needs=PACKED)),
    ),
    ("cpu", "torch"): PassList(
        program=(
            Pass("drop_no_ops"),
            Pass("join_all_reduces", needs=RANKS),
            Pass("pack_experts"),
            Pass("fuse_router"),
            Pass("pack_linear", needs=PACKED),
            Pass("half_embeddings", needs=PACKED),
        ),
    ),
    ("cuda", "torch"): PassList(
        program=(
            Pass("drop_no_ops"),
            Pass("join_all_reduces", needs=RANKS),
            Pass("fuse_experts"),
            Pass("fuse_router"),
            Pass("quantize_linear", needs=PACKED),
            Pass("fuse_rms_norm"),
            Pass("fuse_silu_mul"),
        ),
    ),
    ("cuda", "tensorrt"): PassList(program=FUNCTIONAL, onnx=(Pass("tied_projection"),)),
    ("cuda", "torch-tensorrt"): PassList(program=(Pass("drop_no_ops"),)),
    ("cuda", "onnx"): PassList(
        program=FUNCTIONAL, onnx=(Pass("tied_projection"),), written=(Pass("cast_norms"),)
    ),
}
"""(kind of target, backend) -> its passes."""


LOWER_CACHES = (
    Pass("fuse_update_and_attend"),
    check("require_pairs", "return_pools.require_pairs"),
    check("require_stored"),
    Pass("return_pools"),
    *FUNCTIONAL,
)
"""What `kvgraph.onnx.lower_caches` does to a program of a user's own."""


def run_passes(subject: Rewritten, passes: Iterable[Pass]) -> None:
    """Those that apply, in order; reports join the subject's, rewritten graphs are dumped.

    UnsupportedError of a check says why the program is refused.
    """
    for each in passes:
        if not each.applies(subject.options):
            continue
        report = each.run(subject)
        if report is not None:
            subject.passes.append(report)
        if not each.is_check:
            subject.changed(each.name)
