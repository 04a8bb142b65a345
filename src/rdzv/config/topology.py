"""Where this node is in the network: a path such as `block/rack`, from a setting, a file, a command or the environment."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..errors import SettingsError
from .settings import TABLE, Settings

FILE_MAX = 16 * 1024 * 1024  # Bytes: a hundred thousand nodes with long names.
COMMAND_S = 10.0
"""Longest time that the command may take."""
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
        words = shlex.split(command)
        done = subprocess.run(  # noqa: S603  The user's own command, without a shell.
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(f"{where} did not end within {COMMAND_S:g} s") from None
    except (OSError, ValueError, IndexError) as error:
        raise SettingsError(f"{where} cannot be run: {getattr(error, 'strerror', None) or error}") from None
    if done.returncode:
        said = done.stderr.strip().partition("\n")[0]
        raise SettingsError(f"{where} failed with exit code {done.returncode}{f': {said}' if said else ''}")
    path = done.stdout.strip().partition("\n")[0]
    if not path:
        raise SettingsError(f"{where} printed nothing: it must print the path of this node")
    return path
