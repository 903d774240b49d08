"""A module of a user's own: what it returns, and does to the pool, is checked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kvgraph
from kvgraph import ops
from kvgraph.compiler.frontends.module import load
from tests.support.artifacts import TINY_LLAMA

PARAMS = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=4)
VOCAB = 32


class Decoder(nn.Module):
    """One layer; `between` runs after the store and before the attention."""

    def __init__(self, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32, dtype=dtype)
        self.qkv = nn.Linear(32, 64, dtype=dtype)

    def between(self, pool: torch.Tensor) -> None: ...

    def forward(
        self, tokens: Any, offsets: Any, logits_indices: Any, pool: Any, *index: Any
    ) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        self.between(pool)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return (x + out.reshape(x.shape[0], -1))[logits_indices.long()] @ self.embed.weight.T


class Meddler(Decoder):
    def between(self, pool: torch.Tensor) -> None:
        pool.mul_(2)


class Rounded(Decoder):
    def forward(self, *inputs: Any) -> torch.Tensor:
        return super().forward(*inputs).long()


class EveryToken(Decoder):
    """Forgets which logits are asked for."""

    def forward(self, tokens: Any, offsets: Any, logits_indices: Any, *cache: Any) -> torch.Tensor:
        every = torch.arange(tokens.shape[0], device=tokens.device)
        return super().forward(tokens, offsets, every, *cache)


class Counting(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, *inputs: Any) -> torch.Tensor:
        self.count.add_(1)  # type: ignore[operator]
        return super().forward(*inputs)


class Several(Decoder):
    def forward(self, *inputs: Any) -> Any:
        logits = super().forward(*inputs)
        return logits, logits


class Named(Decoder):
    def forward(self, *inputs: Any) -> Any:
        return {"logits": super().forward(*inputs)}


class NoIndex(Decoder):
    def forward(self, tokens: Any, offsets: Any, logits_indices: Any, pool: Any) -> torch.Tensor:  # type: ignore[override]
        return self.embed(tokens)  # type: ignore[no-any-return]


class Nothing(Decoder):
    def forward(self, *inputs: Any) -> Any:
        super().forward(*inputs)


CUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "split": lambda h: h.view(-1, 8, 8).split((4, 2, 2), 1),
    "slice": lambda h: (h.view(-1, 8, 8)[:, a:b] for a, b in ((0, 4), (4, 6), (6, 8))),
    "reshape": lambda h: (h[:, a:b].reshape(-1, (b - a) // 8, 8) for a, b in SPANS),
    "view": lambda h: (h[:, a:b].view(-1, (b - a) // 8, 8) for a, b in SPANS),
    "transpose": lambda h: (
        x.transpose(0, 1) for x in h.view(-1, 8, 8).transpose(0, 1).split((4, 2, 2))
    ),
}
SPANS = ((0, 32), (32, 48), (48, 64))


class Cut(Decoder):
    """q, k and v as ordinary code takes them from one projection; rows found by the offsets."""

    def __init__(self, cut: str, dense: bool) -> None:
        super().__init__()
        self.cut, self.dense = CUTS[cut], dense
        self.order = nn.Embedding(64, 32)

    def forward(
        self, tokens: Any, offsets: Any, logits_indices: Any, pool: Any, *index: Any
    ) -> torch.Tensor:
        lengths, table, most = index
        at = torch.arange(tokens.shape[0], dtype=torch.int32)
        row = (at[:, None] >= offsets[None, 1:]).sum(-1)
        x = self.embed(tokens) + self.order(at - offsets[row] + lengths[row])
        q, k, v = (y.contiguous() if self.dense else y for y in self.cut(self.qkv(x)))
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return (x + out.reshape(x.shape[0], -1))[logits_indices] @ self.embed.weight.T


def compile_module(module: nn.Module, out: Path, **options: Any) -> Any:
    settings = {"params": PARAMS, "vocab_size": VOCAB, "max_seq_len": 64}
    return kvgraph.compile(module, out, **settings | options)  # type: ignore[arg-type]


def test_it_generates(tmp_path: Path) -> None:
    compile_module(Decoder(), tmp_path / "out")
    tokens = kvgraph.Engine(tmp_path / "out", num_pages=16).generate([[1, 2, 3, 4, 5]])[0].token_ids
    assert len(tokens) == 59


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Decoder(VOCAB + 1), {}, r"logits: expected float32 \['num_logits', 32\] .*, 33\] from"),
        (
            Decoder(dtype=torch.bfloat16),
            {"backend": "torch", "params": None},
            "params: expected KVCacheParams to compile an nn.Module, got None",
        ),
        (Rounded(), {}, r"logits: expected float32 .* from the signature, got int64 .* from the"),
        (
            Decoder(dtype=torch.bfloat16),
            {},
            "expected float32 activations .*, got a module in bfloat16; give module.float",
        ),
        (
            NoIndex(),
            {},
            r"takes 7 inputs by .* \(tokens, .*, max_lengths\), got .*indices, pool\)$",
        ),
        (Decoder(), {"vocab_size": 0}, "vocab_size: expected >= 1, got 0"),
        (Decoder(), {"vocab_size": None}, "vocab_size: expected a value .*, got None"),
        (Decoder(), {"cache": "padded"}, "cache: expected paged from params, got padded; leave it"),
        (Decoder(), {"cache_dtype": "int8"}, "cache_dtype: expected float32 from params, got int8"),
        (Decoder(), {"page_size": 128}, "page_size: expected 4 from params, got 128; leave it out"),
        (Decoder(), {"dtype": "bfloat16"}, "dtype: expected float32 from the module's .*bfloat16"),
        (Counting(), {}, "nothing but the cache, by .*, got aten.add_.Tensor that changes 'count'"),
        (Meddler(), {}, "paged_attention of layer 0: kv_blocks: expected a pool .* got aten.mul_"),
    ],
)
def test_what_does_not_fit_is_said(
    module: nn.Module, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(module, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize(
    ("module", "got"),
    [
        (EveryToken, "got float32 ['total_seq_len', 32] from the module; return a row"),
        (Several, "expected one tensor from the module, got tuple"),
        (Named, "expected one tensor from the module, got dict"),
        (Nothing, "expected one tensor from the module, got NoneType"),
    ],
)
def test_what_is_returned_is_the_logits_alone(
    module: type[Decoder], got: str, backend: str, tmp_path: Path
) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=r"^logits: expected ") as refused:
        compile_module(module(), tmp_path / "out", backend=backend)
    assert got in str(refused.value)


class Inferring(Decoder):
    @torch.inference_mode()
    def forward(self, *inputs: Any) -> torch.Tensor:
        return super().forward(*inputs)


def test_a_module_in_inference_mode(tmp_path: Path) -> None:
    assert compile_module(Inferring(), tmp_path / "out").model.vocab_size == VOCAB


class Lazy(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.LazyLinear(64)


def with_buffer(values: torch.Tensor) -> Decoder:
    module = Decoder()
    module.register_buffer("own", values)
    return module


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (Decoder, {}, "model: expected a folder, a GGUF file or an nn.Module, got the class Dec"),
        (len, {}, "got builtin_function_or_method"),
        (Lazy(), {}, "qkv.weight: expected a tensor with values, got one that is not initialised"),
        (Decoder().to("meta"), {}, "embed.weight: expected a tensor with values, got one on"),
        (Decoder(), {"params": {}}, "params: expected KVCacheParams, got dict"),
        (Decoder(), {"vocab_size": 256.0}, "vocab_size: expected an integer >= 1, got float 256."),
        (with_buffer(torch.empty(3, device="meta")), {}, "own: expected a tensor with values, got"),
        (
            with_buffer(torch.eye(3).to_sparse()),
            {},
            "own: expected a dense tensor, got torch.spars",
        ),
    ],
)
def test_what_is_no_module(
    given: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kvgraph.KVGraphError) as refused:
        compile_module(given, tmp_path / "out", **options)
    assert message in str(refused.value)


@pytest.mark.parametrize("bound", [float("inf"), float("nan")])
def test_a_buffer_may_be_a_bound(bound: float, tmp_path: Path) -> None:
    module = with_buffer(torch.tensor([bound]))
    if bound == bound:
        assert compile_module(module, tmp_path / "out").model.vocab_size == VOCAB
        return
    with pytest.raises(kvgraph.ModelError, match="own: expected finite weights, got nan at"):
        compile_module(module, tmp_path / "out")


def test_numpy_numbers_and_a_parameter_of_indices(tmp_path: Path) -> None:
    """What travels in the manifest is plain; the module's dtype is that of its first float."""
    module = Decoder()
    module.order = nn.Parameter(torch.arange(3), requires_grad=False)
    sizes = {"vocab_size": np.int64(VOCAB), "max_seq_len": np.int32(64)}
    manifest = compile_module(module, tmp_path / "out", **sizes)
    assert (manifest.model.vocab_size, manifest.model.max_seq_len) == (VOCAB, 64)


