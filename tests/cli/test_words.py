"""The quick reader of command lines, beside typer, which reads the same lines."""

from __future__ import annotations

import pytest
import typer

from rdzv.cli.main import make_app
from rdzv.cli.start import AGENTS, command_of
from rdzv.cli.words import read

COMMANDS = typer.main.get_command(make_app(AGENTS)).commands
UNDERSTOOD = [
    "run node1:29400 --run-id job --nnodes 2:4 -- python train.py --lr 3",
    "run --nnodes 1 -- true",
    "run --nnodes=1 --run-id=job node1 -- true -- -x",
    "run -c lease=4 --conf settle=1 --nnodes 2 node1 --conf=grow_every=0 -- a",
    "run --nnodes 1 --nproc-per-node auto --role trainer --max-restarts 3 --stop-timeout 2.5 -- a",
    "run --nnodes 1 --log-dir logs --tee --prefix -- a",
    "run --nnodes 1 --no-prefix --prefix --no-prefix -- a",
    "run --nnodes 1 --nnodes 2:3 --token-file f --tls-ca a --tls-cert b --tls-key c",
    "run --nnodes 1 --run-id= -- a",
    "join node1 --nnodes 2 --json",
    "join --nnodes 2 --run-id x",
    "serve",
    "serve --bind *:29400 --http 0.0.0.0:80 --http-name a --http-name b --allow-actions --actions-token-file t",
]
LEFT_TO_TYPER = [
    "run --help",
    "run node1 -- true",
    "run --nnods 1 -- true",
    "run --nnodes",
    "run --nnodes -- true",
    "run --nnodes 1 one two -- true",
    "run --nnodes 1 --max-restarts -1 -- true",
    "run --nnodes 1 --max-restarts three -- true",
    "run --nnodes 1 --stop-timeout 1e3 -- true",
    "run --nnodes 1 --tee=yes -- true",
    "join -cx=y --nnodes 1",
    "serve here",
]


def as_typer_reads(name: str, words: list[str]) -> dict:
    context = COMMANDS[name].make_context(name, list(words))
    values = {one: list(value) or None if isinstance(value, tuple | list) else value for one, value in context.params.items()}
    return {**values, **({"program": context.args} if name == "run" else {})}


@pytest.mark.parametrize("environ", [{}, {"RDZV_ENDPOINT": "node9", "RDZV_RUN_ID": "from-outside"}, {"RDZV_RUN_ID": ""}])
@pytest.mark.parametrize("line", UNDERSTOOD)
def test_it_reads_what_typer_reads(line: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    name, *words = line.split()
    found = read(command_of(name), words)
    assert found is not None
    assert found == as_typer_reads(name, words)


@pytest.mark.parametrize("line", LEFT_TO_TYPER)
def test_it_leaves_what_needs_an_explanation_to_typer(line: str):
    name, *words = line.split()
    assert read(command_of(name), words) is None


def test_every_parameter_of_a_command_of_agents_is_given_a_value():
    for name in AGENTS:
        assert {one.name for one in COMMANDS[name].params} - {"help"} | ({"program"} if name == "run" else set()) == set(
            read(command_of(name), ["--nnodes", "1"] if name != "serve" else [])
        )
