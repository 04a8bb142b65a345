"""Errors as a new user meets them: real processes print a sentence with cause and remedy, in time.

docs/errors.md shows what each prints, and is compared with the output here.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdzv.errors import RdzvError
from support import certificates
from support.etcd_cluster import Cluster
from support.member_processes import ENVIRON, is_change, is_notice
from support.timing import within

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
PORT = 29400
DEADLINE_S = 45.0
"""More than three times what they take on an idle machine: nothing waits longer than its join_timeout of 2 s."""
SOON = ("-c", "join_timeout=2", "-c", "last_call=0.2", "-c", "lease=3")


def agrees(title: str, said: str) -> None:
    """Compare the output with the page, except for names, numbers and addresses of this machine."""
    found = re.search(rf"^### {re.escape(title)}\n.*?^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/errors.md has nothing on {title!r}, where this is said: {said}"
    promised = found[1].strip()
    assert _plain(promised) in _plain(said), f"{said!r} is not {promised!r}"


def _plain(text: str) -> str:
    text = re.sub(r"\d+(\.\d+){3}|\[?[0-9a-f]*::[0-9a-f:]*\]?", "ADDRESS", text)
    text = text.replace(f"here: {socket.gethostname()}", "here: node1")
    return re.sub(r"\d+(\.\d+)?", "N", text)


def join(endpoint, *words, on=(), nnodes="2", **environ):
    command = [*on, sys.executable, "-m", "rdzv", "join", endpoint, "--run-id", "job", "--nnodes", nnodes, *SOON, *words]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**ENVIRON, **environ})
    within(time.monotonic() - began, DEADLINE_S)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("is unreachable") <= 1, "what is a line of its own is not logged as well"
    return done


def doctor(endpoint, *words, on=()):
    command = [*on, sys.executable, "-m", "rdzv", "doctor", endpoint, "--run-id", "job", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=ENVIRON).stdout


@contextmanager
def serving(*words, **environ):
    command = [sys.executable, "-m", "rdzv", "serve", "--bind", "127.0.0.1:0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**ENVIRON, **environ}) as server:
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.kill()


def test_the_port_is_wrong(network, processes):
    a, b = network.host("a"), network.host("b")
    processes.serve(f"*:{PORT}", on=a.on)
    done = join(f"a:{PORT + 1}", on=b.on)
    assert done.returncode == 3
    agrees("Wrong port", done.stderr)
    said = doctor(f"a:{PORT + 1}", on=b.on)
    assert f"ok       name        a resolves to {a.address} (IPv" in said
    assert f"ok       route       {a.address} is reached through eth0 ({b.address})" in said
    assert f"problem  port        {a.address}:{PORT + 1}: connection refused [RDZV-P03]" in said


def test_the_host_name_is_wrong():
    done = join("no-such-host.invalid:29400")
    assert done.returncode == 3
    assert "host 'no-such-host.invalid' " in done.stderr
    assert "check the name, DNS and the hosts file, or give an address" in done.stderr
    agrees("Wrong host name", done.stderr.replace(
        "was not resolved within 3 s", "does not resolve: name or service not known"
    ).replace("temporary failure in name resolution", "name or service not known"))  # fmt: skip


def test_a_firewall_drops_the_packets(network):
    """b knows a's hardware address, so that only silence remains when a's link is cut."""
    a, b = network.host("a"), network.host("b")
    hardware = re.search(r"link/ether (\S+)", _ip(a, "link", "show", "eth0"))[1]
    _ip(b, "neigh", "replace", a.v4, "lladdr", hardware, "nud", "permanent", "dev", "eth0")
    a.cut()
    done = join(f"a:{PORT}", "-c", "join_timeout=5", on=b.on)
    assert done.returncode == 3
    agrees("A firewall drops the packets", done.stderr)


def _ip(host, *words):
    done = subprocess.run(["ip", "-n", host.space, *words], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def test_dns_is_not_there_yet(network, processes):
    a, b = network.host("a"), network.host("b")
    b.hosts({})
    first = processes.member("a", f"a:{PORT}", "2", on=a.on)
    second = processes.member("b", f"a:{PORT}", "2", on=b.on)
    agrees("DNS is not there yet", second.until(is_notice("engine away"), "the name does not resolve")["reason"])
    b.hosts({"a": a.address})
    assert {first.world(2)["rank"], second.world(2)["rank"]} == {0, 1}


def test_one_node_with_other_nnodes():
    with serving() as place:
        first = subprocess.Popen(
            [sys.executable, "-m", "rdzv", "join", place, "--run-id", "job", "--nnodes", "2:4", "--json", *SOON[2:]],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRON,
        )  # fmt: skip
        try:
            next(line for line in first.stdout if '"present"' in line)
            done = join(place, nnodes="2:3")
        finally:
            first.kill()
            first.communicate(timeout=60)
    assert done.returncode == 2
    agrees("One node with other --nnodes", done.stderr)


def test_one_node_too_few():
    with serving() as place:
        done = join(place, "-c", "join_timeout=5")
    assert done.returncode == 3
    agrees("One node too few", done.stderr)


def test_the_token_is_missing():
    with serving(RDZV_TOKEN=certificates.TOKEN) as place:
        done = join(place)
    assert done.returncode == 6
    agrees("The token is missing", done.stderr)


def test_the_certificate_has_expired():
    pem = certificates.issue("127.0.0.1", days=-1)
    with serving("--tls-cert", pem.tls_cert, "--tls-key", pem.tls_key) as place:
        done = join(place, "--tls-ca", certificates.ca_file())
    assert done.returncode == 6
    agrees("The certificate has expired", done.stderr)


WEB = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_the_port_is_taken_by_another_program():
    with subprocess.Popen([sys.executable, "-c", WEB], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as web:
        try:
            done = join(f"127.0.0.1:{web.stdout.readline().strip()}")
        finally:
            web.kill()
    assert done.returncode == 3
    agrees("The port is taken by another program", done.stderr)


def test_the_hosts_file_maps_the_own_name_to_loopback(network, processes):
    """The member tells others an address that they can reach, and the doctor warns about other programs."""
    a, b = network.host("a"), network.host("b")
    a.hosts({"a": "127.0.1.1", "b": b.address})
    members = [processes.member(host.name, f"a:{PORT}", "2", on=host.on) for host in (a, b)]
    worlds = [member.world(2) for member in members]
    assert {line["bootstrap"].rpartition(":")[0] for line in worlds} <= {a.address, b.address}
    said = doctor(f"a:{PORT}", on=a.on)
    agrees("The hosts file maps the own name to 127.0.1.1", said)
    assert "run 'job' is kept there" in said


def test_the_etcd_has_no_quorum():
    try:
        cluster = Cluster(3)
    except RdzvError as error:
        pytest.skip(f"NOT TESTED on a real etcd: {error}")
    with cluster:
        for node in cluster.nodes[1:]:
            node.kill()
        done = join(cluster.endpoint(), "-c", "join_timeout=15", "-c", "read_timeout=2")
        said = doctor(cluster.endpoint(), "-c", "read_timeout=2")
    assert done.returncode == 3
    problem = r"^problem  engine      .*no quorum.* \[RDZV-P08\]\n +-> (make sure that|bring) a majority "
    assert re.search(problem, said, re.MULTILINE), said
    # What gRPC calls it differs.
    agrees("The etcd has no quorum", re.sub(r"quorum \(.*?\)+;", "quorum (deadline exceeded);", done.stderr))


def test_the_node_of_rank_0_served_and_is_dead(network, processes):
    """No other host can serve at its address, so the error says what to do."""
    a, b = network.host("a"), network.host("b")
    impatient = ("read_timeout=1", "outage_grace=1", "join_timeout=2", "lease=2")
    first, second = (processes.member(host.name, f"a:{PORT}", "1:2", *impatient, on=host.on) for host in (a, b))
    assert {first.world(2)["rank"], second.world(2)["rank"]} == {0, 1}
    a.cut()
    first.kill()
    second.until(is_change("outage"), "the engine is away")
    assert second.wait() == 3
    said = second.errors()
    assert "bring the host of rdzv://a:29400 back or start the job anew; etcd would survive the loss of a host" in said
    agrees("The node of rank 0 is dead", said)
