"""Cut a model for tensor parallelism: each rank has a part of the weights and runs the same graph.

`rank_plan` decides which layers are cut, and how, as in Megatron-LM. A layer that is cut by columns
gives each rank its part of the heads or of the inner width. The layer after it is cut by rows, and
its results are summed over the ranks. Experts are cut by their inner width, or each rank has a
share of them. The embedding and the output projection are cut by vocabulary.

Weights are views of the whole model's if possible, so a rank costs little memory until it is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from kvgraph.compiler.cache import LayerNeed, require_heads
from kvgraph.compiler.frontends.decoder import Decoder, probe
from kvgraph.compiler.frontends.rank_parts import (
    ALL_HEADS,
    EACH_HEAD,
    PACKED_HEADS,
    keep_heads,
    packed_heads,
)
from kvgraph.compiler.frontends.rank_plan import (
    BY_EXPERT,
    ONE_PART,
    PARAMETERS,
    TWO_PARTS,
    Plan,
    pattern_of,
    plan_of,
)
from kvgraph.compiler.model import Model
from kvgraph.compiler.values import Share
from kvgraph.errors import UnsupportedError
from kvgraph.ops import torch_ops

T = TypeVar("T")

WHOLE = ("replicate", "local_params", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles that leave a module whole; the last two differ from the others in training only."""

OF_ANY_MODULE = ("moe_tp_experts", "all_reduce", BY_EXPERT, ALL_HEADS, EACH_HEAD)
"""Styles that apply to modules of any type; other styles need an nn.Linear or nn.Embedding."""

SHARE_TABLES = ("own_rows", "own_columns", "own_experts")
"""Names of the buffers by which a rank finds its share of rows, columns and experts."""


