"""Runs every Python block of the documents, or names the test that does."""

from __future__ import annotations

import re

import pytest

from support.ports import free_port
from test_docs import DOCUMENTS, ROOT, blocks

NAMES = {name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
BY_TEST = {
    "README.md": {"import threading": "test_the_example_of_the_readme_prints_what_the_readme_shows"},
    "docs/frameworks.md": {"# train_": "test_every_command_and_program_of_the_page_is_run_here"},
    "docs/howto.md": {"import rdzv": "test_the_program_of_the_how_to_runs_as_it_stands"},
    "docs/jax.md": {"import jax": "test_the_program_of_the_page_runs_on_two_nodes"},
    "docs/stay.md": {"import rdzv.torch": "test_the_page_shows_the_loop_of_the_example"},
}
"""Python blocks with a test of their own: their page, how they begin, and the test."""
AS_SHOWN = {
    "docs/api.md": {"import rdzv": "0 1 b'hello'\n"},
    "docs/etcd.md": {"rdzv.Rendezvous": "", "from rdzv.engines.etcd.server": "etcd\n"},
    "docs/howto.md": {"import os": "2.ckpt\n"},
    "docs/launcher.md": {"import torch.distributed": ""},
    "docs/migrate.md": {"from torch.distributed": "", "from rdzv.torchrun.rendezvous.c10d": "", "import rdzv": "",
        "from rdzv.torchrun.rendezvous import": ""},
    "docs/workers.md": {"import time": "", "import rdzv.torch": ""},
}  # fmt: skip
"""Python blocks that are run here, and what they print."""
BACKEND = """
from torch.distributed import HashStore
from rdzv.torchrun.rendezvous.dynamic_rendezvous import RendezvousBackend

class MyBackend(RendezvousBackend):
    name = "mine"
    def get_state(self): return None
    def set_state(self, state, token=None): return (state, 1, True)

store = HashStore()
"""
TRAINS = """
import torch.distributed as dist

dist.init_process_group("gloo")
start, steps = 0, 2
train = save = lambda step: None
"""
AROUND = {
    "rdzv.Rendezvous": ("import rdzv\n", ""),
    "import os": ("", "fence = 1\nsave(9, b'')\nfence = 2\nsave(2, b'')\nprint(newest().name)\n"),
    "import rdzv.torch": (TRAINS, "dist.destroy_process_group()\n"),
    "import torch.distributed": ("", "dist.destroy_process_group()\n"),
    "from rdzv.torchrun.rendezvous import": (BACKEND, ""),
}  # fmt: skip
"""What a block needs before it, and what is done with it, by how it begins."""
SHORTER = {"file:///shared/job.rdzv": "file://{folder}/job.rdzv", "min_nodes=2, max_nodes=4": "min_nodes=1, max_nodes=1",
    "STEPS = 1000": "STEPS = 2"}  # fmt: skip
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SHOWN = [(file.relative_to(ROOT).as_posix(), block) for file in DOCUMENTS for block in blocks(file, "python")]


def start_of(page, block):
    """How the block begins, by which the tables know it."""
    found = [start for start in (*BY_TEST.get(page, {}), *AS_SHOWN.get(page, {})) if block.startswith(start)]
    assert found, f"{page}: no test runs the block {block[:60]!r}: add it to AS_SHOWN"
    return max(found, key=len)


@pytest.mark.parametrize(("page", "block"), SHOWN, ids=[page for page, _ in SHOWN])
def test_a_python_block_is_run_here_or_by_another_test(page, block, tmp_path, monkeypatch, capsys):
    start = start_of(page, block)
    if start in BY_TEST.get(page, {}):
        assert BY_TEST[page][start] in NAMES
        return
    if "torch" in block:
        pytest.importorskip("torch.distributed", reason="torch is not installed: the extra `torch` brings it")
    before, after = AROUND.get(start, ("", ""))
    for old, new in SHORTER.items():
        block = block.replace(old, new.format(folder=tmp_path))
    for name, value in {**ALONE, "MASTER_PORT": str(free_port()), "CHECKPOINTS": str(tmp_path / "checkpoints")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    exec(compile(before + block + after, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == AS_SHOWN[page][start]


def test_the_tables_name_only_blocks_that_exist():
    named = {(page, start) for table in (BY_TEST, AS_SHOWN) for page, starts in table.items() for start in starts}
    assert named == {(page, start_of(page, block)) for page, block in SHOWN}
