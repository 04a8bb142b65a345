"""Offers between hosts, on the peer port. Before a host's etcd has the port, this module answers there.

The question is an HTTP request, because etcd is a web server too: where etcd already runs, it answers that it does not know
the path. Then its list of members tells what its host has chosen, since their names contain the numbers.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ...system.dial import DialFailed, Resolver, connect
from ...system.timers import in_time
from .agreement import Offer

ASK_S = 2.0  # Timeout of one question, name resolution included.
MESSAGE_MAX = 64 * 1024
PATH = "/rdzv/quorum"
ACCEPT_AGAIN_S = 0.1
ASKERS_MAX = 64  # Connections that are answered at once. Five hosts ask several times a second, one request each.


class NoOffer(Exception):
    """A host made no offer. The text says why."""


class EtcdMember(msgspec.Struct, rename={"peer_urls": "peerURLs"}):
    """A member in etcd's own list, as its peer port shows it."""

    name: str = ""
    peer_urls: list[str] = []


_decode_offer = msgspec.json.Decoder(Offer).decode
_decode_members = msgspec.json.Decoder(list[EtcdMember]).decode


class Answering:
    """Answers questions at the peer port, until it is closed.

    It accepts connections itself, because a server of asyncio tells nobody of a connection before its TLS handshake is done.
    Such a connection would outlive the server.
    """

    def __init__(self, offer: Callable[[], Offer], context: ssl.SSLContext | None) -> None:
        self._offer = offer
        self._context = context
        self._listening: list[socket.socket] = []
        self._open: dict[asyncio.Task[None], socket.socket] = {}

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Begin to answer. The sockets listen, and are closed with this object."""
        for one in sockets:
            one.setblocking(False)
            self._listening.append(one)
            self._listen(one)

    async def close(self) -> None:
        """Close the port, and all connections: etcd needs the port at once."""
        while self._listening:
            listening = self._listening.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        answers = dict(self._open)
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        for sock in answers.values():
            sock.close()  # A task that was ended before it began has not closed it.

    def _listen(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept a connection. It is no coroutine: one that is ended while it accepts would lose the connection."""
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listening.accept()
        except OSError:  # The asker is gone already, or this process has no file descriptor left.
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_AGAIN_S, self._listen, listening)
            return
        if len(self._open) >= ASKERS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        task = loop.create_task(self._answer(sock), name="rdzv quorum: answer")
        self._open[task] = sock
        task.add_done_callback(self._open.pop)

    async def _answer(self, sock: socket.socket) -> None:
        """Answer one question, and close its connection."""
        with sock, suppress(OSError, asyncio.TimeoutError):
            await in_time(ASK_S, self._reply(Channel(sock, self._context)))

    async def _reply(self, channel: Channel) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            more = await channel.read()
            if not more or len(request) > MESSAGE_MAX:
                return
            request += more
        known = request.startswith(f"GET {PATH} ".encode())
        body = msgspec.json.encode(self._offer()) if known else b"unknown\n"
        status = "200 OK" if known else "404 Not Found"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await channel.write(head.encode() + body)
        await channel.end()


