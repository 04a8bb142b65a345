"""Bytes of earlier releases are read with the same meaning and written alike: members of two versions meet in one run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from rdzv.core import wire
from rdzv.errors import RdzvError
from support import golden

RELEASES = sorted(path for path in Path(__file__).parents[1].joinpath("golden").iterdir() if path.is_dir())
CASES = sorted({(release, one.format) for release in RELEASES for one in golden.read(release / "bytes.jsonl")})
RULE = """
Members of an earlier release and of today's code meet in one run (docs/compatibility.md). Each refuses what it does not know.
A new field of a record may be written only where a setting is in use that the earlier release does not have. A new frame, or
a new field of a frame, may be sent only to a peer that has said in its greeting that it knows it. Golden files never change."""

SINCE = {"record, strike", "record, quarantine"}
"""Kinds that came after the newest release. Only runs with a setting that it refuses have them."""


def cases_of(release: Path, name: str) -> list[golden.Golden]:
    return [one for one in golden.read(release / "bytes.jsonl") if one.format == name]


@pytest.mark.parametrize(("release", "name"), CASES, ids=lambda one: getattr(one, "name", one))
def test_what_a_release_wrote_is_read_with_the_same_meaning(release: Path, name: str):
    for one in cases_of(release, name):
        try:
            read = golden.FORMATS[name].decode(bytes.fromhex(one.bytes))
        except (RdzvError, ValueError) as error:
            pytest.fail(f"{name}: today's code refuses what {release.name} writes: {error}\n{one}{RULE}")
        wrong = list(golden.differences(one.meaning, golden.meaning_of(read)))
        assert not wrong, f"{name}: bytes of {release.name} mean something else today: {wrong}\n{one}{RULE}"


@pytest.mark.parametrize(("release", "name"), CASES, ids=lambda one: getattr(one, "name", one))
def test_what_a_release_knows_is_written_so_that_it_can_read_it(release: Path, name: str):
    made = golden.FORMATS[name]
    for one in cases_of(release, name):
        then = bytes.fromhex(one.bytes)
        now = made.encode(made.decode(then))
        assert now == then, f"{name}: for the same meaning today's code writes {now!r}, {release.name} wrote {then!r}{RULE}"


@pytest.mark.parametrize("release", RELEASES, ids=lambda one: one.name)
def test_keys_first_bytes_and_names_are_spelt_as_a_release_spelt_them(release: Path):
    now = golden.names()
    for group, names in json.loads((release / "names.json").read_text()).items():
        wrong = list(golden.differences(names, now[group], group))
        assert not wrong, f"{release.name}: {wrong}{RULE}"


FRACTIONS = [(kind, one) for kind in wire.SIZES_MAX for one in msgspec.structs.fields(kind) if isinstance(one.default, float)]


@pytest.mark.parametrize(("kind", "field"), FRACTIONS, ids=lambda one: getattr(one, "__name__", None) or one.name)
def test_a_later_field_with_its_default_is_not_written_though_it_is_another_object(kind: type, field):
    then = cases_of(RELEASES[0], f"record, {kind.__struct_config__.tag}")[0].meaning
    (plain, _) = golden.samples_of(kind)
    equal = float(str(field.default))
    assert equal is not field.default
    written = json.loads(wire.encode(msgspec.structs.replace(plain, **{field.name: equal})))
    assert field.name in then or field.name not in written, f"{kind.__name__}.{field.name} is written (see core/wire.py){RULE}"


def test_there_are_golden_bytes_of_every_format_and_kind():
    newest = golden.read(RELEASES[-1] / "bytes.jsonl")
    assert {one.format for one in newest} == set(golden.FORMATS) - SINCE
    assert len(newest) > 60


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"a": 1}, {"a": 1, "new": 0}, []),
        ([1, ["x"]], [1, ["x"], 7], []),
        ({"a": 1}, {"b": 1}, ["it.a is gone"]),
        ([1, 2], [1], ["it was [1, 2] and is [1]"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["it.a[1] was 2 and is 3"]),
        ({"a": 1}, {"a": True}, ["it.a was 1 and is True"]),
    ],
)
def test_differences_of_meaning_are_found(then: object, now: object, expected: list[str]):
    assert list(golden.differences(then, now)) == expected
