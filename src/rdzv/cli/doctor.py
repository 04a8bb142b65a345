"""`rdzv doctor`: what could keep this machine from taking part."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import typer

from ..config.settings import Settings
from ..operate.doctor import PROBLEM, Doctor, Finding
from . import options
from .exit_codes import ExitCode
from .session import settings_for


@options.with_settings
def doctor(
    endpoint: options.Endpoint,
    given: options.Given,
    run_id: options.AnyRunId = "doctor",
    json: options.Json = False,
) -> None:
    """Try the way from here to an endpoint, link by link: names, routes, ports, who answers, trust, rights, clock, torch.

    Changes nothing. Each line is ok, a warning or a problem, with the remedy. Exit code 1: there is a problem.
    """
    settings = settings_for(endpoint, run_id, given)
    sys.exit(asyncio.run(_examine(settings, json)))


async def _examine(settings: Settings, as_json: bool) -> int:
    ill = False
    async for finding in Doctor(settings).examine():
        ill = ill or finding.level == PROBLEM
        typer.echo(msgspec.json.encode(finding).decode() if as_json else _text(finding))
    return ExitCode.FAILED if ill else ExitCode.OK


def _text(finding: Finding) -> str:
    code = f" [{finding.code}]" if finding.code else ""
    remedy = f"\n{'':21}-> {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:8} {finding.topic:10}  {finding.text}{code}{remedy}"
