"""A real Prometheus scrapes a server, agrees with `rdzv status`, and fires the alerts of contrib/."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdzv.operate.run_viewer import RunViewer
from rdzv.web import metrics
from support import browser as browsers
from support.cli_commands import rdzv
from support.embedded_server import session_to
from support.ports import free_port
from support.web_pages import fetch, scene
from test_docs import blocks

CONTRIB = Path(__file__).parents[2] / "contrib"
RULES = CONTRIB / "prometheus" / "alerts.yml"
WALK_RULES, WALK_CONFIG = blocks(CONTRIB.parent / "docs" / "walkthrough.md", "yaml")
SIZES = {"train": 8, "eval": 8, "small": 5}
LONG_S = 25.0


@pytest.fixture(scope="module", autouse=True)
def prometheus():
    reason = browsers.why_not("prometheus")
    if reason:
        pytest.skip(f"NOT TESTED with a real Prometheus: {reason}")


def promtool(*words, text=None):
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, input=text, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextmanager
def scraping(folder, target, *rules):
    """Start a Prometheus that scrapes a port twice a second, and yield its own port."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "500ms"},
        "rule_files": [str(one) for one in rules],
        "scrape_configs": [{"job_name": "rdzv", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=20)


async def query(port, text):
    """Ask Prometheus, and return values by labels (without job, instance and name)."""
    try:
        body = await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(text)}")
    except OSError:  # It is starting.
        return {}
    found = json.loads(body)["data"]["result"]
    hidden = ("__name__", "instance", "job")
    return {
        tuple(value for name, value in sorted(one["metric"].items()) if name not in hidden): float(one["value"][1])
        for one in found
    }


