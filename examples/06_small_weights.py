"""Store weights in int8 and int4 without calibration, and measure the perplexity."""

import sys
from pathlib import Path

import kvgraph
from kvgraph.quality import measure

MODEL = Path(__file__).parent / "tiny-llama"


def main(out: Path) -> None:
    for weights in ("int8", "int4"):
        artifact = out.with_name(f"{out.stem}-{weights}.kvg")
        kvgraph.compile(MODEL, artifact, weights=weights, cache_dtype="int8", force=True)
        size = (artifact / "weights.safetensors").stat().st_size
        quality = measure(artifact, MODEL)
        print(
            f"{weights}: {size / 2**20:.1f} MiB, perplexity {quality.perplexity:.2f} "
            f"(float32: {quality.reference_perplexity:.2f}), {quality.agreement:.0%} of the "
            "likeliest tokens the same"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/tiny-llama.kvg"))
