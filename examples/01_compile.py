"""Compile a checkpoint ahead of time. It allocates no KV memory; any pool size binds later."""

import sys
from pathlib import Path

import kvgraph

MODEL = Path(__file__).parent / "tiny-llama"


def main(out: Path) -> None:
    manifest = kvgraph.compile(MODEL, out, page_size=32, force=True)
    print(f"{manifest.model.architecture} for {manifest.target}: {sorted(manifest.files)}")
    for binding in manifest.inputs:
        print(f"  {binding.name:18} {binding.dtype:8} {binding.dims}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/tiny-llama.kvg"))
