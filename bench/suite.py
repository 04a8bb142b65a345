"""Runs all benchmarks, one after the other, and the report: `make bench`, or with --peers `make bench-peers`.

python bench/suite.py [--peers] [--only form ...] [--quick] [--out bench/results]

--peers measures only the cases that take torch minutes: 128 handlers once, and a job that loses a node three times. --quick
checks that everything works, with few members and repetitions; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from common import BENCH, RESULTS

STEPS = {
    "form": ["form.py"],
    "threads": ["threads.py"],
    "engines": ["engines.py"],
    "notice": ["notice.py"],
    "steady": ["steady.py"],
    "store": ["store.py"],
    "racks": ["racks.py"],
    "recover": ["recover.py", "--backend", "rdzv"],
    "stay": ["stay.py"],
    "quorum": ["quorum.py", "--first", "3", "--lost", "0"],
}
PEERS = {
    "threads": ["threads.py", "--name", "threads-peers", "--members", "128", "--hosted", "128"],
    "recover": ["recover.py", "--name", "recover-peers", "--turns", "3", "--limit", "120"],
}
QUICK = {
    "form": ["--members", "2", "4", "64", "--repeat", "1"],
    "threads": ["--members", "2", "4", "--hosted", "4", "--repeat", "1", "--torch-repeat", "1"],
    "engines": ["--etcd-members", "4", "--register-members", "8", "--repeat", "1"],
    "notice": ["--members", "3", "--repeat", "1"],
    "steady": ["--members", "10", "--idle", "3"],
    "store": ["--operations", "50", "--agents", "20", "--repeat", "1"],
    "racks": ["--members", "1000", "--repeat", "1"],  # With fewer, spares of the same rack could not replace those lost.
    "recover": ["--mode", "idle"],
    "stay": ["--linger", "0.1", "--repeat", "1", "--limit", "0"],
    "quorum": ["--first", "1", "--kills", "2"],
}
BUSY = 0.5
"""Load above which figures are unreliable."""
STEP_S = 3600
"""Longest time of a benchmark. All of them together take a quarter of an hour, those of the peers some minutes more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"this node is busy (load {load:.1f}): the figures will be too bad", flush=True)
    steps = PEERS if args.peers else STEPS
    failed = []
    began_at = time.monotonic()
    for name, command in steps.items():
        if name in args.only:
            words = [sys.executable, str(BENCH / command[0]), *command[1:], "--out", args.out]
            words += QUICK[name] if args.quick and not args.peers else []
            passed_s = time.monotonic() - began_at
            print(f"== {' '.join([*command, *words[len(command) + 3 :]])}, after {passed_s:.0f} s", flush=True)
            try:
                failed += [name] if subprocess.run(words, check=False, timeout=STEP_S).returncode else []
            except subprocess.TimeoutExpired:
                print(f"{name} is killed: it has not ended within {STEP_S} s", flush=True)
                failed.append(name)
    print(f"== report, after {time.monotonic() - began_at:.0f} s", flush=True)
    words = [sys.executable, str(BENCH / "report.py"), "--out", args.out]
    report = subprocess.run(words, check=False, timeout=STEP_S)
    if failed or report.returncode:
        sys.exit(f"failed: {', '.join(failed) or 'the report'}")


if __name__ == "__main__":
    main()
