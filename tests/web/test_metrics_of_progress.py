"""The metrics and the page tell how far the workers are."""

from __future__ import annotations

import msgspec

from rdzv.core.status import RunProgress, Status
from rdzv.web import feed, metrics
from rdzv.web.history import RunModel


class Follower:
    """What the page and the metrics read of a run."""

    def __init__(self, progress):
        self.run_id, self.trouble, self.gone_at, self.model = "job", "", None, RunModel("job")
        self.model.look(Status("job", 1, "sealed", 2, "runs", "a", (), progress=progress), 1.0)


class Runs:
    def __init__(self, **runs):
        self.runs, self.is_up, self.unwatched, self.requests, self.source = runs, True, 0, {}, self

    def figures(self):
        return None


def test_the_metrics_tell_the_progress_of_runs_that_have_one():
    told = RunProgress(80, 95, 2.5, 16, (3,), 31.0)
    text = metrics.text(metrics.take(Runs(job=Follower(told)))).decode()
    for name, value in {"step": 80, "step_furthest": 95, "steps_per_second": 2.5, "step_age_seconds": 31}.items():
        assert f'rdzv_{name}{{run="job"}} {value:.1f}\n' in text
    assert "rdzv_step{" not in metrics.text(metrics.take(Runs(job=Follower(None)))).decode()


def test_a_number_too_large_for_prometheus_leaves_the_metrics_of_all_runs_as_they_are():
    huge, told = Follower(RunProgress(-(10**400), 10**400, 0.0, 1)), RunProgress(80, 95, 2.5, 16)
    huge.run_id = "huge"
    huge.model.look(msgspec.structs.replace(huge.model.status, round=10**400, min_nodes=10**400, max_nodes=10**400), 2.0)
    text = metrics.text(metrics.take(Runs(huge=huge, job=Follower(told)))).decode()
    for name in ("round", "nodes_min", "nodes_max", "step_furthest"):
        assert f'rdzv_{name}{{run="huge"}} +Inf\n' in text
    assert 'rdzv_step{run="huge"} -Inf\n' in text
    assert 'rdzv_step{run="job"} 80.0\n' in text


def test_the_page_is_told_of_the_progress_and_its_age_alone_is_no_news():
    told = feed.glance(Follower(RunProgress(80, 95, 2.5, 16, (3,), 31.0)), 2.0)
    later = feed.glance(Follower(RunProgress(80, 95, 2.5, 16, (3,), 40.0)), 2.0)
    assert told["progress"] == later["progress"] == {
        "step": 80, "furthest": 95, "rate": 2.5, "workers": 16, "behind": (3,), "age_s": None
    }  # fmt: skip
    assert (told["progress_age_s"], later["progress_age_s"]) == (31.0, 40.0)
    assert feed.glance(Follower(None), 2.0)["progress"] is None
