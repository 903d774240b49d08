"""Plain data that the compiling and the deploying side agree on; no framework is imported."""
