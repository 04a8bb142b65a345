"""Options for all tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what happened into tests/transcripts/*.txt instead of comparing it; then read the diff",
    )
