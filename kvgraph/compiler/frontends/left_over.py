"""Find tensors of a checkpoint for which the model has no parameter: a head for another task, an
adapter that was not merged, a layer that the configuration does not count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.frontends.found_instead import INSTEAD, MERGE
from kvgraph.compiler.values import Values
from kvgraph.errors import ModelError
from kvgraph.plural import plural

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED = re.compile(
    r"(^|\.)(rotary_emb\..*|inv_freq|position_ids|(self_attn|attention|attn)\.(masked_)?bias)$"
)
"""Names of buffers that older checkpoints store and models compute."""

DRAFTS = re.compile(r"^(model\.)?mtp\b")
"""Names of layers for multi-token prediction, which draft tokens ahead."""

LAYER = re.compile(r"\blayers\.(\d+)\.")

ONE_EXPERT = re.compile(r"\.experts\.\d+\.")

MOST_ZEROS = 1 << 20
"""Most elements of a bias that is read to see if it is all zeros. AutoGPTQ stores such a bias for
layers without one."""


def left_over(
    model: PreTrainedModel, names: Iterable[str], values: Mapping[str, Values]
) -> list[str]:
    """Tensors of `names` that a user needs: no computed buffers, draft layers or zero biases."""
    known = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    known += [COMPUTED, DRAFTS]
    count = getattr(model.config, "num_hidden_layers", 0)
    ahead = range(count, count + (getattr(model.config, "num_nextn_predict_layers", None) or 0))

    def is_missed(name: str) -> bool:
        layer = LAYER.search(name)
        if layer is not None and int(layer[1]) in ahead:
            return False
        is_known = any(each.search(name) for each in known)
        return not is_known and not _is_zero(name, values.get(name))

    return list(filter(is_missed, sorted(names)))


def notes_of(left: Sequence[str]) -> tuple[str, ...]:
    if not left:
        return ()
    count = f"{len(left)} {plural('tensor', len(left))}"
    return (f"weights: no place in the model for {count} of the checkpoint, such as {left[0]}",)


GOT = {
    "missing_keys": "got none for some, such as",
    "mismatched_keys": "got other shapes than its config.json says, such as",
    "error_msgs": "got",
}
"""transformers' name of a problem -> how an error tells it."""


def incomplete(folder: Path, problem: str, first: str, left: Sequence[str]) -> ModelError:
    """The error for parameters without weights.

    `problem`: transformers' name of it; `first`: what has it. `left`: tensors of the checkpoint
    without use.
    """
    named = next((name for name in left if name.endswith(f".{first}")), None)
    adapter = next((name for name in left if ".lora_" in name), None)
    alone = next((name for name in left if ONE_EXPERT.search(name)), None)
    packed = next((name for name in left if _is_part(name, first)), None)
    step = "; take all files of the checkpoint from its publisher again"
    if adapter is not None:
        step = f"; merge the LoRA adapter, such as {adapter}, into its base model {MERGE}"
    elif named is not None:
        step = f"; strip {named.removesuffix(first)!r} from the names of tensors, as in {named}"
    elif alone is not None and ".experts." in first:
        step = (
            "; experts of this model are not read one by one from tensors such as "
            f"{alone}; {INSTEAD}"
        )
    elif packed is not None:
        step = f"; it is stored in another form, with a part {packed}; {INSTEAD}"
    elif left:
        step = f"; the first tensor without a place is {left[0]}"
    return ModelError(
        f"{folder}: expected weights for every parameter, {GOT[problem]} {first}{step}"
    )


def _is_part(name: str, weight: str) -> bool:
    """Whether a tensor, by its name, may be a part of a missing `weight` in a form of its own."""
    stem = weight.removesuffix(".weight")
    ends = (".", "_") if stem == weight else (".",)
    return name.startswith(tuple(f"{stem}{end}" for end in ends)) and not name.endswith("bias")


def _is_zero(name: str, values: Values | None) -> bool:
    if values is None or not name.endswith(".bias") or len(values.shape) != 1:
        return False
    return values.shape[0] <= MOST_ZEROS and not values.read().any()
