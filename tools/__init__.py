"""What `make` runs on the sources: `python -m tools.NAME`."""
