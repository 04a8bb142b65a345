"""The typed keyword arguments are those of the table of settings."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import get_type_hints

import pytest

from rdzv.config import options, setting_types
from rdzv.config.endpoint import Endpoint
from rdzv.config.secret import Secret
from rdzv.config.settings import _HINTS, TABLE, Settings
from rdzv.errors import SettingsError

FILE = Path(options.__file__)
PARAMETERS = {"endpoint", "run_id", "min_nodes", "max_nodes"}
"""Settings that are parameters of their own, without a default."""
BY_READER = {
    setting_types._read_path: "str | PathLike[str]",
    setting_types._read_folder: "str | PathLike[str]",
    setting_types._read_ports: "tuple[int, int] | int | str",
    setting_types._read_mapping: "Mapping[str, str]",
    setting_types._read_secret: "str | Secret | None",
    setting_types._read_limit: "str",
}
BY_TYPE = {float: "float", int: "int", str: "str", bool: "bool", bool | None: "bool | None"}


def annotation(name):
    """The Python type of a setting, by the function that reads it, its words, or its own type."""
    setting = TABLE[name]
    if setting.read in BY_READER:
        return BY_READER[setting.read]
    if setting.words and "unit=" not in setting.allowed:
        return f"Literal[{', '.join(chr(34) + word + chr(34) for word in setting.words)}]"
    return "str | int" if takes_numbers(name) else BY_TYPE[_HINTS[name].__origin__]


def takes_numbers(name):
    """Whether a text may be given as a number."""
    if _HINTS[name].__origin__ is not str:
        return False
    try:
        return TABLE[name].read(7) == "7"
    except (ValueError, TypeError):
        return False


def field(name):
    text = f"{TABLE[name].meaning}."
    text = text if text.startswith("etcd") else text[0].upper() + text[1:]
    body = f'''    """{text}"""'''
    if len(body) > 120:
        words = textwrap.fill(text, 116, initial_indent="    ", subsequent_indent="    ")
        body = f'''    """{words.lstrip()}"""'''
    return f"    {name}: {annotation(name)}\n{body}\n"


def test_the_file_has_every_setting_as_the_table_has_it(request):
    text = FILE.read_text()
    start = text.index("\n\n", text.index("class Options")) + 2
    wanted = "".join(field(name) for name in TABLE if name not in PARAMETERS)
    if request.config.getoption("--rewrite"):
        FILE.write_text(text[:start] + wanted)
    else:
        assert text[start:] == wanted, "run `pytest tests/config/test_options.py --rewrite` and look at the difference"


def test_names_and_types_can_be_read_when_the_program_runs():
    ast.parse(FILE.read_text(), feature_version=(3, 10))
    hints = get_type_hints(options.Options)
    assert set(hints) == set(TABLE) - PARAMETERS
    assert hints["last_call"] is float
    assert hints["token"] == str | Secret | None


@pytest.mark.parametrize("name", sorted(set(TABLE) - PARAMETERS))
def test_what_the_type_allows_the_reader_takes(name):
    examples = {
        "float": 1.0, "int": 1, "str": "a", "str | int": 7, "bool": True, "bool | None": None, "Mapping[str, str]": {"a": "b"},
        "str | PathLike[str]": Path("a"), "str | Secret | None": Secret("word"), "tuple[int, int] | int | str": (29500, 29600),
        'Literal["close", "wait"]': "wait",
    }  # fmt: skip
    special = {"grow": "unit=4", "quarantine": "3/1h", "local_addr": "node1", "http": "127.0.0.1:29480"}
    value = special.get(name, examples[annotation(name)])
    TABLE[name].read(value)
    with pytest.raises((ValueError, TypeError, SettingsError)):
        TABLE[name].read(object())


def test_the_parameters_of_their_own_are_those_without_a_default():
    endpoint = Endpoint.parse("memory://")
    made = Settings.make(endpoint, run_id="job", min_nodes=1, max_nodes=1)
    assert {name for name in TABLE if name not in get_type_hints(options.Options)} == PARAMETERS
    assert made.run_id == "job"
