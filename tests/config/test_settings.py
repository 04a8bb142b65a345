"""Settings: what is taken in which form, one sentence for each mistake, and what is agreed on."""

from __future__ import annotations

import fractions
import pathlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import DEFAULTS, ORDER_ENV, TABLE, Settings, differences
from rdzv.core import wire
from rdzv.core.model import MemberRecord, RunSettings
from rdzv.errors import SettingsError

MAY_BE_ZERO = {"settle", "grow_every", "replace_wait", "drain_settle", "last_call", "linger", "serve_on"}
TIMES = MAY_BE_ZERO | {"join_timeout", "regroup", "lease", "outage_grace", "closed_for", "read_timeout"}


def make(**options):
    required = {"endpoint": "memory://", "run_id": "job", "min_nodes": 2, "max_nodes": 4}
    return Settings.make(**{**required, **options})


def refusal(**options):
    with pytest.raises(SettingsError) as caught:
        make(**options)
    return caught.value.sentence


# ---- what holds when nothing is said


def test_the_defaults_are_those_of_the_documentation():
    settings = make()
    assert {name: getattr(settings, name) for name in TABLE} == {
        "endpoint": Endpoint("memory"),
        "run_id": "job",
        "min_nodes": 2,
        "max_nodes": 4,
        "join_timeout": 600.0,
        "last_call": 30.0,
        "regroup": 75.0,
        "lease": 10.0,
        "linger": 1.0,
        "serve_on": 60.0,
        "outage_grace": 900.0,
        "settle": 2.0,
        "grow": "settle",
        "unit": 1,
        "grow_every": 60.0,
        "replace_wait": 0.0,
        "drain_settle": 1.0,
        "on_failure": "close",
        "closed_for": 60.0,
        "incarnation": 0,
        "read_timeout": 10.0,
        "is_host": None,
        "order": "",
        "slot": "",
        "topology": "",
        "info": {},
        "bootstrap_port": (0, 0),
        "local_addr": "",
        "token": None,
        "token_file": "",
        "tls": None,
        "tls_cert": "",
        "tls_key": "",
        "tls_ca": "",
        "tls_mutual": None,
        "tls_server_name": "",
    }


def test_the_table_has_every_setting_with_its_purpose_and_what_is_allowed():
    assert tuple(TABLE) == Settings.__struct_fields__
    for name, setting in TABLE.items():
        assert setting.meaning, name
        assert setting.allowed, name
    assert set(TABLE) - set(DEFAULTS) == {"endpoint", "run_id", "min_nodes", "max_nodes"}


def test_every_time_says_what_gets_worse_if_it_is_raised():
    assert {name for name in TIMES if not TABLE[name].raised} == set()


def test_every_default_is_allowed():
    for name, default in DEFAULTS.items():
        assert TABLE[name].read(default) == default, name


def test_what_the_run_agrees_on_has_the_same_defaults_in_its_record():
    assert make().agreed() == RunSettings(min_nodes=2, max_nodes=4)


def test_settings_are_not_changed_and_not_shared():
    mine = {"gpus": "8"}
    settings = make(info=mine)
    mine["gpus"] = "0"
    make().info["gpus"] = "1"
    assert settings.info == {"gpus": "8"}
    assert make().info == {}
    with pytest.raises(AttributeError):
        settings.lease = 5.0  # type: ignore[misc]


# ---- forms


@pytest.mark.parametrize("name", sorted(TIMES))
@pytest.mark.parametrize("value", [1.5, "1.5", " 1.50 ", "15e-1", "+1.5", fractions.Fraction(3, 2)])
def test_a_time_may_come_as_a_number_or_a_text_and_have_a_fraction(name, value):
    assert getattr(make(**{name: value}), name) == 1.5


@pytest.mark.parametrize("name", sorted(TIMES))
@pytest.mark.parametrize("value", [0, "0", 0.0, -0.0])
def test_zero_is_taken_where_not_waiting_makes_sense(name, value):
    if name in MAY_BE_ZERO:
        assert repr(getattr(make(**{name: value}), name)) == "0.0"
    else:
        assert refusal(**{name: value}) == (
            f"{name} is {value!r}: it must be a number of seconds, more than 0 and at most 1000000000"
        )


