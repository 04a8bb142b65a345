"""The end of the workers when `rdzv run` is killed: no process can stop its children after SIGKILL, so another one does.

A shell beside the launcher reads the process groups of the workers from a pipe. The end of the pipe is the death of the
launcher, because no other process has its other end: the shell kills the groups. The kernel's own way (PR_SET_PDEATHSIG) is not
enough. It ends the worker but not the children of the worker, so a program behind a shell would go on.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

logger = logging.getLogger("rdzv.launch")

_PROGRAM = """
trap '' HUP INT TERM
groups=
while read -r group; do
    case $group in
        -*) left=; for one in $groups; do [ "-$one" = "$group" ] || left="$left $one"; done; groups=$left ;;
        *) groups="$groups $group" ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group"; done
"""
"""Signals to a whole job do not end the shell: the launcher may be killed while it still stops its workers."""


class OrphanKiller:
    """Kills process groups if this process ends before `close`."""

    def __init__(self) -> None:
        self._shell: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the shell. A machine without one is no reason to refuse the workers."""
        quiet = asyncio.subprocess.DEVNULL  # A reader of this process's output does not wait for the shell.
        try:
            self._shell = await asyncio.create_subprocess_exec(
                "sh", "-c", _PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
            )
        except (OSError, RuntimeError) as error:  # The latter: no room for a thread, which asyncio needs before Python 3.12.
            logger.warning("no shell could be started (%s): workers would outlive this process if it were killed", error)

    def add(self, group: int) -> None:
        """Have this process group killed, too."""
        if self._shell is not None and self._shell.stdin is not None:
            self._shell.stdin.write(b"%d\n" % group)

    def remove(self, group: int) -> None:
        """Let this process group go: it has ended."""
        self.add(-group)

    async def close(self) -> None:
        """End the shell. The groups have ended, and their numbers may soon be those of others."""
        shell, self._shell = self._shell, None
        if shell is not None:
            with suppress(ProcessLookupError):
                shell.kill()
            await shell.wait()
