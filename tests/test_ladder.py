"""Equivalence ladder: cacheless eager = exported program = reference = ONNX Runtime = torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvgraph
from kvgraph.compiler.cache import plan_cache
from kvgraph.compiler.export import export
from kvgraph.compiler.frontends import huggingface
from kvgraph.contract.inputs import ModelInputs
from kvgraph.contract.signature import GraphSignature
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.support.models import OVERRIDES

TOLERANCE = 1e-4
NEW_TOKENS = 64
LENGTHS = (1, 15, 16, 17, 40, 64, 129, 200)
MODELS = [*OVERRIDES, "tiny-llama"]
IN_MAKE_TEST = ("gemma2", "tiny-llama")
"""Models whose AOTInductor compile is part of `make test`; the others are `slow`."""

BACKENDS = {"exported": "onnx", "reference": "onnx", "onnx": "onnx", "torch": "torch"}
"""Rungs of one rank, and the backend whose artifact each takes. A backend's own rung has its name:
its session is compared, and its greedy tokens too."""

RANKS = {"onnx-2-ranks": ("onnx", 2), "torch-2-ranks": ("torch", 2), "onnx-4-ranks": ("onnx", 4)}
"""Rungs of tensor-parallel artifacts; their ranks are threads of the test's process."""

WITHOUT_RANKS: tuple[str, ...] = ()
"""Models that have no such rung: transformers' plan for them does not cut attention, so a compile
for several ranks refuses them."""


def _case(model: str, kind: str) -> Any:
    marks = [pytest.mark.slow] if _is_slow(model, kind) else []
    return pytest.param(model, kind, id=f"{model}-{kind}", marks=marks)


def _cases(kinds: Iterable[str]) -> list[Any]:
    return [_case(model, kind) for model in MODELS for kind in kinds]


def _is_slow(model: str, kind: str) -> bool:
    if kind in RANKS:
        return (model, kind) != ("tiny-llama", "onnx-2-ranks")
    return kind == "torch" and model not in IN_MAKE_TEST


def _rank_cases() -> list[Any]:
    """Of gpt_oss each rank has a share of the experts; of the last, copies of kv heads."""
    models = [model for model in [*MODELS, "mixtral"] if model not in WITHOUT_RANKS]
    pairs = [(model, "onnx-2-ranks") for model in models]
    pairs += [("llama", "torch-2-ranks"), ("llama", "onnx-4-ranks")]
    return [_case(model, kind) for model, kind in pairs]


def test_a_rung_without_a_backend_is_refused(compiled: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"rung: expected one of .* got 'onx'"):
        _made(compiled, "llama", "onx")


def prompts(vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, vocab_size, n).tolist() for n in LENGTHS]


def _made(compiled: Callable[..., Path], model: str, rung: str) -> Path:
    if rung in RANKS:
        backend, ranks = RANKS[rung]
        return compiled(model, backend, tp=ranks)
    if rung not in BACKENDS:
        raise ValueError(f"rung: expected one of {[*BACKENDS, *RANKS]}, got {rung!r}")
    return compiled(model, BACKENDS[rung])