@pytest.mark.parametrize("name", sorted(TIMES))
@pytest.mark.parametrize(
    "value",
    [-1, "-1", float("nan"), "nan", float("inf"), "inf", "1e999", 10**400, 1e10, True, None, "", "1 s", "1_0", [1], b"1"],
)
def test_no_other_time_is_taken(name, value):
    least = "0 or more" if name in MAY_BE_ZERO else "more than 0"
    sentence = refusal(**{name: value})
    assert sentence.startswith(f"{name} is ")
    assert sentence.endswith(f": it must be a number of seconds, {least} and at most 1000000000")


def test_a_long_value_is_cut_in_the_sentence():
    assert len(refusal(lease="9" * 10_000)) < 200


def test_counts_may_come_as_text():
    settings = make(min_nodes=" 3 ", max_nodes="3", incarnation="7", unit="3")
    assert (settings.min_nodes, settings.max_nodes, settings.incarnation, settings.unit) == (3, 3, 7, 3)


@pytest.mark.parametrize("value", [0, -1, "0", 10_001, 2.0, "2.0", True, None, "two", "", "9" * 5000])
@pytest.mark.parametrize("name", ["min_nodes", "max_nodes", "unit"])
def test_no_other_count_is_taken(name, value):
    sentence = refusal(**{name: value})
    assert sentence.startswith(f"{name} is ")
    assert sentence.endswith(": it must be a whole number from 1 to 10000")


def test_the_largest_run_is_taken():
    assert make(max_nodes=10_000).max_nodes == 10_000


def test_min_above_max_is_refused():
    assert refusal(min_nodes=5) == "min_nodes is 5 and max_nodes is 4: min_nodes must not be more than max_nodes"


@pytest.mark.parametrize("value", ["true", "True", "yes", "1", True])
def test_a_switch_can_be_set_in_many_ways(value):
    assert make(is_host=value).is_host is True


@pytest.mark.parametrize("value", ["false", " FALSE ", "no", "0", False])
def test_a_switch_can_be_unset_in_many_ways(value):
    assert make(is_host=value).is_host is False


@pytest.mark.parametrize("value", ["maybe", "", 1, 0])
def test_anything_else_is_no_switch(value):
    assert refusal(is_host=value) == f"is_host is {value!r}: it must be true or false"


@pytest.mark.parametrize(
    ("value", "ports"),
    [
        (0, (0, 0)),
        ("0", (0, 0)),
        (29500, (29500, 29500)),
        ("29500-29600", (29500, 29600)),
        (" 29500 - 29600 ", (29500, 29600)),
        ((1, 65535), (1, 65535)),
    ],
)
def test_a_port_or_a_range_of_ports_is_taken(value, ports):
    assert make(bootstrap_port=value).bootstrap_port == ports


@pytest.mark.parametrize("value", [-1, 65536, "5-4", "0-5", "1-2-3", (1, 2, 3), "http", True, None, 1.5, "1-"])
def test_no_other_ports_are_taken(value):
    assert refusal(bootstrap_port=value) == (
        f"bootstrap_port is {value!r}: "
        "it must be a port from 1 to 65535, a range such as '29500-29600', or 0 for any free port"
    )


@pytest.mark.parametrize(
    ("value", "address"),
    [("", ""), ("Node1", "node1"), ("10.0.0.1", "10.0.0.1"), ("2001:DB8::1", "2001:db8::1"), ("[::1]", "::1")],
)
def test_an_address_is_taken_and_brought_to_one_form(value, address):
    assert make(local_addr=value).local_addr == address


@pytest.mark.parametrize("value", ["fe80::1", "169.254.1.1", "0.0.0.0", "::", "ff02::1", "no!de", "10.0.0.1:5", 5])
def test_an_address_that_means_nothing_to_others_is_refused(value):
    assert refusal(local_addr=value) == (
        f"local_addr is {value!r}: "
        "it must be a host name or an IP address that others can reach (not link-local, 0.0.0.0 or ::)"
    )


