"""TensorRT: loads an engine, and runs its steps."""
