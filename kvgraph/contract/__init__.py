"""What the compiling and the deploying side agree on: plain data, no framework imported."""