def test_paths_are_taken_as_text_or_path():
    settings = make(token_file=pathlib.Path("a") / "b", tls_ca="c")
    assert (settings.token_file, settings.tls_ca) == ("a/b", "c")


@pytest.mark.parametrize("value", [b"hunter2", "hunter2\n", "hunter2" * 1000])
def test_a_secret_in_place_of_its_file_is_not_repeated(value):
    assert refusal(token_file=value) == (
        f"token_file is not a path (a value of type {type(value).__name__}): it must be the path of a file"
    )


@pytest.mark.parametrize(("given_name", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_a_certificate_and_its_key_come_together(given_name, missing):
    assert refusal(**{given_name: "x"}) == (
        f"{given_name} is set and {missing} is not: a certificate and its key are given together"
    )
    assert make(tls_cert="x", tls_key="y").tls_key == "y"


@pytest.mark.parametrize("name", ["order", "slot"])
def test_a_label_may_be_a_number(name):
    assert getattr(make(**{name: 7}), name) == "7"
    assert refusal(**{name: True}) == f"{name} is True: it must be text of at most 256 characters on one line"


@pytest.mark.parametrize("value", ["x" * 257, "a\nb", "\ud800", 1.5, None])
def test_no_other_label_is_taken(value):
    assert refusal(order=value).endswith(": it must be text of at most 256 characters on one line")


def test_topology_is_text_only():
    assert refusal(topology=5) == "topology is 5: it must be text of at most 256 characters on one line"


@pytest.mark.parametrize("value", ["", "  ", "x" * 201, "a\tb", "\ud800", 5, None])
def test_a_run_needs_a_short_id_on_one_line(value):
    sentence = refusal(run_id=value)
    assert sentence.startswith("run_id is ")
    assert sentence.endswith(": it must be text of 1 to 200 characters on one line")


def test_a_run_id_may_have_200_characters_of_any_script():
    assert make(run_id="å" * 200).run_id == "å" * 200


# ---- info


@pytest.mark.parametrize("value", [{"a": 1}, {1: "a"}, {"a": "x" * 8192}, {"a": "\ud800"}, "a=b", None])
def test_info_is_text_to_text_and_small(value):
    sentence = refusal(info=value)
    assert sentence.startswith("info is ")
    assert sentence.endswith(": it must be a dict of str to str of at most 8192 bytes as JSON")


def test_the_largest_info_and_labels_fit_in_a_member_record():
    info = {"a": "x" * (8192 - len('{"a":""}'))}
    settings = make(info=info, order="o" * 256, slot="s" * 256, topology="t" * 256)
    record = MemberRecord(
        name="n" * 512, host="h" * 253, order=settings.order, topology=settings.topology, info=settings.info
    )
    assert wire.decode(MemberRecord, wire.encode(record)) == record
    assert refusal(info={"a": info["a"] + "x"}).endswith("at most 8192 bytes as JSON")


# ---- growth


@pytest.mark.parametrize("value", ["settle", "now", "never"])
def test_growth_is_one_of_three_words(value):
    settings = make(grow=value)
    assert (settings.grow, settings.unit) == (value, 1)


def test_growth_by_units_is_settling_with_a_unit():
    assert [(s.grow, s.unit) for s in (make(grow="unit=2"), make(grow="unit=2", unit=2))] == [("settle", 2)] * 2
    assert (make(grow="now", unit=4).grow, make(grow="now", unit=4).unit) == ("now", 4)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("setle", " (did you mean 'settle'?)"),
        ("unit=0", ""),
        ("unit=-2", ""),
        ("unit=1.5", ""),
        ("unit=", ""),
        ("yes", ""),
        (5, ""),
        (None, ""),
        ([], ""),
    ],
)
def test_no_other_growth_is_taken(value, hint):
    assert refusal(grow=value) == (
        f"grow is {value!r}: it must be 'settle', 'now', 'never' or 'unit=n' with n of 1 or more{hint}"
    )


