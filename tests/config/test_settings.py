"""Settings: the forms that are taken, one message for each mistake, and the settings that a run agrees on."""

from __future__ import annotations

import fractions
import pathlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.config.endpoint import Endpoint
from rdzv.config.setting_types import INFOS_MAX
from rdzv.config.settings import DEFAULTS, ORDER_ENV, TABLE, Settings, differences
from rdzv.core import wire
from rdzv.core.model import MemberRecord, RunSettings
from rdzv.core.text import NAME_MAX
from rdzv.engines.embedded.frames import FRAME_MAX
from rdzv.errors import SettingsError

TIMES = [name for name, setting in TABLE.items() if setting.allowed.startswith("a number of seconds")]
MAY_BE_ZERO = [name for name in TIMES if "0 or more" in TABLE[name].allowed]
COUNTS = ["min_nodes", "max_nodes", "unit"]


def make(**options):
    required = {"endpoint": "memory://", "run_id": "job", "min_nodes": 2, "max_nodes": 4}
    return Settings.make(**{**required, **options})


def refusal(**options):
    with pytest.raises(SettingsError) as caught:
        make(**options)
    return caught.value.sentence


# ---- defaults: docs/settings.md has their values, which test_settings_page.py compares


def test_the_table_has_every_setting_and_every_default_is_allowed():
    assert tuple(TABLE) == Settings.__struct_fields__
    assert set(TABLE) - set(DEFAULTS) == {"endpoint", "run_id", "min_nodes", "max_nodes"}
    assert [name for name in TIMES if not TABLE[name].raised] == []
    for name, default in DEFAULTS.items():
        assert TABLE[name].read(default) == default == getattr(make(), name), name
    assert make().agreed() == RunSettings(min_nodes=2, max_nodes=4), "the record has the same defaults"


def test_settings_are_not_changed_and_not_shared():
    mine = {"gpus": "8"}
    settings = make(info=mine)
    mine["gpus"] = "0"
    make().info["gpus"] = "1"
    assert settings.info == {"gpus": "8"}
    assert make().info == {}
    with pytest.raises(AttributeError):
        settings.lease = 5.0  # type: ignore[misc]


# ---- values

TAKEN = [
    *((name, value, 1.5) for name in TIMES for value in (1.5, "1.5", " 1.50 ", "15e-1", "+1.5", fractions.Fraction(3, 2))),
    *((name, value, 0.0) for name in MAY_BE_ZERO for value in (0, "0", 0.0, -0.0)),
    ("min_nodes", " 3 ", 3),
    ("max_nodes", "10000", 10_000),
    ("unit", "2", 2),
    ("incarnation", "7", 7),
    *(("is_host", value, True) for value in ("true", "True", "yes", "1", True)),
    *(("is_host", value, False) for value in ("false", " FALSE ", "no", "0", False)),
    ("bootstrap_port", 0, (0, 0)),
    ("bootstrap_port", "0", (0, 0)),
    ("bootstrap_port", 29500, (29500, 29500)),
    ("bootstrap_port", " 29500 - 29600 ", (29500, 29600)),
    ("bootstrap_port", (1, 65535), (1, 65535)),
    ("local_addr", "", ""),
    ("local_addr", "Node1", "node1"),
    ("local_addr", "10.0.0.1", "10.0.0.1"),
    ("local_addr", "2001:DB8::1", "2001:db8::1"),
    ("local_addr", "[::1]", "::1"),
    ("token_file", pathlib.Path("a") / "b", "a/b"),
    ("tls_ca", "c", "c"),
    ("order", 7, "7"),
    ("slot", 7, "7"),
    ("run_id", "å" * 200, "å" * 200),
    ("grow", "settle", "settle"),
    ("grow", "now", "now"),
    ("grow", "never", "never"),
    ("on_failure", "wait", "wait"),
    ("endpoint", Endpoint.parse("node1"), Endpoint.parse("node1")),
    ("endpoint", "node1", Endpoint.parse("node1")),
]


@pytest.mark.parametrize(("name", "value", "expected"), TAKEN)
def test_a_setting_may_come_in_these_forms(name, value, expected):
    taken = getattr(make(**{name: value}), name)
    assert repr(taken) == repr(expected)  # 0.0 and not -0.0, True and not 1.


