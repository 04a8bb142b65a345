"""`rdzv` and `python -m rdzv`."""

from __future__ import annotations

import sys


def main() -> None:
    """The shell tools, if what they need is installed; a library user need not have it."""
    try:
        from .cli.main import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"rdzv: the shell tools need {error.name}: pip install 'rdzv[cli]'")
    app(prog_name="rdzv")


if __name__ == "__main__":
    main()
