"""The folder for an agent's journal: torchrun's --log-dir if it is given, else the user's state folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import FrameType

from ..member.journal_file import state_folder


def journal_folder(frame: FrameType | None) -> str:
    """Return the folder for the agent that the caller makes; empty if there is none."""
    return log_folder_of_caller(frame) or state_folder(os.environ)


def log_folder_of_caller(frame: FrameType | None) -> str:
    """Return the folder for logs that was given to torch's launcher; empty if none was, or the caller is another.

    torch does not tell a handler, but its launcher has the configuration in a variable.
    """
    while frame is not None:
        config = frame.f_locals.get("config") if "config" in frame.f_code.co_varnames else None
        folder = getattr(getattr(config, "logs_specs", None), "root_log_dir", None)
        if isinstance(folder, str):
            # Without --log-dir, torch makes a temporary folder of this name, which nobody looks for after a bad night.
            path = Path(folder)
            made = path.name.startswith("torchelastic_") and path.parent == Path(tempfile.gettempdir())
            return "" if made or folder == os.devnull else str(path.absolute())
        frame = frame.f_back
    return ""
