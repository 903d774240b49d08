"""How a model and its cache fit into a device's memory; no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraph.compiler.cache import plan_cache, pool_types
from kvgraph.compiler.described import Described
from kvgraph.compiler.frontends import stored
from kvgraph.compiler.frontends.folder import checkpoint_dtype, nearest_weights, read_config
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.options import (
    check_weights,
    computes_in_float32,
    default_weights,
    require_ranks,
)
from kvgraph.contract.backends import Support, default_backend
from kvgraph.contract.devices import Target, virtual_devices
from kvgraph.contract.dtypes import SMALL_WEIGHTS, WEIGHT_BITS
from kvgraph.errors import MissingDependencyError, ParamsError
from kvgraph.kv.memory import plan_leaves

ROWS = (1, 64)
"""Of steps whose reads a plan tells."""


@dataclass(frozen=True)
class DeploymentPlan:
    """All sizes in bytes, of one device; activations and the graph itself are not counted.

    Of several ranks each has a device, and all of them the same requests.
    """

    architecture: str
    target: str
    dtype: str
    """Of activations."""
    cache_dtype: str
    memory: int
    weights: int
    """What the target's default backend stores of them, with rotary tables."""
    weights_dtype: str
    """fp32, bf16, int8 or int4; on a GPU the activations' dtype where they are not small."""
    cache_memory: int
    page_size: int
    pages: dict[str, int]
    """By leaf; the empty path is the only cache."""
    bytes_per_page: dict[str, int]
    max_seq_len: int
    concurrent_requests: int
    """Requests of `max_seq_len` tokens that fit at once."""
    longest_context: int
    """Tokens of a lone request, at most the model's own limit."""
    parameters: int
    active_parameters: int
    """Those that work on a token: of a mixture of experts, its active ones."""
    read_by_step: dict[str, int]
    """Of a mixture of experts: rows of a step -> bytes of weights that it reads."""
    ranks: int = 1


def plan_deployment(
    folder: Path,
    *,
    target: str,
    memory: int,
    max_seq_len: int | None,
    max_batch_size: int,
    max_batch_tokens: int = 2048,
    dtype: str | None,
    weights: str | None = None,
    cache_dtype: str | None,
    page_size: int,
    tp: int = 1,
    progress: Callable[[str], None] = lambda stage: None,
) -> DeploymentPlan:
    """Plan one device of `memory` bytes for the checkpoint in `folder`.

    `dtype` and `weights` mean what they mean to `compile` with the target's default backend. The
    cache is described on a virtual device; no weight is read and nothing is allocated. `tp` devices
    share the model and run its ranks, as `compile` cuts it; transformers says how. Weights are
    counted by the headers of the safetensors, or their index; without them, and for other than the
    best-known architectures, transformers is asked. ParamsError where the weights alone do not fit,
    or not one page does; UnsupportedError for weights that the target cannot have, as `compile`
    raises it; MissingDependencyError where transformers is needed.
    """
    parsed = Target.parse(target)
    backend = default_backend(parsed.kind)
    support = backend.targets[parsed.kind]
    check_weights(weights, parsed, backend, dtype)
    with as_folder(folder) as opened:
        config = read_config(opened)
        dtype = dtype or checkpoint_dtype(config)
        if computes_in_float32(support, parsed, weights):
            nearest = nearest_weights(config)
            weights, dtype = weights or default_weights(dtype, support, nearest), "float32"
        require_ranks(tp, backend, parsed)
        bits = WEIGHT_BITS.get(weights or "")
        model = _describe(opened, config, dtype, bits is not None, tp, progress)
    pool_dtype, quantization = pool_types(dtype, cache_dtype)
    cache = plan_cache(
        model.layers,
        dtype=pool_dtype,
        quantization=quantization,
        page_size=page_size,
        devices=virtual_devices(target, tp),
    )
    on_cpu = parsed.kind == "cpu"
    weight_bytes = model.weight_bytes(dtype, bits, on_cpu)
    available = memory - weight_bytes
    if available <= 0:
        less = "".join(_smaller(model, support, (dtype, on_cpu), memory, weight_bytes, tp))
        raise ParamsError(
            f"memory: expected more than the {weight_bytes} bytes of weights, got {memory}{less}"
        )
    length = model.max_seq_len if max_seq_len is None else max_seq_len
    if not 1 <= length <= model.max_seq_len:
        raise ParamsError(
            f"max_seq_len: expected 1 to {model.max_seq_len} from the model, got {length}"
        )
    if max_batch_size < 1:
        raise ParamsError(f"max_batch_size: expected >= 1, got {max_batch_size}")
    leaves = cache.params.leaves
    planned = plan_leaves(cache.params, available * tp, max_batch_size, length, max_batch_tokens)
    unbounded = [p for p, leaf in leaves.items() if leaf.window_size is None]
    tokens = min((planned.pages[p] * page_size for p in unbounded), default=model.max_seq_len)
    return DeploymentPlan(
        architecture=model.architecture,
        target=target,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        memory=memory,
        weights=weight_bytes,
        weights_dtype=weights or dtype,
        cache_memory=planned.nbytes // tp,
        page_size=page_size,
        pages=planned.pages,
        bytes_per_page={path: leaf.bytes_per_page // tp for path, leaf in leaves.items()},
        max_seq_len=length,
        concurrent_requests=planned.max_concurrent_requests,
        longest_context=min(model.max_seq_len, tokens),
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        read_by_step={
            str(rows): model.read_bytes(dtype, bits, on_cpu, rows) for rows in ROWS if model.experts
        },
        ranks=tp,
    )


def _smaller(
    model: Described,
    support: Support,
    kind: tuple[str, bool],
    memory: int,
    weight_bytes: int,
    tp: int,
) -> Iterator[str]:
    """What would fit, as ends of the sentence that this does not. `kind`: the activations' dtype,
    and whether the target is a CPU."""
    dtype, on_cpu = kind
    if "weight_bits" in support.options:
        for name in SMALL_WEIGHTS:
            nbytes = model.weight_bytes(dtype, WEIGHT_BITS[name], on_cpu)
            if nbytes < min(memory, weight_bytes):
                yield f"; --weights {name} takes {nbytes}"
    heads = min(need.n_kv_heads for need in model.layers)
    fitting = (n for n in range(2, heads + 1) if heads % n == 0 and weight_bytes < memory * n)
    least = next(fitting, None) if support.ranks and tp == 1 else None
    if least is not None:
        yield f"; --tp {least} about {weight_bytes // least} on each device"


def _describe(
    folder: Path,
    config: Mapping[str, Any],
    dtype: str,
    by_shape: bool,
    ranks: int,
    progress: Callable[[str], None],
) -> Described:
    """By the checkpoint's own files, or by transformers where they leave something in doubt."""
    try:
        if ranks > 1:
            raise stored.InDoubtError("its model has the plan for tensor parallelism")
        return stored.describe(folder, config, by_shape=by_shape)
    except stored.InDoubtError as error:
        try:
            import torch  # noqa: F401
            import transformers  # noqa: F401
        except ImportError as missing:
            raise MissingDependencyError(
                f"{missing.name}: needed to plan {folder}, since {error}, not installed; "
                "pip install 'kvgraph[compile]'"
            ) from missing
        progress(f"asking transformers, since {error}")
    from kvgraph.compiler.frontends import measured

    return measured.describe(folder, dtype, ranks)
