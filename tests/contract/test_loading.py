"""Errors for packages and libraries that cannot be loaded."""

from __future__ import annotations

import errno
import os
import re

import pytest

from kvgraph.contract.loading import next_step, unimportable


@pytest.mark.parametrize(
    ("why", "step"),
    [
        ("failed to map segment from shared object", r"`ulimit -v`.* noexec"),
        (os.strerror(errno.ENOMEM), "`ulimit -v`"),
        ("std::bad_alloc", "`ulimit -v`"),
        (os.strerror(errno.EMFILE), "`ulimit -n`"),
        (os.strerror(errno.ENFILE), r"fs\.file-max"),
        (os.strerror(errno.EFBIG), "`ulimit -f`"),
        (os.strerror(errno.EACCES), "chmod"),
        ("invalid ELF header", "install it again"),
    ],
)
def test_the_next_step_is_that_of_the_cause(why: str, step: str) -> None:
    text = next_step(f"a.so: {why}", "install it again")
    assert re.search(step, text)
    assert ("install" in text) == ("install" in step)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("no", name="torch"),
            "torch: needed here, not installed; pip install x",
        ),
        (
            ModuleNotFoundError("no", name="sympy"),
            r"torch: needed here, installed, and .*'no'.*; pip install --upgrade x",
        ),
        (
            ImportError("libc10.so: failed to map segment from shared object"),
            r"torch: needed here, installed, and .*; raise the limit of memory .*",
        ),
    ],
)
def test_a_package_that_cannot_be_imported(error: Exception, message: str) -> None:
    assert re.fullmatch(message, str(unimportable("torch", "needed here", error, "pip install x")))
