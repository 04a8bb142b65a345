"""Where this node is in the network: a path such as `block/rack`, from a setting, a file, a command or the environment."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import SettingsError
from ..system.processes import start
from .settings import TABLE, Settings

FILE_MAX = 16 * 1024 * 1024  # Bytes: a hundred thousand nodes with long names.
COMMAND_S = 10.0
"""Longest time that the command may take."""
END_S = 1.0
"""How long to wait for the end of a command that was killed."""
OUTPUT_MAX = 64 * 1024
"""Most bytes that the command may print, to stdout and stderr together. A path has at most 256 characters."""
_decode = msgspec.json.Decoder(dict[str, str]).decode


def locate(settings: Settings, host: str) -> Settings:
    """Return the settings with the node's path, read from the file or asked from the command if one is given.

    The file is read, and the command run, once per member. Raises SettingsError.
    """
    if settings.topology_file:
        where = f"topology_file {settings.topology_file!r}"
        path = _from_file(settings.topology_file, where, host)
    elif settings.topology_command:
        where = f"topology_command {settings.topology_command!r}"
        path = _from_command(settings.topology_command, where)
    else:
        return settings
    try:
        return msgspec.structs.replace(settings, topology=TABLE["topology"].read(path))
    except (ValueError, TypeError):
        raise SettingsError(f"{where} gives the path {path!r}: it must be {TABLE['topology'].allowed}") from None


def _from_file(file: str, where: str, host: str) -> str:
    """Return the path of this host in a file of JSON, `{host: path}`."""
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(FILE_MAX + 1)
        if len(data) > FILE_MAX:
            raise SettingsError(f"{where} has more than {FILE_MAX} bytes")
        paths = _decode(data)
    except OSError as error:
        raise SettingsError(f"{where} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} is not JSON of the form {{host: path}}: {error}") from None
    return _of_host(paths, where, host)


def _of_host(paths: Mapping[str, str], where: str, host: str) -> str:
    for name in (host, host.partition(".")[0]):
        if name in paths:
            return paths[name]
    # A node without a path would be put last, away from its neighbours, and nobody would notice.
    raise SettingsError(f"{where} has no path for host {host!r}: add it")


def _from_command(command: str, where: str) -> str:
    """Return the first line that the command prints."""
    try:
        code, out, errors = _run(shlex.split(command))
    except subprocess.TimeoutExpired:
        raise SettingsError(f"{where} did not end within {COMMAND_S:g} s") from None
    except (OSError, ValueError, IndexError) as error:
        raise SettingsError(f"{where} cannot be run: {getattr(error, 'strerror', None) or error}") from None
    if len(out) + len(errors) > OUTPUT_MAX:
        raise SettingsError(f"{where} printed more than {OUTPUT_MAX} bytes: it must print the path of this node only")
    if code:
        said = _first_line(errors)
        raise SettingsError(f"{where} failed with exit code {code}{f': {said}' if said else ''}")
    path = _first_line(out)
    if not path:
        raise SettingsError(f"{where} printed nothing: it must print the path of this node")
    return path


def _run(words: list[str]) -> tuple[int | None, bytes, bytes]:
    """Run the command, and return its exit code, stdout and stderr. All that it has started is killed at the end."""
    deadline = time.monotonic() + COMMAND_S
    out, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        process = start(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # A group of its own, so that its children can be ended with it.
        )  # fmt: skip
        assert process.stdout is not None, "stdout is a pipe"
        assert process.stderr is not None, "stderr is a pipe"
        with process.stdout, process.stderr:
            try:
                selector.register(process.stdout, selectors.EVENT_READ, out)
                selector.register(process.stderr, selectors.EVENT_READ, errors)
                while selector.get_map() and len(out) + len(errors) <= OUTPUT_MAX:
                    ready = selector.select(deadline - time.monotonic())
                    if not ready:
                        raise subprocess.TimeoutExpired(words, COMMAND_S)
                    for pipe, _ in ready:
                        chunk = os.read(pipe.fd, OUTPUT_MAX)
                        pipe.data.extend(chunk)
                        if not chunk:
                            selector.unregister(pipe.fileobj)
                if not selector.get_map():
                    process.wait(max(0.0, deadline - time.monotonic()))
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # A program of another user, such as sudo, cannot be killed.
                    process.wait(END_S)
    return process.returncode, bytes(out), bytes(errors)


def _first_line(output: bytes) -> str:
    return output.decode(errors="replace").strip().partition("\n")[0].rstrip()
