"""Stories of runs, told by commands and the exact output: tests/transcripts/*.txt.

`pytest --rewrite` writes what happened instead of comparing it. Read the diff, and keep it only if you understand it.

A transcript is a list of blocks: some commands, a line `----`, what came of them, an empty line. Lines that begin with
`#` before the commands are for the reader. The commands are the methods of `Teller`. Of a write of the head the fields
are shown that it changed, so that what it did not touch is not in the way.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from rdzv.core.acts import Evict, Seal, Sweep, Verdict, WriteHead
from rdzv.core.model import DrainNotice, Era, Head, Reach, RunSettings
from rdzv.core.status import describe
from rdzv.core.view import View
from support.rule_story import Story

TRANSCRIPTS = sorted((Path(__file__).parent.parent / "transcripts").glob("*.txt"))
assert len(TRANSCRIPTS) >= 8, "they are found"
_SHOWN = [
    "run", "era", "next_era", "number", "phase", "table", "size", "boot", "call", "adopted", "top", "grown", "flaps", "flapped",
    "notice", "reach",
]  # fmt: skip


class Teller:
    """Runs the commands of one transcript. A command's method returns the lines to show, if any."""

    def __init__(self) -> None:
        self.story = Story(RunSettings(min_nodes=1, max_nodes=1))

    def run(self, *words: str) -> None:
        """`run min=2 max=4 settle=1`: begin, with these settings. `forgetful` is an engine that can come back empty."""
        given = dict(word.split("=") for word in words if word != "forgetful")
        linger = given.pop("linger", "0")
        named = {{"min": "min_nodes", "max": "max_nodes"}.get(name, name): value for name, value in given.items()}
        self.story = Story(durable="forgetful" not in words, settings=msgspec.convert(named, RunSettings, strict=False))
        self.story.linger_s = float(linger)

    def join(self, *names: str) -> None:
        """`join a b`: as new members."""
        for name in names:
            self.story.join(name)

    def ready(self, *names: str) -> None:
        """`ready a`: its workers have stopped, and it wants to be in the next round."""
        for name in names:
            self.story.ready(name)

    def die(self, *names: str) -> None:
        """`die a`: its lease ends."""
        for name in names:
            self.story.die(name)

    def kill(self, *names: str) -> None:
        """`kill a`: its process ends, which only the engine sees; its lease goes on."""
        for name in names:
            self.story.kill(name)

    def sick(self, reason: str, *names: str) -> None:
        """`sick 'bad disk' a`: the check of its node fails, before it says ready or as it comes."""
        for name in names:
            if name not in self.story.people:
                self.story.join(name, unhealthy=reason)
            else:
                self.story.ready(name, unhealthy=reason)

    def drain(self, reason: str, *names: str) -> None:
        """`drain SIGTERM a b`: they say that they are about to go."""
        for name in names:
            self.story.put(name, drain=reason)

    def saved(self, *names: str) -> None:
        """`saved a b`: all workers of these members have answered the notice that runs."""
        assert self.story.head is not None
        for name in names:
            self.story.put(name, saved=self.story.head.call_seq)

    def grace(self, seconds: str, *names: str) -> None:
        """`grace 20 a`: it has so long until its platform kills it."""
        for name in names:
            self.story.put(name, grace=float(seconds))

    def reached(self, step: str, *names: str) -> None:
        """`reached 7 a`: its workers got so far in the round that it has given up, as it says with `ready`."""
        for name in names:
            self.story.put(name, reached=int(step))

    def done(self, *names: str) -> None:
        """`done a`: its work succeeded; it waits for the others."""
        for name in names:
            self.story.put(name, done=True)

    def leave(self, *names: str) -> None:
        """`leave a`: it goes; if it was done, its entry says so, else that it went."""
        for name in names:
            record = self.story.members[self.story.people[name].id].record
            mark = {"done": True} if record.done else {"went": record.drain or "no reason was given"}
            self.story.go(name, **mark)

    def fail(self, reason: str, *names: str) -> None:
        """`fail 'exit code 1' a`: it gives up for good."""
        for name in names:
            self.story.go(name, gave_up=reason)

    def ask(self, reason: str, name: str) -> None:
        """`ask maintenance a`: an operator asks it to drain."""
        self.story.ask(name, reason)

    def ban(self, reason: str, name: str) -> None:
        """`ban 'bad memory' a`: an operator bans its host."""
        self.story.ban(f"node-{name}", reason)

    def forget(self) -> None:
        """The engine restarts and knows nothing."""
        self.story.forget()

    def back(self, *names: str) -> list[str]:
        """`back a b`: they come to the emptied engine and tell."""
        return [f"{name}: {self.story.back(name)}" for name in names]

    def lead(self) -> list[str]:
        """The leader looks until there is nothing to do."""
        lines: list[str] = []
        for view, verdict in self.story.rest():
            lines += _shown(view, verdict)
        return lines or ["nobody leads"]

    def inherit(self, *names: str) -> list[str]:
        """`inherit b c`: each of them asks whether the leader is dead, as members do that nobody leads."""
        lines: list[str] = []
        for name in names:
            before, view = set(self.story.members), self.story.view()
            verdict = self.story.inherit(name)
            lines += [f"{name} asks nothing"] if verdict is None else [f"{name}: {_shown(view, verdict)[0]}"]
            lines += [f"  {view.members[id].record.name} is gone" for id in before - set(self.story.members)]
        return lines

    def wait(self, seconds: str) -> list[str]:
        """`wait 30`: time passes, and the leader looks whenever it said it would."""
        lines: list[str] = []
        until = self.story.now + float(seconds)
        while True:
            looks = self.story.rest()
            for view, verdict in looks:
                # Where nothing was done, nothing is new: `lead` shows what is waited for.
                lines += _shown(view, verdict) if verdict.act is not None else []
            again = looks[-1][1].look_again_s if looks else None
            if again is None or self.story.now + again > until:
                break
            self.story.now += again
            lines.append(f"{self.story.now:g} s:")
        self.story.now = until
        return lines or ["nothing happens"]

    def members(self) -> list[str]:
        """All members look at the head and do what it says."""
        return [f"{name}: {self.story.notice(name)}" for name in sorted(self.story.people)]

    def status(self) -> list[str]:
        """The status, as people see it."""
        return [str(describe("job", self.story.view()))]


