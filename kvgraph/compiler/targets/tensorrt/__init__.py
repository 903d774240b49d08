"""TensorRT: the ONNX half of an artifact, and the engine that is built of it."""
