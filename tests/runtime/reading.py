"""Generates with an artifact, and writes as JSON what each round gave, and how many bytes it read.

python -m tests.runtime.reading ARTIFACT
"""

from __future__ import annotations

import json
import random
import resource
import sys
from dataclasses import replace
from typing import Any

import kvgraph

BLOCK = 512
"""Bytes of what getrusage(2) counts."""

GREEDY = kvgraph.SamplingParams(max_new_tokens=24, ignore_eos=True)
MIXED = replace(GREEDY, temperature=1.5, seed=3)
"""Tokens that differ, and so do their experts."""


def main() -> None:
    engine = kvgraph.Engine(sys.argv[1])
    draw = random.Random(0)
    prompt = [draw.randrange(2, 2048) for _ in range(300)]
    shorts = [prompt[8 * row :][:8] for row in range(6)]
    rounds = [([prompt], GREEDY), (shorts, MIXED), *[([[5, 6, 7]], GREEDY)] * 4]
    found: list[dict[str, Any]] = []
    for prompts, sampling in rounds:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        done = engine.generate(prompts, sampling)
        read = (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * BLOCK
        found.append({"tokens": [each.token_ids for each in done], "read": read})
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
