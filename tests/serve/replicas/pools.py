"""What each replica of a server says that its pool holds: `... pools COUNT`, in the cluster of
RAY_ADDRESS; name -> the last 64 bits of each digest, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import ray
from ray import serve

from kvgraph.serve.replicas.report import packed, unpacked


async def pools(count: int) -> dict[str, list[int]]:
    handle = serve.get_deployment_handle("decode", "kvgraph")
    found: dict[str, list[int]] = {}
    async with asyncio.timeout(60):
        while len(found) < count:
            name, digests = await handle.committed.remote()
            found[name] = sorted(unpacked(packed(digests)))
    return found


if __name__ == "__main__":
    ray.init(log_to_driver=False, logging_level="ERROR")
    print(json.dumps(asyncio.run(pools(int(sys.argv[1])))))
