"""The first failure of a worker, in words: how it ended, and the last exception that it showed. Pure."""

from __future__ import annotations

import re
import signal

import msgspec

from ..printable import shown

EXCEPTION_MAX = 300
"""Characters of an exception in a sentence. It becomes part of the reason that all members are told."""
ERROR_FILE_MAX = 1 << 20
"""Bytes of an error file that are read."""
_TRACEBACK = re.compile(r"^(?P<prefix>.*)Traceback \(most recent call last\):\s*$", re.MULTILINE)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")
"""The line that names an exception: `ValueError: bad`, or a name alone. Lines of the stack are indented."""


class Failure(msgspec.Struct, frozen=True):
    """A worker that failed before any other of its node."""

    rank: int
    local_rank: int
    pid: int
    code: int
    """As the operating system tells it: -n if signal n ended the worker."""
    exception: str = ""
    log: str = ""
    """The file with its stderr, if there is one."""

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def reason(self) -> str:
        """The failure in a few words, for the other members."""
        return f"rank {self.rank}: {end_in_words(self.code)}{f': {self.exception}' if self.exception else ''}"

    @property
    def sentence(self) -> str:
        """The failure for the person who reads the output of this node."""
        log = f", log {self.log}" if self.log else ""
        return f"the program failed: {self.reason} (local rank {self.local_rank}, pid {self.pid}{log})"


def end_in_words(code: int) -> str:
    """Return how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_exception(stderr: str) -> str:
    """Return the line of the last Python traceback that names the exception; empty if there is no traceback."""
    headers = list(_TRACEBACK.finditer(stderr))
    if not headers:
        return ""
    # torch puts `[rank0]: ` before each line, and Python puts bars before the exceptions of a group.
    prefix = headers[-1]["prefix"]
    for line in stderr[headers[-1].end() :].splitlines():
        text = line.removeprefix(prefix).rstrip()
        if _EXCEPTION.fullmatch(text):
            return shown(text, EXCEPTION_MAX)
    return ""


def exception_of_error_file(data: bytes) -> str:
    """Return the message of an error file, as torch's `record` writes it; empty if there is none that can be read."""
    try:
        message = msgspec.json.decode(data)["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, RecursionError):
        return ""
    return shown(str(text).strip().partition("\n")[0], EXCEPTION_MAX)
