"""Server and client without an event loop: bytes are passed from one to the other by hand, and the test moves the clock."""

from __future__ import annotations

from rdzv.engines.embedded.client_protocol import ClientProtocol
from rdzv.engines.embedded.frames import Hello
from rdzv.engines.embedded.server_core import ServerCore
from rdzv.engines.embedded.session import ServerSession
from rdzv.engines.embedded.trust import Trust
from support.embedded_server import FakeTransport


class Core(ServerCore):
    stalled = False
    time_s = 100.0

    def __init__(self, **options):
        self.turn, self.later = [], []
        super().__init__(**options)

    def now(self):
        return self.time_s

    def fence_floor(self):
        return 1

    def call_soon(self, callback):
        self.turn.append(callback)

    def end_turn(self):
        turn, self.turn = self.turn, []
        for callback in turn:
            callback()

    def call_later(self, delay_s, callback):
        self.later.append((delay_s, callback))


class Waiter:
    result = error = None

    def done(self):
        return self.result is not None or self.error is not None

    def set_result(self, result):
        self.result = result

    def set_exception(self, error):
        self.error = error


class Pair:
    """A client and the server's session for it."""

    def __init__(self, core, name="s", attempt=1, run_id="job", host="", **hello):
        self.core = core
        self.client = ClientProtocol("rdzv://x", 5.0, Trust(), core.now, Waiter)
        self.session = ServerSession(core)
        self.client.transport = FakeTransport()
        self.session.opened(FakeTransport(host))
        self.news, self.lost = [], []
        self.client.on_news = lambda watch, news: self.news.append((watch, news))
        self.client.on_lost = self.lost.append
        self.client.say_hello(Hello(run_id, name, attempt, **hello))
        self.exchange()
        self.welcome, self.refused = self.client._welcome.result, self.client._welcome.error

    def exchange(self):
        """Carry all bytes there and back."""
        for source, sink in ((self.client, self.session), (self.session, self.client)):
            data, source.transport.sent = b"".join(source.transport.sent), []
            sink.received(memoryview(data))

    def ask(self, frame):
        _, waiter = self.client.ask(frame)
        self.exchange()
        return waiter
