"""The metrics: the model as Prometheus reads it. Labelled by run, never by member, so that their number stays small.

The figures are copied in the event loop, which takes little time, and made into text in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import accumulate

import msgspec
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .._version import __version__
from ..core.model import CauseKind, Phase
from ..core.status import RunProgress
from .history import UNKNOWN, Counters, Histogram, counts
from .observer import RunsObserver
from .sources import ServerFigures

PHASES = ("none", *(phase.value for phase in Phase))
STATES = (
    "in", "ready", "straggling", "waiting", "spare", "draining", "unhealthy", "quarantined", "done", "banned", "lost", "left",
    "gave up",
)  # fmt: skip
CAUSES = tuple(kind.value for kind in CauseKind if kind not in (CauseKind.SUCCESS, CauseKind.CLOSED, CauseKind.FUTILE))
"""Causes of a break. Each is shown from the start, with 0, so that the first one is seen as an increase."""


class RunFigures(msgspec.Struct, frozen=True):
    """A copy of the figures of one run."""

    run: str
    incarnation: str
    phase: str
    members: dict[str, int]
    nodes_min: int
    nodes_max: int
    round: int
    counters: Counters
    progress: RunProgress | None = None


class Figures(msgspec.Struct, frozen=True):
    """A copy of all figures, taken at one moment."""

    runs: tuple[RunFigures, ...]
    is_up: bool
    unwatched: int
    requests: dict[str, Histogram]
    server: ServerFigures | None


def take(observer: RunsObserver) -> Figures:
    """Copy the figures of all runs."""
    runs = []
    for follower in observer.runs.values():
        model, status = follower.model, follower.model.status
        members = counts(status, STATES) if status is not None else dict.fromkeys(STATES, 0)
        low, high, number = (status.min_nodes, status.max_nodes, status.round) if status is not None else (0, 0, 0)
        phase = status.phase if status is not None else "none"
        counters = deepcopy(model.counters)
        progress = status.progress if status is not None else None
        runs.append(RunFigures(follower.run_id, model.run, phase, members, low, high, number, counters, progress))
    requests = {name: deepcopy(one) for name, one in observer.requests.items()}
    return Figures(tuple(runs), observer.is_up, max(0, observer.unwatched), requests, observer.source.figures())


def text(figures: Figures) -> bytes:
    """Return the figures in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(figures))
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return generate_latest(registry)


class _RunCollector(Collector):
    """Turns figures into metrics."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        figures = self._figures
        build = InfoMetricFamily("rdzv_build", "The version of rdzv that observes the runs.")
        build.add_metric([], {"version": __version__})
        yield build
        yield GaugeMetricFamily("rdzv_engine_up", "Whether the engine answers: 1 or 0.", value=figures.is_up)
        text = "Runs that are not watched, because there are too many."
        yield GaugeMetricFamily("rdzv_runs_unwatched", text, value=figures.unwatched)
        requests = HistogramMetricFamily(
            "rdzv_engine_request_seconds", "Duration of the observer's own requests to the engine.", labels=["op"]
        )
        for name, histogram in figures.requests.items():
            _add_histogram(requests, [name], histogram)
        yield requests
        if figures.server is not None:
            text = "Connections that the server has, of members, viewers and strangers."
            yield GaugeMetricFamily("rdzv_server_connections", text, value=figures.server.connections)
            text = "Memory that all runs of the server take, as it counts for its limits."
            yield GaugeMetricFamily("rdzv_server_bytes", text, value=figures.server.bytes)
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        runs = self._figures.runs
        info = InfoMetricFamily("rdzv_run", "The incarnation of the run.", labels=["run"])
        phase = GaugeMetricFamily("rdzv_run_phase", "1 for the phase that the run is in, else 0.", labels=["run", "phase"])
        members = GaugeMetricFamily("rdzv_members", "Members by state, as rdzv status shows it.", labels=["run", "state"])
        low = GaugeMetricFamily("rdzv_nodes_min", "Fewest nodes that make a round.", labels=["run"])
        high = GaugeMetricFamily("rdzv_nodes_max", "Most nodes in a round.", labels=["run"])
        number = GaugeMetricFamily("rdzv_round", "Number of the last sealed round.", labels=["run"])
        for one in runs:
            info.add_metric([one.run], {"incarnation": one.incarnation})
            for name in PHASES:
                phase.add_metric([one.run, name], one.phase == name)
            for state, count in one.members.items():
                members.add_metric([one.run, state.replace(" ", "_")], count)
            low.add_metric([one.run], _as_float(one.nodes_min))
            high.add_metric([one.run], _as_float(one.nodes_max))
            number.add_metric([one.run], _as_float(one.round))
        yield from (info, phase, members, low, high, number)
        yield from self._progress()

    def _progress(self) -> Iterator[Metric]:
        step = GaugeMetricFamily("rdzv_step", "Lowest step that a worker of the round told.", labels=["run"])
        high = GaugeMetricFamily("rdzv_step_furthest", "Highest step that a worker of the round told.", labels=["run"])
        rate = GaugeMetricFamily("rdzv_steps_per_second", "Rate of the slowest member's steps.", labels=["run"])
        age = GaugeMetricFamily("rdzv_step_age_seconds", "Time since the lowest step was reached.", labels=["run"])
        for one in self._figures.runs:
            told = one.progress
            if told is not None:
                step.add_metric([one.run], _as_float(told.step))
                high.add_metric([one.run], _as_float(told.furthest))
                rate.add_metric([one.run], told.rate)
                if told.age_s is not None:
                    age.add_metric([one.run], told.age_s)
        yield from (step, high, rate, age)

    def _counters(self) -> Iterator[Metric]:
        sealed = CounterMetricFamily("rdzv_rounds_sealed", "Rounds sealed.", labels=["run"])
        broken = CounterMetricFamily("rdzv_rounds_broken", "Rounds broken, by cause.", labels=["run", "cause"])
        lost = CounterMetricFamily(
            "rdzv_lost_seconds", "Time from a break to the next round or the close, by cause.", labels=["run", "cause"]
        )
        evictions = CounterMetricFamily(
            "rdzv_evictions", "Members whose record went without a goodbye: evicted, banned, or not renewed.", labels=["run"]
        )
        leaders = CounterMetricFamily("rdzv_leader_changes", "How often another member began to lead.", labels=["run"])
        form = HistogramMetricFamily("rdzv_form_seconds", "Time from the first member to the first round.", labels=["run"])
        restart = HistogramMetricFamily("rdzv_restart_seconds", "Time from a break to the next round.", labels=["run"])
        for one in self._figures.runs:
            found = one.counters
            sealed.add_metric([one.run], found.sealed)
            for cause in (*CAUSES, *(kind for kind in (UNKNOWN,) if kind in found.broken)):
                broken.add_metric([one.run, cause], found.broken.get(cause, 0))
                lost.add_metric([one.run, cause], found.lost_s.get(cause, 0.0))
            evictions.add_metric([one.run], found.evictions)
            leaders.add_metric([one.run], found.leader_changes)
            _add_histogram(form, [one.run], found.form)
            _add_histogram(restart, [one.run], found.restart)
        yield from (sealed, broken, lost, evictions, leaders, form, restart)


def _as_float(number: int) -> float:
    """Return a whole number of a record, which may be too large for a float: one record must not end all metrics."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum_s)
