"""What a module of a user's own holds in addition to plain weights: views, plain tensors, hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import kvgraph
from kvgraph import ops
from tests.compiler.test_own_module import VOCAB, Decoder, compile_module


def strided(*shape: int) -> nn.Parameter:
    """Every second number of a table's rows: its memory is not that of an array of this shape."""
    return nn.Parameter(torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2] * 0.2)


class Views(Decoder):
    """No weight is row-major; two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv.weight = nn.Parameter(torch.randn(32, 64).t() * 0.2)
        self.qkv.bias = nn.Parameter(torch.randn(1).expand(64))
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.up.weight = self.down.weight = strided(32, 32)
        self.register_buffer("order", torch.randn(32, VOCAB).t())
        self.register_buffer("kept", torch.randn(32, VOCAB).t(), persistent=False)

    def forward(self, tokens: Any, offsets: Any, rows: Any, *cache: Any) -> torch.Tensor:
        every = torch.arange(tokens.shape[0])
        x = super().forward(tokens, offsets, every, *cache)[rows.long()] @ self.order
        x = x + self.down(self.up(x)) @ self.kept.T  # type: ignore[operator]
        return x @ self.embed.weight.T


class Plain(Decoder):
    """Tensors that are neither parameters nor buffers, here and in a part, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(VOCAB, VOCAB)
        self.part = nn.Identity()
        self.part.order = torch.arange(VOCAB).flip(0)
        self.part.scale = torch.randn(VOCAB, VOCAB).t()

    def forward(self, *inputs: Any) -> torch.Tensor:
        logits = super().forward(*inputs) @ self.table * torch.tensor(2.0)
        return logits[:, self.part.order] @ self.part.scale  # type: ignore[index,operator]


@pytest.mark.parametrize("check", [True, False])
def test_weights_that_are_not_row_major(check: bool, tmp_path: Path) -> None:
    """AOTInductor would read them by the strides that they had when it compiled."""
    torch.manual_seed(3)
    module = Views()
    strides = {name: tensor.stride() for name, tensor in module.state_dict().items()}
    compile_module(module, tmp_path / "torch", backend="torch", check=check)
    compile_module(module, tmp_path / "onnx", backend="onnx")
    with safe_open(tmp_path / "torch" / "weights.safetensors", framework="pt") as file:
        assert file.metadata() == {"up.weight": "down.weight"}
    tokens = [
        kvgraph.Engine(tmp_path / name, num_pages=16).generate([[1, 2, 3, 4, 5]])[0].token_ids
        for name in ("torch", "onnx")
    ]
    assert tokens[0] == tokens[1]
    assert {name: tensor.stride() for name, tensor in module.state_dict().items()} == strides


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_plain_tensors(backend: str, tmp_path: Path) -> None:
    manifest = compile_module(Plain(), tmp_path / "out", backend=backend)
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")


