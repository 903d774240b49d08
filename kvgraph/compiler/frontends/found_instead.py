"""Say what is there in place of a checkpoint or of its weights, and what to give instead.

Only names of files are read: those of the folder, and of folders one level down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from kvgraph.compiler.checkpoint_files import (
    CONFIG,
    INDEX,
    INDEXES,
    PICKLED,
    WHOLE,
    require_fetched,
)
from kvgraph.contract.files import kind_of
from kvgraph.contract.manifest import MANIFEST_NAME
from kvgraph.errors import ModelError
from kvgraph.signal_handlers import reraise_if_signalled

INSTEAD = "compile the checkpoint that it was made from, with --weights int4 or int8"
"""Next step of a user whose quantised checkpoint or GGUF file is refused."""

UNREAD = ": a damaged file, or a form that is not read"

ADAPTER, PIPELINE = "adapter_config.json", "model_index.json"
ADAPTER_WEIGHTS = "adapter_model."
MERGE = "(peft: merge_and_unload, then save_pretrained) and compile that folder"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.(?:safetensors|bin)")

NO_MODEL = re.compile(r"mmproj|^imatrix|imatrix\.gguf$|-(?!00001-)\d{5}-of-\d{5}\.gguf$", re.I)
"""Pattern in names of GGUF files that are no model, or a later part of one."""

LAYOUT = "give the checkpoint in transformers' layout, in safetensors"
OTHERS = {
    r"consolidated.*\.(safetensors|pth)": (
        "weights in the layout of the authors' own code",
        LAYOUT,
    ),
    r"(tf_model.*\.h5|model\.ckpt.*)": ("weights of TensorFlow", LAYOUT),
    r"flax_model.*\.msgpack": ("weights of Flax", LAYOUT),
    r".*\.onnx": ("a graph of ONNX", LAYOUT),
    r"qmodel\.pt": ("weights that HQQ quantised", INSTEAD),
}
"""Pattern of names of files with weights that are not read -> what they are, and the next step."""

MOST_ENTRIES = 500
"""Entries of a folder that are looked at, so that a large one takes no time."""
MOST_NAMES = 4


def damaged(where: str, expected: str, got: object) -> ModelError:
    """The error for a damaged part of a quantised checkpoint or GGUF file."""
    return ModelError(f"{where}: expected {expected}, got {got}; {INSTEAD}")


def instead_of_a_folder(path: Path) -> str:
    """Text for an error message: what is at a path that is no folder."""
    if path.is_file():
        return "a file; give the folder that holds config.json"
    if not path.exists() and HUB_ID.fullmatch(str(path)):
        return (
            f"nothing there; if it is a name on the Hugging Face hub, download it first: "
            f"hf download {path} --local-dir DIR"
        )
    return str(kind_of(path.resolve())) if path.exists() else "nothing there"


def instead_of_a_model(folder: Path) -> str:
    """Text for an error message: what a folder without a config.json holds.

    A LoRA adapter is named here, because transformers would try to load its base model.
    """
    if (folder / ADAPTER).is_file():
        return f"a LoRA adapter; merge it into its base model {MERGE}"
    if (folder / MANIFEST_NAME).is_file():
        return f"a compiled artifact; kvgraph inspect {folder} shows it"
    if (folder / PIPELINE).is_file():
        return "a diffusion pipeline"
    names = _files(folder)
    return _gguf(names) or _other(names) or _below(folder) or "none"


def require_known_names(folder: Path) -> None:
    """Raise ModelError if `folder` has weights, but none with a name that transformers reads.

    A folder without any weights passes. A known name may also be a link to nothing.
    """
    known = [folder / name for name in (WHOLE, PICKLED, *INDEXES)]
    if any(path.is_file() for path in known):
        return
    require_fetched(known)
    names = _files(folder)
    got = _unnamed(names) or _adapter(names) or _gguf(names) or _other(names)
    if got:
        raise ModelError(f"{folder}: expected weights in {WHOLE} or {INDEX}, got {got}")


def _unnamed(names: Sequence[str]) -> str:
    """Text on safetensors, or shards of any kind, that no index names. An example of the first is
    AutoGPTQ's `gptq_model-4bit-128g.safetensors`."""
    for index in INDEXES:
        suffix = Path(index.removesuffix(".index.json")).suffix
        shards = [name for name in names if name.endswith(suffix) and _shard_count(name) > 1]
        if not shards:
            continue
        others = [name for name in names if f"{suffix}.index" in name and name.endswith(".json")]
        if others:
            return f"the index {others[0]}; rename it to {index}"
        count, (stem, _) = _shard_count(shards[0]), shards[0].rsplit("-of-", 1)
        wanted = [f"{stem[:-5]}{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]
        missing = [name for name in wanted if name not in names]
        return (
            f"{count - len(missing)} of {count} shards, such as {shards[0]}, and no index; fetch "
            f"{_listed([index, *missing])}"
        )
    found = [n for n in names if n.endswith(".safetensors") and not (_adapter([n]) or _other([n]))]
    if found[1:]:
        return (
            f"{found[0]} and {len(found) - 1} more; rename the one with all weights to {WHOLE}, or "
            f"add {INDEX}, which names them"
        )
    return f"{found[0]}; rename it to {WHOLE}" if found else ""


def _shard_count(name: str) -> int:
    """Number of shards of which `name` is one; 0 for any other file."""
    found = SHARD.fullmatch(name)
    return int(found[2]) if found else 0


def _adapter(names: Sequence[str]) -> str:
    found = [name for name in names if name.startswith(ADAPTER_WEIGHTS)]
    return f"{found[0]}, a LoRA adapter; merge it into its base model {MERGE}" if found else ""


def _gguf(names: Sequence[str]) -> str:
    found = [name for name in names if name.endswith(".gguf")]
    models = _gguf_models(names)
    if models[1:]:
        return f"{len(models)} GGUF files, {_listed(models)}; give one of them"
    if models:
        return f"the GGUF file {models[0]}; give that file"
    step = "and no file of a whole model; give the model's GGUF file"
    return f"{_listed(found)} {step}" if found else ""


def _gguf_models(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(".gguf") and not NO_MODEL.search(name)]


def _other(names: Sequence[str]) -> str:
    for pattern, (what, step) in OTHERS.items():
        found = [name for name in names if re.fullmatch(pattern, name)]
        if found:
            return f"{_listed(found)}, {what}; {step}"
    return ""


def _below(folder: Path) -> str:
    """Text on what the folders in `folder` hold; empty for nothing that is known."""
    places = {folder / "snapshots": "the Hub's cache of it", folder: "a folder above it"}
    for parent, what in places.items():
        inner = [parent / name for name in _entries(parent, os.path.isdir)]
        models = [each for each in inner if os.path.isfile(each / CONFIG)]
        files = [each / name for each in inner for name in _gguf_models(_files(each))]
        if found := models or files:
            step = f"give one of {_listed(found)}" if found[1:] else f"give {found[0]}"
            return f"{what}; {step}"
        for each in inner:
            if text := _other(_files(each)):
                return f"{each.name}/{text}"
    return ""


def _files(folder: Path) -> list[str]:
    return _entries(folder, os.path.isfile)


def _entries(folder: Path, is_wanted: Callable[[str], bool]) -> list[str]:
    """Names of the wanted entries of a folder, in order; empty if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                each.name for each in islice(entries, MOST_ENTRIES) if is_wanted(each.path)
            )
    except OSError as error:
        reraise_if_signalled(error)
        return []


def _listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(map(str, names[:MOST_NAMES])) + more
