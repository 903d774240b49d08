"""Keep pages after an engine ends: in a folder, and in a file with a precomputed prompt."""

import sys
import tempfile
from pathlib import Path

import kvgraph
from kvgraph.runtime.prefix import write_prefix

SYSTEM = "Answer in one sentence, and only about the language and its library. " * 40


def ask(engine: kvgraph.Engine, question: str) -> None:
    done = engine.generate([SYSTEM + question], kvgraph.SamplingParams(max_new_tokens=8))[0]
    assert isinstance(engine.kv, kvgraph.PagedKVCacheManager)  # the kind that has tiers
    metrics = engine.kv.get_metrics_aggregated()
    print(f"computed {metrics.input_tokens} tokens, took {metrics.cache_tokens} from the cache")
    print(f"{question}{done.text}\n")


def main(artifact: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        for question in ("What is a module?", "What is a class?"):  # two engines, one folder
            with kvgraph.Engine(artifact, disk=Path(name) / "pages") as engine:
                ask(engine, question)

        prefix = Path(name) / "system.kvp"  # travels with the artifact
        write_prefix(kvgraph.Engine(artifact), SYSTEM, prefix)
        with kvgraph.Engine(artifact, prefixes=[prefix]) as engine:
            ask(engine, "What is a decorator?")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/tiny-llama.kvg"))
