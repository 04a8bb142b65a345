"""The public API: which names are public, that signatures mention no others, that all are documented, and what they look like.

tests/typing/public_api.txt has every public name with its signature. `pytest --rewrite` writes it anew: read the
difference, and if a program could notice it, write it into the changelog (docs/compatibility.md says what may change when).
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pydoc
import re
import sys
import typing
from pathlib import Path

import pytest

import rdzv
from rdzv import aio, errors
from rdzv.config.options import Options

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "typing" / "public_api.txt"
MODULES = ("rdzv", "rdzv.aio", "rdzv.worker", "rdzv.errors", "rdzv.torch", "rdzv.jax", "rdzv.engines.etcd.server")
"""The public modules. What is in no `__all__` of theirs is private. `rdzv.torchrun.rendezvous` has a page of its own."""
NEEDS = {"rdzv.torch": "torch.distributed", "rdzv.jax": "jax", "rdzv.engines.etcd.server": "grpc"}


def load(module):
    if module in NEEDS:
        pytest.importorskip(NEEDS[module], reason=f"{NEEDS[module]} is not installed")
    return importlib.import_module(module)


MADE = {"World", "Store", "AsyncWorld", "AsyncStore", "LiveWorld", "Rounds", "Driver", "Part"}
"""Objects that rdzv makes, or a protocol: their constructors are not public."""
INNER = {
    "AsyncRendezvous": {"answer_notice", "check", "insist", "keep_out"}, "AsyncWorld": {"end", "moved_to"},
    "AsyncStore": {"end", "moved_to", "finish", "try_now", "over"}, "Rounds": {"check", "end", "progressed"},
    "Secret": {"derive", "prove", "can_be_guessed"}, "Endpoint": {"options"},
}  # fmt: skip
"""Methods for the other parts of rdzv, by class. They are not on the site."""


def members(kind):
    """The public methods and properties of a class, with those that it inherits from ours."""
    for name in dir(kind):
        value = inspect.getattr_static(kind, name, None)  # Before Python 3.11, None for __abstractmethods__.
        ours = any(name in vars(base) and base.__module__.startswith("rdzv.") for base in kind.__mro__)
        called = inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod))
        if not name.startswith("_") and ours and called and name not in INNER.get(kind.__name__, ()):
            yield name, value


def function_of(value):
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def signature(value):
    return str(inspect.signature(value)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")


def annotation(kind, field):
    return next(base.__annotations__[field] for base in kind.__mro__ if field in vars(base).get("__annotations__", {}))


def class_lines(full, kind):
    bases = [base.__name__ for base in kind.__bases__ if not base.__module__.startswith("rdzv") and base is not object]
    fields = getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))
    made = signature(kind) if not fields and not issubclass(kind, BaseException) and kind.__name__ not in MADE else ""
    if not fields:
        told = vars(kind).get("__annotations__", {}).items()
        fields = [name for name, hint in told if not name.startswith("_") and not str(hint).startswith("ClassVar")]
    yield f"{full}{made.removesuffix(' -> None')}" + (f" is a {' and a '.join(bases)}" if bases else "")
    yield from (f"{full}.{field}: {annotation(kind, field)}" for field in fields)
    for name, value in members(kind):
        told = inspect.signature(function_of(value)).return_annotation
        yield f"{full}.{name}: {told}" if isinstance(value, property) else f"{full}.{name}{signature(function_of(value))}"


def lines(module):
    for name in sorted(load(module).__all__):
        value = getattr(load(module), name)
        full = f"{module}.{name}"
        if inspect.isfunction(value):
            yield f"{full}{signature(value)}"
        elif not isinstance(value, type):
            yield full
        elif typing.is_typeddict(value):
            yield from (f"{full}[{key}]" for key in value.__annotations__)
        elif issubclass(value, enum.Enum):
            yield from (f"{full}.{one.name} = {one.value!r}" for one in value)
        else:
            yield from class_lines(full, value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons show some signatures in other words")
@pytest.mark.parametrize("module", MODULES)
def test_the_public_names_and_their_signatures_are_those_that_are_listed(module, request):
    text = LISTED.read_text() if LISTED.exists() else ""
    shown = "".join(f"{line}\n" for line in lines(module))
    pattern = rf"(?m)^# {re.escape(module)}\n(?:[^#\n].*\n)*"
    found = re.search(pattern, text)
    wanted = f"# {module}\n{shown}"
    if request.config.getoption("--rewrite"):
        LISTED.write_text(text.replace(found[0], wanted) if found else f"{text}\n{wanted}".lstrip("\n"))
    else:
        assert found, f"run pytest {Path(__file__).name} --rewrite"
        assert found[0] == wanted


def test_every_module_that_is_public_is_on_the_page_and_no_other():
    page = (ROOT / "docs" / "api.md").read_text()
    assert re.findall(r"^\| `(rdzv[a-z_.]*)` \|", page, re.MULTILINE) == [*MODULES, "rdzv.torchrun.rendezvous"]


def test_every_error_is_public():
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RdzvError)]
    assert sorted(kinds) == errors.__all__


def mentioned(hint):
    """All of our classes that a type is made of."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return {hint} if hint.__module__.startswith("rdzv") else set()
    return {kind for part in typing.get_args(hint) if not isinstance(part, str) for kind in mentioned(part)} | (
        {kind for part in hint for kind in mentioned(part)} if isinstance(hint, list) else set()
    )


PUBLIC = {getattr(module, name) for module in (rdzv, aio, errors) for name in module.__all__}
OURS = {kind for kind in PUBLIC if isinstance(kind, type) and kind.__module__.startswith("rdzv")}
CLASSES = sorted(
    {kind for kind in OURS if not issubclass(kind, BaseException)},
    key=lambda kind: f"{kind.__module__}.{kind.__qualname__}",
)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_all_that_a_signature_mentions_is_public(kind):
    hints = dict(typing.get_type_hints(kind)) if kind is Options or hasattr(kind, "__struct_fields__") else {}
    if kind not in (rdzv.World, rdzv.Store, aio.World, aio.Store):  # `join` and `store` make these.
        hints |= typing.get_type_hints(kind.__init__) if inspect.isfunction(kind.__init__) else {}
    for _, value in members(kind):
        hints |= {f"{id(value)} {name}": hint for name, hint in typing.get_type_hints(function_of(value)).items()}
    known = PUBLIC | {rdzv.Driver}
    names = {f"{one.__module__}.{one.__qualname__}" for hint in hints.values() for one in mentioned(hint) - known}
    assert names - ALLOWED == set()


ALLOWED = {"rdzv.engines.port.Session"}
"""What a driver connects to. Only an engine of one's own needs it, and it may change (docs/api.md)."""


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_every_public_name_is_documented(kind):
    assert (kind.__doc__ or "").strip()
    if issubclass(kind, str):
        return
    assert [name for name, value in members(kind) if not (getattr(value, "__doc__", None) or "").strip()] == []


@pytest.mark.parametrize("kind", [rdzv.Rendezvous, rdzv.World, rdzv.Store, aio.Rendezvous, aio.World, aio.Store])
def test_help_shows_every_member_with_its_sentence(kind):
    shown = re.sub(r".\x08", "", pydoc.render_doc(kind))
    words = " ".join(shown.replace("|", " ").split())
    for name, value in members(kind):
        first = " ".join(inspect.getdoc(value).partition("\n\n")[0].split())
        assert name in words
        assert first in words
