"""The artifact's manifest: the model, the files with their hashes, and the graph's bindings.

`manifest.json` is written last: a folder with a manifest is complete. A reader's error is one
sentence that names the file or field and both values. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kvgraph.contract.collectives import Collective
from kvgraph.contract.devices import parse_logical
from kvgraph.contract.dims import TensorType
from kvgraph.contract.dtypes import ACTIVATIONS, WEIGHTS
from kvgraph.contract.files import PARTIAL, open_regular, reading, replacing
from kvgraph.contract.hashes import FileEntry, inside_folder, require_entries
from kvgraph.contract.layouts import require_layout
from kvgraph.contract.manifest_values import (
    require_counts,
    require_digest,
    require_known,
    require_layers,
    require_model,
    require_plain_text,
    require_profile,
    require_quality,
)
from kvgraph.contract.mixtures import Mixture
from kvgraph.contract.plain import JsonObject, from_json, from_plain, in_short, to_json, to_plain
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.versions import number_of_other, read_from
from kvgraph.errors import ArtifactError
from kvgraph.signal_handlers import reraise_if_signalled

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Binding:
    """One graph input or output. `alias` names the input whose address an output must have."""

    name: str
    kind: str
    dtype: str
    dims: list[int | str]
    device: str
    alias: str | None = None

    def __str__(self) -> str:
        kind = "" if self.kind == "tensor" else f" ({self.kind})"
        alias = "" if self.alias is None else f" with the address of {self.alias}"
        return f"{self.name} {self.dtype} {self.dims} on {self.device}{kind}{alias}"

    @classmethod
    def of(cls, symbol: TensorType, *, output: bool = False) -> Binding:
        alias = symbol.name if output and symbol.kind == "buffer" else None
        shape = list(symbol.shape)
        return cls(symbol.name, symbol.kind, symbol.dtype, shape, str(symbol.device), alias)

    def symbol(self) -> TensorType:
        kind: Literal["tensor", "buffer"] = "buffer" if self.kind == "buffer" else "tensor"
        return TensorType(self.name, self.dtype, tuple(self.dims), parse_logical(self.device), kind)


@dataclass(frozen=True, slots=True)
class LayerRef:
    """Place of a model layer's cache: leaf path ("" for a single cache), and index in the leaf.

    `window` (0: none) and `v_head_dim` are those of the layer's attention in the graph. None: not
    recorded, as for a padded cache, whose graph has no op of attention.
    """

    leaf: str
    index: int
    window: int | None = None
    v_head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The compiled model. `identity`: hash of weights and graph; equal models have equal pages."""

    architecture: str
    identity: str
    vocab_size: int
    max_seq_len: int
    eos_token_ids: list[int]
    bos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class PassEntry:
    """Result of a compiler pass: how often it applied, and the reasons where it did not."""

    name: str
    applied: int
    unmatched: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProfileInfo:
    """An optimisation profile of an engine: least, best and largest extent of each dim."""

    name: str
    min: dict[str, int]
    opt: dict[str, int]
    max: dict[str, int]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A TensorRT engine, and the library that builds and runs it.

    `module`: "tensorrt_rtx" or "tensorrt", of `version`: it built the engine, and only it can read
    it. `archs`: architectures that run the engine; empty: all that the module supports. `profiles`:
    in the engine's order. `host_code`: the plugins' library is part of the engine, so
    reading the engine runs code from it.

    `version` is empty if the engine is not built yet. `names`: the engine's names of the
    signature's inputs and outputs, if they differ; a buffer written in place has no output.
    """

    module: str
    version: str
    archs: list[str]
    profiles: list[ProfileInfo]
    host_code: bool = False
    names: dict[str, str] = field(default_factory=dict)

    def tensor(self, name: str) -> str | None:
        """The engine's name of an input or output; None if the engine has no such output."""
        return self.names.get(name) if self.names else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedKernel:
    """Memory traffic of the kernel in `file`, executed as PTX on a CPU in `steps` small steps with
    correct results. `sectors`: 32-byte sectors of global memory. `wavefronts`: passes of
    shared memory. `ideal_sectors`, `ideal_wavefronts`: the fewest possible."""

    file: str
    steps: int
    sectors: int
    ideal_sectors: int
    wavefronts: int
    ideal_wavefronts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityInfo:
    """How well an artifact predicts a text, against its checkpoint in float32 under transformers.

    `text`: name of the text. `sha256`: hash of its UTF-8 bytes. `tokens`: number of its tokens that
    were predicted, each from the true tokens before it. `agreement`: share of the positions, in
    [0, 1], where artifact and checkpoint have the same most likely token.
    """

    text: str
    sha256: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    agreement: float

    @property
    def loss(self) -> float:
        """Relative increase of the perplexity over the checkpoint's: 0.01 is one percent more."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of manifest.json. `dtype`: of activations. `weights`: precision of the weights: fp32,
    bf16, int8, int4 or stored, or `dtype` if none of these was asked for or is the default."""

    schema_version: int
    kvgraph_version: str
    op_abi_version: int
    model: ModelInfo
    backend: str
    target: str
    dtype: str
    weights: str
    layout: dict[str, object]
    inputs: list[Binding]
    outputs: list[Binding]
    layers: list[LayerRef]
    ops: dict[str, int]
    passes: list[PassEntry]
    notes: list[str]
    files: dict[str, FileEntry]
    nondeterministic_files: list[str]
    tools: dict[str, str]
    engine: EngineInfo | None = None
    quality: QualityInfo | None = None
    executed: list[ExecutedKernel] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    mixtures: list[Mixture] = field(default_factory=list)

    @property
    def signature(self) -> GraphSignature:
        return GraphSignature(
            tuple(binding.symbol() for binding in self.inputs),
            tuple(binding.symbol() for binding in self.outputs),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def identity(self) -> bytes:
        """The 32-byte identity of page contents: SHA-256 of model, activation dtype, page layout.

        Deployment and a page's place in memory have no influence on it.
        """
        fields = {"model": self.model.identity, "dtype": self.dtype, "layout": self.layout}
        return hashlib.sha256(to_json(fields, sort=True)).digest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` atomically, with its own hash in it.

    Mappings keep their order: the order of a layout's leaves is the order of the bindings.
    ArtifactError, with nothing written, for text and values that `read_manifest` refuses.
    """
    fields = to_plain(manifest)
    try:
        require_plain_text(fields)
        _require_values(manifest)
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST_NAME}: {error}") from error
    text = to_json(fields | {"sha256": _hash(fields)}, indent=1)
    with replacing(folder / MANIFEST_NAME) as file:
        file.write(text + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Read and type-check the manifest; files are not opened (see `hashes.verify_files`)."""
    path = folder / MANIFEST_NAME
    with _damage(path):
        if not folder.is_dir():
            got = "a file" if folder.exists() else "nothing there"
            raise ArtifactError(f"{folder}: expected an artifact folder, got {got}")
        try:
            fields = _read(path)
        except FileNotFoundError as error:
            got = "a link that leads nowhere" if path.is_symlink() else "none"
            raise ArtifactError(
                f"{folder}: expected {MANIFEST_NAME} in an artifact, got {got} (not an artifact, "
                "or its compile did not finish)"
            ) from error
        version = fields.get("schema_version")
        if type(version) is not int:
            raise ValueError(f"schema_version: expected int, got {version!r}")
        if version != SCHEMA_VERSION:
            written = fields.get("kvgraph_version")
            said = number_of_other("schema_version", SCHEMA_VERSION, version, written)
            raise ArtifactError(f"{path}: {said}")
        require_plain_text(fields)
        fields = _checked(path, fields)
        engine = fields.get("engine")
        if isinstance(engine, dict) and engine.get("refit") == []:
            del engine["refit"]  # earlier versions wrote it, always empty
        with read_from(path, fields.get("kvgraph_version")):
            manifest = from_plain(Manifest, fields)
            for name in (*manifest.files, *manifest.nondeterministic_files):
                inside_folder(folder, name)
            require_known(fields, to_plain(manifest))
            _require_values(manifest)
        return manifest


def read_measured(folder: Path, measured: Manifest) -> Manifest:
    """Read the manifest of `folder`, to add figures that were measured on the artifact `measured`.

    ArtifactError if the two manifests differ in more than `quality` and `executed`.
    """
    found = read_manifest(folder)
    first, now = (to_plain(replace(each, quality=None, executed=[])) for each in (measured, found))
    if first != now:
        raise ArtifactError(
            f"{folder}: expected the artifact that was measured, got another: it was replaced "
            "while it was measured"
        )
    return found


def listed_names(folder: Path) -> frozenset[str]:
    """Names of the files that a compile wrote into `folder`, with manifest.json and partial files.

    The artifact may have any schema version. ArtifactError if the manifest is none of kvgraph's, or
    names a path outside the folder.
    """
    path = folder / MANIFEST_NAME
    with _damage(path):
        fields = _read(path)
        _checked(path, fields)
        listed = from_plain(_Listed, fields)
    names = {*listed.files, *listed.nondeterministic_files, MANIFEST_NAME}
    for name in names:
        inside_folder(folder, name)
    partial = {path.name for path in folder.iterdir() if PARTIAL.fullmatch(path.name)}
    return frozenset(names | partial)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Fields that manifests of all schema versions have."""

    files: dict[str, object]
    nondeterministic_files: list[str]


def _require_values(manifest: Manifest) -> None:
    """Raise ValueError for values that have the right types but that no compile writes."""
    require_entries(manifest.files)
    require_model(to_plain(manifest.model))
    dims = {dim for binding in manifest.inputs for dim in binding.dims}
    for index, profile in enumerate(manifest.engine.profiles if manifest.engine else []):
        require_profile(f"engine.profiles[{index}]", to_plain(profile), dims)
    for field_name, expected in (
        ("dtype", ACTIVATIONS),
        ("weights", (*WEIGHTS, manifest.dtype)),
    ):
        found = getattr(manifest, field_name)
        if found not in expected:
            raise ValueError(f"{field_name}: expected one of {list(expected)}, got {found!r}")
    for name, count in manifest.ops.items():
        if count < 1:
            raise ValueError(f"ops.{name}: expected >= 1, got {count}")
    if manifest.quality:
        require_quality(to_plain(manifest.quality))
    for name in ("layers", "passes", "mixtures", "executed", "collectives"):
        require_counts(name, getattr(manifest, name))
    for index, mixture in enumerate(manifest.mixtures):
        if not 0 <= mixture.active <= mixture.experts:
            raise ValueError(
                f"mixtures[{index}].active: expected 0 to {mixture.experts} experts, got "
                f"{mixture.active}"
            )
    places = {(layer.leaf, layer.index) for layer in manifest.layers}
    require_layers(places, require_layout("layout", manifest.layout).leaves)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        with reading(path, ArtifactError):
            yield
    except ArtifactError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, wrong types
        reraise_if_signalled(error)
        raise ArtifactError(
            f"{path}: expected a manifest, got a damaged one ({in_short(error)})"
        ) from error


def _read(path: Path) -> JsonObject:
    with open_regular(path) as file:
        return from_json(file.read())


def _checked(path: Path, fields: dict[str, object]) -> dict[str, object]:
    """`fields` without `sha256`; ArtifactError if that is not the hash of the other fields."""
    rest = {k: v for k, v in fields.items() if k != "sha256"}
    found, expected = fields.get("sha256"), _hash(rest)
    require_digest("sha256", found)
    if found != expected:
        raise ArtifactError(
            f"{path}: sha256: expected {expected} from its other fields, got {found}: the file "
            "was changed"
        )
    return rest


def _hash(fields: dict[str, object]) -> str:
    return hashlib.sha256(to_json(fields)).hexdigest()
