"""The look of commands and their help: usage lines, flags without a type, paragraphs, and the program of `rdzv run`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

SCHEMES = (
    ("host:port", "the embedded server; also rdzv://host:port"),
    ("etcd://host:port,host:port/prefix", "an etcd cluster; etcds:// with TLS"),
    ("quorum://h1,h2,h3", "an etcd that the job runs by itself"),
    ("c10d://host:port", "a TCPStore of torch"),
    ("file:///path", "a file that all nodes see"),
    ("memory://name", "this process only"),
    ("auto", "the first node of the job, as the platform names it"),
)
"""Every kind of endpoint, with its meaning."""


def paragraphs(text: str | None) -> str | None:
    """Join the lines of each paragraph, so that a terminal of any width wraps them itself."""
    return text and re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text))


def _without_types(params: Iterable[Any]) -> list[Any]:
    """Take the word `<bool>` from flags: they have no value to give."""
    found = list(params)
    for param in found:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return found


class Command(TyperCommand):
    """A command of rdzv."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "help": paragraphs(options.get("help"))})

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage: an argument that a variable can stand for is in brackets."""
        pieces = [self.options_metavar or ""]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = param.metavar or str(param.name).upper()
                pieces.append(f"[{name}]" if param.envvar or not param.required else name)
        return pieces


class ProgramCommand(Command):
    """A command whose own arguments end at `--`. Behind it stands a program, which is left in `ctx.args`.

    Without the `--`, a misspelt option would be taken for the program, and the program for the endpoint.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args[:end])
        if extra and not ctx.resilient_parsing:
            ctx.fail(f"unexpected {' '.join(extra)!r}: the program and its arguments stand behind --, as in -- python train.py")
        ctx.args = args[end + 1 :]
        return list(ctx.args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- PROGRAM [ARGUMENTS]..."]


class Group(TyperGroup):
    """The command `rdzv` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
