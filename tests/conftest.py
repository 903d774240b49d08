"""Fixtures that tests share: models and artifacts, each made once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import kvgraph
from kvgraph.kv.tiers import lookup, workers
from tests.support import artifacts, costs, remembered
from tests.support.artifacts import Compiled
from tests.support.models import make_model

TESTS = Path(__file__).parent
FAST = (
    "bad_input/test_generate",
    "contract/",
    "kernels/test_launch",
    "kernels/test_plan_golden",
    "kv/",
    "plugins/test_abi",
    "plugins/test_includes",
    "plugins/test_isa",
    "plugins/test_launch_record",
    "runtime/test_config",
    "runtime/test_sampling",
    "runtime/test_scheduler",
    "test_floors",
    "test_public_api",
)
"""Files that `--fast` runs: what the contract, the managers and the scheduler do."""

NOT_FAST = (
    "contract/test_backends",
    "contract/test_dtypes",
    "contract/test_symbols",
    "kv/test_kv_model",
    "kv/test_tier_model",
)
"""Files of those folders that need torch, or half a minute."""

# Tests run one process for each core, and their models are tiny.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The wrappers of AOTInductor's packages call kernels and compute nothing.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# What is kept for a user, of artifacts that tests make.
os.environ["XDG_CACHE_HOME"] = str(artifacts.STORE.with_name("cache"))
# An export makes many objects that live on: collecting at every 700 is 10 % of a compile's time.
gc.set_threshold(100_000, 50, 50)
remembered.remember_kernels()
# How long an example takes says more of the machine than of what is tested.
settings.register_profile("kvgraph", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvgraph")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ instead of comparing"
    )
    parser.addoption(
        "--fast", action="store_true", help="only quick tests without torch; importing it fails"
    )
    parser.addoption(
        "--sample", action="store_true", help="of costly tests a sample (tests/support/costs.py)"
    )
    parser.addoption(
        "--write-costs", action="store_true", help="write tests/costs.json, for --sample"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell's `make test &` ignores Ctrl-C, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--fast"):
        sys.modules |= dict.fromkeys(("torch", "transformers"))  # type: ignore[arg-type]
    if config.getoption("--write-costs"):
        config.pluginmanager.register(costs.Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    remembered.remember_operators()
    if item.get_closest_marker("fresh_kernels"):
        with remembered.fresh_kernels():
            return (yield)
    return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--fast") or collection_path.is_dir():
        return None
    name = collection_path.relative_to(TESTS).as_posix()
    return not name.startswith(FAST) or name.startswith(NOT_FAST)


@pytest.hookimpl(trylast=True)  # of what is selected by marks and names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample"):
        kept = costs.in_sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = (item for item in items if item in kept)
    # Costly files begin first, so that no process waits at the end for another one's.
    seconds = costs.of_files()
    items.sort(key=lambda item: -seconds[costs.file_of(item.nodeid)])


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        artifacts.remove_old()


@pytest.fixture(scope="session", autouse=True)
def patient_tiers() -> None:
    """Engines of this process wait for their tiers on a slow machine too, and compute nothing that
    is there. Tests of that patience set their own."""
    lookup.PATIENCE_SECONDS = workers.GRACE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def closed_databases() -> Iterator[None]:
    """Those of stores that a test leaves open, of which Python warns from 3.13 on."""
    made, connect = [], sqlite3.connect

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **options))
        return made[-1]

    sqlite3.connect = connected
    yield
    sqlite3.connect = connect
    for database in made:
        with contextlib.suppress(sqlite3.ProgrammingError):  # of another thread
            database.close()


@pytest.fixture(scope="session")
def model_folder() -> Callable[[str], Path]:
    """Name of an architecture, or "tiny-llama" -> checkpoint folder; never written to."""

    def folder(name: str) -> Path:
        if name == "tiny-llama":
            return artifacts.TINY_LLAMA
        return artifacts.made({"name": name}, lambda out: make_model(name, out))

    return folder


@pytest.fixture(scope="session")
def compiled(model_folder: Callable[[str], Path]) -> Compiled:
    """`compiled(model, backend="onnx", **options)` -> artifact folder; never written to.

    Not checked where it is made: what is made of it is compared with the model by the tests.
    """

    def artifact(
        model: str, backend: str | None = "onnx", page_size: int = 16, **options: Any
    ) -> Path:
        settings = {"backend": backend, "page_size": page_size, "check": False} | options
        return artifacts.made(
            {"name": f"{model}-{backend}", "model": model} | settings,
            lambda out: kvgraph.compile(model_folder(model), out, **settings),
        )

    return artifact
