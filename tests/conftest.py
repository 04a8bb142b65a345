"""Options and fixtures for all tests."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator

import pytest

from support.network_hosts import Network, why_not

LONG_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what happened into tests/transcripts/*.txt instead of comparing it; then read the diff",
    )


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


@pytest.fixture(autouse=True)
def notices_are_logged() -> Iterator[None]:
    """A command that prints notices silences their logger in its process, which tests share."""
    yield
    logging.getLogger("rdzv.notices").disabled = False


@pytest.fixture(scope="session")
def network_allowed() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"NOT TESTED on networks of several hosts: {reason}")


@pytest.fixture
def network(network_allowed: None) -> Iterator[Network]:
    with Network() as made:
        yield made
