"""What runs, for the page at /: rows, pages and rates."""

from __future__ import annotations

from collections import Counter

from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.engine import Engine
from kvgraph.serve.service import Served


async def state_of(served: Served) -> dict[str, object]:
    """Asked of the engine's thread, between two steps."""
    load = served.meter.load
    found = await served.engine_async.call(_state)
    rates = {"prefill_rate": load.prefill_rate, "step_seconds": load.step_seconds}
    return {**found, **rates, "num_queued": served.admission.num_queued}


def _state(engine: Engine) -> dict[str, object]:
    stats = engine.stats()
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
    return {
        "num_pages": stats.num_pages,
        "num_free_pages": stats.num_free_pages,
        "num_shared_pages": sum([count > 1 for count in held.values()]),
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "rows": rows,
    }
