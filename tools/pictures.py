"""Draw the pictures of docs/concepts.md and docs/architecture.md from the code's own tables: `python tools/pictures.py`.

The phases of a round and the stories of a join and a loss come from the transcripts of the rules, which tests compare with
what the rules do (tests/transcripts). A member's states come from the transition table. tests/test_site.py compares the
pictures with what this script draws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from rdzv.core.member_state import TRANSITIONS, Standing
from rdzv.core.model import Phase
from rdzv.core.rules import RULES, close_after_failure

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
TRANSCRIPTS = ROOT / "tests" / "transcripts"

# Middle tones, which can be read on white and on black: a viewer may have either.
INK, LINE, FILL = "#7a8699", "#7a8699", {"open": "#5b8def", "sealed": "#2e9e5b", "broken": "#d9534f", "closed": "#8a6fb0"}
FONT = "font-family='system-ui, sans-serif'"


def svg(width: int, height: int, *parts: str) -> str:
    """Return the file: its parts on a transparent ground."""
    arrow = (
        f"<defs><marker id='a' markerWidth='9' markerHeight='9' refX='8' refY='4' orient='auto'>"
        f"<path d='M0,0 L9,4 L0,8 z' fill='{LINE}'/></marker></defs>"
    )
    start = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
    return "\n".join([start, arrow, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", fill: str = INK, bold: bool = False) -> str:
    """Return one line of text."""
    weight = " font-weight='600'" if bold else ""
    look = f"{FONT} font-size='{size}' text-anchor='{anchor}' fill='{fill}'{weight}"
    return f"<text x='{x:g}' y='{y:g}' {look}>{escape(words)}</text>"


def box(x: float, y: float, words: str, fill: str, width: int = 110) -> str:
    """Return a rounded box with its name, around a point."""
    shape = f"<rect x='{x - width / 2:g}' y='{y - 18:g}' width='{width}' height='36' rx='9' fill='{fill}'/>"
    return shape + text(x, y + 5, words, anchor="middle", fill="#ffffff", size=15, bold=True)


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """Return an arrow along the points."""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = " stroke-dasharray='5 4'" if dashed else ""
    return f"<polyline points='{way}' fill='none' stroke='{LINE}' stroke-width='1.6' marker-end='url(#a)'{dash}/>"


# ---- the phases of a round


def phase_changes() -> dict[tuple[str, str], list[str]]:
    """Return every change of phase in the transcripts, with the reasons that the rules gave for it."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(TRANSCRIPTS.glob("*.txt")):
        reason = ""
        for line in file.read_text().splitlines():
            told = re.match(r"(?:write|seal|close): (.+)", line)
            reason = told[1] if told else reason
            change = re.match(r"  phase: (\w+) -> (\w+)", line)
            if change:
                found.setdefault((change[1], change[2]), []).append(reason)
    return found


PLACES = {"open": (90, 110), "sealed": (320, 110), "broken": (560, 110), "closed": (320, 250)}
"""Where each phase stands in the picture."""
WAYS: Mapping[tuple[str, str], tuple[tuple[tuple[float, float], ...], tuple[float, float], str]] = {
    ("open", "sealed"): (((145, 104), (265, 104)), (205, 70), "all are here,\nor last call over"),
    ("sealed", "broken"): (((375, 104), (505, 104)), (440, 70), "lost, left, failed,\na newcomer, a drain"),
    ("broken", "sealed"): (((560, 128), (560, 165), (360, 165), (345, 128)), (452, 184), "all who live are ready: next round"),
    ("sealed", "closed"): (((320, 128), (320, 232)), (352, 215), "all done"),
    ("broken", "closed"): (((590, 128), (590, 250), (375, 250)), (490, 268), "gave up, and no quorum"),
    ("open", "closed"): (((90, 128), (90, 250), (265, 250)), (175, 268), "closed by a person"),
}


def phases() -> str:
    """Draw the phases, with an arrow for every change that a transcript has, and for those that close a run."""
    closing = {(phase.value, "closed") for phase, rules in RULES.items() if phase is not None and close_after_failure in rules}
    known = set(phase_changes()) | closing
    missing = known - set(WAYS)
    if missing:
        raise SystemExit(f"transcripts have changes of phase that the picture has no way for: {missing}")
    parts = [box(*PLACES[phase.value], phase.value, FILL[phase.value]) for phase in Phase]
    for change in sorted(known):
        points, (x, y), words = WAYS[change]
        lines = words.split("\n")
        parts += [arrow(*points), *(text(x, y + 15 * n, line, size=12, anchor="middle") for n, line in enumerate(lines))]
    return svg(680, 290, text(20, 30, "The phases of a round", size=17, bold=True), *parts)


# ---- stories


