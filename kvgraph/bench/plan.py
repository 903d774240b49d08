"""Plan of a run: engines, cases, and the job of each. Every argument is checked here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvgraph.bench import peers as peer_adapters
from kvgraph.bench.counts import Counts, count
from kvgraph.bench.engines import EngineSpec
from kvgraph.bench.protocol import Case, Settings, check_lengths, make_prompts, plan_cases
from kvgraph.contract.backends import find_backend, imported
from kvgraph.contract.devices import Target
from kvgraph.contract.manifest import Manifest
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.trees import params_from_layout
from kvgraph.contract.versions import version_of
from kvgraph.errors import MissingDependencyError, ModelError, RequestError
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions.base import Session

OURS = Path(__file__).with_name("ours.py")
FIRST_PROMPT_TOKENS = 16
"""Tokens of the prompt that is used to measure the start to the first token."""
SECONDS_TO_ANSWER = 120.0

FIND_MODULES = """
import importlib.util, json, sys
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(json.dumps([name for name in sys.argv[1:] if not found(name)]))
"""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Plan of a run. `engines`: in the order in which they run. `counts`: of artifacts by name;
    artifacts of several ranks have none, since each rank has a part of the weights, and so no
    shares of the limits."""

    settings: Settings
    cases: list[Case]
    engines: list[EngineSpec]
    counts: dict[str, Counts]
    job: JsonObject


def make_plan(
    folders: Sequence[Path],
    settings: Settings,
    *,
    peers: Sequence[str] = (),
    model: Path | None = None,
    work: Path,
) -> BenchPlan:
    """Plan a run: read manifests and check the peers' interpreters, without measuring.

    `peers`: texts NAME[:CLASS[+CLASS]]=PYTHON. `model`: their Hugging Face folder. `work`: folder
    for the model in the peers' own formats. RequestError, ArtifactError, ModelError or
    MissingDependencyError names the argument that does not fit.
    """
    loaded = {name: artifacts.load(folder) for name, folder in _names(folders).items()}
    counts = {name: count(each.folder, each.manifest) for name, each in loaded.items()}
    manifest = _common_model(loaded)
    steps = (_session_step_tokens(each.manifest) for each in loaded.values())
    cases = plan_cases(settings, min(settings.step_tokens, *steps))
    longest = min(each.manifest.model.max_seq_len for each in loaded.values())
    check_lengths(settings, cases, longest)
    job = _job(settings, cases, manifest, work)
    engines = [
        EngineSpec(
            name=name,
            ours=True,
            precision=counts[name].precision,
            adapter=OURS,
            python=sys.executable,
            model=each.folder.resolve(),
            versions=_versions(each.manifest.backend),
        )
        for name, each in loaded.items()
    ]
    classes = list(dict.fromkeys(each.precision for each in counts.values()))
    if peers:
        checkpoint = _checkpoint(model, manifest)
        for text in peers:
            engines += _peer_engines(text, classes, checkpoint, job)
    whole = {name: counts[name] for name, each in loaded.items() if each.ranks == 1}
    return BenchPlan(settings, cases, engines, whole, job)


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by their names, or by their paths if two folders have the same name."""
    if len(set(folders)) < len(folders):
        raise RequestError("artifacts: expected each folder once, got one twice")
    names = [folder.resolve().name for folder in folders]
    whole = len(set(names)) < len(names)
    return {str(f) if whole else name: f for name, f in zip(names, folders, strict=True)}


def _common_model(loaded: dict[str, Artifact]) -> Manifest:
    """The first manifest; RequestError unless all are for the CPU and of one model, by the fields
    that they have."""
    first = next(iter(loaded.values())).manifest
    known = _known_of(first)
    for each in loaded.values():
        if Target.parse(each.manifest.target).kind != "cpu":
            raise RequestError(
                f"{each.folder}: expected an artifact for cpu, got one for {each.manifest.target}"
            )
        for name, got in _known_of(each.manifest).items():
            if name in known and got != known[name]:
                raise RequestError(
                    f"{each.folder}: expected artifacts of one model, with {name} {known[name]}, "
                    f"got {got}"
                )
    return first


def _known_of(manifest: Manifest) -> dict[str, int | str]:
    """Fields of a manifest's model, by their names in config.json.

    The architecture of a module's artifact is the name of a Python class and no model_type.
    """
    model = manifest.model
    known: dict[str, int | str] = {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": len(manifest.layers),
    }
    return known | ({"model_type": model.architecture} if model.architecture.islower() else {})


def _session_step_tokens(manifest: Manifest) -> int:
    """Most tokens of a step in the default session for the CPU; no session is opened."""
    runner = find_backend(manifest.backend).targets["cpu"].sessions[0]
    found: int = getattr(imported(runner.entry), "step_tokens", Session.step_tokens)
    return found


def _versions(backend: str) -> dict[str, str]:
    """Versions of kvgraph and of the backend's packages. They are read here and not in the
    engine's process, where that would take 3 MB."""
    found = {"kvgraph": version_of()}
    for package in find_backend(backend).packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _checkpoint(model: Path | None, manifest: Manifest) -> Path:
    """Check and return the folder of --model. Fields that its config.json leaves to transformers'
    defaults are not compared; the engines' `first_ids` are compared instead (see table.py)."""
    if model is None:
        raise RequestError("model: expected a Hugging Face folder for --peers, got none")
    path = model / "config.json"
    if not path.is_file():
        raise ModelError(f"{model}: expected config.json in a model folder, got none")
    try:
        config = json.loads(path.read_bytes())
        nested = config.get("text_config")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path}: expected JSON, got a damaged file ({error})") from error
    text, where = (nested, "text_config: ") if isinstance(nested, dict) else (config, "")
    for name, expected in _known_of(manifest).items():
        got = text.get(name)
        if got not in (None, expected) and f"{got}_text" != expected:  # only its text part
            raise RequestError(
                f"{path}: {where}{name}: expected {expected} as the artifact has, got {got}"
            )
    return model.resolve()


