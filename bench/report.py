"""Makes tables, plots and verdicts from the results of the benchmarks: results.md and two SVG files beside the JSON files.

python bench/report.py [--out bench/results]

The goals are defined here. A goal that was not reached is marked NOT HELD.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from common import RESULTS, median
from threads import LIMIT_S

GROWTH_FROM = 250


class Rows:
    """The rows of all benchmarks."""

    def __init__(self, folder: Path) -> None:
        self.about: dict = {}
        self.rows: list[dict] = []
        for file in sorted(folder.glob("*.json")):
            book = json.loads(file.read_text("utf-8"))
            self.about[file.stem] = book["about"]
            self.rows += book["rows"]

    def find(self, bench: str, figure: str, **wanted: object) -> dict[int, float]:
        """Return the medians by n."""
        found = {}
        for row in self.rows:
            if row["bench"] == bench and row.get(figure) and all(row.get(name) == value for name, value in wanted.items()):
                found[row["n"]] = median(row[figure])
        return dict(sorted(found.items()))


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def exponent(by_n: dict[int, float], least: int = GROWTH_FROM) -> float | None:
    """Return the exponent of the power of n that fits best from that many members on."""
    points = [(math.log(n), math.log(value)) for n, value in by_n.items() if n >= least and value > 0]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


# ---- growth


def growth(rows: Rows) -> dict[tuple[str, str], float | None]:
    """Return the exponent of each cost, summed over all members."""
    found = {}
    for mode in ("cold", "warm", "again"):
        for figure in ("took_s", "client_cpu_s", "server_cpu_s", "requests", "bytes"):
            by_n = rows.find("form", figure, engine="embedded", mode=mode)
            if not figure.endswith("_s"):
                by_n = {n: value * n for n, value in by_n.items()}  # Counted per member.
            if by_n:
                found[mode, figure] = exponent(by_n)
    return found


# ---- verdicts


def verdicts(rows: Rows) -> list[tuple[str, str, str]]:
    """Return each goal, the measured value, and whether the goal was reached."""
    cold, warm = (rows.find("form", "took_s", engine="embedded", mode=mode) for mode in ("cold", "warm"))
    crowded = rows.find("form", "took_s", engine="embedded", mode="crowded")
    floor = rows.find("form", "took_s", engine="embedded", what="floor")
    lighthouse = rows.find("form", "took_s", what="lighthouse")
    threads, hosted, many, many_hosted = (
        {what: rows.find(bench, "took_s", what=what, mode=mode) for what in ("ours", "torch")}
        for bench in ("threads", "threads-peers")
        for mode in ("together", "hosted")
    )
    two = {what: rows.find("threads", "last_s", what=what, mode="late") for what in ("ours", "torch")}
    loop = rows.find("form", "last_s", engine="embedded", mode="late")
    shrunk = {what: rows.find("recover-peers", "shrunk_s", what=what, mode="collectives") for what in ("ours", "torch")}
    exponents = growth(rows)
    server_cpu = rows.find("form", "server_cpu_s", engine="embedded", mode="warm")
    served = server_cpu[1000] / 1000 if 1000 in server_cpu else None

    def idle(figure: str) -> float | None:
        return rows.find("steady", figure).get(10_000)

    table = [
        below("form warm, n=1,000: under 0.4 s", warm.get(1000), 0.4),
        times("form warm, n=1,000: at least 5 times faster than torchft's lighthouse", lighthouse, warm, 1000, 5),
        times("form warm, n=64: at least 1.1 times faster than torchft's lighthouse", lighthouse, warm, 64, 1.1),
        below("form warm, n=4,000: under 1.5 s", warm.get(4000), 1.5),
        below("form warm, n=10,000: under 4 s", warm.get(10_000), 4.0),
        below("form warm, exponent of time from 1,000 to 10,000: at most 1.1", exponent(warm, 1000), 1.1, plain),
        below("the same, with 20 processes for 1,000, too", exponent({10_000: warm.get(10_000, 0), **crowded}), 1.1, plain),
        below("form warm, n=1,000: server CPU per member at most 90 µs", served, 90e-6),
        below("10,000 idle members: at most 15 % of one core in the server", idle("server_cpu"), 0.15, plain),
        below("10,000 idle members: at most 8 KB each in the server", idle("kb_per_member"), 8.0, plain),
        below("form warm, exponent of bytes from 250 to 4,000: at most 1.15", exponents.get(("warm", "bytes")), 1.15, plain),
        below("form cold, n=1,000: under 1.2 s", cold.get(1000), 1.2),
        times("threads, n=64: at least 50 times faster than torch c10d", hosted["torch"], hosted["ours"], 64, 50),
        times("the same with a server process", threads["torch"], threads["ours"], 64, 50),
        *(
            times(asked, both["torch"], both["ours"], 128, 500, LIMIT_S)
            for asked, both in (
                ("threads, n=128: at least 500 times faster than torch c10d", many_hosted),
                ("the same with a server process", many),
            )
        ),
        below("two members in threads, last arrival until both have the world: under 5 ms", two["ours"].get(2), 0.005),
        below("the same in one event loop", loop.get(2), 0.005),
    ]
    for n in (64, 1000, 4000, 10_000):
        ratio = warm[n] / floor[n] if n in warm and n in floor else None
        table.append(below(f"form warm, n={n:,}: within 1.3 times of the floor", ratio, 1.3, plain))
    etcd = {what: rows.find("engines", "took_s", engine="etcd", **more) for what, more in ETCD.items()}
    ratio = etcd["ours"][1000] / etcd["floor"][1000] if 1000 in etcd["ours"] and 1000 in etcd["floor"] else None
    table.append(below("form on etcd, n=1,000: at most 3 times what bare etcd takes", ratio, 3, plain))
    racks = rows.find("racks", "rule_s").get(1000)
    table.append(below("ranks by racks, n=1,000 over 32 racks, 20 lost: the rule takes under 20 ms", racks, 0.02))
    table.append(times("recover: at least 8 times faster than torch's shrink", shrunk["torch"], shrunk["ours"], 3, 8))
    asked = "torchrun, unchanged scripts: kill -9 until the survivors train again with collectives, at most 2.8 s"
    table.append(below(asked, rows.find("recover", "shrunk_s", what="ours", mode="collectives").get(3), 2.8))
    parts = ("shrunk", "beheaded", "grown", "drained")
    stays = {part: rows.find("stay", f"{part}_s", mode="linger 1 s").get(3) for part in parts}
    table.append(below("processes that stay: kill -9 until the next all-reduce, at most 0.5 s", stays["shrunk"], 0.5))
    table.append(below("processes that stay: the same for the one that leads, at most 0.5 s", stays["beheaded"], 0.5))
    table.append(below("processes that stay: a newcomer interrupts the others for at most 0.1 s", stays["grown"], 0.1))
    table.append(below("processes that stay: a drained one interrupts the others for at most 0.1 s", stays["drained"], 0.1))
    figures = ("took_s", "told_s", "shrunk_s", "whole_s")
    quorum = {figure: rows.find("quorum", figure, engine="quorum").get(4) for figure in figures}
    table.append(below("quorum, four hosts: torchrun from nothing to the first world, at most 6 s", quorum["took_s"], 6.0))
    table.append(below("quorum: a killed agent is noticed within 1 s", quorum["told_s"], 1.0))
    table.append(below("etcd: a killed agent is noticed within 1 s", rows.find("quorum", "told_s", engine="etcd").get(4), 1.0))
    table.append(below("quorum: a lost host costs at most the lease (10 s) and 5 s", quorum["shrunk_s"], 15.0))
    table.append(below("quorum: a host that is back is in the round within 15 s", quorum["whole_s"], 15.0))
    table += [survival(rows, "torch's idle job notices no loss", "idle", "shrunk_s")]
    table += [survival(rows, "torch's job with collectives does not survive growing", "collectives", "grown_s")]
    return table


ETCD = {"ours": {"mode": "warm"}, "floor": {"what": "floor"}}
MISSING = ("-", "not measured")


def plain(value: float) -> str:
    return f"{value:.2f}"


def below(asked: str, value: float | None, limit: float, show: Callable[[float], str] = seconds) -> tuple[str, str, str]:
    if value is None:
        return asked, *MISSING
    return asked, show(value), "held" if value <= limit else "NOT HELD"


def times(
    asked: str, theirs: dict[int, float], ours: dict[int, float], n: int, least: float, limit_s: float = math.inf
) -> tuple[str, str, str]:
    """Compare two times. `limit_s` is the time after which theirs was given up."""
    if n not in theirs or n not in ours:
        return asked, *MISSING
    ratio = theirs[n] / ours[n]
    their = f"theirs {seconds(theirs[n])}" if theirs[n] < limit_s else f"theirs was not done in {seconds(theirs[n])}"
    shown = f"{ratio:.3g} times ({seconds(ours[n])}, {their})"
    return asked, shown, "held" if ratio >= least else "NOT HELD"


def survival(rows: Rows, asked: str, mode: str, figure: str) -> tuple[str, str, str]:
    """Compare a case that torch does not survive and rdzv does, in the same run."""
    found = {row["what"]: row for row in rows.rows if row["bench"] == "recover-peers" and row.get("mode") == mode}
    if not {"ours", "torch"} <= found.keys():
        return asked, *MISSING
    lost = found["torch"]
    shown = seconds(median(lost[figure])) if lost[figure] else f"not within {lost['limit_s']:g} s"
    ours = seconds(median(found["ours"][figure])) if found["ours"][figure] else "neither do we"
    return asked, f"torch: {shown}; ours: {ours}", "shown" if not lost[figure] and found["ours"][figure] else "NOT SHOWN"


# ---- texts


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(line)} |" for line in lines), ""]


def cell(name: str, value: object) -> str:
    if value in (None, []):
        return "-"
    if isinstance(value, str):
        return value
    return seconds(median(value)) if name.endswith("_s") else f"{median(value):.4g}"


def everything(rows: Rows) -> list[str]:
    """Return one table per benchmark, with a column for each figure of its rows."""
    text = []
    for bench in dict.fromkeys(row["bench"] for row in rows.rows):
        mine = [row for row in rows.rows if row["bench"] == bench]
        columns = [name for name in dict.fromkeys(name for row in mine for name in row) if name != "bench"]
        columns = [name for name in columns if any(row.get(name) not in (None, []) for row in mine)]
        head = [name.removesuffix("_s").replace("_", " ") for name in columns]
        text += [f"## {bench}", "", *table(head, [[cell(name, row.get(name)) for name in columns] for row in mine])]
    return text


def write(folder: Path) -> None:
    rows = Rows(folder)
    about = next(iter(rows.about.values()))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    marks = verdicts(rows)
    text = ["# Results", "", f"{about['machine']}; {about['system']}; Python {about['python']}; {versions}."]
    runs = [f"{name}: {one['stamp']}, commit {one['commit']}, load {one['load']:.1f}" for name, one in rows.about.items()]
    text += ["", "; ".join(runs) + ".", "", "## Asked and measured", "", *table(["asked", "measured", ""], marks)]
    lines = [
        [mode, figure.removesuffix("_s"), "-" if value is None else plain(value)]
        for (mode, figure), value in growth(rows).items()
    ]
    text += ["## Growth", "", f"From {GROWTH_FROM} members on, the cost of all together grows as n to this power.", ""]
    text += table(["mode", "cost", "exponent"], lines)
    (folder / "results.md").write_text("\n".join(text + everything(rows)), encoding="utf-8")
    for asked, measured, held in marks:
        print(f"{held:13} {asked}: {measured}")
    for mode, figure, value in lines:
        print(f"{'exponent':13} {mode} {figure}: {value}")
    from plots import draw  # noqa: PLC0415  The verdicts do not need matplotlib.

    draw(rows, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(RESULTS))
    write(Path(parser.parse_args().out))


if __name__ == "__main__":
    main()
