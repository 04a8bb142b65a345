"""Endpoints: every form that is taken, and one sentence for each that is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.config.endpoint import Endpoint, parse_host
from rdzv.errors import SettingsError

TAKEN = [
    # text, scheme, hosts, path, canonical
    ("memory://", "memory", (), "", "memory://"),
    ("memory:///", "memory", (), "", "memory://"),
    ("memory://blue-1", "memory", (), "blue-1", "memory://blue-1"),
    ("", "rdzv", (), "", "rdzv://"),
    ("  ", "rdzv", (), "", "rdzv://"),
    ("rdzv://", "rdzv", (), "", "rdzv://"),
    ("localhost:0", "rdzv", (), "", "rdzv://"),
    ("[::1]:0", "rdzv", (), "", "rdzv://"),
    ("127.0.0.1:0", "rdzv", (), "", "rdzv://"),
    ("node1", "rdzv", (("node1", 29400),), "", "rdzv://node1:29400"),
    ("Node1.Example.com:1234", "rdzv", (("node1.example.com", 1234),), "", "rdzv://node1.example.com:1234"),
    ("node_1:65535", "rdzv", (("node_1", 65535),), "", "rdzv://node_1:65535"),
    ("10.0.0.1:1", "rdzv", (("10.0.0.1", 1),), "", "rdzv://10.0.0.1:1"),
    ("[2001:DB8:0::1]:5", "rdzv", (("2001:db8::1", 5),), "", "rdzv://[2001:db8::1]:5"),
    ("[::1]", "rdzv", (("::1", 29400),), "", "rdzv://[::1]:29400"),
    ("[fe80::1%eth0]:5", "rdzv", (("fe80::1%eth0", 5),), "", "rdzv://[fe80::1%eth0]:5"),
    ("RDZV://node1/", "rdzv", (("node1", 29400),), "", "rdzv://node1:29400"),
    ("rdzv://memory", "rdzv", (("memory", 29400),), "", "rdzv://memory:29400"),
    ("etcd://a,b:1,[::1]", "etcd", (("a", 2379), ("b", 1), ("::1", 2379)), "", "etcd://a:2379,b:1,[::1]:2379"),
    ("etcds://a/team%20x/", "etcds", (("a", 2379),), "team x", "etcds://a:2379/team%20x"),
    ("c10d://a", "c10d", (("a", 29400),), "", "c10d://a:29400"),
    ("file:///data/my%20run", "file", (), "/data/my run", "file:///data/my%20run"),
    ("file:///data/@x", "file", (), "/data/@x", "file:///data/%40x"),
]


@pytest.mark.parametrize(("text", "scheme", "hosts", "path", "canonical"), TAKEN, ids=[row[0] for row in TAKEN])
def test_each_form_is_read_and_shown_in_one_way(text, scheme, hosts, path, canonical):
    endpoint = Endpoint.parse(text)
    assert endpoint == Endpoint(scheme, hosts, path)
    assert str(endpoint) == canonical


@pytest.mark.parametrize("text", [row[0] for row in TAKEN])
def test_the_canonical_text_names_the_same_endpoint(text):
    endpoint = Endpoint.parse(text)
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_equal_places_are_equal_values():
    assert len({Endpoint.parse("node1"), Endpoint.parse("rdzv://NODE1:29400/"), Endpoint.parse("node2")}) == 2


REFUSED = [
    ("node1:", "endpoint 'node1:': port '' is not a number from 1 to 65535"),
    ("node1:http", "endpoint 'node1:http': port 'http' is not a number from 1 to 65535"),
    ("node1:65536", "endpoint 'node1:65536': port '65536' is not a number from 1 to 65535"),
    ("node1:-1", "endpoint 'node1:-1': port '-1' is not a number from 1 to 65535"),
    (
        "node1:0",
        "endpoint 'node1:0': port 0 means any port, which other machines cannot find; give one from 1 to 65535",
    ),
    (
        "etcd://localhost:0",
        "endpoint 'etcd://localhost:0': port 0 means any port, which other machines cannot find; give one from 1 to 65535",
    ),
    (":29400", "endpoint ':29400': it names no host"),
    ("29400", "endpoint '29400': '29400' is neither a host name nor an IPv4 address"),
    ("300.1.1.1", "endpoint '300.1.1.1': '300.1.1.1' is neither a host name nor an IPv4 address"),
    (
        "no!de",
        "endpoint 'no!de': 'no!de' is not a host name (letters, digits, '.', '-' and '_', at most 253)",
    ),
    ("::1:29400", "endpoint '::1:29400': write an IPv6 address in brackets, as in '[::1]:29400'"),
    ("[::1", "endpoint '[::1': brackets are for an IPv6 address, as in '[::1]:29400'"),
    ("[::1]29400", "endpoint '[::1]29400': brackets are for an IPv6 address, as in '[::1]:29400'"),
    ("[node1]:5", "endpoint '[node1]:5': brackets are for an IPv6 address, as in '[::1]:29400'"),
    ("[::x]", "endpoint '[::x]': '::x' is not an IPv6 address"),
    (
        "a:1,b:2",
        "endpoint 'a:1,b:2': several hosts are for etcd:// only, where they are one cluster; name the one that serves",
    ),
    ("etcd://a,a:2379", "endpoint 'etcd://a,a:2379': it names one host twice"),
    ("etcd://a,", "endpoint 'etcd://a,': it names no host"),
    ("etcd://", "endpoint 'etcd://': it names no host, as in 'etcd://host:2379'"),
    ("c10d:///x", "endpoint 'c10d:///x': an endpoint of scheme 'c10d' has no path, this one has 'x'"),
    ("rdzv://a/b", "endpoint 'rdzv://a/b': an endpoint of scheme 'rdzv' has no path, this one has 'b'"),
    ("memory", "endpoint 'memory': did you mean 'memory://'?"),
    ("memory://a b", "endpoint 'memory://a b': it has spaces or control characters in it; write them as %20 and the like"),
    (
        "memory://a/b",
        "endpoint 'memory://a/b': 'a/b' is not a name for an engine in memory (letters, digits, '.', '-' and '_')",
    ),
    ("file://data", "endpoint 'file://data': a file is named by its whole path, as in 'file:///data'"),
    ("file://", "endpoint 'file://': a file is named by its whole path, as in 'file:///path'"),
    ("file:///data/", "endpoint 'file:///data/': it names a directory; name a file in it"),
    ("file:///a%00b", "endpoint 'file:///a%00b': its path '/a%00b' has control characters in it"),
    ("file:///a%ff", "endpoint 'file:///a%ff': its path '/a%ff' is not UTF-8"),
    ("file:///a#b", "endpoint 'file:///a#b': it has a '#' in it; write that as %23"),
    ("http://a:2379", "endpoint 'http://a:2379': unknown scheme 'http': did you mean 'etcd'?"),
    ("etcdd://a", "endpoint 'etcdd://a': unknown scheme 'etcdd': did you mean 'etcd'?"),
    (
        "zookeeper://a",
        "endpoint 'zookeeper://a': unknown scheme 'zookeeper'; there is memory, rdzv, etcd, etcds, c10d, file, quorum",
    ),
    (
        "quorum://a,b",
        "endpoint 'quorum://a,b': it names 2 hosts, and a quorum has three (one of them may be lost) or five (two)",
    ),
    (
        "quorum://a,b,localhost",
        "endpoint 'quorum://a,b,localhost': some of its hosts are loopback, which no other machine reaches: name real hosts",
    ),
    ("quorum://a:1,a:2,a:4", "endpoint 'quorum://a:1,a:2,a:4': each host also needs the port after the one that is named"),
    ("://a", "endpoint '://a': '' is not a scheme; the schemes are memory, rdzv, etcd, etcds, c10d, file, quorum"),
    ("etcd://a?x", "endpoint 'etcd://a?x': its query 'x' is not of the form name=value&name=value"),
    ("etcd://a?x=%ff", "endpoint 'etcd://a?x=%ff': its query 'x=%ff' is not of the form name=value&name=value"),
    ("etcd://a?x=1&x=2", "endpoint 'etcd://a?x=1&x=2': its query gives 'x' twice"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[row[0] for row in REFUSED])
def test_each_mistake_gets_its_sentence(text, sentence):
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse(text)
    assert caught.value.sentence == sentence


def test_a_long_endpoint_is_cut_in_the_sentence():
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse("a" * 5000)
    assert caught.value.sentence == f"endpoint '{'a' * 120}...': it has 5000 characters, at most 4096 are allowed"


def test_more_hosts_than_a_cluster_has_are_refused():
    with pytest.raises(SettingsError, match=r"it names 101 hosts, at most 100 are allowed "):
        Endpoint.parse("etcd://" + ",".join(f"h{i}" for i in range(101)))


@pytest.mark.parametrize(
    "text",
    [
        "etcd://me:hunter2@a",
        "hunter2@a:29400",
        "rdzv://me:hun/ter2?hunter2@a",
        "http://me:hunter2@a",
        "file://me:hunter2@a/x",
        "file:///x://me:hunter2@a",
        "me:hunter2@a:notaport",
    ],
)
def test_credentials_are_refused_and_not_repeated(text):
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse(text)
    assert caught.value.sentence == (
        "endpoint has credentials in it (a part before '@'), which would end up in logs: "
        "leave them out and name a token_file or tls_cert instead"
    )
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", ["token", "PASSWORD", "my_secret", "api_key", "%74oken"])
def test_a_secret_in_the_query_is_refused_and_not_repeated(name):
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse(f"etcd://a:bad?x=1&{name}=hunter2")
    assert "hunter2" not in str(caught.value)
    assert str(caught.value).startswith("endpoint has a secret in its query (")


def test_a_query_is_kept_in_order_and_shown_quoted():
    endpoint = Endpoint.parse("etcd://a?b=2&a=x%20y&c=")
    assert endpoint.query == (("b", "2"), ("a", "x y"), ("c", ""))
    assert endpoint.options("a", "b", "c") == {"a": "x y", "b": "2", "c": ""}
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("known", "ending"),
    [
        (("store",), "unknown option 'stor': did you mean 'store'?"),
        (("x", "y"), "unknown option 'stor'; there is x, y"),
        ((), "unknown option 'stor'; there is none"),
    ],
)
def test_an_option_that_the_driver_does_not_know_is_refused(known, ending):
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse("c10d://a?stor=1").options(*known)
    assert caught.value.sentence == f"endpoint 'c10d://a:29400?stor=1' has an {ending}"


@pytest.mark.parametrize(
    ("text", "one_machine", "loopback"),
    [
        ("", True, False),
        ("localhost", False, True),
        ("127.0.1.1:5", False, True),
        ("etcd://[::1],localhost", False, True),
        ("etcd://a,localhost", False, False),
        ("memory://", False, False),
    ],
)
def test_places_that_other_machines_cannot_find_are_known(text, one_machine, loopback):
    endpoint = Endpoint.parse(text)
    assert (endpoint.is_one_machine, endpoint.is_loopback) == (one_machine, loopback)


def test_an_ipv6_host_needs_no_brackets_where_there_is_no_port():
    assert parse_host("2001:DB8::1") == "2001:db8::1"


@given(st.text(max_size=60) | st.from_regex(r"(rdzv|etcd|file|memory|c10d)://[a-z0-9:,/%?=&\[\].@-]{0,30}", fullmatch=True))
def test_any_text_is_taken_or_refused_in_one_line(text):
    try:
        endpoint = Endpoint.parse(text)
    except SettingsError as error:
        assert str(error).isprintable()  # noqa: PT017 - refusing is as good as taking here
    else:
        assert Endpoint.parse(str(endpoint)) == endpoint


@given(st.text(max_size=20), st.sampled_from(["", "/"]))
def test_no_password_ever_comes_back(password, slash):
    secret = f"s3cr3t{password}s3cr3t"
    with pytest.raises(SettingsError) as caught:
        Endpoint.parse(f"etcd://me:{secret}@host{slash}")
    assert "s3cr3t" not in str(caught.value)
