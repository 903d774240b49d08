"""Plans: every row's tokens get a tile, whatever the host knows; sizes that need no launch."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.errors import KernelError, UnsupportedError
from kvgraph.kernels import launch, shapes, variants
from kvgraph.kernels.shapes import AttentionShape, PoolShape, Rope

CACHE = PoolShape("bfloat16", "bfloat16", 8, 128, 128, 32)
SHAPE = AttentionShape(CACHE, 32, 0.09, rope=Rope(128))


def values(step: launch.Launch) -> dict[str, str | int]:
    names = (p.name for p in step.variant.parameters)
    return dict(zip(names, step.arguments, strict=True))


def tokens_of(step: launch.Launch, new: list[int], block: int, kv_heads: int) -> list[int]:
    """How many programs of `step` own each new token: `row_of_tile` in plain Python."""
    offsets = np.concatenate([[0], np.cumsum(new)])
    given = values(step)
    per_row, batch = int(given["tiles_per_row"]), int(given["batch_size"])
    above, upto = given.get("new_above", -1), given.get("new_upto", 2**31)
    owners = [0] * int(offsets[-1])
    for tile in range(step.grid[0] // kv_heads):
        if per_row:
            row, first = tile // per_row, tile % per_row * block
        else:
            starts = [int(offsets[b]) // block + b for b in range(batch)]
            row = max(b for b in range(batch) if starts[b] <= tile)
            first = (tile - starts[row]) * block
        if int(above) < new[row] <= int(upto):
            for token in range(first, min(first + block, new[row])):
                owners[int(offsets[row]) + token] += 1
    return owners


@settings(max_examples=200)
@given(
    new=st.lists(st.integers(0, 90), min_size=1, max_size=9),
    slack=st.integers(0, 40),
    heads=st.sampled_from([8, 24, 32, 64]),
    arch=st.sampled_from(["sm_80", "sm_90"]),
)
def test_every_new_token_has_one_tile(new: list[int], slack: int, heads: int, arch: str) -> None:
    shape = AttentionShape(CACHE, heads, 0.09)
    sizes = launch.Sizes(len(new), sum(new), max(new) + slack, 900, 8)
    plan = launch.plan_update_and_attend(shape, arch, sizes, layer=3)
    owners = {"store_kv": [0] * sum(new), "paged_attention": [0] * sum(new)}
    for step in plan.launches:
        if step.variant.kernel.name in owners:
            constants = step.variant.constants
            block = constants.get("BLOCK_R") or int(str(constants["BLOCK_M"])) // shape.group
            found = tokens_of(step, new, int(str(block)), 8)
            total = owners[step.variant.kernel.name]
            owners[step.variant.kernel.name] = [a + b for a, b in zip(total, found, strict=True)]
    assert all(count == 1 for counts in owners.values() for count in counts)


def test_roles_follow_the_lengths() -> None:
    def roles(*sizes: int) -> list[str]:
        plan = launch.plan_attention(SHAPE, "sm_90", launch.Sizes(*sizes, 256), 0)
        return [step.variant.role or step.variant.kernel.name for step in plan.launches]

    assert roles(256, 256, 1, 4096) == ["decode"]
    assert roles(1, 1, 1, 4096) == ["decode_split", "merge_parts"]
    assert roles(1, 1, 1, 200) == ["decode"]
    assert roles(1, 512, 512, 512) == ["prefill"]
    assert roles(4, 2048, 512, 512) == ["prefill"]
    assert roles(9, 520, 512, 512) == ["prefill", "decode"]
    assert roles(0, 0, 0, 0) == roles(3, 0, 0, 9) == []


def test_a_split_needs_scratch_for_its_parts_only() -> None:
    plan = launch.plan_attention(SHAPE, "sm_90", launch.Sizes(2, 2, 1, 32768, 256), 0)
    attend, merge = plan.launches
    parts = attend.grid[1]
    assert parts == values(merge)["num_parts"] == shapes.MAX_PARTS
    assert plan.scratch == {
        "partial_out": 2 * 4 * 32 * parts * 128,
        "partial_state": 2 * 4 * 32 * parts * 2,
    }
    busy = launch.plan_attention(SHAPE, "sm_90", launch.Sizes(2, 2, 1, 32768, 256), 0,
                                 multiprocessors=8)  # fmt: skip
    assert busy.launches[0].grid[1] == 2


def test_layers_share_variants() -> None:
    sizes = launch.Sizes(4, 4, 1, 4096, 32)
    plans = [launch.plan_update_and_attend(SHAPE, "sm_90", sizes, layer) for layer in (0, 31)]
    first, last = ([step.variant.name for step in plan.launches] for plan in plans)
    assert first == last
    assert [values(p.launches[0])["layer"] for p in plans] == [0, 31]
    compiled = {v.name for v in variants.attention_variants(SHAPE, "sm_90")}
    assert set(first[1:]) <= compiled


def test_layers_differ_in_their_number_alone() -> None:
    """The native library is asked for one of them; tests/golden has its own for others."""
    plans = launch.plans_of_steps(SHAPE, "sm_90")
    for sizes in (launch.Sizes(1, 1, 1, 4096, 32), launch.Sizes(3, 700, 600, 900, 32)):
        first, last = plans.plan(sizes, 0), plans.plan(sizes, 31)
        assert first is plans.plan(sizes, 0), "it is kept"
        assert last.scratch == first.scratch
        assert last.scratch_dtypes() == first.scratch_dtypes()
        for one, other in zip(first.launches, last.launches, strict=True):
            assert (one.variant, one.grid) == (other.variant, other.grid)
            with_layer = {"layer": 31} if "layer" in values(one) else {}
            assert values(other) == values(one) | with_layer


def test_sizes_that_no_step_has_are_refused_every_time() -> None:
    sizes = launch.Sizes(0, 1, 1, 1, 8)
    for _ in range(2):
        with pytest.raises(KernelError, match="batch_size: expected at least 1, got 0"):
            launch.plan_update_and_attend(SHAPE, "sm_90", sizes, 1)


def test_plans_are_kept_by_their_rows() -> None:
    variant = variants.rms_norm_variant("bfloat16", 4096, 1e-5)
    plan = launch.plans_by_sizes(launch.plan_rms_norm, variant)
    assert plan is launch.plans_by_sizes(launch.plan_rms_norm, variant)
    assert plan(7) is plan(7)
    for rows in (0, 7, 8, *range(2 * launch.KEPT_PLANS)):
        assert plan(rows) == launch.plan_rms_norm(variant, rows)


def test_variant_names_tell_variants_apart() -> None:
    window = AttentionShape(CACHE, 32, 0.09, window=512, rope=Rope(128))
    wide = [v for s in (SHAPE, window) for v in variants.attention_variants(s, "sm_90")]
    names = [v.name for v in wide]
    assert len(set(names)) == len(names)
    assert all(a != b for a, b in pairwise(sorted(names)))
    json.dumps([dict(v.constants) for v in wide])


@pytest.mark.parametrize(
    ("cache", "heads", "said"),
    [
        (PoolShape("bfloat16", "bfloat16", 8, 576, 16, 4), 8, "head_dim: .*16 to 512, got 576"),
        (PoolShape("bfloat16", "bfloat16", 8, 20, 16, 4), 8, "head_dim: .*multiple of 8.* 20"),
        (PoolShape("bfloat16", "bfloat16", 8, 64, 777, 4), 8, r"page_size: .*\[16, 32.* 777"),
        (PoolShape("bfloat16", "bfloat16", 8, 64, 16, 4, 80), 8, "v_head_dim: .*64, got 80"),
        (PoolShape("float64", "bfloat16", 8, 64, 16, 4), 8, "dtype: .*float64"),
        (PoolShape("float16", "int4", 8, 64, 16, 4), 8, "pool dtype: .*int4"),
        (PoolShape("float16", "int8", 8, 64, 16, 4), 8, "granularity: .*int8 pool, got 0"),
        (PoolShape("float16", "float16", 8, 64, 16, 4, 0, 64), 8, "granularity: .*got 64"),
        (PoolShape("float16", "int8", 8, 96, 16, 4, 0, 48), 8, "granularity: .*power.*got 48"),
        (CACHE, 20, "num_heads: .*8 kv heads, got 20"),
        (PoolShape("float16", "float16", 1, 64, 16, 4), 256, "num_heads: .*1 to 128.* 256"),
        (PoolShape("float16", "float16", 1, 512, 16, 4), 17, "1 to 16 .*of 512 elements, got 17"),
    ],
)
def test_refuses_by_name(cache: PoolShape, heads: int, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        AttentionShape(cache, heads, 0.1).check()


def test_heads_that_an_architecture_has_no_room_for() -> None:
    wide = PoolShape("float16", "float16", 2, 264, 16, 4)
    shapes.check_arch(wide, "sm_80")
    with pytest.raises(UnsupportedError, match="head_dim: expected at most 256 on sm_75, got 264"):
        shapes.check_arch(wide, "sm_75")


def test_refuses_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedError, match=r"arch: expected one of .*sm_90.*got 'sm_70'"):
        variants.decode_variant(SHAPE, "sm_70", split=False)
