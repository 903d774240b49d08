"""The check of a compile: compare its logits with the model's own, before it is put in its place.

Decision: the check runs two ragged rows of a few dozen tokens in chunks. The model's own forward
pass never sees this: rows that must not mix, and keys that come from the cache. The last step has
one token of one row, like a decode step of a single request. Windows are cut to 16 tokens in graph
and model alike, so that short rows reach beyond them. A model with more than 1 GiB of parameters is
checked by one layer of each kind (`subject.py`), lowered by the same passes. So is every decoder
for CUDA, and its program runs here operator by operator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvgraph.compiler.cache import CachePlan, plan_cache
from kvgraph.compiler.check.compare import (
    EXACT,
    Difference,
    Logits,
    Tolerance,
    difference,
    step_difference,
    tolerance,
)
from kvgraph.compiler.check.host import logits_of
from kvgraph.compiler.check.locate import wrong_layer
from kvgraph.compiler.check.own import LEFT, in_batches, refusal
from kvgraph.compiler.check.ranks import rank_logits
from kvgraph.compiler.check.reference import WINDOW, cut_windows, reference_logits
from kvgraph.compiler.check.routes import ROUNDED_ROUTES, rerouted
from kvgraph.compiler.check.rows import OTHERS, Row, chunk_of, crowd_of, rows_of
from kvgraph.compiler.check.subject import may_route, parameter_bytes, reduced
from kvgraph.compiler.frontends.decoder import Decoder, probe
from kvgraph.compiler.interpret import ProgramRun
from kvgraph.compiler.model import Model
from kvgraph.compiler.streamed import with_values
from kvgraph.compiler.trace import trace
from kvgraph.compiler.traced import Traced
from kvgraph.compiler.weights import NAMES
from kvgraph.contract.backends import Backend, Support, imported
from kvgraph.contract.devices import Target
from kvgraph.contract.dtypes import WEIGHT_BITS
from kvgraph.contract.manifest import Manifest
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.shards import shards_of
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import CheckError
from kvgraph.kv.forward import Chunk
from kvgraph.plural import plural

Run = Callable[[Sequence[Row], Chunk], list[Logits]]
"""`run(rows, chunk)`: logits of every token."""
RunArtifact = Callable[[Path, Sequence[Row], Chunk], list[Logits]]
"""`run(folder, rows, chunk)`: logits of every token, by the session of the artifact's backend."""
Write = Callable[[Traced, Path], Manifest]

MOST_BYTES = 1 << 30
"""Most bytes of parameters of a model that is checked whole, not by one layer of each kind."""


