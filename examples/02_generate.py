"""From an artifact to tokens: stream one prompt, then run several together."""

import sys
from pathlib import Path

import kvgraph


def main(artifact: Path) -> None:
    engine = kvgraph.Engine(artifact)
    for piece in engine.stream("The import statement", kvgraph.SamplingParams(max_new_tokens=32)):
        print(piece, end="", flush=True)
    print("\n")

    sampling = kvgraph.SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=7)
    prompts = ["A function definition", "The with statement", "Dictionaries are"]
    for prompt, done in zip(prompts, engine.generate(prompts, sampling), strict=True):
        print(f"{prompt}{done.text} [{done.finish_reason}]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/tiny-llama.kvg"))
