"""Run torch.compile over a paged cache: one graph serves every batch size, and equals eager."""

from importlib import import_module

import numpy as np
import torch

import kvgraph

own = import_module("04_own_module")  # the decoder of that example

PARAMS = kvgraph.KVCacheParams("float32", own.KV_HEADS, own.HEAD_DIM, own.LAYERS, page_size=16)
SIGNATURE = kvgraph.GraphSignature.of(PARAMS.get_symbolic_inputs()[0], own.VOCAB)


def inputs(manager, batch) -> list[torch.Tensor]:
    """One step's values, in the order of the symbols. Symbolic dims are marked as dynamic."""
    offsets = np.cumsum([0, *(request.active_length for request in batch)])
    tokens = np.concatenate([r.tokens[r.processed_length :] for r in batch])
    given = [np.asarray(x, np.int32) for x in (tokens, offsets, offsets[1:] - 1)]
    cache = manager.runtime_inputs([batch])
    values = [torch.from_numpy(np.asarray(value)) for value in (*given, *cache)]
    for symbol, value in zip(SIGNATURE.inputs, values, strict=True):
        for axis, dim in enumerate(symbol.shape):
            if isinstance(dim, str) and value.shape[axis] > 1:
                torch._dynamo.mark_dynamic(value, axis)
    return values


def main() -> None:
    decoder = own.Decoder()
    compiled = torch.compile(decoder, fullgraph=True)
    torch._dynamo.config.error_on_recompile = True
    manager = kvgraph.PagedKVCacheManager(PARAMS, None, total_num_pages=64, max_batch_size=8)
    batch: list[kvgraph.TextContext] = []
    for lengths in ((20, 3, 40), (5,), (), (33, 7, 18, 1), ()):  # requests that join, step by step
        for length in lengths:
            batch.append(kvgraph.TextContext(f"r{len(batch)}", list(range(length))))
            manager.claim(batch[-1].request_id)
        for request in batch:
            manager.alloc(request)
        values = inputs(manager, batch)
        with torch.inference_mode():
            logits, expected = compiled(*values), decoder(*values)
        torch.testing.assert_close(logits, expected)
        print(f"{len(batch)} rows, {len(values[0])} tokens: equal to eager")
        for request, token in zip(batch, logits.argmax(-1).tolist(), strict=True):
            request.update(token)
        manager.step([batch])


if __name__ == "__main__":
    main()
