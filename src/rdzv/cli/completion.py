"""Shell completion of run ids, asked from the engine, and of setting names. A failure completes nothing, silently."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import typer

from ..config.settings import TABLE

ANSWER_S = 2.0
"""Longest wait for the engine: a person waits before the prompt."""
RUNS_MAX = 200
_ELSEWHERE = {"endpoint", "run_id", "min_nodes", "max_nodes", "info", "token", "token_file", "tls_ca", "tls_cert", "tls_key"}
"""Settings that have an option of their own, or may not be given on a command line."""


def complete_run_id(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of the runs at the endpoint that is on the line or in the environment."""
    # Only for a person who presses a key: every other command line does without them. `options` names this function.
    from ..operate.runs import list_runs  # noqa: PLC0415
    from .options import trust_of, viewer_settings  # noqa: PLC0415

    endpoint = ctx.params.get("endpoint") or os.environ.get("RDZV_ENDPOINT", "")
    if not endpoint:
        return []
    logging.disable(logging.CRITICAL)
    try:
        settings = viewer_settings(endpoint, trust_of(ctx.params))
        found = asyncio.run(asyncio.wait_for(list_runs(settings, RUNS_MAX), ANSWER_S))
    except Exception:  # noqa: BLE001  The line under the cursor must stay as it is, whatever happens.
        return []
    finally:
        logging.disable(logging.NOTSET)
    return [run.run_id for run in found.runs if run.run_id.startswith(incomplete)]


def complete_conf(incomplete: str) -> list[Any]:
    """Return settings as `name=` with their meaning, or the values of a setting that has few."""
    name, equals, value = incomplete.partition("=")
    name = name.replace("-", "_")
    if equals:
        words = TABLE[name].words if name in TABLE else ()
        return [f"{name}={word}" for word in words if word.startswith(value)]
    known = [(one, setting) for one, setting in TABLE.items() if one not in _ELSEWHERE]
    return [(f"{one}=", setting.meaning) for one, setting in known if one.startswith(name)]