@dataclass(frozen=True)
class Compiled:
    """A compile before it is put in its place: the artifact lies in the staging `folder`.

    `write(traced, folder)` writes the artifact of another trace with the same options.
    """

    traced: Traced
    folder: Path
    manifest: Manifest
    backend: Backend
    write: Write

    @property
    def kind(self) -> str:
        """Device kind of the target: "cpu" or "cuda"."""
        return Target.parse(self.manifest.target).kind

    @property
    def support(self) -> Support:
        return self.backend.targets[self.kind]

    @property
    def ranks(self) -> int:
        """Number of ranks of the artifact. `traced` is the whole model, whatever their number."""
        return shards_of(self.manifest.layout)

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance for the precisions of activations, weights and pools."""
        traced = self.traced
        rounded = [NAMES[bits] for bits in traced.weights.rounded]
        kinds = [*traced.kinds, self.manifest.weights, *rounded, *traced.pool_kinds]
        return tolerance(kinds, routed=may_route(traced.model))


def check(compiled: Compiled, run: RunArtifact) -> str:
    """Check the compile. Return a note for the manifest: what was checked, or why nothing was.

    CheckError: logits differ by more than their precision explains; it names the layer.
    """
    model = compiled.traced.model
    if compiled.kind == "cpu":
        if not model.is_own and parameter_bytes(model) > MOST_BYTES:
            return _check_reduced(compiled, run)
        return _check_whole(compiled, run)
    return _check_module(compiled) if model.is_own else _check_reduced(compiled, run)


def _check_whole(compiled: Compiled, run: RunArtifact) -> str:
    """Check the artifact itself, in the session that will run it. Return the note."""
    traced, rows = compiled.traced, rows_of(compiled.traced.model)
    padded, own = traced.plan.strategy is KVCacheStrategy.PADDED, partial(run, compiled.folder)
    if not _has_long_windows(traced):
        found = _require_near(compiled, traced, own, rows)
        if traced.model.is_own and not padded:
            _require_alone(compiled, own, rows, found)
        return _note("all layers", _not_reached(traced, rows))
    if compiled.support.cut_windows and not padded:
        with_windows_cut = imported(compiled.support.cut_windows)
        with (
            cut_windows(traced.model.module),
            tempfile.TemporaryDirectory(dir=compiled.folder) as name,
        ):
            shorter = with_windows_cut(compiled.folder, Path(name), WINDOW)
            _require_near(compiled, traced, partial(run, shorter), rows)
    else:  # windows in the artifact cannot be cut: a program with shorter ones is checked as well
        _require_near(compiled, traced, own, rows)
        with cut_windows(traced.model.module):
            given = (traced.model, traced.signature, traced.plan)
            again = padded or compiled.backend.functional
            program = trace(*given, functional=False).program if again else traced.program
            step = ProgramRun(program, window=WINDOW, weights=traced.weights)
            _require_near(compiled, traced, _run_of(step, traced), rows)
    return _note("all layers")


def _require_alone(
    compiled: Compiled, run: Run, rows: Sequence[Row], found: Sequence[Logits]
) -> None:
    """Raise CheckError unless rows of a user's own module have the logits `found` in a larger batch
    too. `require_own` checks the module itself in the same way."""
    model = compiled.traced.model
    crowd, chunks = crowd_of(rows, model.max_seq_len)
    apart = difference(run(crowd, chunks)[OTHERS:], found, compiled.tolerance)
    if not apart.fits:
        raise refusal(model.architecture, *in_batches(len(rows)), apart.text)


def _check_reduced(compiled: Compiled, run: RunArtifact) -> str:
    """Check one layer of each kind, lowered by the same passes. Return the note."""
    model = compiled.traced.model
    assert isinstance(model.module, Decoder)
    with cut_windows(model.module):
        small = reduced(model)
        if small is None:
            return "check: not done, the model does not have its layers in one list"
        subject, chosen = small
        layers = probe(model.module, model.architecture, len(chosen))
        subject, rows = replace(subject, layers=layers), rows_of(subject)
        on_cpu = compiled.kind == "cpu"
        functional = on_cpu and compiled.backend.functional
        traced = _trace(subject, compiled.traced.plan, functional=functional)
        if on_cpu:
            with tempfile.TemporaryDirectory(dir=compiled.folder) as name:
                compiled.write(traced, Path(name))
                _require_near(compiled, traced, partial(run, Path(name)), rows, chosen)
        else:
            _require_near(compiled, traced, _program_run(compiled, traced), rows, chosen)
    numbers = ", ".join(map(str, chosen))
    checked = f"one layer of each kind ({plural('layer', len(chosen))} {numbers})"
    return _note(checked, _not_reached(traced, rows))


def _check_module(compiled: Compiled) -> str:
    """Check the whole program of a user's own module for CUDA, on the CPU. Return the note."""
    given = compiled.traced
    traced = trace(given.model, given.signature, given.plan, functional=False)
    run, rows = _program_run(compiled, traced), rows_of(traced.model)
    found = _require_near(compiled, traced, run, rows)
    _require_alone(compiled, run, rows, found)
    return _note("all layers", _not_reached(traced, rows))


def _program_run(compiled: Compiled, traced: Traced) -> Run:
    """A run of the program after the passes of the target, of all ranks together."""
    if compiled.ranks > 1:
        rewrite = partial(_rewrite, compiled)
        return partial(rank_logits, traced, compiled.ranks, compiled.kind, rewrite)
    if compiled.support.rewrite:
        _rewrite(compiled, traced)
    return _run_of(ProgramRun(traced.program, weights=traced.weights), traced)


