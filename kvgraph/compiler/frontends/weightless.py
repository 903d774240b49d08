"""Build a decoder of transformers without its weights: parameters are fake, buffers are real.

`locate` finds the sources of the values, or says why transformers has to load them into memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.checkpoint_files import StoredTensor, stored_tensors
from kvgraph.compiler.frontends.conversion import language_part, of_parameters
from kvgraph.compiler.frontends.folder import GGUF, Config, quantization
from kvgraph.compiler.frontends.found_instead import INSTEAD
from kvgraph.compiler.frontends.left_over import incomplete, left_over, notes_of
from kvgraph.compiler.frontends.stored import HEAD, TABLE
from kvgraph.compiler.quantized import gguf, weights_of
from kvgraph.compiler.quiet import first_line
from kvgraph.compiler.values import Cast, Plain, Turned, Values
from kvgraph.contract.dtypes import ACTIVATIONS
from kvgraph.errors import KVGraphError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


WEIGHTS = [getattr(torch, name) for name in (*ACTIVATIONS, "float64")]
"""dtypes in which a checkpoint may store a plain weight."""


IN_ROWS = ("awq", "gptq")
"""Quantisation methods that store each layer as `[outputs, inputs]`, whatever layer it is."""


BY_VALUE = "_no_grad_trunc_normal_"
"""The one initialiser of torch that reads values, which fake parameters do not have."""


@dataclass(frozen=True)
class Located:
    """The sources of a model's values, or why there are none.

    `why`: why transformers has to load the values. `instead`: the next step for the user if it
    cannot. `form`: the quantised form of the weights, as text. `left`: tensors of the checkpoint
    for which the model has no parameter. `apart`: names of a tied parameter that are stored with
    different values, which transformers unties.
    """

    checkpoint: Checkpoint | None
    why: str = ""
    form: str = ""
    instead: str = ""
    left: Sequence[str] = ()
    apart: Sequence[str] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on tensors that are left out, and on the quantised form."""
        form = (f"weights: the checkpoint's are {self.form}",) if self.form else ()
        return (*notes_of(self.left), *form)


@contextlib.contextmanager
def fake_parameters() -> Iterator[None]:
    """Make new modules get parameters without storage while it is active; buffers stay real.

    Buffers hold values computed from the configuration, such as rotary frequencies. Memory that a
    module allocates for a parameter's initial value is not written, and freed at once.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or isinstance(parameter, FakeTensor):
            return None  # unchanged, so that a tied parameter stays one object
        with mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            return nn.Parameter(empty, requires_grad=False)

    hook = nn.modules.module.register_module_parameter_registration_hook(fake)
    untouched = mock.patch.object(nn.init, BY_VALUE, lambda tensor, *_, **__: tensor)
    try:
        with untouched:
            yield
    finally:
        hook.remove()


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert to float32 the parameters and buffers that transformers keeps in float32 for `dtype`.

    The model's class names them by patterns, for example a router.
    """
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    made: dict[torch.Tensor, nn.Parameter] = {}  # a tied parameter stays one object
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point() or not any(each.search(name) for each in kept):
            continue
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own in module._buffers:
            module._buffers[own] = tensor.float()
        else:
            wide = made.setdefault(tensor, nn.Parameter(tensor.float(), requires_grad=False))
            module._parameters[own] = wide


NO_SAFETENSORS = "the checkpoint has no safetensors"
UNTIE = 'set "tie_word_embeddings": false in config.json to keep both'


def locate(
    model: PreTrainedModel,
    folder: Path,
    config: Config,
    larger: PretrainedConfig | None = None,
) -> Located:
    """Find the sources of `model`'s parameters, or why the values cannot be read as stored.

    `larger`: the configuration of the checkpoint's whole model, if `model` is its language part.
    ModelError, as for a real load, if tensors are missing or have another shape. UnsupportedError
    for a weight of two or more dims that is stored as no floats.
    """
    wanted = _wanted(model)
    given = _tensors(model, folder, config, larger.model_type if larger else "")
    if isinstance(given, Located):
        return given
    values, form, stored, read = given.values, given.form, given.stored, given.read
    if larger is not None:
        if not any(name in values for names, _ in wanted for name in names):
            return Located(None, "the language part is not found by its names", form)
        is_apart = any(names == [HEAD] for names, _ in wanted)
        said = (larger, larger.get_text_config())  # either may say that the head is tied
        is_tied = any(getattr(each, "tie_word_embeddings", False) for each in said)
        if is_apart and TABLE in values and is_tied:
            values.setdefault(HEAD, values[TABLE])
    why, step, apart = _why_not(model, folder, stored, read, values)
    if why:
        return Located(None, why, form, step, apart=apart)
    own = [name for name in given.others if larger is None or name not in read]
    left = left_over(model, own, given.named)
    found: dict[str, Values] = {}
    for names, shape in wanted:
        name = next((n for n in names if n in values), names[0])
        if name not in values:
            raise incomplete(folder, "missing_keys", name, left)
        if values[name].shape != shape:
            both = f"{name} {list(values[name].shape)} for {list(shape)}"
            raise incomplete(folder, "mismatched_keys", both, left)
        found |= dict.fromkeys(names, values[name])
    return Located(Checkpoint(found), "", form, left=left)


