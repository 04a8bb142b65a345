"""docs/observe.md names each metric, and each value of the labels `phase`, `cause` and `op`."""

from __future__ import annotations

import re
from pathlib import Path

from rdzv.web import metrics
from rdzv.web.history import UNKNOWN
from rdzv.web.observer import OPERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "observe.md").read_text()


def words(text):
    return re.findall(r"`([a-z_]+)`", text)


def test_every_metric_is_on_the_page_and_every_metric_of_the_page_exists():
    source = Path(metrics.__file__).read_text()
    suffix = {"Counter": "_total", "Info": "_info", "Gauge": "", "Histogram": ""}
    made = re.findall(r'(Counter|Info|Gauge|Histogram)MetricFamily\(\s*"(\w+)"', source)
    assert len(made) > 20
    shown = re.findall(r"`(rdzv_\w+)(?:\{\w+\})?`", "".join(re.findall(r"^\| (`rdzv_.*?) \|", PAGE, re.MULTILINE)))
    assert sorted(shown) == sorted(name + suffix[kind] for kind, name in made)


def test_every_value_of_a_label_is_on_the_page():
    phases = re.search(r"the phase that the run is in: (.*?) \|", PAGE)[1]
    assert words(phases) == list(metrics.PHASES)
    causes, operations = re.search(r"^`cause` is (.*?)`op` is (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL).groups()
    assert words(causes) == [*metrics.CAUSES, UNKNOWN]
    assert sorted(words(operations)) == sorted(OPERATIONS)
