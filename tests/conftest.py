"""Options and fixtures for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.network_hosts import Network, why_not
from support.timing import mark_measuring

LONG_S = 60.0
GIVEN = {name: value for name, value in os.environ.items() if name.startswith("RDZV_")}
"""What the developer gave to all tests, such as RDZV_SEEDS."""
LONGEST = ("tests/torchrun/test_worker_ranks.py", "tests/engines/etcd/test_random_faults.py", "tests/engines/quorum/")
"""Of the soak, these begin first, so that at the end no job is left alone with one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what happened into tests/transcripts/*.txt instead of comparing it; then read the diff",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_measuring(items)
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Return the place of a test in the order. Paths on the command line give none: pytest drops one that another contains."""
    places = (place for place, path in enumerate(LONGEST) if item.nodeid.startswith(path))
    return next(places, len(LONGEST)) if item.get_closest_marker("soak") else len(LONGEST)


def pytest_collection_finish() -> None:
    """Keep torch and thousands of tests out of every later collection, and shared with the processes that are forked."""
    import hypothesis  # noqa: F401  When it is loaded it asks who refers to trio's generator: nobody, once that is frozen.

    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def test_...` on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), LONG_S))
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures that tests have recorded as `explored`."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ()) if one.when == "call"]
    for line in [value for report in reports for name, value in report.user_properties if name == "explored"]:
        terminalreporter.write_line(f"explored {line}")


@pytest.fixture(autouse=True, scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep the journals of agents out of the developer's own folder."""
    folder = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def restored_environ() -> Iterator[None]:
    """An agent within the test's process tells its workers about a run by the environment: not the next test.

    It is restored before a test too: a fixture of a whole module, or a thread that a test left behind, may have set it between.
    """
    _restore_environ()
    yield
    _restore_environ()


def _restore_environ() -> None:
    for name in [name for name in os.environ if name.startswith("RDZV_") and name not in GIVEN]:
        del os.environ[name]
    os.environ.update(GIVEN)


@pytest.fixture(scope="session")
def network_allowed() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"NOT TESTED on networks of several hosts: {reason}")


@pytest.fixture
def network(network_allowed: None) -> Iterator[Network]:
    with Network() as made:
        yield made
