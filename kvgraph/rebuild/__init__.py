"""`kvgraph compile --from-artifact`: an engine from an artifact, on the machine that runs it."""

from kvgraph.rebuild.artifact import rebuild

__all__ = ["rebuild"]
