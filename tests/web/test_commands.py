"""`rdzv serve --http`, `rdzv dashboard` and the setting `http`, as processes and on other engines."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdzv.aio import AsyncRendezvous
from rdzv.cli.dashboard import actions_secret
from rdzv.cli.main import make_app
from rdzv.config.secret import Secret
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.etcd.server import EtcdServer
from rdzv.errors import RdzvError, SettingsError
from rdzv.web.serving import WebServer
from rdzv.web.sources import EndpointSource
from support.certificates import ca_file, issue
from support.cli_commands import rdzv, running
from support.ports import free_port
from support.staged_runs import StagedRun
from support.web_pages import Listener, fetch, until

ONE = {"run_id": "job", "min_nodes": 1, "max_nodes": 1}


def read(url, **options):
    with urllib.request.urlopen(url, timeout=20, **options) as answer:
        return answer.read().decode()


def seen(look, is_it):
    """Look until it is there, for 30 s at most, and return what was seen last."""
    deadline = time.monotonic() + 30
    while not is_it(found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_serve_shows_its_runs_and_a_dashboard_shows_them_from_outside():
    with running("serve", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0") as server:
        endpoint = server.stdout.readline().split()[-1]
        page = server.stdout.readline().split()[-1]
        with (
            running("join", endpoint, "--run-id", "job", "--nnodes", "1", "--json") as member,
            running("dashboard", endpoint, "--http", "127.0.0.1:0") as dashboard,
        ):
            elsewhere = dashboard.stdout.readline().split()[-1]
            for line in member.stdout:
                if json.loads(line)["event"] == "world":
                    break
            for url in (page, elsewhere):
                runs = seen(
                    lambda url=url: json.loads(read(f"{url}/api/runs"))["runs"],
                    lambda runs: runs and runs[0]["phase"] == "sealed",
                )
                assert [(run["run"], run["round"], run["size"]) for run in runs] == [("job", 1, 1)]
                assert read(f"{url}/readyz") == "ready\n"
                assert 'rdzv_rounds_sealed_total{run="job"} 1.0' in read(f"{url}/metrics")
            assert "rdzv_server_connections" in read(f"{page}/metrics")
            assert "rdzv_server_connections" not in read(f"{elsewhere}/metrics")
            for process in (dashboard, server):
                process.terminate()
                assert process.wait(20) == 0
                assert process.stderr.read() == ""


def test_a_dashboard_without_the_secret_says_so_and_one_with_it_shows_the_runs(tmp_path):
    token = tmp_path / "token"
    token.write_text("5f4dcc3b5aa765d61d8327deb882cf99")
    token.chmod(0o600)
    trusted = ("--token-file", str(token))
    with running("serve", "--bind", "127.0.0.1:0", *trusted) as server:
        endpoint = server.stdout.readline().split()[-1]
        with (
            running("join", endpoint, "--run-id", "job", "--nnodes", "1", *trusted),
            running("dashboard", endpoint, "--http", "127.0.0.1:0") as stranger,
            running("dashboard", endpoint, "--http", "127.0.0.1:0", "--run-id", "job", *trusted) as friend,
        ):
            urls = [process.stdout.readline().split()[-1] for process in (stranger, friend)]
            pages = seen(
                lambda: [json.loads(read(f"{url}/api/runs")) for url in urls],
                lambda pages: pages[1]["runs"] and "secret" in pages[0]["trouble"],
            )
            assert (pages[0]["up"], pages[0]["runs"], "give the member the same" in pages[0]["trouble"]) == (False, [], True)
            assert [run["run"] for run in pages[1]["runs"]] == ["job"]


def test_without_http_there_is_no_port():
    with running("serve", "--bind", "127.0.0.1:0") as server:
        port = server.stdout.readline().rsplit(":", 1)[1].strip()
        assert listening(server.pid) == {int(port)}


def listening(pid):
    """Return the ports at which a process listens."""
    inodes = {str(link.readlink()).removeprefix("socket:[").rstrip("]") for link in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A" and words[9] in inodes}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dashboard", "node1", "--http", "nonsense"], "it must be HOST:PORT"),
        (["dashboard", "node1", "--allow-actions"], "--allow-actions needs a secret"),
        (["dashboard", "c10d://node1:29400"], "name one with --run-id"),
        (["dashboard", "node1", "--actions-token-file", "x"], "without --allow-actions"),
        (["serve", "--http", "127.0.0.1:99999"], "it must be HOST:PORT"),
        (["join", "node1", "--run-id", "r", "--nnodes", "1", "--conf", "http=nowhere"], "http is 'nowhere'"),
    ],
)
def test_wrong_usage_is_refused_with_a_sentence(words, says):
    done = CliRunner().invoke(make_app(), words)
    assert (done.exit_code, says in done.stderr) == (2, True), done.output


def test_actions_are_allowed_with_the_servers_secret_or_one_of_their_own(tmp_path):
    (tmp_path / "own").write_text("5f4dcc3b5aa765d61d8327deb882cf99\n")
    (tmp_path / "server").write_text("098f6bcd4621d373cade4e832627b4f6\n")
    trusted = Settings.make("127.0.0.1:1", token_file=str(tmp_path / "server"), **ONE)
    etcd = Settings.make("etcd://127.0.0.1", **ONE)
    assert actions_secret(trusted, False, None) is None
    assert actions_secret(trusted, True, None) == Secret("098f6bcd4621d373cade4e832627b4f6")
    for settings in (trusted, etcd):
        assert actions_secret(settings, True, str(tmp_path / "own")) == Secret("5f4dcc3b5aa765d61d8327deb882cf99")
    with pytest.raises(SettingsError, match="needs a secret"):
        actions_secret(etcd, True, None)


def test_a_port_that_is_taken_is_named():
    with running("serve", "--bind", "127.0.0.1:0") as server:
        where = server.stdout.readline().split()[-1]
        done = rdzv("dashboard", "127.0.0.1:1", "--http", where)
        assert (done.returncode, "cannot listen there" in done.stderr) == (5, True)


def test_without_the_extra_the_command_says_what_to_install():
    program = "import sys; sys.modules['starlette'] = None; sys.argv = ['rdzv', 'dashboard', 'n']"
    program += "; from rdzv.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "pip install 'rdzv[web]'" in done.stderr) == (2, True), done.stderr


def test_without_the_extra_the_setting_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("rdzv.web", "starlette"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(SettingsError, match=r"pip install 'rdzv\[web\]'"):
        open_driver(Settings.make("127.0.0.1:1", http="127.0.0.1:0", **ONE))


async def test_an_agent_that_serves_shows_its_run_and_stops_with_it():
    http, port = free_port(), free_port()
    async with AsyncRendezvous(f"127.0.0.1:{port}", **ONE, http=f"127.0.0.1:{http}") as member:
        world = await member.join()
        world.bootstrap.release()
        runs = []
        while not runs or runs[0]["size"] != 1:
            runs = json.loads((await fetch(http, "/api/runs"))[2])["runs"]
        assert (runs[0]["run"], runs[0]["phase"]) == ("job", "sealed")
    with pytest.raises(ConnectionError):
        await fetch(http, "/healthz")


async def test_an_agent_whose_port_is_taken_goes_on_without_a_page(caplog):
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    taken = listening.sockets[0].getsockname()[1]
    async with AsyncRendezvous(f"127.0.0.1:{free_port()}", **ONE, http=f"127.0.0.1:{taken}") as member:
        (await member.join()).bootstrap.release()
    assert re.search(r"no metrics and no page .* the run goes on", caplog.text)
    listening.close()
    await listening.wait_closed()


async def test_with_a_certificate_the_port_speaks_https_only():
    http, port, pem = free_port(), free_port(), issue()
    trusted = {**pem._asdict(), "tls_ca": ca_file(), "tls_mutual": False}
    async with AsyncRendezvous(f"127.0.0.1:{port}", **ONE, **trusted, http=f"127.0.0.1:{http}") as member:
        (await member.join()).bootstrap.release()
        context = ssl.create_default_context(cafile=ca_file())
        answer = await asyncio.to_thread(read, f"https://127.0.0.1:{http}/healthz", context=context)
        assert answer == "ok\n"
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await fetch(http, "/healthz")


async def test_a_certificate_that_cannot_be_used_opens_no_port(tmp_path):
    page = WebServer(EndpointSource(Settings.make("127.0.0.1:1", **ONE)), ("127.0.0.1", 0), tls_cert=str(tmp_path / "none"))
    with pytest.raises(OSError, match="No such file"):
        await page.start()
    with pytest.raises(ConnectionError):
        await fetch(page.port, "/healthz")


async def test_etcd_pays_one_watch_per_run_however_many_browsers_look():
    try:
        server = EtcdServer()
        server.start()
    except RdzvError as error:
        pytest.skip(f"NOT TESTED on a real etcd: {error}")
    place = server.get_endpoint()
    settings = Settings.make(f"etcd://{place}", run_id="dashboard", min_nodes=1, max_nodes=1)
    driver = open_driver(settings)
    session = await driver.connect()
    for run_id in ("one", "two"):
        await StagedRun(session, run_id, 20).begin()

    def watchers():
        text = read(f"http://{place}/metrics")
        return int(float(re.search(r"^etcd_debugging_mvcc_watcher_total (\S+)", text, re.MULTILINE)[1]))

    before = await asyncio.to_thread(watchers)
    page = WebServer(EndpointSource(settings), ("127.0.0.1", 0))
    await page.start()
    await until(lambda: [one.model.counters.sealed for one in page.observer.runs.values()] == [1, 1])
    # etcd counts each prefix of a watch: the group of a run, and the progress of its workers. A run is shown before the
    # second one begins.
    await until(lambda: watchers() - before == 2 * 2)
    listeners = [await Listener.open(page.port, f"/events?run={run_id}") for run_id in ("one", "one", "two", "one")]
    for one in listeners:
        assert len((await one.next())[1]["members"]) == 20
    assert await asyncio.to_thread(watchers) - before == 2 * 2
    for one in listeners:
        one.writer.close()
    await page.stop()
    await session.close()
    await driver.close()
    server.stop()


async def test_runs_in_a_file_are_shown(tmp_path):
    settings = Settings.make(f"file://{tmp_path}/runs", run_id="dashboard", min_nodes=1, max_nodes=1)
    driver = open_driver(settings)
    session = await driver.connect()
    await StagedRun(session, "job", 3).begin()
    page = WebServer(EndpointSource(settings), ("127.0.0.1", 0))
    await page.start()
    await until(lambda: "job" in page.observer.runs and page.observer.runs["job"].model.counters.sealed == 1)
    assert page.observer.runs["job"].renewal_ages() == {}
    await page.stop()
    for run_id, runs in (("job", {"job"}), ("other", set())):
        page = WebServer(EndpointSource(settings, run_id), ("127.0.0.1", 0))
        await page.start()
        await until(lambda page=page: page.observer.is_up)
        assert page.observer.runs.keys() == runs
        await page.stop()
    await session.close()
    await driver.close()