def require_loadable(located: Located, folder: Path, config: Config, *, is_built: bool) -> None:
    """Raise UnsupportedError if transformers would have to load the values of `located`, and
    cannot. `is_built`: the model is a language part that transformers does not load by itself."""
    if located.checkpoint is not None:
        return
    if quantization(config) is not None:
        step = f"{located.instead}, or {INSTEAD}" if located.instead else INSTEAD
        raise UnsupportedError(f"{folder}: quantised weights: {located.why}; {step}")
    if is_built:
        hint = f"; {located.instead}" if located.instead else ""
        raise UnsupportedError(
            f"{folder}: the language part of {config['model_type']!r}: {located.why}{hint}"
        )


@dataclass(frozen=True)
class _Tensors:
    """A checkpoint's tensors: as `stored`, as `read` and as `named`, the `values` by a model's
    names, and `others`, for which it has none. `form`: see `Located`."""

    values: dict[str, Values]
    form: str
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    read: Mapping[str, Values] = field(default_factory=dict)
    named: Mapping[str, Values] = field(default_factory=dict)
    others: Sequence[str] = ()


def _tensors(
    model: PreTrainedModel, folder: Path, config: Config, larger: str
) -> _Tensors | Located:
    """The checkpoint's tensors, or why transformers has to load them.

    `larger`: the type of the checkpoint's whole model, if `model` is its language part; else empty.
    """
    given = quantization(config)
    if given is not None and given["quant_method"] == GGUF:
        return _Tensors(*gguf.weights(model, config))
    stored = stored_tensors(folder)
    read, form = weights_of(folder, config, stored)
    if not stored:
        return Located(None, NO_SAFETENSORS, form, "save the model as safetensors")
    try:
        named = language_part(read) if larger else read
        values, others = of_parameters(model, named, larger)
    except KVGraphError:
        raise
    except ImportError:
        return Located(None, "transformers' own names of them are not known", form)
    except Exception as error:
        reraise_if_signalled(error)
        return Located(None, f"transformers converts them: {first_line(error)}", form)
    if given is not None and given["quant_method"] in IN_ROWS:
        values = _turned(model, values)
    return _Tensors(values, form, stored, read, named, others)


def _turned(model: PreTrainedModel, values: Mapping[str, Values]) -> dict[str, Values]:
    """`values` with those of Conv1D layers (GPT-2) as these have them: `[inputs, outputs]`."""
    from transformers.pytorch_utils import Conv1D

    layers = dict(model.named_modules())

    def is_turned(name: str) -> bool:
        stem, _, end = name.rpartition(".")
        is_matrix = end == "weight" and isinstance(layers.get(stem), Conv1D)
        return is_matrix and not isinstance(values[name], Plain)

    return {name: Turned(each) if is_turned(name) else each for name, each in values.items()}


def _why_not(
    model: PreTrainedModel,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    read: Mapping[str, Values],
    values: Mapping[str, Values],
) -> tuple[str, str, list[str]]:
    """Why `values` cannot be read as stored, the next step if there is one, and the tied names that
    differ; else empty."""
    state = model.state_dict(keep_vars=True)
    for names, shape in _wanted(model):
        kinds = [stored[n].dtype for n in names if n in stored and not _is_read(read.get(n))]
        made = [values[n].dtype for n in names if n in values and not _is_read(values[n])]
        if len(shape) > 1 and state[names[0]].is_floating_point() and (kinds or made):
            got = str([*kinds, *made][0]).removeprefix("torch.")
            is_packed = got.lower().startswith("u")  # 4 bits of bitsandbytes or MLX
            raise UnsupportedError(
                f"{folder}: {names[0]}: expected floats of 16, 32 or 64 bits in a plain weight, "
                f"got {got}; {INSTEAD if is_packed else 'save the model in its own dtype'}"
            )
        if kinds:
            return f"{names[0]} is stored as {kinds[0]}", "", []
        present = [name for name in names if name in values]
        each = [Cast(values[name], state[name].dtype) for name in present]
        if any(not _are_equal(each[0], other) for other in each[1:]):
            step = UNTIE if HEAD in present else ""
            return f"tied {' and '.join(present)} differ", step, present
    return "", "", []


def _are_equal(a: Values, b: Values) -> bool:
    """Whether two tensors of one dtype have equal values: files may store a tied tensor twice."""
    return a.shape == b.shape and all(map(torch.equal, a.pieces(), b.pieces()))


def _is_read(values: Values | None) -> bool:
    """Whether a tensor can be read as a weight: its values have a dtype of WEIGHTS."""
    return values is not None and values.dtype in WEIGHTS


def _wanted(model: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """All names (several if tied) and the shape of each tensor that a checkpoint stores of
    `model`."""
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return [(tied, tuple(state[tied[0]].shape)) for tied in names.values()]
