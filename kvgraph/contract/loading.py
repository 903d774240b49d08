"""Errors for packages and libraries that cannot be loaded, with the next step for their cause."""

from __future__ import annotations

import errno
import os

import numpy as np

from kvgraph.errors import MissingDependencyError

NOT_MAPPED = "failed to map segment"
"""Part of the error of the system's loader for a library in a folder that is mounted noexec, and
for one that a limit of memory leaves no room for."""

MEMORY = "raise the limit of memory (`ulimit -v`, or a container's)"
STEPS = (
    (NOT_MAPPED, f"{MEMORY}, or use a folder that is not mounted noexec"),
    (os.strerror(errno.ENOMEM), MEMORY),
    ("bad_alloc", MEMORY),
    (os.strerror(errno.ENFILE), "raise the system's limit of open files (fs.file-max)"),
    (os.strerror(errno.EMFILE), "raise the limit of open files (`ulimit -n`)"),
    (os.strerror(errno.EFBIG), "raise the limit of a file's size (`ulimit -f`)"),
    (os.strerror(errno.EACCES), "let this user read it (see `ls -l` and `chmod`)"),
)
"""Parts of the system's messages, and the next step for each. The first part that is found counts:
ENFILE's message begins like EMFILE's."""


def next_step(why: str, otherwise: str) -> str:
    """Return the next step for the system's message `why`; `otherwise` if it is none of STEPS."""
    return next((step for part, step in STEPS if part in why), otherwise)


def with_step(sentence: str, why: str) -> str:
    """Return `sentence`, and the next step for the system's message `why` if STEPS has it."""
    step = next_step(why, "")
    return f"{sentence}; {step}" if step else sentence


def unimportable(name: str, need: str, error: Exception, install: str) -> MissingDependencyError:
    """Return the error for a package `name` whose import raised `error`.

    `need`: such as "needed to compile"; `install`: a `pip install` command.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return MissingDependencyError(f"{name}: {need}, not installed; {install}")
    upgrade = install.replace("pip install", "pip install --upgrade")
    return MissingDependencyError(
        f"{name}: {need}, installed, and it cannot be imported ({error!r} with NumPy "
        f"{np.__version__}); "
        f"{next_step(str(error), upgrade)}"
    )
