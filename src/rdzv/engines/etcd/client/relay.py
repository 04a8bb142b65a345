"""gRPC in a helper process, for a process that was forked from one that had used gRPC.

gRPC's threads do not survive a fork, and a child that uses it hangs or crashes. But torch's own launcher forks agents, and its
parent may have used etcd before. So the forked process starts a fresh Python program that makes the gRPC calls, and sends it
each call over a socket. `RelayChannel` has the part of a gRPC channel that this package uses. The helper ends when the socket
does, so it never outlives the process that it works for.

A frame is four bytes of length and a msgpack array: the number of the call, the kind of message, and its arguments.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import msgspec

from ....system.fork import fork_lock, let_go_in_children
from ....system.processes import reap, start
from .channels import Files, open_channel
from .errors import NO_HELPER

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, str, list[Any]]).decode
_Metadata = Sequence[tuple[str, str]]


def _frame(number: int, kind: str, *args: object) -> bytes:
    data = _encode((number, kind, args))
    return len(data).to_bytes(4, "big") + data


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, str, list[Any]]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return _decode(await reader.readexactly(size))


# ---- in the forked process


class Relay:
    """The helper of one client, started with the first call and again if it has ended. Belongs to one event loop."""

    def __init__(self, files: Files | None) -> None:
        """`files`: the contents of the certificates; None without TLS."""
        self._files = files
        self._calls: dict[int, UnaryCall | StreamCall] = {}
        self._number = 0
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None
        """The task of the helper that calls are sent to."""
        self._tasks: set[asyncio.Task[None]] = set()
        """This one, and those that wait for the end of a former helper."""

    def start(self, call: UnaryCall | StreamCall) -> int:
        """Register a call, and return its number."""
        if self._serving is None:
            self._outbox = asyncio.Queue()
            self._serving = asyncio.get_running_loop().create_task(self._run(), name="rdzv relays gRPC")
            self._tasks.add(self._serving)
            self._serving.add_done_callback(self._tasks.discard)
        self._number += 1
        self._calls[self._number] = call
        return self._number

    def send(self, number: int, kind: str, *args: object) -> None:
        self._outbox.put_nowait(_frame(number, kind, *args))

    def forget(self, number: int) -> None:
        """End a call from this side."""
        if self._calls.pop(number, None) is not None:
            self.send(number, "cancel")

    async def close(self) -> None:
        """End the helper."""
        if self._serving is not None:
            self._serving.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Start a helper, and hand out what it says until it ends."""
        process, problem = None, "the helper process for gRPC has ended"
        try:
            process, ours = _open_helper()
            await self._read(*await asyncio.open_connection(sock=ours))
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            if process is None:
                problem = f"{NO_HELPER}: {error.strerror or error}"
        finally:
            # Before the process is waited for: the calls that end here are made again at once, and need another helper.
            self._serving = None
            ended, self._calls = self._calls, {}
            for call in ended.values():
                call.receive("end", ["UNAVAILABLE", problem])
            if process is not None:
                await reap(process)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_frame(0, "files", self._files))
        writing = asyncio.get_running_loop().create_task(self._write(writer), name="rdzv relays gRPC")
        try:
            while True:
                number, kind, args = await _read_frame(reader)
                call = self._calls.get(number)
                if call is not None:
                    if kind == "end":
                        del self._calls[number]
                    call.receive(kind, args)
        finally:
            writing.cancel()
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                writer.write(await self._outbox.get())
                await writer.drain()


