"""`kvgraph compile --from-artifact`: build an artifact's engine on the machine that will run it."""

from kvgraph.rebuild.artifact import rebuild

__all__ = ["rebuild"]
