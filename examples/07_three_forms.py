"""One set of symbols, three forms: a torch.export program, an ONNX graph, a TensorRT profile."""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import kvgraph
import kvgraph.onnx

own = import_module("04_own_module")  # the decoder of that example


def main(path: Path) -> None:
    params = kvgraph.KVCacheParams("float32", own.KV_HEADS, own.HEAD_DIM, own.LAYERS, page_size=16)
    signature = kvgraph.GraphSignature.of(params.get_symbolic_inputs()[0], own.VOCAB)
    names = [symbol.name for symbol in signature.inputs]

    args, shapes = signature.to_torch_export()
    shapes = (*shapes[:3], shapes[3:])  # the module's *cache is one argument
    program = torch.export.export(own.Decoder(), args, dynamic_shapes=shapes)

    lowered, table = kvgraph.onnx.lower_caches(program), kvgraph.onnx.translation_table()
    named = {"input_names": names, "output_names": ["logits", "kv_blocks_out"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(lowered, f=path, custom_translation_table=table, **named, verbose=False)

    least = dict.fromkeys((dim for symbol in signature.inputs for dim in symbol.symbolic_dims), 1)
    most = dict.fromkeys(least, 64) | {"total_seq_len": 512, "num_page_slots": 257}
    for name, (low, _, high) in signature.to_tensorrt_profile(least, least, most).items():
        print(f"{name:18} {low} to {high}")

    manager = kvgraph.PagedKVCacheManager(params, None, total_num_pages=8, max_batch_size=2)
    request = kvgraph.TextContext("a", list(range(20)))
    manager.claim("a")
    manager.alloc(request)
    given = [np.array(x, np.int32) for x in (request.tokens, [0, 20], [18, 19])]
    step = [*given, *map(np.asarray, manager.runtime_inputs([[request]]))]

    with torch.inference_mode():
        in_torch = program.module()(*map(torch.from_numpy, step)).numpy()
    settings = onnxruntime.SessionOptions()
    settings.register_custom_ops_library(kvgraph.onnx.library_path())
    session = onnxruntime.InferenceSession(path, settings)
    binding = session.io_binding()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in step]
    for name, value in zip(names, values, strict=True):
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("logits")
    binding.bind_ortvalue_output("kv_blocks_out", values[names.index("kv_blocks")])
    session.run_with_iobinding(binding)
    in_onnx = binding.get_outputs()[0].numpy()
    print(f"torch and ONNX differ by {np.abs(in_torch - in_onnx).max():.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/three-forms.onnx"))
