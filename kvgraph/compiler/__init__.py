"""From a checkpoint to an artifact; never imports the runtime."""
