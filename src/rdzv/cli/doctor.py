"""`rdzv doctor`: checks the connection from this machine to an endpoint."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import typer

from ..config.settings import Settings
from ..operate.doctor import PROBLEM, Doctor
from . import options
from .exit_codes import ExitCode
from .session import settings_for


@options.with_settings
def doctor(
    endpoint: options.Endpoint, given: options.Given, run_id: options.AnyRunId = "doctor", json: options.Json = False
) -> None:
    """Check each step from here to an endpoint: names, routes, ports, the server, trust, rights, clock, torch.

    Changes nothing. Each line is ok, a warning or a problem, with the remedy. Exit code 1: there is a problem.
    """
    settings = settings_for(endpoint, run_id, given)
    sys.exit(asyncio.run(_examine(settings, json)))


async def _examine(settings: Settings, as_json: bool) -> int:
    code = ExitCode.OK
    async for finding in Doctor(settings).examine():
        if finding.level == PROBLEM:
            code = ExitCode.FAILED
        number = f" [{finding.code}]" if finding.code else ""
        remedy = f"\n{'':21}-> {finding.remedy}" if finding.remedy else ""
        text = f"{finding.level:8} {finding.topic:10}  {finding.text}{number}{remedy}"
        typer.echo(msgspec.json.encode(finding).decode() if as_json else text)
    return code
