"""An artifact on disk: read and verified, nothing allocated yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvgraph.contract.backends import OURS, find_backend
from kvgraph.contract.file_names import ENGINE_NAME, ONNX_NAME, PROGRAM_NAME, WEIGHTS_NAME
from kvgraph.contract.files import as_path
from kvgraph.contract.manifest import MANIFEST_NAME, Binding, read_manifest
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.plain import in_short
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.versions import AGAIN
from kvgraph.errors import ArtifactError, RequestError, UnsupportedError
from kvgraph.runtime.external import require_model
from kvgraph.runtime.folder import ATTENTION, ArtifactFolder, state_of
from kvgraph.runtime.intact import require_intact
from kvgraph.runtime.machine import require_machine, require_threads
from kvgraph.runtime.ranks.launched import Launched, launched
from kvgraph.runtime.sessions.package import require_ops
from kvgraph.runtime.sessions.weights import require_weights
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

if TYPE_CHECKING:
    from kvgraph.runtime.sessions.base import Session


class Pending(NamedTuple):
    """A check of hashes that is still to be done."""

    again: bool
    """Whether files with a valid stamp are hashed too."""
    rank: int | None
    """The rank of torchrun whose files are checked; None: all files."""


@dataclass(frozen=True)
class Artifact(ArtifactFolder):
    """An artifact folder that `compile` wrote."""

    pending: Pending | None = field(default=None, compare=False, repr=False)
    """The check of the files' hashes that comes before a session opens them."""

    def session(
        self,
        kind: str | None = None,
        *,
        num_threads: int | None = None,
        collective_timeout: float | None = None,
    ) -> Session:
        """Open a session that runs the graph.

        `kind`: as in `contract.backends.OURS`; default: the session of the artifact's backend.
        `num_threads`: 0 or None for all cores. RequestError for more threads than the processors
        that this process may run on.
        `collective_timeout`: seconds that a rank waits for another (default: 60).

        For an artifact of several ranks, the session is the leader of all ranks. Under torchrun
        each rank is a process, and ranks above 0 call `follow`. Otherwise the ranks are threads of
        this process and share its cores. RankError if a rank is missing or differs.
        """
        require_threads(num_threads)
        opened = self.checked_unless_rank()
        make = partial(opened._make, kind)
        if self.ranks == 1:
            return make(opened, num_threads)
        from kvgraph.runtime.ranks.sessions import open_leader

        return open_leader(opened, make, num_threads, collective_timeout)

    def opened(self, session: str | Session | None, *, num_threads: int | None = None) -> Session:
        """`session` if it is one of this artifact; else a new one, of the kind `session`.

        RequestError for a session of another artifact: one with a file that differs. Two compiles
        of a model are one artifact if the manifest lists no nondeterministic file.
        """
        from kvgraph.runtime.sessions.base import Session

        if not isinstance(session, Session):
            return self.session(session, num_threads=num_threads)
        mine, theirs = self.manifest.files, session.artifact.manifest.files
        if mine != theirs:
            name = min(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
            raise RequestError(
                f"session: expected one of {self.folder}, got one of {session.artifact.folder}, "
                f"which is another artifact: {name} differs"
            )
        return session

    def follow(
        self,
        kind: str | None = None,
        *,
        num_threads: int | None = None,
        collective_timeout: float | None = None,
        joined: Callable[[Launched], None] = lambda own: None,
    ) -> None:
        """Run this process's rank, one above 0 under torchrun, until rank 0 is done.

        The arguments are those of `session`. `joined`: called once this rank has met the others
        and opened its session. RankError if rank 0 is gone or differs.
        """
        from kvgraph.runtime.ranks import sessions as ranks

        require_threads(num_threads)
        ranks.follow(self, partial(self._make, kind), num_threads, collective_timeout, joined)

    def checked(self) -> Artifact:
        """The artifact after the pending check of its files, if there is one. ArtifactError as in
        `load`."""
        if self.pending is None:
            return self
        again, rank = self.pending
        require_intact(self.folder, self.manifest, again=again, rank=rank)
        return replace(self, pending=None)

    def checked_unless_rank(self) -> Artifact:
        """`checked`, except for a rank of torchrun, which checks its files once all have met."""
        return (
            self if self.pending is not None and self.pending.rank is not None else self.checked()
        )

    def _make(self, kind: str | None, part: ArtifactFolder, num_threads: int | None) -> Session:
        """Open the session of one rank; `part`: this artifact for that rank."""
        from kvgraph.runtime import sessions

        self.checked()
        return sessions.create(part, kind, num_threads)

    def require_consistent(self) -> None:
        """Raise ArtifactError unless ops, bindings, layout and files fit this kvgraph."""
        where, manifest = self.folder / "manifest.json", self.manifest
        if self.other_abi:
            raise ArtifactError(self.other_abi)
        try:
            backend = find_backend(manifest.backend)
        except UnsupportedError as error:
            raise ArtifactError(
                f"{where}: {in_short(error)}; the package that adds it must be installed here"
            ) from error
        for name in backend.files:
            if name not in manifest.files:
                raise ArtifactError(
                    f"{where}: files: expected {name} for backend {manifest.backend!r}, got none"
                )
        if manifest.backend == "tensorrt" and not (manifest.engine and manifest.engine.profiles):
            raise ArtifactError(
                f"{where}: engine: expected what built {ENGINE_NAME} and its profiles, got "
                f"{'none' if manifest.engine is None else 'no profile'}; {AGAIN}"
            )
        try:
            params = self.params()
            record = params.get_symbolic_inputs()[0]
            expected = GraphSignature.of(record, manifest.model.vocab_size)
        except Exception as error:  # a field of the wrong kind may cause any error
            reraise_if_signalled(error)
            raise ArtifactError(
                f"{where}: layout and bindings: expected those of a cache, got {in_short(error)}"
            ) from error
        inputs = [Binding.of(symbol) for symbol in expected.inputs]
        outputs = [Binding.of(symbol, output=True) for symbol in expected.outputs]
        _require_bindings(f"{where}: inputs", inputs, manifest.inputs)
        _require_bindings(f"{where}: outputs", outputs, manifest.outputs)
        self._require_attention(where, params.leaves)
        wanted, count = len(manifest.layers), manifest.ops.get(ATTENTION, 0)
        if (
            backend in OURS
            and params.cache_strategy is not KVCacheStrategy.PADDED
            and count != wanted
        ):
            raise ArtifactError(
                f"{where}: ops: expected {wanted} of {ATTENTION}, one for each of `layers`, "
                f"got {count}"
            )

    def _require_attention(self, where: Path, leaves: Mapping[str, KVCacheParams]) -> None:
        """Raise ArtifactError unless the graph's attention sees what the layout keeps."""
        for position, layer in enumerate(self.manifest.layers):
            leaf = leaves[layer.leaf]
            kept = {"window": leaf.window_size, "v_head_dim": leaf.v_head_dim}
            for name, expected in kept.items():
                found = getattr(layer, name)
                if leaf.cache_strategy is KVCacheStrategy.PADDED:
                    expected = None  # its graph has no op of attention
                elif None in (expected, found):
                    continue
                if expected != found:
                    raise ArtifactError(
                        f"{where}: layers[{position}].{name}: expected {expected} from the layout, "
                        f"got {found} from the graph's attention"
                    )

    def require_machine(self) -> None:
        """Raise ArtifactError unless this machine is the artifact's target."""
        require_machine(self.manifest.target, f"{self.folder / 'manifest.json'}")


def _require_bindings(where: str, expected: list[Binding], found: list[Binding]) -> None:
    """Raise ArtifactError, which begins with `where`, at the first binding that differs."""
    for index, (mine, theirs) in enumerate(zip_longest(expected, found)):
        if mine != theirs:
            raise ArtifactError(
                f"{where}[{index}]: expected {mine or 'no more'} from the layout, "
                f"got {in_short(theirs or 'none')}"
            )


def load(folder: str | Path, *, verify: bool | None = None) -> Artifact:
    """Read the manifest of `folder`, check that this machine can run it, and hash its files.

    Files that this user's cache folder lists as intact, and that have not changed since, are not
    hashed again, unless `verify` is True. `verify` False skips hashes and sizes, but not the
    checks of the manifest. ArtifactError names the file or field and both values in one sentence.

    For a rank of torchrun, `session` or `follow` hashes the files that the rank reads, once all
    ranks have met.
    """
    return read(folder, verify=verify).checked_unless_rank()


def read(folder: str | Path, *, verify: bool | None = None) -> Artifact:
    """Read an artifact as `load` does, except that `session` or `follow` hashes its files."""
    folder = as_path("artifact", folder)
    seen = {MANIFEST_NAME: state_of(folder / MANIFEST_NAME)}
    manifest = read_manifest(folder)
    if verify is not False:
        seen |= {name: state_of(folder / name) for name in manifest.files}
    artifact = Artifact(folder, manifest, seen=seen)
    artifact.require_machine()
    artifact.require_consistent()
    if verify is not False:
        own = launched() if artifact.ranks > 1 else None
        pending = Pending(verify is True, None if own is None else own.rank)
        artifact = replace(artifact, pending=pending)
    with ignoring(OSError):  # the working folder no longer exists
        artifact = replace(artifact, folder=folder.absolute())
    return artifact


def verify(folder: str | Path) -> Artifact:
    """Read an artifact that may be for another machine, and check its manifest and all its files,
    and that `weights.safetensors` has the tensors of `model.onnx` or `model.pt2`.

    No session is opened, and the target is not checked. ArtifactError as in `load`.
    """
    folder = as_path("artifact", folder)
    artifact = Artifact(folder, read_manifest(folder))
    artifact.require_consistent()
    require_intact(folder, artifact.manifest, again=True)
    for model, checks in (
        (ONNX_NAME, (require_model,)),
        (PROGRAM_NAME, (require_weights, require_ops)),
    ):
        if {model, WEIGHTS_NAME} <= set(artifact.manifest.files):
            for rank, require in product(range(artifact.ranks), checks):
                require(replace(artifact, rank=rank))
    return artifact