def _peer_engines(
    text: str, classes: Sequence[str], model: Path, job: JsonObject
) -> list[EngineSpec]:
    """One EngineSpec per class of precision: the named classes, or the artifacts' classes that the
    peer can run."""
    left, equals, python = text.partition("=")
    name, colon, wanted = left.partition(":")
    if not (equals and python):
        raise RequestError(f"peers: expected NAME=PYTHON, got {text!r}")
    if name not in peer_adapters.PEERS:
        raise RequestError(f"peers: expected one of {list(peer_adapters.PEERS)}, got {name!r}")
    adapter = peer_adapters.adapter(name)
    can = adapter.PRECISIONS
    chosen = wanted.split("+") if colon else [each for each in classes if each in can]
    if not chosen or not set(chosen) <= set(can):
        got = wanted if colon else f"artifacts of {'+'.join(classes)}"
        raise RequestError(
            f"peers: {name}: expected one of its classes {list(can)}, got {got}; "
            f"name one: {name}:{can[0]}=PYTHON"
        )
    if job["prefix_caching"] and not getattr(adapter, "PREFIX_CACHING", False):
        raise RequestError(f"peers: {name}: expected a peer with prefix caching, got one without")
    _check_interpreter(name, python, adapter.NEEDS)
    specs = []
    for precision in dict.fromkeys(chosen):
        cache = cache_bytes(job, precision)
        environment = {}
        if hasattr(adapter, "environment"):
            environment = adapter.environment(job | {"cache_bytes": cache})
        specs.append(
            EngineSpec(
                name=f"{name} {precision}",
                ours=False,
                precision=precision,
                adapter=Path(adapter.__file__),
                python=python,
                model=model,
                prepares=hasattr(adapter, "prepare"),
                environment=environment,
            )
        )
    return specs


def _check_interpreter(name: str, python: str, needs: dict[str, str]) -> None:
    """Raise RequestError without an interpreter, MissingDependencyError without the engine's
    packages."""
    command = [python, "-c", FIND_MODULES, *needs]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
        missing = json.loads(done.stdout)
    except OSError as error:
        raise RequestError(
            f"peers: {name}: expected a Python interpreter at {python}, got none ({error.strerror})"
        ) from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise RequestError(
            f"peers: {name}: expected a Python interpreter at {python}, got a program that does "
            "not answer as one"
        ) from error
    if missing:
        packages = " ".join(needs[module] for module in missing)
        raise MissingDependencyError(
            f"peers: {name}: expected {', '.join(missing)} in {python}, not installed; "
            f"{python} -m pip install {packages}"
        )


def _job(settings: Settings, cases: Sequence[Case], manifest: Manifest, work: Path) -> JsonObject:
    """The job of all engines. `rows`: tokens of each row, longest first, so that every case fits.
    `new_tokens`: most of any case.
    """
    model = manifest.model
    lengths = [
        sorted((length + case.new_tokens for length in case.lengths), reverse=True)
        for case in cases
    ]
    rows = [
        max(each[i] for each in lengths if i < len(each)) for i in range(max(map(len, lengths)))
    ]
    first = Case("first token", "batch", (FIRST_PROMPT_TOKENS,), 1, 1)
    prompts = make_prompts(first, model.vocab_size, model.bos_token_id, settings.seed)
    leaves = params_from_layout(manifest.layout).leaves.values()
    return {
        "threads": settings.threads,
        "step_tokens": settings.step_tokens,
        "prefix_caching": settings.prefix_caching,
        "rows": rows,
        "new_tokens": max(case.new_tokens for case in cases),
        "folder": str(work),
        "first_prompt": prompts[0],
        "cache_elements": sum(
            leaf.kv_dim * leaf.num_layers * leaf.n_kv_heads * leaf.head_dim for leaf in leaves
        )
        * sum(rows),
        "cases": [
            {
                "name": case.name,
                "kind": case.kind,
                "prompts": make_prompts(case, model.vocab_size, model.bos_token_id, settings.seed),
                "lead": case.lead,
                "new_tokens": case.new_tokens,
                "repeats": case.repeats,
            }
            for case in cases
        ],
    }


def cache_bytes(job: JsonObject, precision: str) -> int:
    """Bytes of a cache for all rows: float32 for class fp32, 16 bits for all others."""
    return int(job["cache_elements"]) * (4 if precision == "fp32" else 2)


def engine_job(plan: BenchPlan, spec: EngineSpec) -> JsonObject:
    """The job of one engine: the plan's job, with its `cache_bytes`."""
    return plan.job | {"cache_bytes": cache_bytes(plan.job, spec.precision)}
