"""Endpoints in torch's notation."""

from __future__ import annotations

import re

import pytest

from rdzv.torchrun.rendezvous.utils import parse_rendezvous_endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("localhost", 123)),
        ("", ("localhost", 123)),
        ("  ", ("localhost", 123)),
        ("node", ("node", 123)),
        ("dummy.com", ("dummy.com", 123)),
        (" node_1-x.org:0 ", ("node_1-x.org", 0)),
        ("node:65535", ("node", 65535)),
        ("1.2.3.4:7", ("1.2.3.4", 7)),
        ("[2001:db8::1]", ("2001:db8::1", 123)),
        ("[2001:db8::1]:99", ("2001:db8::1", 99)),
        ("2001:db8::1", ("2001:db8::1", 123)),
        ("::1", ("::1", 123)),
    ],
)
def test_endpoints_that_can_be_read(text, expected):
    assert parse_rendezvous_endpoint(text, 123) == expected


@pytest.mark.parametrize("text", ["~", "a b", "/etc", "[::1", "[::1]x", ":", ":1", "[]:1", "a,b:1"])
def test_endpoints_without_a_host(text):
    with pytest.raises(ValueError, match=f"endpoint {re.escape(repr(text))}"):
        parse_rendezvous_endpoint(text, 123)


@pytest.mark.parametrize("text", ["node:", "node:x", "node:65536", "node:100000", "node:-1", "node:1.5", "[::1]:"])
def test_endpoints_with_a_wrong_port(text):
    with pytest.raises(ValueError, match="its port must be a number from 0 to 65535"):
        parse_rendezvous_endpoint(text, 123)