NO_TIME = (-1, "-1", float("nan"), "nan", float("inf"), "1e999", 10**400, 1e10, True, None, "", "1 s", "1_0", [1], b"1")
REFUSED = [
    *((name, value, "") for name in TIMES for value in NO_TIME),
    *((name, value, "") for name in TIMES if name not in MAY_BE_ZERO for value in (0, "0", 0.0, -0.0)),
    *((name, value, "") for name in COUNTS for value in (0, -1, "0", 10_001, 2.0, "2.0", True, None, "two", "", "9" * 5000)),
    *(("is_host", value, "") for value in ("maybe", "", 1, 0)),
    *(
        ("bootstrap_port", value, "")
        for value in (-1, 65536, "5-4", "0-5", "1-2-3", (1, 2, 3), "http", True, None, 1.5, "1-")
    ),
    *(
        ("local_addr", value, "")
        for value in ("fe80::1", "169.254.1.1", "0.0.0.0", "::", "ff02::1", "no!de", "10.0.0.1:5", 5)
    ),
    *(("order", value, "") for value in ("x" * 257, "a\nb", "\ud800", 1.5, None, True)),
    ("slot", True, ""),
    ("topology", 5, ""),
    *(("run_id", value, "") for value in ("", "  ", "x" * 201, "a\tb", "\ud800", 5, None)),
    *(("info", value, "") for value in ({"a": 1}, {1: "a"}, {"a": "x" * 8192}, {"a": "\ud800"}, "a=b", None)),
    *(("grow", value, "") for value in ("unit=0", "unit=-2", "unit=1.5", "unit=", "yes", 5, None, [])),
    ("grow", "setle", " (did you mean 'settle'?)"),
    ("on_failure", "closed", " (did you mean 'close'?)"),
    ("endpoint", 5, ""),
]


@pytest.mark.parametrize(("name", "value", "hint"), REFUSED)
def test_no_other_value_is_taken(name, value, hint):
    sentence = refusal(**{name: value})
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:60] + "..."
    assert sentence == f"{name} is {shown}: it must be {TABLE[name].allowed}{hint}"


@pytest.mark.parametrize("value", [b"hunter2", "hunter2\n", "hunter2" * 1000])
def test_a_secret_in_place_of_its_file_is_not_repeated(value):
    assert refusal(token_file=value) == (
        f"token_file is not a path (a value of type {type(value).__name__}): it must be the path of a file"
    )


def test_an_endpoint_that_cannot_be_read_keeps_its_own_sentence():
    assert refusal(endpoint="node1:x") == "endpoint 'node1:x': port 'x' is not a number from 1 to 65535"


def info_of(size):
    return {"a": "x" * (size - len('{"a":""}'))}


def test_the_largest_info_and_labels_fit_in_a_member_record():
    info = info_of(8192)
    settings = make(info=info, order="o" * 256, slot="s" * 256, topology="t" * 256)
    record = MemberRecord(
        name="n" * NAME_MAX, host="h" * NAME_MAX, order=settings.order, topology=settings.topology, info=settings.info
    )
    assert wire.decode(MemberRecord, wire.encode(record)) == record
    assert refusal(info={"a": info["a"] + "x"}).endswith("at most 8192 bytes as JSON")


def test_the_largest_infos_of_a_run_take_half_of_the_answer_in_which_a_leader_lists_it():
    assert 2 * INFOS_MAX == FRAME_MAX
    assert make(max_nodes=1024, info=info_of(8192)).info
    assert make(max_nodes=10_000, info=info_of(838)).info
    assert refusal(max_nodes=1025, info=info_of(8192)) == (
        "info has 8192 bytes as JSON and max_nodes is 1025: with so many nodes it may have at most 8184, because a leader "
        "reads the info of all nodes at once; shorten it, or put the rest into the round's store"
    )
    assert "at most 838," in refusal(max_nodes=10_000, info=info_of(839))


# ---- values that contradict each other, and names


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_nodes": 5}, "min_nodes is 5 and max_nodes is 4: min_nodes must not be more than max_nodes"),
        ({"tls_cert": "x"}, "tls_cert is set and tls_key is not: a certificate and its key are given together"),
        ({"tls_key": "x"}, "tls_key is set and tls_cert is not: a certificate and its key are given together"),
        (
            {"min_nodes": 5, "max_nodes": 7, "grow": "unit=4"},
            "unit is 4: it must have a multiple from min_nodes 5 to max_nodes 7",
        ),
        ({"unit": 5}, "unit is 5: it must have a multiple from min_nodes 2 to max_nodes 4"),
        ({"grow": "unit=2", "unit": 4}, "grow is 'unit=2' and unit is 4: give one of them"),
        (
            {"grow": "unit=20000"},
            "unit is '20000' (from grow='unit=20000'): it must be a whole number from 1 to 10000",
        ),
        (
            {"endpoint": "localhost:0"},
            (
                "endpoint is 'rdzv://', which no other machine can find, and max_nodes is 4: "
                "it must name the host that serves, as in 'host:29400'"
            ),
        ),
        ({"last_cal": 1}, "unknown setting 'last_cal': did you mean 'last_call'?"),
        ({"join_timeout_s": 1}, "unknown setting 'join_timeout_s': did you mean 'join_timeout'?"),
        ({"rank": 1}, "unknown setting 'rank': did you mean 'order'?"),
        ({"timeout": 1}, "unknown setting 'timeout': did you mean 'join_timeout'?"),
        ({"last_call_timeout": 1}, "unknown setting 'last_call_timeout': did you mean 'last_call'?"),
        ({"qqq": 1, "run_id": ""}, f"unknown setting 'qqq'; the settings are {', '.join(TABLE)}"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, sentence):
    assert refusal(**options) == sentence


