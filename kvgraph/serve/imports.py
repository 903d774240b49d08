"""The modules that requests import, imported before the first one.

A server whose clients hold all its file descriptors can open no module: such requests would fail.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

NEEDED = (
    "concurrent.futures.thread",  # threads of the event loop
    "numpy.random",  # samples
    "kvgraph.runtime.templates",  # chats
)

OPTIONAL = (
    "llguidance.gbnf_to_lark",
    "llguidance.numpy",
)
"""Modules of extras. A request that needs one that cannot be imported is refused by name."""


def import_for_requests() -> None:
    """Import what requests import. Takes a tenth of a second: call it in a thread."""
    for name in NEEDED:
        import_module(name)
    for name in OPTIONAL:
        with suppress(Exception):
            import_module(name)
