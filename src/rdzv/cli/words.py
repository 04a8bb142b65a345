"""Options and arguments of commands, and a reader for command lines that need no explanation.

typer reads any command line, explains wrong ones and shows help. It brings pydantic with it, and the two take longer to
import than an agent otherwise takes to start. So commands describe their options with the classes here. `read` takes what it
fully understands. For everything else, such as a misspelt option or --help, `main.py` builds the same command with typer.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

_NUMBERS: dict[type, re.Pattern[str]] = {int: re.compile(r"[0-9]{1,15}"), float: re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")}
END = "--"
"""The word after which the program of `rdzv run` stands."""
PROGRAM = "program"
"""The parameter that gets the program."""


class Word:
    """A parameter on the command line, with details as `typer.Option` has them. `autocompletion` is a name in completion.py."""

    def __init__(self, *names: str, **details: Any) -> None:
        self.names = names
        self.details = details


class Option(Word):
    """A parameter with a name that begins with dashes."""


class Argument(Word):
    """A parameter that is known by its place."""


def word_of(parameter: inspect.Parameter) -> tuple[Any, Word] | None:
    """Return the type and the description of a parameter; None: it is not on the command line."""
    if get_origin(parameter.annotation) is None:
        return None
    kind, *about = get_args(parameter.annotation)
    return next(((kind, one) for one in about if isinstance(one, Word)), None)


class NotUnderstood(Exception):
    """The command line is wrong, or unusual: typer knows."""


def read(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a command's parameters; None: let typer read the line."""
    try:
        return _Reader(command).read(list(words))
    except NotUnderstood:
        return None


class _Reader:
    """One command line."""

    def __init__(self, command: Callable[..., None]) -> None:
        self._parameters = inspect.signature(command).parameters
        self._options: dict[str, tuple[str, Any, bool]] = {}
        """By the text on the line: the parameter, its type, and what a flag means."""
        self._places: list[str] = []
        for name, parameter in self._parameters.items():
            found = word_of(parameter)
            if found is not None and isinstance(found[1], Argument):
                self._places.append(name)
            elif found is not None:
                for text in found[1].names:
                    for number, one in enumerate(text.split("/")):  # --on/--off
                        self._options[one] = name, found[0], number == 0

    def read(self, words: list[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if PROGRAM in self._parameters:
            end = words.index(END) if END in words else len(words)
            words, values[PROGRAM] = words[:end], words[end + 1 :]
        places = list(self._places)
        while words:
            word = words.pop(0)
            if word.startswith("-"):
                self._read_option(word, words, values)
            elif places:
                values[places.pop(0)] = word
            else:
                raise NotUnderstood
        return {name: values[name] if name in values else self._otherwise(name) for name in self._parameters}

    def _read_option(self, word: str, words: list[str], values: dict[str, Any]) -> None:
        text, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if text not in self._options:
            raise NotUnderstood
        name, kind, meaning = self._options[text]
        kinds = get_args(kind) or (kind,)
        if bool in kinds:
            if equals:
                raise NotUnderstood
            values[name] = meaning
            return
        if not equals:
            value = words.pop(0) if words else "-"
            if value.startswith("-"):
                raise NotUnderstood
        if any(get_origin(one) is list for one in kinds):
            values.setdefault(name, []).append(value)
        else:
            values[name] = _convert(kind, value, self._word(name))

    def _word(self, name: str) -> Word:
        found = word_of(self._parameters[name])
        assert found is not None
        return found[1]

    def _otherwise(self, name: str) -> Any:
        """The value of a parameter that is not on the line: from its variable, or its default."""
        variable = self._word(name).details.get("envvar")
        given = os.environ.get(variable, "") if variable else ""
        if given:
            return given
        default = self._parameters[name].default
        if default is inspect.Parameter.empty:
            raise NotUnderstood
        return default


def _convert(kind: Any, text: str, word: Word) -> Any:
    if kind not in _NUMBERS:
        if str not in (get_args(kind) or (kind,)) or "parser" in word.details:
            raise NotUnderstood
        return text
    number = kind(text) if _NUMBERS[kind].fullmatch(text) else None
    if number is None or not word.details.get("min", number) <= number <= word.details.get("max", number):
        raise NotUnderstood
    return number