class Eager:
    """transformers on each prompt alone, with its own eager attention."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.vocab_size = int(self.model.config.vocab_size)
        self._continuations: list[tuple[list[int], list[float]]] = []

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()

    @torch.no_grad()
    def continuations(self) -> list[tuple[list[int], list[float]]]:
        """Per prompt: greedy tokens, and the gap between the two best logits at each."""
        if not self._continuations:
            self._continuations = [self._continue(p) for p in prompts(self.vocab_size)]
        return self._continuations

    def _continue(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        gaps = [float(top[0, 0] - top[0, 1]) for top in (x.topk(2).values for x in output.logits)]
        return output.sequences[0, len(prompt) :].tolist(), gaps


@pytest.fixture(scope="module")
def eager(model_folder: Callable[[str], Path]) -> Callable[[str], Eager]:
    return functools.cache(lambda name: Eager(model_folder(name)))


def ragged_step(session: Any, params: Any, rows: list[list[int]]) -> np.ndarray[Any, Any]:
    """Logits of every token of `rows`, run as one ragged batch through a fresh paged cache."""
    manager = PagedKVCacheManager(params, session, 64, max_batch_size=len(rows))
    contexts = [TextContext(f"r{i}", row) for i, row in enumerate(rows)]
    with manager.reserve([contexts]):
        kv = manager.runtime_inputs([contexts])
        tokens = np.concatenate([c.active_tokens for c in contexts])
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        inputs = ModelInputs(tokens, offsets, np.arange(len(tokens), dtype=np.int32))
        return session.run(inputs, kv)


class ExportedSession:
    """The exported program, run eagerly by torch with the registered ops."""

    def __init__(self, folder: Path, params: Any) -> None:
        model = huggingface.load(folder, "float32")
        plan = plan_cache(
            model.layers,
            dtype="float32",
            quantization=None,
            page_size=params.page_size,
            devices=params.devices,
        )
        assert plan.params == params
        model.place(plan)
        signature = GraphSignature.of(params.get_symbolic_inputs()[0], model.vocab_size)
        self._module = export(model, signature, return_buffers=False).module()
        self.identity = b""

    def allocate(self, symbol: Any, sizes: Any) -> Any:
        from kvgraph.contract.inputs import Buffer

        shape = symbol.extents(sizes)
        return Buffer(symbol.dtype, shape, symbol.device, np.full(shape, np.nan, np.float32))

    @torch.no_grad()
    def run(self, inputs: ModelInputs, kv: Any) -> np.ndarray[Any, Any]:
        own = (inputs.tokens, inputs.input_row_offsets, inputs.logits_indices)
        arrays = [*own, *(np.asarray(buffer) for buffer in kv.flatten())]
        return self._module(*map(torch.from_numpy, arrays))[0].numpy()


@pytest.mark.parametrize(
    ("model", "rung"),
    [*_cases(BACKENDS), *_rank_cases()],
)
def test_logits_equal_cacheless_eager(
    model: str,
    rung: str,
    eager: Callable[[str], Eager],
    compiled: Callable[..., Path],
    model_folder: Callable[[str], Path],
) -> None:
    rows = prompts(eager(model).vocab_size)
    artifact = kvgraph.load(_made(compiled, model, rung))
    params = artifact.params()
    if rung == "exported":
        session: Any = ExportedSession(model_folder(model), params)
    else:
        session = artifact.session("reference" if rung == "reference" else None)
    got = ragged_step(session, params, rows)
    expected = np.concatenate([eager(model).logits(row) for row in rows])
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "rung"),
    [*_cases([rung for rung, backend in BACKENDS.items() if rung == backend]), *_rank_cases()],
)
def test_greedy_tokens_equal_transformers_generate(
    model: str, rung: str, eager: Callable[[str], Eager], compiled: Callable[..., Path]
) -> None:
    """8 prompts, admitted at different steps into one running batch, in chunks of 96 tokens."""
    engine = kvgraph.Engine(_made(compiled, model, rung), num_pages=160, max_batch_tokens=96)
    sampling = kvgraph.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for prompt in prompts(eager(model).vocab_size):
        tokens[engine.submit(prompt, sampling)] = []
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    while engine.busy:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    compared = 0
    for (expected, gaps), got in zip(eager(model).continuations(), tokens.values(), strict=True):
        tie = next((i for i, gap in enumerate(gaps) if gap < TOLERANCE), NEW_TOKENS)
        assert len(got) == NEW_TOKENS
        assert got[:tie] == expected[:tie]
        compared += tie
    assert compared >= 0.9 * NEW_TOKENS * len(LENGTHS), "too many near-ties to prove anything"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_near_to_float32_as_eager_is(
    dtype: str, eager: Callable[[str], Eager], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rounding differs from eager's, so both are measured against eager in float32."""
    from transformers import AutoModelForCausalLM

    rows = prompts(eager("tiny-llama").vocab_size)
    exact = np.concatenate([eager("tiny-llama").logits(row) for row in rows])
    half = AutoModelForCausalLM.from_pretrained(
        model_folder("tiny-llama"), dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        theirs = np.concatenate(
            [half(torch.tensor([row]), use_cache=False).logits[0].float().numpy() for row in rows]
        )
    kvgraph.compile(
        model_folder("tiny-llama"), tmp_path / "out", backend="torch", dtype=dtype, page_size=16
    )
    artifact = kvgraph.load(tmp_path / "out")
    ours = ragged_step(artifact.session(), artifact.params(), rows)
    assert np.abs(ours - exact).mean() <= 1.1 * np.abs(theirs - exact).mean()