def test_growth_by_units_is_settling_with_a_unit():
    assert [(s.grow, s.unit) for s in (make(grow="unit=2"), make(grow="unit=2", unit=2))] == [("settle", 2)] * 2
    assert (make(grow="now", unit=4).grow, make(grow="now", unit=4).unit) == ("now", 4)
    assert make(min_nodes=5, max_nodes=8, grow="unit=4").unit == 4


def test_one_node_needs_no_endpoint_and_a_certificate_comes_with_its_key():
    assert make(endpoint="", min_nodes=1, max_nodes=1).endpoint.is_one_machine
    assert make(tls_cert="x", tls_key="y").tls_key == "y"


# ---- environment


@pytest.mark.parametrize("variable", ORDER_ENV)
def test_the_batch_system_says_which_node_this_is(variable):
    assert make(environ={variable: "12"}).order == "12"
    assert make(environ={variable: "12"}, order="3").order == "3"


def test_the_batch_system_says_which_life_and_which_place_this_is(monkeypatch):
    settings = make(environ={"SLURM_RESTART_COUNT": "3", "SLURM_TOPOLOGY_ADDR": "s1.s2.node7"})
    assert (settings.incarnation, settings.topology) == (3, "s1/s2")
    assert make(environ={"SLURM_RESTART_COUNT": "3"}, incarnation=5).incarnation == 5
    assert refusal(environ={"SLURM_RESTART_COUNT": "x"}) == (
        "incarnation is 'x' (from SLURM_RESTART_COUNT): it must be a whole number from 0 to 2147483647"
    )
    environ = {"SLURM_NODEID": "", "PET_NODE_RANK": "2", "JOB_COMPLETION_INDEX": "3"}
    assert make(environ=environ).order == "2", "the first variable that is set decides"
    monkeypatch.setenv("SLURM_NODEID", "12")
    assert make().order == "", "the environment of the process is not read"


# ---- agreeing


def test_every_difference_is_named_with_both_values():
    mine = make(lease=10, unit=2, on_failure="wait").agreed()
    theirs = make(min_nodes=3, lease=10.5).agreed()
    assert differences(mine, theirs) == [
        "min_nodes is 2 here and 3 in the run",
        "lease is 10 here and 10.5 in the run",
        "unit is 2 here and 1 in the run",
        "on_failure is wait here and close in the run",
    ]
    assert differences(mine, mine) == []


@given(st.floats(1, 100, exclude_max=True), st.floats(1, 100, exclude_max=True))
def test_two_different_values_are_never_shown_alike(one, other):
    texts = differences(make(lease=one).agreed(), make(lease=other).agreed())
    if one == other:
        assert texts == []
    else:
        here, there = texts[0].removeprefix("lease is ").removesuffix(" in the run").split(" here and ")
        assert here != there


def test_settings_survive_the_trip_through_the_engine():
    agreed = make(lease="0.1", grow="unit=2").agreed()
    assert wire.decode(RunSettings, wire.encode(agreed)) == agreed


def test_the_summary_has_what_decides_and_what_was_set():
    assert make().summary() == "min_nodes=2 max_nodes=4 join_timeout=600 last_call=30 regroup=75 lease=10"
    assert make(settle=0.5, bootstrap_port="1-2", is_host="yes", last_call=0).summary() == (
        "min_nodes=2 max_nodes=4 join_timeout=600 last_call=0 regroup=75 lease=10 settle=0.5 is_host=True "
        "bootstrap_port=1-2"
    )
    assert make(bootstrap_port=7).summary().endswith(" bootstrap_port=7")


def test_the_summary_keeps_files_and_info_to_itself():
    summary = make(token_file="hunter2", tls_ca="hunter2", info={"hunter2": "hunter2"}).summary()
    assert "hunter2" not in summary


# ---- anything


@given(
    st.sampled_from(sorted(TABLE)),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.binary(max_size=5)
    | st.lists(st.integers(), max_size=3) | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)  # fmt: skip
def test_any_value_is_taken_or_refused_in_one_line(name, value):
    try:
        settings = make(**{name: value})
    except SettingsError as error:
        assert str(error).isprintable()  # noqa: PT017 - refusing is as good as taking here
    else:
        # What was taken can be written: the engine and the log get to see it.
        msgspec.json.encode(settings.agreed())
        settings.summary().encode()
