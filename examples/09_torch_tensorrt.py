"""Build a torch-tensorrt engine in two places: all but the engine here, the engine on the GPU's
machine. Here it needs no GPU, no TensorRT and no torch-tensorrt; there it needs no Triton."""

import sys
from pathlib import Path

import kvgraph
from kvgraph.errors import KVGraphError
from kvgraph.rebuild import rebuild

MODEL = Path(__file__).parent / "tiny-llama"


def main(out: Path = Path("out")) -> None:
    shipped, here = out / "tiny-llama.torch-trt.kvg", out / "tiny-llama.here.kvg"
    made = kvgraph.compile(
        MODEL, shipped, backend="torch-tensorrt", target="cuda:sm_80,sm_90", force=True
    )
    kernels = [name for name in made.files if name.endswith(".cubin")]
    print(f"{shipped}: {len(kernels)} compiled kernels for {made.target}")
    try:  # the same as: kvgraph compile --from-artifact
        rebuild(shipped, here, force=True)
    except KVGraphError as error:
        print(f"no engine here: {error}")
        return
    engine = kvgraph.Engine(here)
    for piece in engine.stream("The import statement"):
        print(piece, end="", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
