"""TensorRT backends: an artifact's graph or program, its kernels, and the engine built of them."""