def test_a_module_goes_on_training(tmp_path: Path) -> None:
    module = Decoder().train()
    module.qkv.eval()
    assert compile_module(module, tmp_path / "out", eos_token_ids=3).model.eos_token_ids == [3]
    assert [part.training for part in module.modules()] == [True, True, False]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_table_that_is_the_head_too(weights: str, tmp_path: Path) -> None:
    """A product with the embedding's transpose keeps the table in float32."""
    compile_module(Decoder(), tmp_path / "out", weights=weights)
    assert len(kvgraph.Engine(tmp_path / "out").generate([[1, 2, 3]])[0].token_ids)


@pytest.mark.parametrize("cut", CUTS)
def test_ordinary_ways_to_cut_a_projection(cut: str, tmp_path: Path) -> None:
    """Each with and without `.contiguous()`: the same tokens, at a batch of one token too."""
    found = []
    for dense in (False, True):
        torch.manual_seed(3)
        compile_module(Cut(cut, dense), tmp_path / "out", force=True)
        engine = kvgraph.Engine(tmp_path / "out", num_pages=32)
        prompts = [[1], [2, 3, 4, 5, 6]]
        together = [done.token_ids for done in engine.generate(prompts)]
        assert together == [engine.generate([prompt])[0].token_ids for prompt in prompts]
        found.append(together)
    assert found[0] == found[1]