def cut(model: Model, ranks: int, rank: int) -> Model:
    """The part of `model` that `rank` of `ranks` runs; its cache holds its share of the kv heads.

    UnsupportedError: the model has no plan, the plan has an unknown style, or `ranks` does not
    divide a layer or a number of heads. The message names it.
    """
    decoder = model.module
    assert isinstance(decoder, Decoder), "of a checkpoint folder"
    require_heads(model.architecture, model.layers, ranks)
    own = decoder.over_same_weights()
    plan = plan_of(decoder, model.architecture, ranks)
    cutter = _Cutter(model.architecture, plan, ranks, rank, model.layers)
    cutter.run(own.model)
    try:
        seen = probe(own, model.architecture, len(model.layers))
    except UnsupportedError as error:
        raise UnsupportedError(
            f"tp: expected code of {model.architecture!r} that runs with a part of its "
            "heads, got one that does not"
        ) from error
    for layer, (part, whole) in enumerate(zip(seen, model.layers, strict=True)):
        wanted = max(1, whole.n_kv_heads // ranks)
        if part.n_kv_heads != wanted:
            raise UnsupportedError(
                f"tp: expected {wanted} kv heads of a rank in layer {layer} of "
                f"{model.architecture!r}, got {part.n_kv_heads}: its plan does not cut attention"
            )
    checkpoint = model.checkpoint
    if checkpoint is not None:
        shares = {f"model.{name}": share for name, share in cutter.shares.items()}
        checkpoint = checkpoint.cut(shares)
    return replace(model, module=own, place=own.place, checkpoint=checkpoint)


@dataclass
class _Cutter:
    """Cuts the modules of one rank's copy in place."""

    architecture: str
    plan: Plan
    ranks: int
    rank: int
    needs: Sequence[LayerNeed]
    """The cache need of each layer of the whole model."""
    shares: dict[str, Share] = field(default_factory=dict)
    """Share of each cut parameter that this rank keeps, by the parameter's name."""
    _parts: dict[str, nn.Module] = field(default_factory=dict)
    _cut: dict[tuple[int, int, tuple[int, ...]], nn.Parameter] = field(default_factory=dict)

    def run(self, model: nn.Module) -> None:
        styles: dict[str, Callable[[str, nn.Module], None]] = {
            "colwise": self._columns,
            "colwise_gather_output": self._gathered_columns,
            "colwise_rep": self._gathered_columns,
            "rowwise": self._rows,
            "rowwise_split_input": self._rows_of_whole,
            "packed_colwise": self._packed_columns,
            PACKED_HEADS: self._packed_heads,
            "embedding_rowwise": self._vocabulary,
            "moe_tp_experts": lambda name, module: self._sum_output(module),
            "all_reduce": lambda name, module: self._sum_output(module),
            BY_EXPERT: self._experts,
            ALL_HEADS: self._norm_of_all_heads,
            EACH_HEAD: self._norm_of_each_head,
        }
        self._parts = dict(model.named_modules())
        for name, module in self._parts.items():
            style = self._style(name)
            if style is not None:
                apply = self._known(styles, name, style)
                self._require_type(name, module, style)
                apply(name, module)
        for name, module in list(model.named_modules()):
            for own in list(module._parameters):
                style = self._style(f"{name}.{own}")
                if style is not None:
                    self._known(PARAMETERS, f"{name}.{own}", style)
                    self._parameter(f"{name}.{own}", module, own, *PARAMETERS[style])

    def _style(self, name: str) -> str | None:
        style = self.plan.get(pattern_of(name))
        return None if style in WHOLE else style

    def _known(self, styles: Mapping[str, T], name: str, style: str) -> T:
        if style not in styles:
            raise UnsupportedError(
                f"tp: {name} of {self.architecture!r}: expected a style of {sorted(styles)} from "
                f"its plan, got {style!r}"
            )
        return styles[style]

    def _require_type(self, name: str, module: nn.Module, style: str) -> None:
        """Raise UnsupportedError if the style needs a Linear or an Embedding and `module` is none.

        Other modules may have another layout of their weight.
        """
        kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
        if style not in OF_ANY_MODULE and not isinstance(module, kind):
            raise UnsupportedError(
                f"tp: {name} of {self.architecture!r}: expected a {kind.__name__} to cut "
                f"{style!r}, got {type(module).__name__}"
            )

    # -- modules

    def _columns(self, name: str, module: nn.Module) -> None:
        heads = self._copied_heads(name, module)
        if heads:
            self._heads(name, module, heads)
            return
        for own in _present(module):
            self._parameter(f"{name}.{own}", module, own, 0)

    def _packed_columns(self, name: str, module: nn.Module) -> None:
        for own in _present(module):
            self._parameter(f"{name}.{own}", module, own, 0, TWO_PARTS)

    def _packed_heads(self, name: str, module: nn.Module) -> None:
        """Cut a projection of queries, keys and values, and set the attention's numbers of heads,
        by which it splits them."""
        attention = self._parts[name.rpartition(".")[0]]
        heads, kv_heads = packed_heads(attention)
        if kv_heads % self.ranks:
            raise UnsupportedError(
                f"tp: expected ranks that divide the {kv_heads} kv heads that {name} of "
                f"{self.architecture!r} packs, got {self.ranks}"
            )
        for own in _present(module):
            self._parameter(f"{name}.{own}", module, own, 0, (heads, kv_heads, kv_heads))
        keep_heads(attention, heads // self.ranks, kv_heads // self.ranks)

    def _copied_heads(self, name: str, module: nn.Module) -> int:
        """Number of kv heads of a layer that makes keys or values, if it is below the number of
        ranks; 0 for any other layer."""
        layer = getattr(self._parts.get(name.rpartition(".")[0]), "layer_idx", None)
        if not isinstance(layer, int):
            return 0
        need = self.needs[layer]
        widths = (need.n_kv_heads * width for width in (need.head_dim, need.v_head_dim))
        is_copied = need.n_kv_heads < self.ranks and _rows_of(module) in widths
        return need.n_kv_heads if is_copied else 0

    def _gathered_columns(self, name: str, module: nn.Module) -> None:
        width = _rows_of(module)
        self._columns(name, module)
        _behind(module, lambda out: _gather(out, self.ranks, width))

    def _rows(self, name: str, module: nn.Module) -> None:
        """Cut a layer by rows and sum its output over the ranks; then add the bias."""
        self._parameter(f"{name}.weight", module, "weight", -1)
        if module._parameters.get("bias") is None:
            self._sum_output(module)
            return

        def forward(x: torch.Tensor) -> torch.Tensor:
            parts = nn.functional.linear(x, module.weight)  # type: ignore[arg-type]
            return _reduce(parts, self.ranks) + module.bias  # type: ignore[operator]

        module.forward = forward

    def _rows_of_whole(self, name: str, module: nn.Module) -> None:
        """Cut a layer by rows whose input is whole on every rank; a rank selects its columns."""
        weight = module._parameters["weight"]
        assert weight is not None
        own = self._own_columns(module, weight.shape[1])
        self._rows(name, module)
        run = module.forward
        module.forward = lambda x: run(own(x))

    def _norm_of_all_heads(self, name: str, module: nn.Module) -> None:
        """Gather the input of a norm over all heads, and keep this rank's part of the result.

        Heads that are copied to several ranks are refused: they would count twice.
        """
        heads = self._copied_heads(name, module)
        if heads:
            raise UnsupportedError(
                f"tp: expected at most {heads} ranks, one for each kv head, as {name} of "
                f"{self.architecture!r} is over all heads, got {self.ranks}"
            )
        width = _rows_of(module)
        own = self._own_columns(module, width)
        run = module.forward
        module.forward = lambda x: own(run(_gather(x, self.ranks, width)))

    def _norm_of_each_head(self, name: str, module: nn.Module) -> None:
        self._heads(name, module, min(_rows_of(module), self.ranks))

    def _heads(self, name: str, module: nn.Module, parts: int) -> None:
        """Keep one of `parts` equal parts of whole heads. With fewer parts than ranks, several
        ranks keep the same part."""
        one = Share(0, ONE_PART, parts, self.rank * parts // self.ranks)
        for own in _present(module):
            self._keep(f"{name}.{own}", module, own, one)

    def _own_columns(self, module: nn.Module, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that selects this rank's columns of `width`, by a table of their indices."""
        share = torch.arange(width).chunk(self.ranks)[self.rank]
        module.register_buffer("own_columns", share)
        return lambda x: x.index_select(-1, module.own_columns)  # type: ignore[arg-type]

    def _vocabulary(self, name: str, module: nn.Module) -> None:
        """Cut an embedding by vocabulary. Ids of other ranks give zeros, which add nothing to the
        sum.

        The row of each id comes from a table. A number that differs between ranks would be folded
        into the graph as a constant, but ranks share one graph.
        """
        whole = _rows_of(module)
        self._parameter(f"{name}.weight", module, "weight", 0)
        module.register_buffer("own_rows", self._own(whole).int()[:, None])
        look_up = module.forward

        def forward(ids: torch.Tensor) -> torch.Tensor:
            rows = nn.functional.embedding(ids[0], module.own_rows)  # type: ignore[arg-type]
            found = look_up(rows[:, 0].clamp(min=0))
            return _reduce(torch.where(rows >= 0, found, 0), self.ranks)[None]

        module.forward = forward

    def _experts(self, name: str, module: nn.Module) -> None:
        """Cut a layer of experts by expert. Ids of other ranks' experts become -1, with weight 0.

        The place of each expert comes from a table, as in `_vocabulary`.
        """
        count = next(module.parameters()).shape[0]
        if count % self.ranks:
            raise UnsupportedError(
                f"tp: expected ranks that divide the {count} experts of {name}, got {self.ranks}"
            )
        module.register_buffer("own_experts", self._own(count)[:, None])
        run = module.forward

        def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            own = nn.functional.embedding(ids, module.own_experts)[..., 0]  # type: ignore[arg-type]
            return _reduce(run(x, own, torch.where(own >= 0, weights, 0)), self.ranks)

        module.forward = forward

    def _own(self, count: int) -> torch.Tensor:
        """`[count]`: the index of each entry in this rank's share of `count`; -1 if another rank
        has it."""
        share = count // self.ranks
        own = torch.arange(count) - self.rank * share
        own[(own < 0) | (own >= share)] = -1
        return own

    def _sum_output(self, module: nn.Module) -> None:
        _behind(module, lambda out: _reduce(out, self.ranks))

    # -- parameters

    def _parameter(
        self, name: str, module: nn.Module, own: str, dim: int, parts: tuple[int, ...] = ONE_PART
    ) -> None:
        """Keep this rank's share of a parameter, along `dim`, of each of `parts` packed there.

        `parts`: relative sizes of the packed parts.
        """
        whole = module._parameters[own]
        assert whole is not None
        if whole.dim() == 1:
            dim = 0
        extent = whole.shape[dim]
        unit = extent // sum(parts)
        if extent % sum(parts) or any(part * unit % self.ranks for part in parts):
            raise UnsupportedError(
                f"tp: expected ranks that divide the {extent // len(parts)} rows or columns of "
                f"{name}, got {self.ranks}"
            )
        self._keep(name, module, own, Share(dim % whole.dim(), parts, self.ranks, self.rank))

    def _keep(self, name: str, module: nn.Module, own: str, share: Share) -> None:
        whole = module._parameters[own]
        assert whole is not None
        self.shares[name] = share
        key = (id(whole), share.dim, share.parts)
        if key not in self._cut:
            view = share.of(whole.detach())
            # A fake tensor must be no view: ranks share a program, which would have its offset.
            kept = view.clone() if isinstance(view, FakeTensor) else view.contiguous()
            self._cut[key] = nn.Parameter(kept, requires_grad=False)
        module._parameters[own] = self._cut[key]


def _rows_of(module: nn.Module) -> int:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0]


def _present(module: nn.Module) -> list[str]:
    return [name for name, given in module._parameters.items() if given is not None]


def _behind(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make `module` return `change(result)` in place of its result."""
    run = module.forward
    module.forward = lambda *args, **kwargs: change(run(*args, **kwargs))


def _reduce(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Sum over the ranks, of rows `[T, W]`, or of `[1, T, W]` as models have them."""
    summed: torch.Tensor
    if x.dim() == 2:
        summed = torch_ops.all_reduce(x, ranks=ranks)
    else:
        summed = torch_ops.all_reduce(x[0], ranks=ranks)[None]
    return summed


def _gather(x: torch.Tensor, ranks: int, width: int) -> torch.Tensor:
    joined: torch.Tensor = torch_ops.all_gather(x[0], ranks=ranks, out_width=width)[None]
    return joined
