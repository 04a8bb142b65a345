"""The entry point of `rdzv` and `python -m rdzv`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the shell tools."""
    from .cli.output import usable_stdout  # noqa: PLC0415  The package's users do without it.

    with usable_stdout():
        _run(sys.argv[1:])


def _run(words: list[str]) -> None:
    """Run a command, or name the missing package: users of the library need not install it."""
    from .cli.start import needed, start  # noqa: PLC0415

    if start(words):
        return
    try:
        from .cli.main import make_app  # noqa: PLC0415

        app = make_app(needed(words))
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"rdzv: the shell tools need {error.name}: pip install 'rdzv[cli]'")
    app(prog_name="rdzv")


if __name__ == "__main__":
    main()
