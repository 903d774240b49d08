"""TensorRT: an engine that is deserialised here, and its step."""
