"""Errors for packages and libraries that cannot be loaded, with the next step for their cause."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import numpy as np

from kvgraph.errors import MissingDependencyError
from kvgraph.signal_handlers import reraise_if_signalled

NOT_MAPPED = "failed to map segment"
"""Part of the error of the system's loader for a library in a folder that is mounted noexec, and
for one that a limit of memory leaves no room for."""

MEMORY = "raise the limit of memory (`ulimit -v`, or a container's)"
STEPS = (
    (NOT_MAPPED, f"{MEMORY}, or use a folder that is not mounted noexec"),
    (os.strerror(errno.ENOMEM), MEMORY),
    ("bad_alloc", MEMORY),
    ("atexit after shutdown", "import it before the main thread ends"),
    (os.strerror(errno.ENFILE), "raise the system's limit of open files (fs.file-max)"),
    (os.strerror(errno.EMFILE), "raise the limit of open files (`ulimit -n`)"),
    (os.strerror(errno.EFBIG), "raise the limit of a file's size (`ulimit -f`)"),
    (os.strerror(errno.EACCES), "let this user read it (see `ls -l` and `chmod`)"),
)
"""Parts of messages, of the system or of Python, and the next step for each. The first part that is
found counts: ENFILE's message begins like EMFILE's."""


def next_step(why: str, otherwise: str) -> str:
    """Return the next step for the system's message `why`; `otherwise` if it is none of STEPS."""
    return next((step for part, step in STEPS if part in why), otherwise)


def with_step(sentence: str, why: str) -> str:
    """Return `sentence`, and the next step for the system's message `why` if STEPS has it."""
    step = next_step(why, "")
    return f"{sentence}; {step}" if step else sentence


def require_package(module: str, need: str, install: str, package: str = "") -> ModuleType:
    """Import and return `module`, in a scope of `importing`."""
    with importing(module, need, install, package):
        return import_module(module)


@contextmanager
def importing(module: str, need: str, install: str, package: str = "") -> Iterator[None]:
    """Raise the error of `unimportable` if the import of `module` in this scope fails for another
    reason than memory."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reraise_if_signalled(error)
        raise unimportable(module, need, error, install, package) from error


def unimportable(
    module: str, need: str, error: Exception, install: str, package: str = ""
) -> MissingDependencyError:
    """Return the error for a `module` whose import raised `error`.

    `need`: such as "needed to compile"; `install`: a `pip install` command; `package`: its name
    for pip if the module has another one.
    """
    package = package or module.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return MissingDependencyError(f"{package}: {need}, not installed; {install}")
    upgrade = install.replace("pip install", "pip install --upgrade")
    return MissingDependencyError(
        f"{package}: {need}, installed, and it cannot be imported ({error!r} with NumPy "
        f"{np.__version__}); "
        f"{next_step(str(error), upgrade)}"
    )
