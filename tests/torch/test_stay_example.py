"""The example of docs/stay.md does what the page says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from support.staying import StayingProcess
from support.torchrun_jobs import LONG_S, ServeProcess, wait_for

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "stay_ddp.py"


def test_the_example_goes_on_at_its_step_when_a_process_is_killed_and_lets_a_new_one_in(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the extra `torch` brings it")
    with ServeProcess() as server:
        processes = {}

        def start(name):
            words = [str(EXAMPLE), server.endpoint, "--name", name, "--nnodes", "2:3", "--steps", "100", "--step-s", "0.05"]
            processes[name] = StayingProcess(name, tmp_path / name, "run_program", words)
            return processes[name]

        def report():
            return "\n".join(one.report() for one in processes.values())

        try:
            a, b, c = (start(name) for name in "abc")
            for one in (a, b, c):
                wait_for(lambda one=one: "of 3, from step 0\n" in one.text, "the first round", LONG_S, report)
            b.kill()
            for one in (a, c):
                wait_for(lambda one=one: " of 2, " in one.text, "a round without b", LONG_S, report)
            d = start("d")
            assert [one.ends(2 * LONG_S) for one in (a, c, d)] == [0, 0, 0], report()
        finally:
            for one in processes.values():
                one.kill()
    for one in (a, c, d):
        steps = [int(step) for step in re.findall(r"from step (\d+)", one.text)]
        assert steps == sorted(steps)
        assert re.search(r"^done at step 100, loss 0\.", one.text, re.MULTILINE), report()
    assert int(re.findall(r"of 3, from step (\d+)", d.text)[0]) > 0, "the newcomer went on with the others' state"


def test_the_page_shows_the_loop_of_the_example():
    page, program = (file.read_text() for file in (ROOT / "docs" / "stay.md", EXAMPLE))
    (shown,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    wanted = [line.strip() for line in shown.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    lines = {line.strip() for line in program.splitlines()}
    assert len(wanted) > 10
    assert [line for line in wanted if line not in lines] == []