class Channel:
    """An accepted connection, with TLS or without.

    It is no transport of asyncio: one of these stays open for good if its task is ended just before the TLS handshake begins.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None if context is None else context.wrap_bio(self._received, self._to_send, server_side=True)

    async def read(self) -> bytes:
        """Return some bytes of the peer; none: it has sent all. The first call makes the handshake."""
        while self._tls is not None:
            try:
                return self._tls.read(MESSAGE_MAX)
            except ssl.SSLWantReadError:
                await self._send()
                data = await self._loop.sock_recv(self._sock, MESSAGE_MAX)
                if not data:
                    return b""
                self._received.write(data)
            except ssl.SSLZeroReturnError:
                return b""
        return await self._loop.sock_recv(self._sock, MESSAGE_MAX)

    async def write(self, data: bytes) -> None:
        """Send all of it."""
        if self._tls is None:
            await self._loop.sock_sendall(self._sock, data)
            return
        while data:
            data = data[self._tls.write(data) :]
            await self._send()

    async def end(self) -> None:
        """Say that nothing more comes, and wait until the peer closes: closing first could take back what it has not read."""
        self._sock.shutdown(socket.SHUT_WR)
        while await self._loop.sock_recv(self._sock, MESSAGE_MAX):
            pass

    async def _send(self) -> None:
        await self._loop.sock_sendall(self._sock, self._to_send.read())


class Asker:
    """Asks hosts for their offers."""

    def __init__(self, hosts: Sequence[tuple[str, int]], context: Callable[[], ssl.SSLContext | None]) -> None:
        """Take the peers' addresses, in the order of the list."""
        self._hosts = tuple(hosts)
        self._context = context
        self._resolver = Resolver()

    async def ask(self, index: int) -> Offer:
        """Return the offer that a host makes now. Raises NoOffer."""
        try:
            return await in_time(ASK_S, self._ask(*self._hosts[index]))
        except asyncio.TimeoutError:
            raise NoOffer(f"no answer within {ASK_S:g} s") from None
        except DialFailed as failed:
            raise NoOffer(failed.problem) from None
        except ssl.SSLError as error:
            raise NoOffer(f"no TLS: {(error.reason or str(error)).lower().replace('_', ' ')}") from None
        except OSError as error:
            raise NoOffer((error.strerror or str(error)).lower()) from None

    async def ask_agent(self, index: int) -> Offer | None:
        """Return the offer of a host whose agent answers, because it runs no etcd; None: no agent answers."""
        with suppress(asyncio.TimeoutError, DialFailed, OSError, msgspec.DecodeError, UnicodeDecodeError):
            code, body = await in_time(ASK_S, self._get(*self._hosts[index], PATH))
            return _decode_offer(body) if code == 200 else None
        return None

    async def runs_etcd(self, index: int) -> bool:
        """Whether an etcd answers at a host's peer port."""
        with suppress(asyncio.TimeoutError, DialFailed, OSError):
            return (await in_time(ASK_S, self._get(*self._hosts[index], "/members")))[0] == 200
        return False

    async def _ask(self, host: str, port: int) -> Offer:
        code, body = await self._get(host, port, PATH)
        try:
            if code == 200:
                return _decode_offer(body)
            code, body = await self._get(host, port, "/members")
            if code == 200:
                return self._chosen(_decode_members(body))
        except (msgspec.DecodeError, ValueError):
            pass
        raise NoOffer("another program has its peer port")

    def _chosen(self, members: list[EtcdMember]) -> Offer:
        """Return the offer of a host whose etcd runs. ValueError: it is no member of ours."""
        numbers = dict.fromkeys(self._hosts, "")
        quorums = set()
        for member in members:
            parts = urlsplit(member.peer_urls[0] if member.peer_urls else "")
            quorum, _, number = member.name.partition("-")
            quorums.add(quorum)
            numbers[parts.hostname or "", parts.port or 0] = number
        if len(quorums) != 1:
            raise ValueError("not a quorum of rdzv")
        return Offer(quorums.pop(), tuple(numbers.values()), chosen=True)

    async def _connect(self, host: str, port: int) -> socket.socket:
        addresses = await self._resolver.resolve(host, port, ASK_S)
        for address in addresses[:-1]:
            with suppress(DialFailed):
                return await connect(address, ASK_S)
        return await connect(addresses[-1], ASK_S)

    async def _get(self, host: str, port: int, path: str) -> tuple[int, bytes]:
        """Return status code and body of an HTTP request. Raises DialFailed, OSError."""
        sock = await self._connect(host, port)
        context = self._context()
        try:
            options: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": host}
            reader, writer = await asyncio.open_connection(sock=sock, limit=MESSAGE_MAX, **options)
        except BaseException:
            sock.close()
            raise
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            # By the length that it tells: etcd was seen to leave the connection open after its reply.
            size = re.search(rb"\r\ncontent-length: *([0-9]{1,5})\r\n", head, re.IGNORECASE)
            body = await reader.readexactly(int(size[1])) if size else b""
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return 0, b""
        finally:
            writer.close()
        words = head.split(b" ", 2)
        return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body