def _shown(view: View, verdict: Verdict) -> list[str]:
    act = verdict.act
    if isinstance(act, WriteHead):
        return [f"write: {verdict.reason}", *_changes(view.head, act.head)]
    if isinstance(act, Seal):
        ranks = sorted(act.entries.values(), key=lambda entry: entry.rank)
        listed = ", ".join(f"{entry.rank} {entry.name}" for entry in ranks)
        return [f"seal: {verdict.reason}", *_changes(view.head, act.head), f"  ranks: {listed}"]
    if isinstance(act, Evict):
        verb = "evict" if act.away_s is None else f"evict if away for {act.away_s:g} s"
        return [f"{verb}: {verdict.reason}", f"  {', '.join(view.members[id].record.name for id in act.ids)}"]
    if isinstance(act, Sweep):
        return [f"sweep: {verdict.reason}", f"  {', '.join(act.tables)}"]
    again = "" if verdict.look_again_s is None else f" (again in {verdict.look_again_s:g} s)"
    return [f"rest: {verdict.reason}{again}"]


def _changes(old: Head | None, new: Head) -> list[str]:
    """The changes of the head, field by field; the cause last, because it is long."""
    lines = []
    for field in _SHOWN:
        before, after = getattr(old, field, None), getattr(new, field)
        if before != after and (before is not None or after):
            was = "" if before is None else f"{_plain(before)} -> "
            lines.append(f"  {field}: {was}{_plain(after)}")
    if new.cause is not None and (old is None or new.cause != old.cause):
        about = f" {list(new.cause.members)}" if new.cause.members else ""
        lines.append(f"  cause: {new.cause.kind.value}{about} {new.cause.text}")
    return lines


def _plain(value: object) -> str:
    if isinstance(value, Era):
        return f"{value.level}@{value.id}"
    if isinstance(value, DrainNotice):
        return f"{value.limit_s:g} s for {value.drains}"
    if isinstance(value, Reach):
        return f"step {value.step}, {value.rounds} rounds without more" + (f" since {value.cause}" if value.cause else "")
    return str(getattr(value, "value", value)) or "''"


def blocks(text: str) -> list[tuple[str, str, str]]:
    """(what stands before them, commands, expected output) of each block."""
    found = re.findall(r"((?:^(?:#.*)?\n)*)((?:^[^#\n-].*\n)+)^----\n((?:.+\n)*)", text, re.MULTILINE)
    again = "".join(f"{before}{commands}----\n{output}" for before, commands, output in found)
    assert again == text, "not a transcript"
    return found


def tell(text: str) -> str:
    """The transcript with the output that comes of its commands."""
    teller, parts = Teller(), []
    for before, commands, _ in blocks(text):
        parts.append(f"{before}{commands}----\n")
        for command in commands.splitlines():
            verb, *words = shlex.split(command)
            parts += [f"{line}\n" for line in getattr(teller, verb)(*words) or ()]
    return "".join(parts)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
def test_the_story_goes_as_it_was_told(path, request):
    text = path.read_text()
    told = tell(text)
    if request.config.getoption("--rewrite"):
        path.write_text(told)
    else:
        assert told.splitlines() == text.splitlines()


@pytest.mark.parametrize("text", ["join a\n", "join a\n----", "----\n", "# only a remark\n"])
def test_what_is_not_a_transcript_is_not_taken_for_one(text):
    with pytest.raises(AssertionError, match="not a transcript"):
        blocks(text)


def test_a_story_that_goes_otherwise_is_noticed():
    told = tell(TRANSCRIPTS[0].read_text().replace("max=", "last_call=7 max="))
    assert told != TRANSCRIPTS[0].read_text()
