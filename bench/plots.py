"""Two plots: time and cost of forming against the number of members."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

mpl.rcParams["svg.hashsalt"] = "rdzv"  # Equal figures give an equal file.
mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False

TIMES = (
    ("rdzv, cold", "form", {"mode": "cold", "engine": "embedded"}, "tab:blue", "o--"),
    ("rdzv, warm", "form", {"mode": "warm", "engine": "embedded"}, "tab:blue", "o-"),
    ("floor", "form", {"what": "floor"}, "tab:gray", "s:"),
    ("torchft lighthouse", "form", {"what": "lighthouse"}, "tab:orange", "^-"),
    ("rdzv, handlers in threads", "threads", {"what": "ours", "mode": "together"}, "tab:green", "o-"),
    ("torch c10d, handlers in threads", "threads", {"what": "torch", "mode": "together"}, "tab:red", "v-"),
    ("torch c10d, n=128", "threads-peers", {"what": "torch"}, "tab:red", "v"),
)
SIDES = (("rdzv, warm", {"mode": "warm", "engine": "embedded"}, "o-"), ("floor", {"what": "floor"}, "s:"))
COSTS = (
    ("bytes", "bytes per member", 1),
    ("requests", "requests per member", 1),
    ("client_cpu_s", "CPU of a member, ms", 1000),
    ("server_cpu_s", "CPU of the server per member, ms", 1000),
)


def draw(rows, folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 5))
    for label, bench, wanted, colour, style in TIMES:
        found = rows.find(bench, "took_s", **wanted)
        if found:
            axes.plot(found.keys(), found.values(), style, color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="members", ylabel="seconds until the last has its world")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, folder / "form.svg")
    figure, all_axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True)
    for (name, label, factor), axes in zip(COSTS, all_axes.flat, strict=True):
        for what, wanted, style in SIDES:
            found = rows.find("form", name, **wanted)
            per = {n: value * factor / (n if name.endswith("_s") else 1) for n, value in found.items()}
            axes.plot(per.keys(), per.values(), style, label=what)
        axes.set(xscale="log", title=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0][0].legend(frameon=False)
    for axes in all_axes[1]:
        axes.set_xlabel("members")
    _save(figure, folder / "cost.svg")


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
