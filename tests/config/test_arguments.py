"""Arguments of a wrong type are refused with a sentence, by every call of the public API, and do nothing."""

from __future__ import annotations

import array

import pytest

import rdzv
from rdzv.config import arguments
from rdzv.engines.etcd.server import EtcdServer
from rdzv.errors import RdzvError, WrongArgument
from support.memory_members import QUICK, memory


@pytest.fixture(scope="module")
def member():
    with rdzv.Rendezvous(memory(), run_id="job", min_nodes=1, max_nodes=1, **QUICK) as rendezvous:
        rendezvous.world = rendezvous.join()
        yield rendezvous


ON_THE_STORE = {
    "a number to write": (lambda s: s.set("step", 5), "set: the value of 'step' is 5, of type int: it must be bytes or text"),
    "a list to write": (lambda s: s.set("step", [1, 2]), "set: the value of 'step' is [1, 2], of type list: it must be bytes"),
    "nothing to write": (lambda s: s.set("step", None), "set: the value of 'step' is None, of type NoneType: it must be bytes"),
    "a key that is no text": (lambda s: s.set(b"step", b"5"), "set: key is b'step', of type bytes: it must be text"),
    "a key that has no hash": (lambda s: s.set(["step"], b"5"), "set: key is ['step'], of type list: it must be text"),
    "pairs": (lambda s: s.multi_set([("a", b"1")]), "multi_set: values is [('a', b'1')], of type list: it must be a dict"),
    "a number among pairs": (lambda s: s.multi_set({"a": 1}), "multi_set: the value of 'a' is 1, of type int"),
    "a key among pairs": (lambda s: s.multi_set({1: "a"}), "multi_set: a key is 1, of type int: it must be text"),
    "a text to check": (lambda s: s.check("step"), "check: keys is 'step', of type str: it must be a list of keys"),
    "a text to wait for": (lambda s: s.wait("ready", 0.1), "wait: keys is 'ready', of type str: it must be a list of keys"),
    "a text to get": (lambda s: s.multi_get("ab", 0.1), "multi_get: keys is 'ab', of type str: it must be a list of keys"),
    "a number to check": (lambda s: s.check(5), "check: keys is 5, of type int: it must be a list of keys"),
    "numbers to check": (lambda s: s.check([5]), "check: a key is 5, of type int: it must be text"),
    "a number to get": (lambda s: s.get(5), "get: key is 5, of type int: it must be text"),
    "a text as a time": (lambda s: s.get("a", "5"), "get: timeout_s is '5', of type str: it must be a number of seconds"),
    "a text as a time for all": (lambda s: s.set_timeout("5"), "set_timeout: timeout_s is '5', of type str"),
    "half a number to add": (lambda s: s.add("n", 0.5), "add: amount is 0.5, of type float: it must be a whole number"),
    "a text to add": (lambda s: s.add("n", "1"), "add: amount is '1', of type str: it must be a whole number"),
    "a flag to add": (lambda s: s.add("n", True), "add: amount is True, of type bool: it must be a whole number"),
    "a number to append": (lambda s: s.append("n", 3), "append: the value of 'n' is 3, of type int: it must be bytes or text"),
    "a number to expect": (lambda s: s.compare_set("n", 3, b""), "compare_set: the value of 'n' is 3, of type int"),
    "a number to delete": (lambda s: s.delete(3), "delete: key is 3, of type int: it must be text"),
}  # fmt: skip

ON_THE_MEMBER = {
    "a text as a time to join": (lambda r: r.join("5"), "join: timeout_s is '5', of type str: it must be a number of seconds"),
    "no number to join": (lambda r: r.join(float("nan")), "join: timeout_s is nan, of type float: it must be a number"),
    "no function": (lambda r: r.join(lasts="x"), "join: lasts is 'x', of type str: it must be a function"),
    "a text as a time": (lambda r: r.wait_changed("5"), "wait_changed: timeout_s is '5', of type str"),
    "a flag as a time": (lambda r: r.wait_changed(True), "wait_changed: timeout_s is True, of type bool"),
    "a number as a reason": (lambda r: r.drain(5), "drain: reason is 5, of type int: it must be text"),
    "a number as a reason to close": (lambda r: r.close_run(5), "close_run: reason is 5, of type int: it must be text"),
    "a number as a reason to go": (lambda r: r.leave(reason=5), "leave: reason is 5, of type int: it must be text"),
    "a text as a flag": (lambda r: r.leave(failed="no"), "leave: failed is 'no', of type str: it must be True or False"),
}


@pytest.mark.parametrize("case", ON_THE_STORE)
def test_the_store_refuses(member, case):
    call, sentence = ON_THE_STORE[case]
    with pytest.raises(WrongArgument) as caught:
        call(member.world.store)
    assert caught.value.sentence.startswith(sentence)
    assert member.world.store.num_keys() == 0


@pytest.mark.parametrize("case", ON_THE_MEMBER)
def test_a_member_refuses(member, case):
    call, sentence = ON_THE_MEMBER[case]
    with pytest.raises(WrongArgument) as caught:
        call(member)
    assert caught.value.sentence.startswith(sentence)
    assert member.changed is None


def test_an_observer_that_cannot_be_called_is_refused_before_the_first_notice():
    for module in (rdzv, rdzv.aio):
        with pytest.raises(WrongArgument, match="Rendezvous: observer is 'x', of type str: it must be a function"):
            module.Rendezvous(memory(), run_id="job", min_nodes=1, max_nodes=1, observer="x")
        with pytest.raises(WrongArgument, match="Rendezvous: driver is 'x', of type str: it must be a driver"):
            module.Rendezvous(memory(), run_id="job", min_nodes=1, max_nodes=1, driver="x")


def test_an_etcd_server_refuses_wrong_types():
    with pytest.raises(WrongArgument, match="EtcdServer: data_dir is 5, of type int: it must be text"):
        EtcdServer(5)
    with pytest.raises(WrongArgument, match="EtcdServer: port is '2379', of type str: it must be a whole number"):
        EtcdServer(port="2379")


def test_what_is_like_bytes_is_taken(member):
    store = member.world.store
    try:
        for value in (bytearray(b"ab"), memoryview(b"ab"), array.array("B", b"ab"), "ab"):
            store.set("a", value)
            assert store.get("a") == b"ab"
        store.wait({"a"})
        assert store.check(key for key in ("a",))
        assert store.multi_get(key for key in ("a", "a")) == [b"ab", b"ab"]
    finally:
        store.delete("a")


def test_a_long_value_is_shown_in_part_and_the_error_is_a_type_error():
    error = arguments.refused("set", "value", [0] * 1000, "bytes")
    assert len(str(error)) < 150
    assert isinstance(error, TypeError)
    assert isinstance(error, RdzvError)
