"""Durations as people write and read them."""

from __future__ import annotations

import pytest

from rdzv.core.duration import read_duration, show_duration


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("90", 90, "90 s"), ("90s", 90, "90 s"), (" 15m ", 900, "15 min"), ("2h", 7200, "2 h"), ("1d", 86_400, "1 d"),
        ("90m", 5400, "90 min"), ("1.5h", 5400, "90 min"), ("0.5", 0.5, "0.5 s"), ("36h", 129_600, "36 h"), ("0", 0, "0 s"),
    ],
)  # fmt: skip
def test_a_duration_is_read_and_shown_in_its_largest_unit(text, seconds, shown):
    assert read_duration(text) == seconds
    assert show_duration(seconds) == shown


@pytest.mark.parametrize("text", ["", "h", "2 h", "-1h", "1e9", "inf", "nan", "2w", "2h30m", "1" * 10])
def test_what_is_no_duration_is_named(text):
    with pytest.raises(ValueError, match="is no duration: write 90s, 15m, 2h or 1d"):
        read_duration(text)
