"""The scripts of contrib/slurm on a real Slurm of four nodes: nodes are killed and drained, jobs are requeued and preempted."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from support.network_hosts import ip
from support.slurm_cluster import Slurm, why_not

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "contrib" / "slurm"
PROGRAM = ROOT / "tests" / "support" / "torchrun_programs" / "steps.py"
LONG_S = 90.0
STARTED = re.compile(r"fence (\d+): rank (\d) of (\d) from step (\d+)")
TORCHRUN, RUN = "torchrun.sbatch", "run.sbatch"
each_script = pytest.mark.parametrize("script", [TORCHRUN, RUN])


@pytest.fixture
def slurm(network, tmp_path, monkeypatch, request):
    reason = why_not()
    if reason:
        pytest.skip(f"NOT TESTED on a real Slurm: {reason}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Slurm(network, tmp_path, **getattr(request, "param", {})) as made:
        shutil.copy(PROGRAM, made.work / "train.py")
        yield made
    left = [host.space for host in made.hosts.values()]
    made.until(lambda: not any(ip("netns", "pids", space) for space in left), "no process is left")


class Job:
    """A job that runs the program of these tests."""

    def __init__(self, slurm: Slurm, script: str, *options: str, edit=lambda text: text) -> None:
        if script == TORCHRUN:
            pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
        text = (SCRIPTS / script).read_text().replace("--nproc-per-node=8", "--nproc-per-node=1")
        (slurm.work / script).write_text(edit(text))
        self.slurm = slurm
        self.id = slurm.submit(*options, script)

    def worlds(self, size: int) -> list[dict[int, int]]:
        """Return the worlds of that size in which every rank was started, oldest first: the first step by rank."""
        found: dict[int, dict[int, int]] = {}
        for row in STARTED.findall(self.slurm.output(self.id)):
            fence, rank, size_of_it, step = map(int, row)
            if size_of_it == size:
                found.setdefault(fence, {})[rank] = step
        return [world for _, world in sorted(found.items()) if len(world) == size]

    def until_trained(self, size: int, times: int = 1) -> int:
        """Wait until so many worlds of that size were started. Return the step that the last one began at."""
        what = f"{times} worlds of {size} nodes"
        self.slurm.until(lambda: len(self.worlds(size)) >= times, what, LONG_S, self.id)
        begin = max(self.worlds(size)[-1].values())
        self.slurm.until(lambda: self.steps() > begin + 5, f"steps after {begin}", LONG_S, self.id)
        return begin

    def steps(self) -> int:
        file = self.slurm.work / "steps"
        return int(file.read_text()) if file.exists() else 0

    def until_requeued(self, times: int = 1) -> None:
        """Wait for the next life of the job, with time enough. Slurm would let it wait for two minutes."""
        is_pending = {"JobState": "PENDING", "Restarts": str(times)}
        self.slurm.until(lambda: is_pending.items() <= self.fields.items(), "the job is requeued", 2 * LONG_S, self.id)
        # Not at once: slurmd refuses a job whose former credential it has revoked within the same second.
        self.slurm.run("scontrol", "update", f"jobid={self.id}", "starttime=now+2", "timelimit=60")

    def finish(self, code: int = 0) -> dict[str, str]:
        """Let the program end with that code. Return the fields of the job when it is over."""
        part = self.slurm.work / "finish.part"
        part.write_text(str(code))
        part.replace(self.slurm.work / "finish")
        return self.slurm.until_over(self.id, LONG_S)

    @property
    def fields(self) -> dict[str, str]:
        return self.slurm.job(self.id)

    def report(self) -> str:
        return self.slurm.report(self.id)


def assert_completed(job: Job, restarts: int = 0) -> None:
    over = job.finish()
    assert (over["JobState"], over["ExitCode"], over["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), job.report()
    assert re.search(r"all \d members of round \d+ are done", job.slurm.output(job.id))


def assert_survived_as_slurm_knows(job: Job, node: str) -> None:
    """Training goes on without the node, and Slurm has noticed its loss and neither ended the step nor the job."""
    assert job.until_trained(3) > 0  # From where the four had come to.
    job.slurm.until(lambda: node in job.slurm.nodes_that_are("down*", "down"), "the node is down", LONG_S, job.id)
    job.slurm.until_said(job.id, f"Node failure on {node}")
    assert_completed(job)


def test_a_job_survives_a_killed_node_and_completes(slurm):
    job = Job(slurm, RUN)
    job.until_trained(4)
    slurm.kill_node("n2")
    # As Slurm does it by itself after SlurmdTimeout, for which this test does not wait.
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=killed")
    assert_survived_as_slurm_knows(job, "n2")


@pytest.mark.soak
@each_script
def test_a_job_survives_a_node_without_power(slurm, script):
    job = Job(slurm, script)
    job.until_trained(4)
    slurm.kill_node("n2", silent=True)
    assert_survived_as_slurm_knows(job, "n2")


@pytest.mark.soak
@each_script
def test_a_job_completes_although_a_task_of_it_was_killed(slurm, script):
    job = Job(slurm, script)
    job.until_trained(4)
    slurm.kill_tasks("n3")
    job.until_trained(3)
    slurm.until_said(job.id, "srun: error: n3: task 3: Killed")  # srun then returns 137.
    assert_completed(job)


@pytest.mark.soak
@each_script
def test_a_node_is_drained_for_maintenance(slurm, script):
    job = Job(slurm, script)
    job.until_trained(4)
    slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=maintenance")
    slurm.until(lambda: "n3" in slurm.nodes_that_are("drng"), "n3 is draining", LONG_S, job.id)
    assert len(job.worlds(4)) == 1  # Slurm lets a job go on there.
    drain = ("rdzv", "drain", "n3", "auto", "--reason", "maintenance")
    said = slurm.run("srun", f"--jobid={job.id}", "--overlap", "--nodes=1", "--ntasks=1", *drain)
    assert "asked to drain: n3" in said
    job.until_trained(3)
    assert_completed(job)
    slurm.until(lambda: "n3" in slurm.nodes_that_are("drain"), "n3 is drained", LONG_S, job.id)


@pytest.mark.soak
@each_script
def test_a_requeued_job_goes_on_where_it_was(slurm, script):
    job = Job(slurm, script)
    job.until_trained(4)
    steps = job.steps()
    slurm.run("scontrol", "requeue", job.id)
    job.until_requeued()
    assert job.until_trained(4, times=2) >= steps
    assert_completed(job, restarts=1)


@pytest.mark.soak
@each_script
def test_a_job_saves_before_its_time_is_over_and_is_requeued(slurm, script):
    job = Job(slurm, script, "--signal=TERM@20")
    job.until_trained(4)
    hours, minutes, seconds = map(int, job.fields["RunTime"].split(":"))
    limit = hours * 60 + minutes + (seconds + 45) // 60 + 1  # In minutes, and at least 45 s from now.
    slurm.run("scontrol", "update", f"jobid={job.id}", f"timelimit={limit}")
    job.until_requeued()
    saved = int((slurm.work / "saved").read_text())
    assert "the run did not end: it was interrupted" in slurm.output(job.id)
    assert job.until_trained(4, times=2) >= saved - 1
    assert_completed(job, restarts=1)


RECIPE = re.search(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs" / "howto.md").read_text(), re.DOTALL)[1]
TORCHRUN_OPTIONS = "torchrun --rdzv-backend=rdzv --nnodes=2:4 --max-restarts=100 --rdzv-conf=drain_notice=90 train.py"
RUN_OPTIONS = "rdzv run auto --nnodes 2:4 --conf drain_notice=90 -- python train.py"


@pytest.mark.soak
@pytest.mark.parametrize("command", [TORCHRUN_OPTIONS, RUN_OPTIONS], ids=["torchrun", "run"])
def test_the_recipe_for_a_time_limit_lets_all_workers_save_once_and_train_until_then(slurm, command):
    if command == TORCHRUN_OPTIONS:
        pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    assert RECIPE.count(TORCHRUN_OPTIONS) == RECIPE.count("@180") == 1
    shutil.copy(PROGRAM.with_name("saves.py"), slurm.work / "train.py")
    (slurm.work / "job.sbatch").write_text(RECIPE.replace(TORCHRUN_OPTIONS, command).replace("@180", "@40"))
    job = slurm.submit("job.sbatch")
    slurm.until_said(job, " of 4 trains", LONG_S, times=4)
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=1")
    over = slurm.until_over(job, 2 * LONG_S)
    assert_all_saved_once(slurm.output(job))
    assert over["JobState"] == "TIMEOUT", over


def assert_all_saved_once(output: str) -> None:
    """All workers were told and have saved, once, before Slurm ended their round."""
    said = output.partition("round 1 broken")[0]
    for rank in range(4):
        assert said.count(f"round 1: rank {rank} of 4 is told: n0, n1, n2 and 1 more draining: end of the job, ") == 1, output
        assert said.count(f"round 1: rank {rank} of 4 has saved") == 1, output


@pytest.mark.soak
@pytest.mark.parametrize("slurm", [{"grace_s": 30, "more": "SlurmctldParameters=preempt_send_user_signal"}], indirect=True)
def test_the_recipe_lets_all_workers_save_before_a_preemption(slurm):
    shutil.copy(PROGRAM.with_name("saves.py"), slurm.work / "train.py")
    (slurm.work / "job.sbatch").write_text(RECIPE.replace(TORCHRUN_OPTIONS, RUN_OPTIONS))
    job = slurm.submit("--exclusive", "--requeue", "--time=60", "job.sbatch")
    slurm.until_said(job, " of 4 trains", LONG_S, times=4)
    (slurm.work / "urgent.sbatch").write_text("#!/bin/bash\nsrun sleep 1\n")
    slurm.submit("--partition=high", "--exclusive", "--nodes=4", "urgent.sbatch")
    slurm.until_said(job, " DUE TO PREEMPTION", LONG_S)
    assert_all_saved_once(slurm.output(job))


@pytest.mark.soak
def test_a_job_that_is_interrupted_before_its_agents_have_begun_is_requeued(slurm):
    slow = f"{sys.executable} -c 'print(\"imports\", flush=True); import time; time.sleep(300)'"
    job = Job(slurm, RUN, edit=lambda text: text.replace("    rdzv run auto", f"    {slow} rdzv run auto"))
    slurm.until_said(job.id, "imports", LONG_S, times=4)
    slurm.run("scancel", "--signal=TERM", job.id)
    slurm.until(lambda: job.fields["Restarts"] == "1", "the job is requeued", LONG_S, job.id)


@pytest.mark.soak
def test_a_job_without_the_program_fails_at_once(slurm):
    job = Job(slurm, RUN, edit=lambda text: text.replace("    rdzv run auto", "    no-such-program run auto"))
    over = slurm.until_over(job.id, LONG_S)
    assert (over["JobState"], over["ExitCode"], over["Restarts"]) == ("FAILED", "2:0", "0"), job.report()


@pytest.mark.soak
@each_script
def test_a_job_saves_when_it_is_preempted_and_is_requeued(slurm, script):
    job = Job(slurm, script, "--exclusive")
    job.until_trained(4)
    (slurm.work / "urgent.sbatch").write_text("#!/bin/bash\nsrun sleep 1\n")
    urgent = slurm.submit("--partition=high", "--exclusive", "--nodes=4", "urgent.sbatch")
    slurm.until(lambda: slurm.job(urgent)["JobState"] == "COMPLETED", "the urgent job has run", LONG_S, job.id)
    job.until_requeued()
    saved = int((slurm.work / "saved").read_text())
    assert job.until_trained(4, times=2) >= saved - 1
    assert_completed(job, restarts=1)


@pytest.mark.soak
@each_script
def test_after_the_loss_of_the_first_node_the_others_have_the_job_requeued(slurm, script):
    def impatient(text):
        settings = ("join_timeout=10", "outage_grace=10")
        more = "".join(f",{one}" if script == TORCHRUN else f" --conf {one}" for one in settings)
        assert 'journal_dir="$journal"' in text
        return text.replace('journal_dir="$journal"', f'journal_dir="$journal"{more}')

    job = Job(slurm, script, edit=impatient)
    job.until_trained(4)
    slurm.kill_node("n0", silent=True)
    slurm.until(lambda: job.fields["Restarts"] == "1", "the job is requeued", LONG_S, job.id)
    slurm.start_node("n0")
    job.until_requeued()
    job.until_trained(4, times=2)
    assert_completed(job, restarts=1)


@pytest.mark.soak
def test_a_program_that_fails_is_not_run_again_and_again(slurm):
    job = Job(slurm, RUN, edit=lambda text: text.replace("--max-restarts 100", "--max-restarts 0"))
    job.until_trained(4)
    over = job.finish(code=3)
    assert (over["JobState"], over["ExitCode"], over["Restarts"]) == ("FAILED", "4:0", "0"), job.report()
    assert re.search(r"rdzv: the run failed: n\d gave up: rank \d: exit code 3", slurm.output(job.id))


@pytest.mark.soak
def test_a_job_that_a_user_cancels_is_not_requeued(slurm):
    job = Job(slurm, RUN)
    job.until_trained(4)
    slurm.run("scancel", job.id)
    assert slurm.until_over(job.id, LONG_S)["JobState"] == "CANCELLED"
    slurm.until(lambda: not slurm.run("squeue", "--noheader"), "nothing is left", LONG_S, job.id)
    assert job.fields["Restarts"] == "0"


@pytest.mark.soak
def test_without_no_kill_for_the_step_slurm_ends_it_when_it_notices_the_loss(slurm):
    job = Job(slurm, RUN, edit=lambda text: text.replace("srun --no-kill", "srun"))
    job.until_trained(4)
    slurm.kill_node("n2")
    slurm.until_said(job.id, "Force Terminated StepId", LONG_S)
    slurm.until(lambda: job.fields["Restarts"] == "1", "the script has it requeued", LONG_S, job.id)


@pytest.mark.soak
def test_the_line_of_the_readme_is_enough_to_form_a_job(slurm):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    (line,) = re.findall(r"^srun .*torchrun .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (slurm.work / TORCHRUN).write_text(f"#!/bin/bash\n{line}\n")
    job = Job.__new__(Job)
    job.slurm, job.id = slurm, slurm.submit("--nodes=4", "--ntasks-per-node=1", TORCHRUN)
    job.until_trained(4)
    assert job.finish()["JobState"] == "COMPLETED"


# ---- without Slurm


def test_the_scripts_differ_only_in_the_program_that_they_start():
    lines = [(SCRIPTS / script).read_text().splitlines() for script in (TORCHRUN, RUN)]
    different = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert [pair[0].split()[0] for pair in different] == ["#", "torchrun", "--nnodes=2:4"]


@each_script
def test_the_page_explains_each_option_of_the_scripts(script):
    text = (SCRIPTS / script).read_text()
    assert text.startswith("#!/bin/bash\n")
    used = set(re.findall(r"^#SBATCH (--\S+?)(?:=.*)?$", text, re.MULTILINE))
    of_srun = re.search(r"^srun (.*) bash", text, re.MULTILINE)[1]
    used |= {f"srun {option}" for option in re.findall(r"--[a-z-]+(?:=0)?", of_srun)}
    section = (ROOT / "docs" / "torchrun.md").read_text().partition("\n## Slurm\n")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `((?:srun )?--[a-z-]+(?:=0)?)", section, re.MULTILINE))
    assert used == explained


STAY = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --no-kill
srun --no-kill --kill-on-bad-exit=0 --wait=0 python stay_ddp.py auto --nnodes 2:3 --steps 200
"""


@pytest.mark.soak
def test_processes_that_stay_are_members_under_srun_itself_and_go_on_without_a_lost_one(slurm):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    shutil.copy(ROOT / "examples" / "stay_ddp.py", slurm.work)
    (slurm.work / "stay.sbatch").write_text(STAY)
    job = slurm.submit("stay.sbatch")
    for rank in range(3):
        slurm.until_said(job, f"round 1: rank {rank} of 3, from step 0")
    slurm.until_said(job, "step 20: loss")
    slurm.kill_tasks("n2")  # The process on n0 serves.
    slurm.until_said(job, "of 2, from step ", times=2)
    slurm.until_said(job, "done at step 200", times=2)
    said = slurm.output(job)
    assert "from step 0" not in "".join(line for line in said.splitlines() if " of 2, " in line), said