class Branches(Decoder):
    def forward(self, tokens: Any, *rest: Any) -> torch.Tensor:
        if tokens.shape[0] > 4:  # not known at compile time
            tokens = tokens + 0
        return super().forward(tokens, *rest)


class Reads(Decoder):
    def forward(self, tokens: Any, *rest: Any) -> torch.Tensor:
        return super().forward(tokens + int(tokens.max()), *rest)


@pytest.mark.parametrize(
    ("module", "why", "code"),
    [
        (Branches(), "it is made for 2 <= total_seq_len", "if tokens.shape[0] > 4:"),
        (Reads(), "Could not extract specialized integer", "tokens + int(tokens.max())"),
    ],
)
def test_line_at_which_torch_refuses(
    module: nn.Module, why: str, code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kvgraph.UnsupportedError) as refused:
        compile_module(module, tmp_path / "out")
    message = str(refused.value)
    assert f"torch.export cannot trace it with dynamic rows and tokens: {why}" in message
    assert f", at {__file__}:" in message
    assert code in message
    assert "\n" not in message
    assert capfd.readouterr().err == ""


def test_logits_in_bfloat16(tmp_path: Path) -> None:
    compile_module(Decoder(dtype=torch.bfloat16), tmp_path / "out", backend="torch")
    done = kvgraph.Engine(tmp_path / "out", num_pages=16).generate([[1, 2, 3]])[0]
    assert len(done.token_ids) == 61


def test_a_module_brings_its_text_files(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    shutil.copy(TINY_LLAMA / "tokenizer.json", source)
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5], "bos_token_id": 1}')
    vocab = 2048
    options = {"vocab_size": vocab, "tokenizer": source, "force": True}
    manifest = compile_module(Decoder(vocab), tmp_path / "out", **options)
    assert manifest.model.eos_token_ids == [3, 5]
    assert manifest.model.bos_token_id == 1
    assert (tmp_path / "out" / "generation_config.json").is_file()
    engine = kvgraph.Engine(tmp_path / "out", num_pages=16)
    ending = kvgraph.SamplingParams(max_new_tokens=8)
    assert engine.generate(["The import"], ending)[0].text
    options |= {"tokenizer": source / "tokenizer.json", "eos_token_ids": (7,)}
    assert compile_module(Decoder(vocab), tmp_path / "out", **options).model.eos_token_ids == [7]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenizer": "nowhere"}, kvgraph.ModelError, "nowhere: expected tokenizer.json or a fol"),
        (
            {"eos_token_ids": [32]},
            kvgraph.UnsupportedError,
            r"eos_token_ids: expected token ids in \[0, 32\), got 32",
        ),
        (
            {"bos_token_id": -1},
            kvgraph.UnsupportedError,
            r"bos_token_id: expected token ids in \[0, 32\), got -1",
        ),
        *[
            ({name: given}, kvgraph.UnsupportedError, f"{name}: expected an integer, got {said}")
            for name, given, said in (
                ("eos_token_ids", "17", "str '17'"),
                ("eos_token_ids", 2.7, "float 2.7"),
                ("eos_token_ids", [3, None], "NoneType None"),
                ("bos_token_id", "1", "str '1'"),
            )
        ],
    ],
)
def test_text_that_does_not_fit(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        compile_module(Decoder(), tmp_path / "out", **options)


@pytest.mark.parametrize("given", [{3, 5}, np.array([3, 5]), iter((3, 5)), torch.tensor([3, 5])])
def test_end_tokens_come_in_any_order_of_things(given: Any) -> None:
    options: dict[str, Any] = {"vocab_size": VOCAB, "max_seq_len": 64, "dtype": None}
    loaded = load(Decoder(), eos_token_ids=given, bos_token_id=np.int64(1), **options)
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((3, 5), 1)
    assert load(Decoder(), eos_token_ids=np.array(3), **options).eos_token_ids == (3,)


def test_a_model_folder_has_its_own_text_files(tmp_path: Path) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="eos_token_ids: expected None for a model"):
        kvgraph.compile(TINY_LLAMA, tmp_path / "out", eos_token_ids=[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_named(tmp_path: Path) -> None:
    module = Decoder()
    part = torch.jit.script(nn.Linear(2, 2))
    for given, name in ((part, "model"), (module, "qkv")):
        module.qkv = part
        with pytest.raises(
            kvgraph.UnsupportedError, match=f"{name}: expected an nn.Module in Python, got a torch."
        ):
            compile_module(given, tmp_path / "out")
