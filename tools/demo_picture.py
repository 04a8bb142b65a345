"""Record `rdzv demo` and draw it as a terminal in which the lines appear as they came: `python tools/demo_picture.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from html import escape
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "demo.svg"
SPEED = 2.0
"""The picture takes this many times as long as the demo, so that one can read it."""
COLOURS = {"killed": "#ff7b72", "told": "#e3b341", "agree": "#7ee787"}


def draw(lines: list[str]) -> str:
    """Return the picture. Each line begins with the milliseconds since the start."""
    times = [int(line.split()[0]) for line in lines]
    height, whole_s = 44 + 19 * len(lines), (times[-1] - times[0]) / 1000 * SPEED + 4
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 760 {height}' width='760' height='{height}'>",
        f"<rect width='760' height='{height}' rx='8' fill='#0d1117'/>",
        "<g font-family='ui-monospace, monospace' font-size='13'>",
        "<text x='16' y='26' fill='#8b949e'>$ rdzv demo</text>",
    ]
    for number, (line, at) in enumerate(zip(lines, times, strict=True)):
        colour = next((value for word, value in COLOURS.items() if word in line), "#c9d1d9")
        share = (at - times[0]) / 1000 * SPEED / whole_s
        # Lines are visible without animation, and for viewers that show a picture as it stands.
        show = (
            f"<animate attributeName='opacity' values='0;0;1;1' keyTimes='0;{share:.4f};{min(share + 0.0001, 1):.4f};1' "
            f"dur='{whole_s:.1f}s' repeatCount='indefinite'/>"
        )
        shown = escape(line).replace("  ", "\u00a0 ")
        parts.append(f"<text x='16' y='{50 + 19 * number}' fill='{colour}'>{shown}{show}</text>")
    return "\n".join([*parts, "</g>", "</svg>", ""])


def main() -> None:
    """Run the demo, and write the picture with neutral host names."""
    done = subprocess.run([sys.executable, "-m", "rdzv", "demo"], capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stdout.splitlines() if re.match(r"\s*\d+ ms ", line)]
    FILE.write_text(draw([re.sub(r"[\w.-]+/(node\d)", r"\1", line) for line in lines]))


if __name__ == "__main__":
    main()
