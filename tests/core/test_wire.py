"""Records as bytes: what goes out comes back, and nothing else comes in."""

from __future__ import annotations

import json
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core import model, wire
from rdzv.core.model import Ban, Call, Cause, DrainRequest, Era, Head, MemberRecord, Phase, RoundId
from rdzv.core.text import NAME_MAX, REASON_MAX
from rdzv.errors import Incompatible, LimitExceeded
from rdzv.printable import clean

ERA = Era(2, "f00d")
CAUSE = Cause(kind=model.CauseKind.LOST, text="node7 was lost", members=("node7",))
TOLD = model.RoundReport(
    run="r1", era=ERA, number=3, table="t1", phase=Phase.BROKEN, size=2, rank=1, digest="d", boot="h:1", top=4, grown=2,
    incarnation=1, next_era=Era(3, "beef"), cause=CAUSE,
)  # fmt: skip

# One of each kind with nothing left at its default, so that a field that is lost on the way is missed.
FULL: list[model.Record] = [
    Head(
        run="r1", era=ERA, number=3, phase=Phase.SEALED, table="t1", size=2, digest="d", boot="h:1", seen=17,
        fence=859093042311725058,
        call=Call.SETTLE, call_seq=5, waited=2.5, seq=6, cause=CAUSE, adopted=True, next_era=Era(3, "beef"), top=4, grown=2,
        came=("node9",), flaps={"node7": 2}, flapped=("node7",), incarnation=1,
        notice=model.DrainNotice(reason="node7 draining", limit_s=30.0, drains=1),
        reach=model.Reach(step=118, rounds=2, cause="node7 lost"),
    ),
    MemberRecord(
        name="node7/0", host="node7", addr="10.0.0.7", pid=99, order="7", topology="s1.node7", version="0.1.0",
        info={"gpus": "8"}, boot="10.0.0.7:29500", same_port=True, left=RoundId(ERA, 2), role="trainer", workers=8,
        drain="SIGTERM", grace=25.0, saved=5, reached=118, unhealthy="the check failed with exit code 1",
        stalled=model.StallReport(table="t1", step=9, ranks=(3,), for_s=600.0, furthest=10),
        done=True, holds=TOLD, heard=TOLD, fence=7, fence_place="boot/net/*:29400",
    ),
    model.RankEntry(
        rank=1, created=12, name="node7/0", host="node7", order="7", topology="b1/r2/node7", sealed_as="m1", since=2, done=True,
        gave_up="exit code 1", went="drained", workers=model.WorkerRanks(8, 16, 0, 8),
    ),
    model.RunSettings(
        min_nodes=2, max_nodes=4, last_call=1.5, regroup=2.5, lease=3.5, settle=4.5, grow="now", unit=2, segment=2,
        grow_every=5.5, replace_wait=6.5, drain_settle=7.5, stall=9.5,
        drain_notice=90.0, futile_rounds=5, on_failure="wait", closed_for=8.5,
        quarantine=model.QuarantineLimit(3, 3600.0, 60.0),
    ),
    DrainRequest(reason="maintenance"),
    Ban(reason="bad memory"),
    model.Strike(count=3, reason="node7 was lost"),
    model.Quarantine(reason="broke 3 rounds within 1 h"),
    model.ProgressReport(
        table="t1", low=9, high=10, rate=0.5, slowest=(3,), workers=8, since_s=1.5, stamp="2026-01-01T00:00:00Z"
    ),
    model.JournalEntry(
        seq=6, run="r1", era=ERA, number=3, phase=Phase.BROKEN, size=2, call=Call.REGROUP, by="node1", reason="node7 was lost",
        cause=CAUSE, came=("node8",), gone=("node7",), lasted_s=1.5, stamp="2026-01-01T00:00:00Z",
    ),
]  # fmt: skip
KINDS = [type(record) for record in FULL]
each = pytest.mark.parametrize("record", FULL, ids=[kind.__name__ for kind in KINDS])


def test_every_kind_that_has_a_limit_is_tried_here_and_every_tagged_kind_has_one():
    tagged = {
        kind
        for kind in vars(model).values()
        if isinstance(kind, type) and issubclass(kind, model.Record) and kind.__struct_config__.tag is not None
    }
    assert set(KINDS) == set(wire.SIZES_MAX) == tagged


