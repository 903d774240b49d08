"""Checkpoints in fewer bits: logits are those of the numbers that each format's own package reads.

The reference is transformers in float32 over these numbers. Its products round their inputs as the
kernels do (docs/support.md, "Weights"). Then logits differ by about 4e-7 of their spread; without
that by 0.05, or by 0.2 in int8. A router sees the same numbers too, so it chooses the same experts:
without that it may choose others, which changes logits by up to 3 times their spread. So every
token of every row is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvgraph
from kvgraph.build import run_artifact
from tests.compiler import test_gguf_architectures
from tests.compiler.conftest import EXPERTS
from tests.support import gguf_files, quantized
from tests.support.models import make_model, randomize_vectors
from tests.support.rounded_products import (
    GROUPS,
    INTO_INT8,
    PLAIN,
    ROWS,
    Reference,
    Roundings,
    apart,
)

RANDOM = np.random.default_rng(1)
PROMPTS = [RANDOM.integers(3, 160, 1 + i % 4).astype(np.int32) for i in range(16)]
CHUNK = 3
"""Rows above it take a second step, whose keys come from the cache."""

MOST, TYPICAL = 1e-3, 1e-5
"""Differences over the spread of a token's logits: of any token, and of half of them."""


def require_equal_logits(out: Path, meant: Path, kept: Callable[[str], Roundings | None]) -> None:
    found = run_artifact(out, PROMPTS, CHUNK)
    reference = Reference(meant, kept)
    errors = np.concatenate(
        [
            apart(logits, reference.nearest(prompt.tolist(), logits, MOST))
            for prompt, logits in zip(PROMPTS, found, strict=True)
        ]
    )
    assert errors.max() < MOST
    assert np.median(errors) < TYPICAL


def require_tokens_apart(out: Path) -> None:
    """Tokens do not depend on the batch."""
    sampling = kvgraph.SamplingParams(max_new_tokens=8, ignore_eos=True)
    prompts = [[5 + (7 * i * j) % 60 for j in range(3 + 11 * i)] for i in range(5)]
    with kvgraph.Engine(out, num_pages=64) as engine:
        together = [done.token_ids for done in engine.generate(prompts, sampling)]
        alone = [engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert together == alone


def by_name(
    linear: Roundings, experts: Roundings, head: Roundings
) -> Callable[[str], Roundings | None]:
    """Routers are in float32."""

    def kept(name: str) -> Roundings | None:
        if ".experts." in name:
            return None if name.endswith("bias") else experts
        if name == "lm_head.weight":
            return head
        return linear if name.endswith("proj.weight") else None

    return kept


@pytest.fixture(scope="module")
def random_plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As `plain`, with random norms and biases. With norms of ones, many numbers of the first layer
    lie exactly in the middle of two of int8."""
    made: dict[str, Path] = {}

    def of(architecture: str) -> Path:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("plain") / architecture
            made[architecture] = make_model(architecture, folder, **EXPERTS)
            randomize_vectors(folder)
        return made[architecture]

    return of


CASES = [
    ("llama", "gptq", GROUPS),
    ("llama", "awq", GROUPS),
    ("llama", "w4a16", GROUPS),
    ("llama", "w8a16", GROUPS),
    ("llama", "fp8", GROUPS),
    ("llama", "fp8-channel", GROUPS),
    ("llama", "mxfp4-packed", GROUPS),
    ("llama", "nvfp4", GROUPS),
    ("llama", "w8a8", ROWS),
    ("llama", "gptq-act-order", INTO_INT8),
    ("qwen3_moe", "awq", GROUPS),
    ("qwen3_moe", "nvfp4", GROUPS),
    ("qwen3_moe", "w8a8", ROWS),
    ("gpt_oss", "mxfp4", GROUPS),
]


@pytest.mark.parametrize(("architecture", "form", "kept"), CASES)
def test_logits_are_those_of_the_numbers_and_tokens_do_not_depend_on_the_batch(
    architecture: str,
    form: str,
    kept: Roundings,
    random_plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = quantized.make(form, random_plain(architecture), tmp_path / "in", tmp_path / "meant")
    kvgraph.compile(folder, tmp_path / "a", page_size=16, check=False)
    linear = PLAIN if form == "mxfp4" else kept  # of experts alone
    require_equal_logits(tmp_path / "a", tmp_path / "meant", by_name(linear, kept, PLAIN))
    require_tokens_apart(tmp_path / "a")


GGUF = [
    ("llama yarn", "Q4_0", "", GROUPS, GROUPS),
    ("llama yarn", "Q8_0", "", GROUPS, GROUPS),
    ("llama yarn", "Q4_1", "", GROUPS, GROUPS),
    ("qwen3 linear", "Q5_0", "", INTO_INT8, INTO_INT8),
    ("qwen3 linear", "F16", "", PLAIN, PLAIN),
    ("mixtral", "Q4_0", "Q8_0", GROUPS, GROUPS),
    ("mixtral", "Q8_0", "Q4_1", GROUPS, GROUPS),
    ("gpt-oss", "Q8_0", "MXFP4", GROUPS, GROUPS),
]


@pytest.mark.parametrize(("name", "kind", "experts", "linear", "of_experts"), GGUF)
def test_logits_of_gguf_are_those_of_the_numbers_that_the_package_reads(
    name: str, kind: str, experts: str, linear: Roundings, of_experts: Roundings, tmp_path: Path
) -> None:
    """The head is stored like linear layers. Minima of Q4_1 are in eighths of the scale."""
    model, path = test_gguf_architectures.make(name, tmp_path, kind, experts=experts)
    gguf_files.meant(model, tmp_path / "meant", kind, experts)
    kvgraph.compile(path, tmp_path / "a", page_size=16, check=False)
    kept = by_name(linear, of_experts, linear)
    require_equal_logits(tmp_path / "a", tmp_path / "meant", kept)


@pytest.mark.parametrize("down", ["Q8_0", "BF16"])
def test_each_layer_of_experts_has_its_own_form(down: str, tmp_path: Path) -> None:
    """Weights of one node in int8 and in bfloat16 too."""
    kinds = {"ffn_down_exps": down}
    model, path = test_gguf_architectures.make("mixtral", tmp_path, "Q4_0", kinds=kinds)
    gguf_files.meant(model, tmp_path / "meant", "Q4_0", down=down)
    kvgraph.compile(path, tmp_path / "a", page_size=16, check=False)
    of_down = GROUPS if down == "Q8_0" else PLAIN
    kept = by_name(GROUPS, GROUPS, GROUPS)
    require_equal_logits(
        tmp_path / "a", tmp_path / "meant", lambda name: of_down if ".w2." in name else kept(name)
    )
    require_tokens_apart(tmp_path / "a")