def tripled(_: nn.Module, given: Any, logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return logits * 3


def clamped(_: nn.Module, given: Any) -> Any:
    return (given[0].clamp(max=3), *given[1:])


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_hooks_see_what_the_module_returns(backend: str, tmp_path: Path) -> None:
    module, seen = Decoder(), []
    module.register_forward_hook(lambda module, given, logits: seen.append(logits.ndim))
    module.register_forward_hook(tripled)
    module.register_forward_pre_hook(clamped)
    hooks = [*module._forward_hooks.values()]
    compile_module(module, tmp_path / "out", backend=backend)
    assert {*seen} == {2}
    assert [*module._forward_hooks.values()] == hooks


def test_the_module_is_as_before(tmp_path: Path) -> None:
    module, other = Decoder(), Decoder()
    own = other.forward
    other.forward = own  # type: ignore[method-assign]
    for each in (module, other):
        before = dict(vars(each))
        compile_module(each, tmp_path / "out", force=True)
        assert vars(each) == before | {"training": True}
    assert "forward" not in vars(module)


def test_a_module_that_is_refused_is_as_before(tmp_path: Path) -> None:
    module = Decoder(VOCAB + 1)
    with pytest.raises(kvgraph.UnsupportedError):
        compile_module(module, tmp_path / "out")
    assert "forward" not in vars(module)
    assert not module._forward_hooks


class Masked(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        real = torch.arange(VOCAB) < VOCAB - 3
        return torch.where(real, super().forward(*inputs), -torch.inf)


def test_a_vocabulary_that_is_padded(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    compile_module(Masked(), tmp_path / "out")
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
    tokens = kvgraph.Engine(tmp_path / "out", num_pages=16).generate([[1, 2, 3]])[0].token_ids
    assert max(tokens) < VOCAB - 3


class Twice(Decoder):
    """Both layers have one cache."""

    def forward(self, tokens: Any, offsets: Any, rows: Any, pool: Any, *index: Any) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        for _ in range(2):
            q = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return (x + q.reshape(x.shape[0], -1))[rows.long()] @ self.embed.weight.T


@pytest.mark.parametrize(
    ("module", "layers", "message"),
    [
        (Twice, 1, "layer 0 of the cache: expected 1 calls of attention, got 2; a module of"),
        (Decoder, 2, "layer 1 of the cache: expected 1 calls of attention, got 0"),
    ],
)
def test_each_layer_is_read_once(
    module: Callable[[], Decoder], layers: int, message: str, tmp_path: Path
) -> None:
    params = kvgraph.KVCacheParams("float32", 2, 8, num_layers=layers, page_size=4)
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(module(), tmp_path / "out", params=params)


class Normed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCAB)
        assert self.norm.running_mean is not None
        self.norm.running_mean.normal_()

    def forward(self, *inputs: Any) -> torch.Tensor:
        normed: torch.Tensor = self.norm(super().forward(*inputs))
        return normed


def test_batch_norm_by_the_numbers_of_its_training(tmp_path: Path) -> None:
    module = Normed()
    compile_module(module, tmp_path / "out")
    assert module.norm.training
    module.norm = nn.BatchNorm1d(VOCAB, track_running_stats=False)
    with pytest.raises(kvgraph.UnsupportedError, match=r"tokens apart: _native_batch_norm_"):
        compile_module(module, tmp_path / "out2")


class Versioned(Decoder):
    def get_extra_state(self) -> Any:
        return {"version": 2}


def test_a_state_that_is_no_tensor(tmp_path: Path) -> None:
    assert compile_module(Versioned(), tmp_path / "out").notes[-1].startswith("check: logits of")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_weights_that_torch_packed_are_named(tmp_path: Path) -> None:
    module = Decoder()
    quantize = torch.ao.quantization.quantize_dynamic
    packed = quantize(module, {nn.Linear}, dtype=torch.qint8)
    module.register_buffer("own", torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8))
    for given, name, got in (
        (packed, "qkv._packed_params", r"packed ones of .*\.LinearPackedParamsBase; give the"),
        (
            module,
            "own",
            "torch.qint8; give the module before torch.ao quantises it, and weights='i",
        ),
    ):
        expected = f"^{name}: expected weights as plain tensors, got {got}"
        with pytest.raises(kvgraph.UnsupportedError, match=expected):
            compile_module(given, tmp_path / "out")


def test_another_default_device(tmp_path: Path) -> None:
    """What the module makes itself, and what we give it, is in host memory all the same."""
    module = Masked()
    with torch.device("meta"):
        compile_module(module, tmp_path / "out")
        assert torch.empty(1).is_meta


def test_a_dtype_is_that_of_a_parameter_with_a_name(tmp_path: Path) -> None:
    expected = r"expected bfloat16 from the module's first parameter 'embed\.weight', got float32"
    with pytest.raises(kvgraph.UnsupportedError, match=expected):
        compile_module(Decoder(dtype=torch.bfloat16), tmp_path / "out", dtype="float32")


class Counts(Decoder):
    """A tensor that no list of buffers has."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, *inputs: Any) -> torch.Tensor:
        self.count.add_(1)
        return super().forward(*inputs) * self.count


class Lengthens(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        inputs[4].add_(1)
        return super().forward(*inputs)


class Remembers(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.previous = torch.zeros(1)  # in no list of buffers

    def forward(self, *inputs: Any) -> torch.Tensor:
        logits = super().forward(*inputs) + self.previous
        return logits + self.previous.copy_(logits[-1, :1])


@pytest.mark.parametrize(
    ("module", "name"),
    [(Counts(), "count"), (Lengthens(), "cache_lengths"), (Remembers(), "previous")],
)
def test_state_of_any_kind_is_refused(module: Decoder, name: str, tmp_path: Path) -> None:
    with pytest.raises(
        kvgraph.UnsupportedError,
        match=r"module: expected one that changes nothing but the cache, by cache ops, got "
        rf"aten\.\w+\S* that changes '{name}'",
    ):
        compile_module(module, tmp_path / "out")


class Fresh(Decoder):
    """A constant that each step makes again, and changes."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        factor = torch.tensor([1.0, 2.0])
        factor[1:] *= 3.0
        return super().forward(*inputs) * factor.sum()


def test_what_a_step_makes_itself_may_change(tmp_path: Path) -> None:
    manifest = compile_module(Fresh(), tmp_path / "out")
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")


class Decays(Decoder):
    """The pool changes behind its last use."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        logits = super().forward(*inputs)
        inputs[3][:, 0].mul_(0.5)
        return logits


class Padded(Decoder):
    """Logits of ids that are no tokens."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        logits = super().forward(*inputs)
        logits[:, -1] = -1e4
        logits[:, 3:5] = 0.0
        return logits


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_numbers_over_a_part_of_the_logits(backend: str, tmp_path: Path) -> None:
    compile_module(Padded(), tmp_path / "out", backend=backend)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_a_pool_is_changed_by_cache_ops_alone(backend: str, tmp_path: Path) -> None:
    message = "nothing but the cache, by cache ops, got aten.mul_.Tensor that changes 'kv_blocks'"
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(Decays(), tmp_path / "out", backend=backend)


def test_a_module_that_was_made_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        module = Decoder()
    compile_module(module, tmp_path / "out", weights="int8")
    assert all(each.requires_grad and each.is_inference() for each in module.parameters())


class Cast(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(*inputs).float()


class Either(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        found = super().forward(*inputs)
        return torch.cond(inputs[2].sum() > -1, lambda x: x * 1.0, lambda x: x * 2.0, (found,))


class Mapped(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        return torch.vmap(lambda x: x / x.norm())(super().forward(*inputs))


@pytest.mark.parametrize(
    ("module", "got"), [(Cast, "autocast"), (Either, "cond"), (Mapped, "vmap or another")]
)
def test_parts_under_conditions_are_refused(
    module: type[Decoder], got: str, tmp_path: Path
) -> None:
    expected = (
        f"expected operators that run one after the other, got torch.{got}.*; compute without it"
    )
    with pytest.raises(kvgraph.UnsupportedError, match=expected):
        compile_module(module(), tmp_path / "out")


class Draws(Decoder):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.draw(super().forward(*inputs))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.rand(VOCAB),
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: x * torch.bernoulli(torch.full((VOCAB,), 0.5)),
    ],
)
def test_random_numbers_are_refused(draw: Any, tmp_path: Path) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="a model that draws no random numbers, got"):
        compile_module(Draws(draw), tmp_path / "out")
    off = Draws(lambda x: nn.functional.dropout(x, 0.5, training=False))
    compile_module(off, tmp_path / "out")


class Remembers(Decoder):
    """A list for whoever looks at activations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, *inputs: Any) -> torch.Tensor:
        logits = super().forward(*inputs)
        self.seen.append(logits)
        return logits


def test_a_trace_leaves_nothing_in_a_list(tmp_path: Path) -> None:
    module = Remembers()
    compile_module(module, tmp_path / "out", check=False)
    assert not any(isinstance(each, FakeTensor) for each in module.seen)


def test_a_module_in_float64_is_refused(tmp_path: Path) -> None:
    module = Decoder()
    module.embed = module.embed.double()
    said = r"got one in float64; give module\.float"
    for backend in ("onnx", "torch"):
        with pytest.raises(kvgraph.UnsupportedError, match=said):
            compile_module(module, tmp_path / "out", backend=backend)