@each
def test_no_field_of_the_examples_is_left_at_its_default(record):
    assert [field.name for field in msgspec.structs.fields(record) if getattr(record, field.name) == field.default] == []


# ---- round trips


@each
def test_a_record_comes_back_as_it_went_out(record):
    assert wire.decode(type(record), wire.encode(record)) == record


@each
def test_an_operator_can_read_a_record_and_sees_its_version_and_kind_first(record):
    shown = json.loads(wire.encode(record))
    assert list(shown)[:2] == ["v", "type"]
    assert (shown["v"], shown["type"]) == (1, type(record).__struct_config__.tag)


def test_what_is_at_its_default_is_not_sent():
    assert wire.encode(model.RunSettings(min_nodes=1, max_nodes=2)) == b'{"v":1,"type":"settings","min_nodes":1,"max_nodes":2}'


any_text = st.text(st.characters(codec="utf-8"), max_size=20)
texts = any_text.map(clean)
counts = st.integers(0, 2**40)
eras = st.builds(Era, counts, texts)
STRATEGIES = {
    str: texts,
    int: counts,
    bool: st.booleans(),
    float: st.floats(0, 1e9),
    model.QuarantineLimit | None: st.none() | st.just(model.QuarantineLimit(3, 3600.0)),
    float | None: st.none() | st.floats(0, 1e6),
    Era: eras,
    RoundId: st.builds(RoundId, eras, counts),
    Phase: st.sampled_from(Phase),
    Call: st.sampled_from(Call),
    model.CauseKind: st.sampled_from(model.CauseKind),
    tuple[str, ...]: st.lists(texts, max_size=8).map(tuple),
    tuple[int, ...]: st.lists(counts, max_size=8).map(tuple),
    dict[str, str]: st.dictionaries(texts, texts, max_size=4),
    dict[str, int]: st.dictionaries(texts, counts, max_size=4),
}


def any_of(kind):
    """Any record of that kind, by the types of its fields."""
    return st.builds(kind, **{field.name: STRATEGIES[field.type] for field in msgspec.structs.fields(kind)})


STRATEGIES[Cause | None] = st.none() | any_of(Cause)
STRATEGIES[model.RoundReport | None] = st.none() | any_of(model.RoundReport)
STRATEGIES[model.WorkerRanks | None] = st.none() | st.builds(model.WorkerRanks, counts, counts, counts, counts)
STRATEGIES[model.StallReport | None] = st.none() | any_of(model.StallReport)
STRATEGIES[model.DrainNotice | None] = st.none() | any_of(model.DrainNotice)
STRATEGIES[model.Reach | None] = st.none() | any_of(model.Reach)
records = st.one_of(*map(any_of, KINDS))


@given(records)
def test_any_record_comes_back_as_it_went_out(record):
    assert wire.decode(type(record), wire.encode(record)) == record


# ---- what others wrote


