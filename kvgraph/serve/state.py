"""State of the engine for the page at /: rows, pages and rates."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.stats import EngineStats
from kvgraph.serve.load import Load


async def state_of(engine: AsyncEngine, load: Load) -> dict[str, object]:
    """The state, read in the engine's thread between two steps."""
    held = await engine.call(_held)
    return {**counts_of(held.pop("stats"), load), **held}


def counts_of(stats: EngineStats, load: Load) -> dict[str, object]:
    return {
        "num_pages": stats.num_pages,
        "num_free_pages": stats.num_free_pages,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefill_rate": load.prefill_rate,
    }


def _held(engine: Engine) -> dict[str, Any]:
    """Statistics, shared pages, and the tokens and pages of each row."""
    held: Counter[int] = Counter()
    rows = []
    for request in engine.scheduler.running:
        pages = []
        if isinstance(engine.kv, PagedKVCacheManager):
            pages = engine.kv.get_req_blocks(request.request_id)
        held.update(pages)
        rows.append(
            {
                "prompt_tokens": request.prompt_length,
                "tokens": request.context.current_length,
                "pages": len(pages),
            }
        )
    shared = sum([count > 1 for count in held.values()])
    return {"stats": engine.stats(), "num_shared_pages": shared, "rows": rows}