def _read(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


async def until(holds, what):
    for _ in range(int(LONG_S / 0.1)):
        if await holds():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within {LONG_S:g} s: {what}")


async def test_prometheus_agrees_with_status_and_an_alert_fires_when_a_run_is_stuck(tmp_path):
    rules = tmp_path / "alerts.yml"
    rules.write_text(re.sub(r"for: \w+", "for: 1s", RULES.read_text()))
    async with scene() as made:
        for run_id, size in SIZES.items():
            names = [f"{run_id}-{index}" for index in range(size)]
            made.go(*names, run_id=run_id, nodes=(size - (run_id != "small"), size), lease=4, last_call=10)
        for run_id, size in SIZES.items():
            await made.until_round(1, size, run_id)
        promtool("check", "metrics", text=(await fetch(made.port, "/metrics"))[2].decode())
        (tmp_path / "walk-alerts.yml").write_text(WALK_RULES)
        with scraping(tmp_path, made.port, rules, tmp_path / "walk-alerts.yml") as port:

            async def sees_rounds():
                return await query(port, "rdzv_round") == {(run_id,): 1.0 for run_id in SIZES}

            await until(sees_rounds, "all runs are scraped")
            await agrees_with_status(made, port)
            assert await query(port, 'ALERTS{alertname="RdzvRunStuck",alertstate="firing"}') == {}
            await made.kill("small-3")  # All are needed.
            await made.kill("train-3")

            async def is_stuck():
                firing = 'count by (run) (ALERTS{alertname="RdzvRunStuck",alertstate="firing"})'
                return await query(port, firing) == {("small",): 1.0}

            await until(is_stuck, "the alert fires for the run that is stuck, and for no other")

            async def are_missing():
                firing = 'count by (run) (ALERTS{alertname="NodeMissing",alertstate="firing"})'
                return await query(port, firing) == {("small",): 1.0, ("train",): 1.0}

            await until(are_missing, "the walkthrough's alert fires for both runs that lost a node")
            await made.until_round(2, SIZES["train"] - 1, "train")
            await asyncio.sleep(1.2)
            await agrees_with_status(made, port)
            lost = await query(port, 'rdzv_rounds_broken_total{cause="lost"}')
            assert lost == {("lost", "train"): 1.0, ("lost", "small"): 1.0, ("lost", "eval"): 0.0}


async def agrees_with_status(made, port):
    """Compare what Prometheus has with what `rdzv status` shows of each run."""
    members, phases, numbers, lows = await asyncio.gather(
        *(query(port, text) for text in ("rdzv_members", "rdzv_run_phase == 1", "rdzv_round", "rdzv_nodes_min"))
    )
    for run_id in SIZES:
        async with session_to(made.server.port, run_id) as session:
            status = await RunViewer(session, run_id, time.monotonic).look()
        counts = dict.fromkeys(metrics.STATES, 0.0)
        for member in status.members:
            counts[member.state] += 1
        assert {state: members[run_id, state.replace(" ", "_")] for state in metrics.STATES} == counts
        assert phases[status.phase, run_id] == 1
        assert (numbers[run_id,], lows[run_id,]) == (status.round, status.min_nodes)
    where = f"127.0.0.1:{made.server.port}"
    done = await asyncio.to_thread(rdzv, "status", where, "--run-id", "train", "--json")
    assert members["train", "in"] == sum(one["state"] == "in" for one in json.loads(done.stdout)["members"])


def test_the_files_of_the_walkthrough_are_valid(tmp_path):
    (tmp_path / "contrib").symlink_to(CONTRIB)
    (tmp_path / "walk-alerts.yml").write_text(WALK_RULES)
    (tmp_path / "walk-prometheus.yml").write_text(WALK_CONFIG)
    assert "2 rule files found" in promtool("check", "config", str(tmp_path / "walk-prometheus.yml")).stdout


def test_the_alert_rules_are_valid_and_fire_when_they_should(tmp_path):
    promtool("check", "rules", str(RULES))
    (tmp_path / "test.yml").write_text(f"""
rule_files: [{RULES}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'rdzv_run_phase{{instance="i",run="r",phase="broken"}}', values: '0x4 1x20'}}
      - {{series: 'rdzv_run_phase{{instance="i",run="r",phase="sealed"}}', values: '1x4 0x20'}}
      - {{series: 'rdzv_members{{instance="i",run="r",state="ready"}}', values: '0x4 1x20'}}
      - {{series: 'rdzv_run_phase{{instance="i",run="empty",phase="none"}}', values: '1x24'}}
      - {{series: 'rdzv_members{{instance="i",run="empty",state="ready"}}', values: '0x24'}}
      - {{series: 'rdzv_run_phase{{instance="i",run="gone",phase="broken"}}', values: '1x24'}}
      - {{series: 'rdzv_members{{instance="i",run="gone",state="banned"}}', values: '1x24'}}
      - {{series: 'rdzv_rounds_broken_total{{instance="i",run="r",cause="lost"}}', values: '0 1 2 3 4 5 6 7 8x20'}}
      - {{series: 'rdzv_lost_seconds_total{{instance="i",run="r",cause="lost"}}', values: '0+60x24'}}
      - {{series: 'rdzv_engine_up{{instance="i"}}', values: '1x4 0x20'}}
    alert_rule_test:
      - {{eval_time: 10m, alertname: RdzvRunStuck, exp_alerts: []}}
      - eval_time: 20m
        alertname: RdzvRunStuck
        exp_alerts:
          - exp_labels: {{severity: warning, instance: i, run: r}}
            exp_annotations:
              summary: Run r has had no round for 10 minutes
              description: The page and `rdzv status` say what it waits for.
      - eval_time: 12m
        alertname: RdzvRunFlapping
        exp_alerts:
          - exp_labels: {{severity: warning, instance: i, run: r}}
            exp_annotations:
              summary: Run r was restarted more than 5 times in 15 minutes
              description: The page lists the hosts that caused restarts.
      - eval_time: 20m
        alertname: RdzvTimeLost
        exp_alerts:
          - exp_labels: {{severity: warning, instance: i, run: r}}
            exp_annotations:
              summary: Run r lost more than 10 % of the last hour to restarts
              description: "`rdzv journal` names the cause and the cost of each."
      - {{eval_time: 4m, alertname: RdzvEngineDown, exp_alerts: []}}
      - eval_time: 8m
        alertname: RdzvEngineDown
        exp_alerts:
          - exp_labels: {{severity: critical, instance: i}}
            exp_annotations:
              summary: The engine behind i does not answer
              description: Workers go on for outage_grace (15 minutes by default), then members are told to stop them.
""")
    promtool("test", "rules", str(tmp_path / "test.yml"))


async def test_alerts_and_dashboard_use_metrics_that_exist_in_queries_that_are_valid(tmp_path):
    async with scene() as made:
        made.go("a", "b", nodes=(2, 2))
        await made.until_round(1, 2)
        text = (await fetch(made.port, "/metrics"))[2].decode()
    there = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) | set(re.findall(r"^(\w+)\{?", text, re.MULTILINE))
    dashboard = json.loads((CONTRIB / "grafana" / "rdzv.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["expr"] for one in dashboard["annotations"]["list"]]
    used = set(re.findall(r"\b(?:rdzv|process)_\w+", " ".join(queries) + RULES.read_text()))
    assert used - there - {"rdzv_journal"} == set()
    plain = [re.sub(r"\$__(?:range|rate_interval)", "5m", one) for one in queries]
    rules = [{"record": f"a:b{index}", "expr": one} for index, one in enumerate(plain)]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "queries.yml"))