def _open_helper() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a helper, and return it with our end of its socket. Raises OSError."""
    with fork_lock:  # A child with their end would hide the helper's death.
        ours, theirs = socket.socketpair()
        let_go_in_children(ours)
        with theirs:
            try:
                return _start_helper(theirs.fileno()), ours
            except OSError:
                ours.close()
                raise


def _start_helper(descriptor: int) -> subprocess.Popen[bytes]:
    program = f"from {__name__} import main; main({descriptor})"
    return start(
        [sys.executable, "-c", program],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


class RelayChannel:
    """The part of `grpc.aio.Channel` that the client uses, for one member of the cluster."""

    def __init__(self, relay: Relay, target: str) -> None:
        self._relay = relay
        self._target = target

    def unary_unary(self, method: str) -> Callable[..., UnaryCall]:
        def call(request: bytes, *, timeout: float, metadata: _Metadata | None) -> UnaryCall:
            return UnaryCall(self._relay, (self._target, method, request, timeout, metadata or []))

        return call

    def stream_stream(self, method: str) -> Callable[..., StreamCall]:
        def call(*, metadata: _Metadata | None) -> StreamCall:
            return StreamCall(self._relay, (self._target, method, metadata or []))

        return call

    async def close(self) -> None:
        await self._relay.close()


def _error(code: str, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class UnaryCall:
    """A call with one reply, to be awaited."""

    def __init__(self, relay: Relay, args: tuple[object, ...]) -> None:
        self._relay = relay
        self._reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._number = relay.start(self)
        relay.send(self._number, "unary", *args)

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._reply.__await__()

    def cancel(self) -> None:
        self._relay.forget(self._number)
        self._reply.cancel()

    def receive(self, kind: str, args: list[Any]) -> None:
        """Take the reply (`message`) or the error (`end`). The end also follows a reply."""
        if self._reply.done():
            return
        if kind == "message":
            self._reply.set_result(args[0])
        else:
            self._reply.set_exception(_error(args[0], args[1]))


class StreamCall:
    """A call with many messages in both directions."""

    def __init__(self, relay: Relay, args: tuple[object, ...]) -> None:
        self._relay = relay
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._status = ("OK", "")
        self._number = relay.start(self)
        relay.send(self._number, "stream", *args)

    async def read(self) -> Any:
        """Return the next message, or EOF after the last one of a stream that the server ended well."""
        message = await self._messages.get()
        if message is not None:
            return message
        if self._status[0] != "OK":
            raise _error(*self._status)
        return grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        self._relay.send(self._number, "write", message)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode[self._status[0]]

    async def details(self) -> str:
        return self._status[1]

    def cancel(self) -> None:
        self._relay.forget(self._number)

    def receive(self, kind: str, args: list[Any]) -> None:
        if kind == "message":
            self._messages.put_nowait(args[0])
        else:
            self._status = (args[0], args[1])
            self._messages.put_nowait(None)


# ---- in the helper


class _Helper:
    """Makes the calls that come by the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._files: Files | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, asyncio.Queue[bytes]] = {}

    async def run(self) -> None:
        """Serve until the other end closes the socket."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                self._take(*await _read_frame(self._reader))

    def _take(self, number: int, kind: str, args: list[Any]) -> None:
        if kind == "files":
            self._files = None if args[0] is None else Files(**args[0])
        elif kind == "unary":
            self._start(number, self._unary(number, *args))
        elif kind == "stream":
            self._streams[number] = asyncio.Queue()
            self._start(number, self._stream(number, *args))
        elif kind == "write" and number in self._streams:
            self._streams[number].put_nowait(args[0])
        elif kind == "cancel" and number in self._calls:
            self._calls[number].cancel()

    def _start(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        async def call() -> None:
            code, details = "OK", ""
            try:
                await work
            except grpc.aio.AioRpcError as error:
                code, details = error.code().name, error.details() or ""
            finally:
                self._calls.pop(number, None)
                self._streams.pop(number, None)
                self._tell(number, "end", code, details)

        self._calls[number] = asyncio.get_running_loop().create_task(call())

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = open_channel(target, self._files)
        return self._channels[target]

    async def _unary(self, number: int, target: str, method: str, request: bytes, timeout: float, metadata: Any) -> None:
        stub = self._channel(target).unary_unary(method)
        self._tell(number, "message", await stub(request, timeout=timeout, metadata=_pairs(metadata)))

    async def _stream(self, number: int, target: str, method: str, metadata: Any) -> None:
        call = self._channel(target).stream_stream(method)(metadata=_pairs(metadata))
        writing = asyncio.get_running_loop().create_task(self._write(call, self._streams[number]))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._tell(number, "message", message)
        finally:
            writing.cancel()
            call.cancel()

    async def _write(self, call: Any, messages: asyncio.Queue[bytes]) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await messages.get())

    def _tell(self, number: int, kind: str, *args: object) -> None:
        self._writer.write(_frame(number, kind, *args))


def _pairs(metadata: Sequence[Sequence[str]]) -> list[tuple[str, str]] | None:
    return [(name, value) for name, value in metadata] or None


def main(descriptor: int) -> None:
    """Run the helper program. It ignores signals to its group: the process that it works for may need it to leave."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        await _Helper(reader, writer).run()

    asyncio.run(serve())
    os._exit(0)  # Nothing is left to say, and closing gRPC takes time.