def story(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield what happens in a transcript: the event, the phase afterwards, and the reason that the leader gives."""
    phase, passed = "", 0.0
    for step in (TRANSCRIPTS / f"{name}.txt").read_text().split("\n\n"):
        lines = [line for line in step.splitlines() if line and not line.startswith("#")]
        if "----" not in lines:
            continue
        asked, told = lines[: lines.index("----")], lines[lines.index("----") + 1 :]
        for line in told:
            change = re.match(r"  phase: (?:\w+ -> )?(\w+)", line)
            phase = change[1] if change else phase
        event = ", ".join(line for line in asked if line not in ("lead", "members", "status"))
        reasons = [line.partition(": ")[2] for line in told if re.match(r"(write|seal|rest|evict): ", line)]
        given = [f"{who}: {rank}" for who, rank in re.findall(r"^(\S+): given (rank \d)", "\n".join(told), re.MULTILINE)]
        if event.startswith("wait"):
            passed += float(event.split()[1])
        if given:
            yield "all members are told", phase, ", ".join(given)
        elif event and reasons:
            later = f"{passed:g} s later" if passed else ""
            what = "" if event.startswith("wait") else said(event)
            yield ": ".join(part for part in (later, what) if part), phase, re.sub(r" \(again in .+\)", "", reasons[0])
            passed = 0.0


def said(event: str) -> str:
    """Return the event of a transcript in words."""
    words = event.split()
    run = re.match(r"run min=(\d+) max=(\d+), (.+)", event)
    if run:
        return f"{run[1]} to {run[2]} nodes; {said(run[3])}"
    verbs = {"join": "joins", "die": "is killed", "ready": "has stopped its workers"}
    who = " ".join(words[1:])
    several = {"joins": "join"}.get(verbs.get(words[0], ""), verbs.get(words[0], words[0]))
    return f"{who} {verbs.get(words[0], words[0]) if len(words) == 2 else several}"


def tell(title: str, name: str, until: int) -> str:
    """Draw the first steps of a transcript, one below the other, with the phase of the run at each."""
    steps = list(story(name))[:until]
    parts, y = [text(20, 30, title, size=17, bold=True)], 70
    for number, (event, phase, reason) in enumerate(steps):
        if number:
            parts.append(arrow((345, y - 40), (345, y - 18)))
        parts += [
            text(275, y + 5, event, anchor="end"),
            box(345, y, phase, FILL[phase], 100),
            text(415, y + 5, reason),
        ]
        y += 58
    return svg(900, y - 20, *parts)


# ---- a member


STANDINGS = {"idle": (80, 90), "away": (330, 90), "present": (650, 90), "evicted": (650, 260), "ended": (330, 260),
    "leaving": (80, 260), "left": (80, 350)}  # fmt: skip
COLOURS = {"present": "#2e9e5b", "away": "#e0a030", "evicted": "#d9534f", "ended": "#8a6fb0"}


def edge(old: str, new: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of an arrow between two states, beside the straight line, so that there is room for one back."""
    (x, y), (to_x, to_y) = STANDINGS[old], STANDINGS[new]
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    right, down = (to_x - x) / length, (to_y - y) / length
    cut = min(50 / abs(right) if right else 999, 22 / abs(down) if down else 999)
    aside_x, aside_y = -down * 9, right * 9
    return (
        (x + right * cut + aside_x, y + down * cut + aside_y),
        (to_x - right * cut + aside_x, to_y - down * cut + aside_y),
    )


def member_states() -> str:
    """Draw a member's states, with an arrow for each pair in the transition table."""
    edges: dict[tuple[str, str], list[str]] = {}
    for standing, row in TRANSITIONS.items():
        for event, targets in row.items():
            for target in targets:
                if target is not standing and (target is not Standing.LEAVING or standing is Standing.IDLE):
                    edges.setdefault((standing.value, target.value), []).append(event.__name__)
    parts = [box(*STANDINGS[one.value], one.value, COLOURS.get(one.value, "#5b8def"), 90) for one in Standing]
    for (old, new), names in sorted(edges.items()):
        start, end = edge(old, new)
        parts.append(arrow(start, end))
        flat, back = abs(start[1] - end[1]) < 1, start[0] > end[0] + 1
        upward = start[1] > end[1] + 1 and not flat
        x, y = start[0] + (end[0] - start[0]) * 0.4, start[1] + (end[1] - start[1]) * 0.4
        anchor = "middle" if flat else "start" if upward else "end"
        shift = (0, -7 if back else 17) if flat else (8 if upward else -8, 0)
        parts.append(text(x + shift[0], y + shift[1], ", ".join(names), size=11, anchor=anchor))
    title = text(20, 30, "The states of a member", size=17, bold=True)
    return svg(760, 390, title, text(20, 52, "Leave leads from every state to leaving.", size=12), *parts)


PICTURES = {
    "phases.svg": phases,
    "join.svg": lambda: tell("A join: the first round of two to four nodes", "first_round", 5),
    "loss.svg": lambda: tell("A loss: one of four nodes is killed", "loss_and_regroup", 7),
    "member.svg": member_states,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