def test_a_unit_needs_a_multiple_between_min_and_max():
    assert make(min_nodes=5, max_nodes=8, grow="unit=4").unit == 4
    assert refusal(min_nodes=5, max_nodes=7, grow="unit=4") == (
        "unit is 4: it must have a multiple from min_nodes 5 to max_nodes 7"
    )
    assert refusal(unit=5) == "unit is 5: it must have a multiple from min_nodes 2 to max_nodes 4"


def test_a_unit_is_said_once():
    assert refusal(grow="unit=2", unit=4) == "grow is 'unit=2' and unit is 4: give one of them"


def test_a_unit_has_the_limits_of_a_count():
    assert refusal(grow="unit=20000") == (
        "unit is '20000' (from grow='unit=20000'): it must be a whole number from 1 to 10000"
    )


def test_a_failure_policy_that_does_not_exist_is_refused_with_the_likely_one():
    assert make(on_failure="wait").on_failure == "wait"
    assert refusal(on_failure="closed") == (
        "on_failure is 'closed': it must be 'close' or 'wait' (did you mean 'close'?)"
    )


# ---- names


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("last_cal", "last_call"),
        ("join_timeout_s", "join_timeout"),
        ("outage_graze", "outage_grace"),
        ("rank", "order"),
        ("timeout", "join_timeout"),
        ("last_call_timeout", "last_call"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_likely_one(name, likely):
    assert refusal(**{name: 1}) == f"unknown setting {name!r}: did you mean {likely!r}?"


def test_an_unknown_setting_like_no_other_is_refused_with_all_there_are():
    assert refusal(qqq=1) == f"unknown setting 'qqq'; the settings are {', '.join(TABLE)}"


def test_a_name_is_judged_before_any_value():
    assert refusal(run_id="", qqq=1).startswith("unknown setting")


# ---- endpoint


def test_an_endpoint_may_come_parsed_or_as_text():
    assert make(endpoint=Endpoint.parse("node1")).endpoint == make(endpoint="node1").endpoint


def test_an_endpoint_that_cannot_be_read_keeps_its_own_sentence():
    assert refusal(endpoint="node1:x") == "endpoint 'node1:x': port 'x' is not a number from 1 to 65535"


def test_an_endpoint_is_text():
    assert refusal(endpoint=5) == (
        "endpoint is 5: it must be text such as 'host:29400', 'etcd://host:2379' or 'memory://'"
    )


def test_one_machine_is_enough_for_one_node_only():
    assert make(endpoint="", min_nodes=1, max_nodes=1).endpoint.is_one_machine
    assert refusal(endpoint="localhost:0") == (
        "endpoint is 'rdzv://', which no other machine can find, and max_nodes is 4: "
        "it must name the host that serves, as in 'host:29400'"
    )


# ---- environment


@pytest.mark.parametrize("variable", ORDER_ENV)
def test_the_batch_system_says_which_node_this_is(variable):
    assert make(environ={variable: "12"}).order == "12"
    assert make(environ={variable: "12"}, order="3").order == "3"


def test_the_first_variable_that_is_set_decides():
    environ = {"SLURM_NODEID": "", "PET_NODE_RANK": "2", "JOB_COMPLETION_INDEX": "3"}
    assert make(environ=environ).order == "2"


def test_the_batch_system_says_which_life_and_which_place_this_is():
    settings = make(environ={"SLURM_RESTART_COUNT": "3", "SLURM_TOPOLOGY_ADDR": "s1.s2.node7"})
    assert (settings.incarnation, settings.topology) == (3, "s1.s2.node7")
    assert make(environ={"SLURM_RESTART_COUNT": "3"}, incarnation=5).incarnation == 5


def test_a_wrong_variable_is_named():
    assert refusal(environ={"SLURM_RESTART_COUNT": "x"}) == (
        "incarnation is 'x' (from SLURM_RESTART_COUNT): it must be a whole number from 0 to 2147483647"
    )


def test_the_process_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "12")
    assert make().order == ""


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