def _run_of(step: ProgramRun, traced: Traced) -> Run:
    def run(rows: Sequence[Row], chunk: Chunk) -> list[Logits]:
        return logits_of(step, traced.signature, traced.plan.params, rows, chunk=chunk)

    return run


def _rewrite(compiled: Compiled, own: Traced) -> None:
    own.bits, own.archs = WEIGHT_BITS.get(compiled.manifest.weights), compiled.traced.archs
    imported(compiled.support.rewrite)(own)


def _trace(model: Model, plan: CachePlan, *, functional: bool) -> Traced:
    """Trace a model with fewer layers, over caches like those of `plan`."""
    leaf = next(iter(plan.params.leaves.values()))
    own = plan_cache(
        model.layers,
        dtype=leaf.dtype,
        quantization=leaf.quantization,
        page_size=leaf.page_size,
        devices=leaf.devices,
        strategy=leaf.cache_strategy,
    )
    model.place(own)
    signature = GraphSignature.of(own.params.get_symbolic_inputs()[0], model.vocab_size)
    return trace(model, signature, own, functional=functional)


def _has_long_windows(traced: Traced) -> bool:
    """Whether a layer has a window above WINDOW, and `cut_windows` shortens all such windows.

    False if the model's own code keeps its windows when they are cut.
    """
    model = traced.model
    if not isinstance(model.module, Decoder):
        return False
    if all((need.window_size or 0) <= WINDOW for need in model.layers):
        return False
    with cut_windows(model.module):
        layers = probe(model.module, model.architecture, len(model.layers))
    return all((need.window_size or 0) <= WINDOW for need in layers)


def _not_reached(traced: Traced, rows: Sequence[Row]) -> list[int]:
    """Windows of the program, in tokens, that hold the longest row whole."""
    windows = {node.kwargs.get("window") for node in traced.graph.nodes}
    return sorted(w for w in windows if isinstance(w, int) and w >= len(rows[0]))


def _require_near(
    compiled: Compiled,
    traced: Traced,
    run: Run,
    rows: Sequence[Row],
    chosen: Sequence[int] | None = None,
) -> list[Logits]:
    """Return the logits of `run` in chunks. CheckError unless they are the model's own, within the
    tolerance for its precisions. `chosen`: indices of the checked layers in the whole model.

    The step of one token must keep to the limit too. If it does not, it may be rounded as it would
    be in one piece with the tokens before it: then its own logits in one piece are near.
    """
    allowed, found = compiled.tolerance, run(rows, chunk_of(rows))
    with with_values(traced.model):
        expected, has_routers = reference_logits(traced, rows), False
        apart, step = _differences(found, expected, allowed)
        if may_route(traced.model) and not (apart.fits and step.fits):
            expected, has_routers = rerouted(traced, rows, found, allowed)
            again = _differences(found, expected, allowed)
            apart, step = (apart if apart.fits else again[0]), (step if step.fits else again[1])
        where = "" if apart.fits else wrong_layer(traced, rows[0], allowed, chosen)
    if not where:
        if step.fits or step_difference(found, run(rows[:1], len(rows[0])), allowed).fits:
            return found
        apart, where = step, "in a step of one token"
    if has_routers and allowed.error != EXACT.error:
        where += f"; {ROUNDED_ROUTES}"
    raise CheckError(
        f"check of {traced.model.architecture!r}: expected the logits of its own forward pass "
        f"within {allowed.error:g} of their spread, got {apart.text} {where}; {LEFT}"
    )


def _differences(
    found: Sequence[Logits], expected: Sequence[Logits], allowed: Tolerance
) -> tuple[Difference, Difference]:
    """The difference of all tokens, and that of the step of one token."""
    return difference(found, expected, allowed), step_difference(found, expected, allowed)


def _note(layers: str, not_reached: Sequence[int] = ()) -> str:
    left = f"; windows of {', '.join(map(str, not_reached))} tokens were not reached"
    return (
        "check: logits of two ragged rows, in chunks and in a step of one token, are the model's "
        f"own, {layers}{left if not_reached else ''}"
    )
