"""The passes of each target, in order: the list that compile runs, and that inspect and docs print.

Decision: a check is a Pass too, but it changes nothing. It refuses the compile or does nothing, so
it has no report, except `require_tokens_apart`, which counts what it proved.

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
    """The subject of passes: a Traced, or a program alone. Passes also read other attributes of it,
    by name."""

    passes: list[PassReport]

    @property
    def options(self) -> PassOptions: ...

    def changed(self, step: str) -> None: ...


@dataclass(frozen=True)
class Condition:
    """A condition on the options for a pass to run; `otherwise`: text for when it does not hold."""

    holds: Callable[[PassOptions], bool]
    otherwise: str


UNPADDED = Condition(lambda options: not options.is_padded, "the cache is padded")
RANKS = Condition(lambda options: options.ranks > 1, "there is one rank")
PACKED = Condition(lambda options: options.is_packed, "weights are not packed")


@dataclass(frozen=True)
class Pass:
    """A rewrite or a check: a function of this package, imported on first use, so that `inspect`
    lists passes without importing torch.

    `run` calls the function with those attributes of `subject` that its parameters name, as pytest
    does with fixtures. `at`: "file.function", if file and function are not both called `name`.
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
        """One sentence on the pass: first paragraph of a check's function or a rewrite's module."""
        function = self.function
        text = getdoc(function if self.is_check else import_module(function.__module__))
        return " ".join((text or "").partition("\n\n")[0].split())

    def applies(self, options: PassOptions) -> bool:
        return self.needs is None or self.needs.holds(options)

    def run(self, subject: Rewritten) -> PassReport | None:
        """Rewrite or check `subject`. Return the pass's report; None for a check without one."""
        function = self.function
        return function(*(getattr(subject, name) for name in signature(function).parameters))


def check(name: str, at: str = "", needs: Condition | None = None) -> Pass:
    return Pass(name, at, needs, is_check=True)


@dataclass(frozen=True)
class PassList:
    """The passes of one target after those in TRACE.

    `program`: over the traced program. `onnx`: over the ONNX graph made of it. `written`: over that
    graph as a protobuf, as it is written.
    """

    program: tuple[Pass, ...] = ()
    onnx: tuple[Pass, ...] = ()
    written: tuple[Pass, ...] = ()

    def __iter__(self) -> Iterator[Pass]:
        """Iterate over all passes of the target, in order, from TRACE on."""
        return iter(TRACE + self.program + self.onnx + self.written)


TRACE = (
    check("require_whole_inputs", "require_stored.require_whole_inputs"),
    Pass("pair_complex"),
    Pass("fold_constants"),
    check("require_positions"),
    check("require_tokens_apart", "require_tokens_apart.require_model_tokens_apart"),
    Pass("select_rows_early", needs=UNPADDED),
    Pass("fuse_update_and_attend"),
    check("require_fused", "fuse_update_and_attend.require_fused", UNPADDED),
    check("require_stored"),
    check("require_planned", "require_stored.require_planned"),
    Pass("fuse_rope"),
)
"""Passes that run over every program, whatever its target."""

FUNCTIONAL = (Pass("wide_indices"), Pass("thread_pool"))
"""The last passes over a program before it is exported to ONNX."""

PASSES = {
    ("cpu", "onnx"): PassList(
        program=(
            Pass("drop_no_ops"),
            Pass("drop_batch_dim", needs=UNPADDED),
            Pass("fuse_head_norms"),
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
            Pass("fuse_head_norms"),
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
            Pass("fuse_head_norms"),
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
"""(kind of target, backend) -> the passes."""


LOWER_CACHES = (
    Pass("pair_complex"),
    Pass("fuse_update_and_attend"),
    check("require_pairs", "return_pools.require_pairs"),
    check("require_stored"),
    Pass("return_pools"),
    *FUNCTIONAL,
)
"""The passes of `kvgraph.onnx.lower_caches`, over a user's own program."""


def run_passes(subject: Rewritten, passes: Iterable[Pass]) -> None:
    """Run the passes that apply, in order. Add their reports to the subject's, and dump graphs.

    UnsupportedError: a check refuses the program; the message says why.
    """
    for each in passes:
        if not each.applies(subject.options):
            continue
        report = each.run(subject)
        if report is not None:
            subject.passes.append(report)
        if not each.is_check:
            subject.changed(each.name)