def every_text(value, name=""):
    """All texts in a record as builtins, each with the name of its field."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield name, key
            yield from every_text(one, key)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from every_text(one, name)


@given(st.data(), st.sampled_from(KINDS), st.text(st.characters(codec="utf-8"), max_size=200))
def test_no_reader_gets_a_text_that_is_not_printable_or_too_long(data, kind, evil):
    record = data.draw(any_of(kind))
    fields = [field.name for field in msgspec.structs.fields(kind) if field.type is str]
    if not fields:
        return
    data_of = msgspec.structs.replace(record, **dict.fromkeys(fields, evil))
    try:
        encoded = wire.encode(data_of)
    except LimitExceeded:
        return
    read = wire.decode(kind, encoded)
    for name, text in every_text(msgspec.to_builtins(read)):
        if name != "info":
            assert text.isprintable(), (name, text)
            assert len(text) <= (NAME_MAX if name in ("name", "host", "by") else REASON_MAX)
    assert wire.decode(kind, wire.encode(read)) == read, "clean stays as it is"


def test_a_name_is_cut_even_if_every_letter_of_it_is_plain():
    """The head holds names of several members. One that is too long to write would stop every leader."""
    for evil in ("x" * 900, "x" * 9_000, "\x1b" * 900):
        read = wire.decode(MemberRecord, wire.encode(MemberRecord(name=evil, host="h")))
        assert len(msgspec.json.encode(read.name)) <= NAME_MAX + 2
        read = wire.decode(MemberRecord, wire.encode(MemberRecord(name="n", host=evil)))
        assert len(msgspec.json.encode(read.host)) <= NAME_MAX + 2


def test_info_is_what_its_program_wrote():
    info = {"key\n": "two\nlines\x00", "long": "x" * 5000}
    read = wire.decode(MemberRecord, wire.encode(MemberRecord(name="n\n", host="h", info=info)))
    assert (read.name, read.info) == ("n ", info)


def test_names_in_lists_and_keys_are_cleaned_too():
    cause = Cause(kind=model.CauseKind.LOST, text="a\x1b[31m", members=("b\n", "c" * 500))
    read = wire.decode(Head, wire.encode(Head(run="r", era=ERA, next_era=ERA, cause=cause, flaps={"d\x00": 1})))
    assert read.cause.text == "a [31m"
    assert read.cause.members[0] == "b "
    assert len(read.cause.members[1]) <= NAME_MAX
    assert read.flaps == {"d ": 1}


def test_the_error_about_a_record_does_not_repeat_its_escapes():
    said = refusal(DrainRequest, b'{"v":1,"type":"ask","reason":"x","\\u001b[31m\\n":1}')
    assert said.isprintable()
    assert "[31m" in said


def test_a_request_that_cannot_be_read_counts_without_its_reason():
    assert wire.reason_of(Ban, wire.encode(Ban(reason="bad\nmemory"))) == "bad memory"
    assert wire.reason_of(DrainRequest, b"garbage") == "no readable reason"


@pytest.mark.parametrize(
    ("kind", "data", "field"),
    [
        (MemberRecord, b'{"v":1,"type":"member","name":"n","host":"h","boot":"h:1"}', "workers"),
        (MemberRecord, b'{"v":1,"type":"member","name":"n","host":"h","boot":"h:1"}', "fence"),
        (Head, b'{"v":1,"type":"head","run":"r","era":[1,"e"],"number":3,"next_era":[1,"e"]}', "fence"),
        (model.RankEntry, b'{"v":1,"type":"entry","rank":0,"created":3,"name":"n","host":"h","sealed_as":"m"}', "workers"),
    ],
)
def test_a_record_of_an_earlier_release_is_read_with_defaults(kind, data, field):
    assert not getattr(wire.decode(kind, data), field)


# ---- what is not ours


def refusal(kind, data):
    with pytest.raises(Incompatible) as caught:
        wire.decode(kind, data)
    return caught.value.sentence


def never_anything_but_incompatible(kind, data):
    try:
        record = wire.decode(kind, data)
    except Incompatible as error:
        assert str(error)  # noqa: PT017 - refusing is as good as reading here
    else:
        assert type(record) is kind


@given(st.sampled_from(KINDS), st.sampled_from([b"", b'{"v":1,']), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(kind, start, data):
    never_anything_but_incompatible(kind, start + data)


@given(st.data())
def test_a_damaged_record_is_read_or_refused(data):
    record = data.draw(st.sampled_from(FULL))
    good = bytearray(wire.encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    never_anything_but_incompatible(type(record), bytes(good[: data.draw(st.integers(0, len(good)))]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_a_record_with_a_field_of_another_type_is_read_or_refused(data):
    record = data.draw(st.sampled_from(FULL))
    shown = json.loads(wire.encode(record))
    del shown["v"]
    shown[data.draw(st.sampled_from(sorted(shown)))] = data.draw(json_values)
    never_anything_but_incompatible(type(record), b'{"v":1,' + json.dumps(shown).encode()[1:])


@pytest.mark.parametrize("start", [b'{"x":', b'{"v":1,"type":"member","x":', b'{"v":1,"type":"member","info":'])
def test_a_bottomless_record_is_refused(start):
    assert refusal(MemberRecord, start + b"[" * 16_000).startswith("record 'member' cannot be read: ")


@each
def test_pickled_data_is_refused_and_not_run(record):
    assert refusal(type(record), pickle.dumps(record)).endswith(" cannot be read: it is not a record of rdzv")


@pytest.mark.parametrize("data", [b"", b"{}"[:1], b"\xff\xfe", b"null", b"[1]", b'{"v":"1"}'])
def test_what_is_no_record_at_all_is_said_to_be_none(data):
    assert refusal(DrainRequest, data) == "record 'ask' cannot be read: it is not a record of rdzv"


@pytest.mark.parametrize("version", [0, 2, 10])
def test_both_versions_are_named(version):
    data = b'{"v":%d,"type":"ask","reason":"x","new":[1,{}]}' % version
    assert refusal(DrainRequest, data) == (
        f"record 'ask' cannot be read: it is of version {version}, this is version 1: all members of a run need one version"
    )


def test_a_record_without_a_version_is_of_version_0():
    assert "it is of version 0, this is version 1" in refusal(DrainRequest, b'{"type":"ask","reason":"x"}')


@pytest.mark.parametrize("data", [b'{"type":"ask","v":1,"reason":"x"}', b'{ "v":1,"type":"ask","reason":"x"}'])
def test_a_record_that_another_program_wrote_anew_is_refused(data):
    assert refusal(DrainRequest, data) == (
        "record 'ask' cannot be read: it is a record of another kind, "
        "or its fields are not in the order this version writes them"
    )


@each
def test_a_record_of_one_kind_is_not_taken_for_another(record):
    for kind in KINDS:
        if kind is not type(record):
            refusal(kind, wire.encode(record))


@each
def test_a_field_that_is_not_known_could_mean_anything(record):
    data = wire.encode(record)[:-1] + b',"surprise":1}'
    assert refusal(type(record), data).endswith("cannot be read: Object contains unknown field `surprise`")


@pytest.mark.parametrize("value", [b'"2"', b"2.5", b"2.0", b"true", b"null", b"[2]"])
def test_a_number_is_a_number(value):
    data = b'{"v":1,"type":"settings","min_nodes":' + value + b',"max_nodes":4}'
    assert "Expected `int`, got " in refusal(model.RunSettings, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (DrainRequest, b'{"v":1,"type":"ask","reason":1}'),
        (DrainRequest, b'{"v":1,"type":"ask"}'),
        (model.RankEntry, b'{"v":1,"type":"entry","rank":1,"name":"a","host":"h","sealed_as":"x","done":1}'),
        (MemberRecord, b'{"v":1,"type":"member","name":"a","host":"h","info":{"a":1}}'),
        (Head, b'{"v":1,"type":"head","run":"r","era":[1,"x"],"next_era":[1,"x"],"phase":"melted"}'),
        (Head, b'{"v":1,"type":"head","run":"r","era":{"level":1},"next_era":[1,"x"]}'),
        (DrainRequest, b'{"v":1,"type":"ask","reason":"\xff"}'),
        (DrainRequest, b'{"v":1,"type":"ask","reason":"x"}{}'),
        (DrainRequest, b'{"v":1,"v":1,"type":"ask","reason":"x"}'),
        (DrainRequest, b'{"v":1,}'),
    ],
)
def test_types_are_strict(kind, data):
    refusal(kind, data)


# ---- limits


@pytest.mark.parametrize("kind", [DrainRequest, Ban])
def test_the_limit_is_exact_on_both_sides(kind):
    room = wire.SIZES_MAX[kind] - len(wire.encode(kind(reason="")))
    largest = kind(reason="x" * room)
    assert wire.decode(kind, wire.encode(largest)) == largest

    tag = kind.__struct_config__.tag
    with pytest.raises(LimitExceeded) as caught:
        wire.encode(kind(reason="x" * (room + 1)))
    assert caught.value.sentence == f"record '{tag}' has 1025 bytes, at most 1024 are allowed"

    too_large = wire.encode(largest)[:-2] + b'x"}'
    assert refusal(kind, too_large) == f"record '{tag}' cannot be read: it has 1025 bytes, at most 1024 are allowed"


@each
def test_the_limit_of_each_kind_holds_on_both_sides(record):
    size_max = wire.SIZES_MAX[type(record)]
    fields = {"head": "run", "member": "name", "entry": "name", "settings": "grow", "journal": "run", "progress": "table"}
    text_field = fields.get(type(record).__struct_config__.tag, "reason")
    with pytest.raises(LimitExceeded):
        wire.encode(msgspec.structs.replace(record, **{text_field: "x" * size_max}))
    assert f"at most {size_max} are allowed" in refusal(type(record), b" " * (size_max + 1))
