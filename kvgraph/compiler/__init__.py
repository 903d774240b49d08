"""Compile a checkpoint to an artifact. Nothing here imports the runtime."""
