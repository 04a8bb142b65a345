"""Slurm's lists of nodes, as examples of Slurm's manual and as properties."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.config.nodelist import expand


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", "n1"),
        ("n[0-3,7]", "n0 n1 n2 n3 n7"),
        ("n[7,0-1]", "n7 n0 n1"),
        ("login,n[1-2],gpu3", "login n1 n2 gpu3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[0001]", "n0001"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a[1-2]b[3,5]c[7]-ib", "a1b3c7-ib a1b5c7-ib a2b3c7-ib a2b5c7-ib"),
        ("n[1-2].cluster.example,m-1_x", "n1.cluster.example n2.cluster.example m-1_x"),
        (" n1 , n[2, 4] ", "n1 n2 n4"),
    ],
)
def test_a_list_is_expanded_as_slurm_does_it(nodelist, names):
    assert list(expand(nodelist)) == names.split()


@pytest.mark.parametrize(
    ("nodelist", "problem"),
    [
        ("", "a name is empty"),
        ("a,,b", "a name is empty"),
        ("n[0-", "the brackets of 'n[0-' do not match"),
        ("n0-3]", "the brackets of 'n0-3]' do not match"),
        ("n[[1]]", "the brackets of 'n[[1]]' do not match"),
        ("n[]", "'' is neither a number nor a range such as 0-3"),
        ("n[1-2-3]", "'1-2-3' is neither a number nor a range such as 0-3"),
        ("n[a-c]", "'a-c' is neither a number nor a range such as 0-3"),
        ("n[³]", "'³' is neither a number nor a range such as 0-3"),
        ("n[3-1]", "the range '3-1' ends before it begins"),
    ],
)
def test_what_is_no_list_is_refused_with_the_part_that_is_wrong(nodelist, problem):
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        list(expand(nodelist))


def test_the_first_of_very_many_costs_nothing():
    began_s = time.process_time()
    assert next(expand("n[0-999999999999]")) == "n0"
    assert next(expand(",".join(f"host{index}" for index in range(50_000)))) == "host0"
    assert time.process_time() - began_s < 1.0


words = st.text("abz.-_", max_size=4)
numbers = st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 4))
"""First number, how many follow it, and how wide it is written."""
brackets = st.lists(numbers, min_size=1, max_size=3)
parts = st.tuples(words, st.lists(st.tuples(brackets, words), max_size=3)).filter(lambda part: part[0] or part[1])


def written(part):
    """The part as Slurm would write it."""
    stem, rest = part
    for ranges, after in rest:
        inside = [f"{low:0{width}}" + (f"-{low + more:0{width}}" if more else "") for low, more, width in ranges]
        stem += f"[{','.join(inside)}]{after}"
    return stem


def names_of(part):
    """The names that it stands for: every choice of a number in each bracket."""
    stem, rest = part
    choices = [
        [f"{number:0{width}}{after}" for low, more, width in ranges for number in range(low, low + more + 1)]
        for ranges, after in rest
    ]
    return [stem + "".join(chosen) for chosen in itertools.product(*choices)]


@given(st.lists(parts, min_size=1, max_size=3))
def test_every_name_is_given_once_for_each_time_it_is_meant_and_in_order(several):
    wanted = (name for part in several for name in names_of(part))
    found = expand(",".join(map(written, several)))
    assert list(itertools.islice(found, 500)) == list(itertools.islice(wanted, 500))


@given(st.text("n0123,-[] ", max_size=12))
def test_any_text_is_expanded_or_refused_and_nothing_else(text):
    try:
        names = list(itertools.islice(expand(text), 1000))
    except ValueError:
        return
    assert names
    assert not any(set(name) & set("[],") or not name for name in names)
