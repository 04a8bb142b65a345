"""The handler, called as torch's agent calls it; several handlers in one process."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import store as store_util

from rdzv.config import secret
from rdzv.core.model import WorkerRanks
from rdzv.engines.memory import MemoryDriver
from rdzv.errors import Evicted, Unreachable
from rdzv.system.bootstrap import bind
from rdzv.torchrun import events, plugin
from rdzv.torchrun import handler as handler_module
from rdzv.torchrun.agent_store import TERMINAL
from support.ports import has_ipv6
from support.torchrun_jobs import ServeProcess, wait_for

LONG_S = 20.0
QUICK = {"last_call": "0.2", "settle": "0.1", "drain_settle": "0.1", "grow_every": "0", "lease": "2"}
_engines = itertools.count()


class Handlers:
    """Handlers of one run, each in its own thread, as if it were an agent."""

    def __init__(self, low, high, **conf):
        self.low, self.high, self.conf = low, high, conf
        self.endpoint = f"memory://handler-{next(_engines)}"
        self.stack = ExitStack()
        self.pool = self.stack.enter_context(ThreadPoolExecutor(8))
        self.slots = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def agent(self, run_id="job", **conf):
        given = {**QUICK, "timeout": 900, "slot": str(next(self.slots)), **self.conf, **conf}
        endpoint = given.pop("endpoint", self.endpoint)
        parameters = RendezvousParameters("rdzv", endpoint, run_id, self.low, self.high, "127.0.0.1", **given)
        handler = plugin.create_rdzv(parameters)
        self.stack.callback(handler.shutdown)
        return handler

    def next(self, *handlers):
        """Call next_rendezvous of all of them at once."""
        calls = [self.pool.submit(handler.next_rendezvous) for handler in handlers]
        return [call.result(LONG_S) for call in calls]

    def form(self, count, **conf):
        handlers = [self.agent(**conf) for _ in range(count)]
        return handlers, self.next(*handlers)


def finish(info):
    """Enter the last barrier, as an agent does whose workers have succeeded."""
    store_util.barrier(info.store, info.world_size, TERMINAL, LONG_S)


def child_failed(code=3, message=None):
    failed = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
    if message is not None:
        failed.message = message
    return ChildFailedError("train.py", {5: failed})


def address(info):
    return info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port


def test_torchs_event_handlers_hear_of_every_notice_of_a_round_and_of_a_failure(monkeypatch):
    heard = []
    monkeypatch.setattr(events, "construct_and_record_rdzv_event", lambda **fields: heard.append(fields))
    with Handlers(1, 2) as job:
        (a, b), _ = job.form(2)
        b.shutdown()
        wait_for(lambda: a.num_nodes_waiting() > 0)
    with Handlers(2, 2, timeout="0.3") as job, pytest.raises(RendezvousTimeoutError):
        job.next(job.agent(run_id="few"))
    messages = [one["message"] for one in heard if one["node_state"] is events.NodeState.RUNNING]
    for kind in ("present", "sealed: 2 nodes", "given", "broken", "left"):
        assert any(f": {kind}" in message for message in messages), (kind, messages)
    failed = [one["message"] for one in heard if one["node_state"] is events.NodeState.FAILED]
    assert any("waiting for 1 more" in message and message.endswith("[RDZV-E05]") for message in failed), failed


def test_workers_inherit_neither_secret_nor_password(monkeypatch):
    """torch copies the agent's environment for its workers, after the handler was made."""
    monkeypatch.setattr(secret, "_put_aside", {})
    monkeypatch.setattr(secret, "_passwords", {})
    monkeypatch.setenv("RDZV_TOKEN", "5f0c9b1e7a3d48268b1d3c5e7f9a0b2c")
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "a password")
    with Handlers(1, 1) as job:
        job.form(1)
        assert not {"RDZV_TOKEN", "RDZV_ETCD_PASSWORD"} & os.environ.keys()


def test_agents_are_given_one_world_and_a_store_that_rank_0_serves():
    with Handlers(2, 2) as job:
        handlers, infos = job.form(2)
        assert sorted(info.rank for info in infos) == [0, 1]
        assert {info.world_size for info in infos} == {2}
        assert len({address(info) for info in infos}) == 1
        host, port = address(infos[0])
        assert host == "127.0.0.1"
        client = TCPStore(host, port, None, False, wait_for_workers=False)
        client.set("k", "v")
        assert client.get("k") == b"v"
        assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
        assert handlers[0].use_agent_store
        assert (handlers[0].get_backend(), handlers[0].get_run_id()) == ("rdzv", "job")
        assert not handlers[0].is_closed()
        assert (os.environ["RDZV_RUN_ID"], os.environ["RDZV_ROUND"]) == ("job", "1")
        assert {str(handler._world.fence) for handler in handlers} == {os.environ["RDZV_FENCE"]}
        assert os.environ["RDZV_REASON"] == "this node came to join"


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_the_store_of_a_node_that_is_known_by_its_name_is_reached_in_both_families():
    bound = bind("some-name.example", (0, 0))
    store = handler_module._serve(bound.take_socket())
    assert store.host == "127.0.0.1", "a container without IPv6 has no other loopback"
    for host in ("127.0.0.1", "::1"):
        TCPStore(host, bound.port, None, False, wait_for_workers=False).set("k", host)
        assert store.get("k") == host.encode()


def test_a_loss_is_told_and_the_next_round_has_a_bootstrap_of_its_own():
    with Handlers(1, 2) as job:
        handlers, infos = job.form(2)
        first = next(h for h, info in zip(handlers, infos, strict=True) if info.rank == 0)
        other = next(h for h in handlers if h is not first)
        first.shutdown()
        wait_for(lambda: other.num_nodes_waiting() > 0)
        [info] = job.next(other)
        assert (info.rank, info.world_size) == (0, 1)
        assert address(info) != address(infos[0])
        assert os.environ["RDZV_REASON"].endswith("left: its work here is over")


def test_an_agent_whose_workers_failed_takes_the_others_into_a_new_round_and_nothing_stale_is_there():
    with Handlers(2, 2) as job:
        handlers, infos = job.form(2)
        TCPStore(*address(infos[0]), None, False, wait_for_workers=False).set("stale", "1")
        again = job.pool.submit(handlers[0].next_rendezvous)
        wait_for(lambda: handlers[1].num_nodes_waiting() > 0)
        info = job.next(handlers[1])[0]
        assert address(again.result(LONG_S)) == address(info) != address(infos[0])
        assert not TCPStore(*address(info), None, False, wait_for_workers=False).check(["stale"])


def test_one_bootstrap_port_is_free_again_for_the_next_round(free_port):
    with Handlers(1, 1, bootstrap_port=str(free_port)) as job:
        [handler], [info] = job.form(1)
        for _ in range(3):
            assert address(info) == ("127.0.0.1", free_port)
            [info] = job.next(handler)


def test_a_worker_of_rank_0_can_serve_instead(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with Handlers(1, 1) as job:
        [handler], [info] = job.form(1)
        assert not handler.use_agent_store
        with socket.create_server(address(info)) as server:
            assert server.getsockname() == address(info)


# ---- the end


def test_a_run_closes_when_all_are_done_and_a_spare_leaves_with_code_0():
    with Handlers(2, 2) as job:
        handlers, infos = job.form(2)
        spare = job.agent()
        waiting = job.pool.submit(spare.next_rendezvous)
        wait_for(lambda: len(handlers[0]._rendezvous.status().members) == 3)
        assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
        for call in [job.pool.submit(finish, info) for info in infos]:
            call.result(LONG_S)
        error = waiting.exception(LONG_S)
        assert isinstance(error, SystemExit)
        assert error.code == 0
        assert handlers[0].is_closed()
        assert all(handler.shutdown() for handler in [*handlers, spare])


def test_a_spare_of_a_program_that_goes_on_gets_torchs_error():
    with Handlers(1, 1) as job:
        [handler], [info] = job.form(1)
        waiting = job.pool.submit(job.agent(spare_exit="error").next_rendezvous)
        wait_for(lambda: len(handler._rendezvous.status().members) == 2)
        finish(info)
        with pytest.raises(RendezvousGracefulExitError, match="is closed: the only member of round 1 is done"):
            waiting.result(LONG_S)


def test_whether_torch_handles_its_own_error_is_tried(monkeypatch):
    assert handler_module.torch_handles_graceful_exit() is False, "torch handles it now: update the docs"
    monkeypatch.setattr(SimpleElasticAgent, "run", lambda self: RunResult(state=WorkerState.SUCCEEDED))
    assert handler_module.torch_handles_graceful_exit() is True
    monkeypatch.setattr(SimpleElasticAgent, "run", lambda self: 1 / 0)
    assert handler_module.torch_handles_graceful_exit() is False


def test_an_agent_that_comes_to_a_closed_run_is_no_spare():
    with Handlers(1, 1) as job:
        [handler], [info] = job.form(1)
        finish(info)
        with pytest.raises(RendezvousClosedError, match="run 'job' is closed: the only member of round 1 is done"):
            job.agent().next_rendezvous()
        handler.shutdown()


def test_an_agent_out_of_restarts_closes_a_run_that_cannot_go_on_and_the_others_are_told_its_rank_and_exit_code():
    with Handlers(2, 2) as job:
        handlers, _ = job.form(2)
        try:
            raise child_failed()
        except ChildFailedError:
            handlers[0].shutdown()
        wait_for(lambda: handlers[1].num_nodes_waiting() > 0)
        assert handlers[1].is_closed()
        with pytest.raises(RendezvousClosedError, match="gave up: rank 5 failed: exit code 3; 1 of at least 2 nodes remain"):
            handlers[1].next_rendezvous()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (child_failed(1, {"message": "OutOfMemoryError: CUDA\nmore", "extraInfo": {}}), "exit code 1: OutOfMemoryError: CUDA"),
        (child_failed(1, "a text"), "exit code 1: a text"),
        (child_failed(-9, ""), "killed by SIGKILL"),
    ],
)
def test_the_reason_of_a_failure_has_the_first_workers_message(error, text):
    assert handler_module.failure_reason(error, None) == f"rank 5 failed: {text}"
    assert handler_module.failure_reason(error, error) == "", "the caller's own exception"


def test_an_error_of_the_agent_itself_is_a_failure_too():
    assert handler_module.failure_reason(OSError("x"), None) == "OSError: x"
    for error in (None, RendezvousClosedError("x"), SystemExit(1), KeyboardInterrupt()):
        assert handler_module.failure_reason(error, None) == ""


def test_an_agent_that_leaves_in_an_except_block_of_its_caller_has_not_failed():
    with Handlers(1, 2) as job:
        try:
            raise child_failed()
        except ChildFailedError:
            handlers, _ = job.form(2)
            handlers[0].shutdown()
        wait_for(lambda: handlers[1].num_nodes_waiting() > 0)
        assert handlers[1]._rendezvous.changed.reason.endswith("left: its work here is over")


def test_an_agent_that_finished_in_an_except_block_has_not_failed():
    with Handlers(1, 1) as job:
        [handler], [info] = job.form(1)
        finish(info)
        try:
            raise child_failed()
        except ChildFailedError:
            assert handler.shutdown()


def test_leaving_never_raises(monkeypatch, caplog):
    with Handlers(1, 1) as job:
        [handler], _ = job.form(1)
        real = handler._rendezvous.leave
        for error, answer in [(SignalException("sigterm", 15), True), (KeyboardInterrupt(), True), (OSError("x"), False)]:

            def leave(error=error, **_):
                raise error

            monkeypatch.setattr(handler._rendezvous, "leave", leave)
            assert handler.shutdown() is answer
        assert "could not leave run 'job' properly" in caplog.text
        monkeypatch.setattr(handler._rendezvous, "leave", real)


def test_an_agent_that_was_signalled_is_done_without_at_once():
    with Handlers(1, 2) as job:
        handlers, _ = job.form(2)
        handlers[0]._on_signal("SIGTERM")
        wait_for(lambda: handlers[1].num_nodes_waiting() > 0)
        assert handlers[1]._rendezvous.changed.reason.endswith("draining: SIGTERM received")
        [info] = job.next(handlers[1])
        assert info.world_size == 1
        with pytest.raises(SystemExit) as left:
            handlers[0].next_rendezvous()
        assert left.value.code == 0


def test_a_signal_after_the_end_disturbs_nobody():
    with Handlers(1, 1) as job:
        [handler], [info] = job.form(1)
        finish(info)
        handler._on_signal("SIGTERM")
        handler.shutdown()
        handler._finished = False
        handler._on_signal("SIGTERM")  # Has left already: nothing to say, and nothing raised.


@pytest.fixture
def torchs_sigterm():
    """torch's own handler for SIGTERM, as while workers run."""
    former = signal.signal(signal.SIGTERM, multiprocessing_api._terminate_process_handler)
    yield
    signal.signal(signal.SIGTERM, former)


def test_a_signal_is_not_held_back_for_workers_that_cannot_be_told_to_save(torchs_sigterm, monkeypatch):
    monkeypatch.setattr(handler_module, "TELL_S", 0.2)
    with ServeProcess() as server, Handlers(1, 1, endpoint=server.endpoint, is_host="false", drain_notice="900") as job:
        handler = job.agent()
        handler.next_rendezvous()
        assert handler.num_nodes_waiting() == 0
        server.kill()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SignalException):
            wait_for(lambda: handler.num_nodes_waiting() > 0)


def test_the_others_are_still_told_if_the_engine_comes_back_while_the_workers_stop(monkeypatch):
    with Handlers(1, 2) as job:
        handlers, _ = job.form(2)
        real, limits = handlers[0]._rendezvous.drain, []

        def drain(reason, limit_s):
            limits.append(limit_s)
            return _raise(Unreachable("e", "it is away", limit_s)) if len(limits) == 1 else real(reason, limit_s)

        monkeypatch.setattr(handlers[0]._rendezvous, "drain", drain)
        handlers[0]._on_signal("SIGTERM")
        assert limits == [5, 30]
        wait_for(lambda: handlers[1].num_nodes_waiting() > 0)


@pytest.mark.parametrize("held", [True, False])
def test_an_agent_whose_workers_have_succeeded_does_not_hold_a_signal_back_for_long(torchs_sigterm, monkeypatch, held):
    limits, told = [], []

    def done(limit_s):
        limits.append(limit_s)
        if not held:
            signal.raise_signal(signal.SIGTERM)
        told.append(True)

    with Handlers(1, 1, drain_notice="900") as job:
        [handler], _ = job.form(1)
        handler.num_nodes_waiting()
        if held:
            signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(handler._rendezvous, "done", done)
        with pytest.raises(SignalException):
            handler.finish(300.0)
        assert (limits, told) == (([5.0], [True]) if held else ([300.0], []))


def test_a_handler_that_is_dropped_leaves():
    with Handlers(1, 2) as job:
        one = job.agent()
        parameters = RendezvousParameters("rdzv", job.endpoint, "job", 1, 2, "127.0.0.1", slot="x", timeout=900, **QUICK)
        other = plugin.create_rdzv(parameters)
        job.next(one, other)
        del other
        gc.collect()
        wait_for(lambda: one.num_nodes_waiting() > 0)
        assert one._rendezvous.changed.reason.endswith("left: its Rendezvous was dropped")


# ---- torch's errors


def test_other_settings_than_the_runs_are_refused():
    with Handlers(1, 2) as job:
        job.form(1)
        with pytest.raises(RendezvousError, match="lease is 5 here and 2 in the run"):
            job.agent(lease="5").next_rendezvous()


def test_a_closed_run_says_so():
    with Handlers(1, 2) as job:
        [handler], _ = job.form(1)
        handler.set_closed()
        wait_for(handler.is_closed)
        with pytest.raises(RendezvousClosedError, match="closed by its program"):
            handler.next_rendezvous()


def test_an_error_while_closing_is_torchs_error(monkeypatch):
    with Handlers(1, 1) as job:
        handler = job.agent()
        with pytest.raises(RendezvousError, match="has not joined"):
            handler.set_closed()

        def away(reason, timeout_s):
            raise Unreachable("e", "it is away")

        monkeypatch.setattr(handler._rendezvous, "close_run", away)
        with pytest.raises(RendezvousConnectionError, match="engine e is unreachable: it is away"):
            handler.set_closed()


# ---- a server of many runs


def test_a_shared_server_refuses_a_run_without_an_id():
    with ServeProcess() as server, Handlers(1, 1) as job:
        with pytest.raises(RendezvousError, match=r"the run has no id \('none'\), and the server at"):
            job.agent(run_id="none", endpoint=server.endpoint).next_rendezvous()
        [info] = job.next(job.agent(endpoint=server.endpoint))
        assert info.world_size == 1


def test_a_server_of_our_own_does_not(free_port):
    with Handlers(1, 1) as job:
        [info] = job.next(job.agent(run_id="none", endpoint=f"127.0.0.1:{free_port}"))
        assert info.world_size == 1


def test_a_handler_serves_from_when_it_is_made_until_it_goes(free_port):
    """As torch's does: agents that start a moment later find it, though it has not been asked for a round yet."""

    def is_served():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", free_port)) == 0

    with Handlers(1, 1) as job:
        assert not is_served()
        job.agent(endpoint=f"127.0.0.1:{free_port}")
        wait_for(is_served)
    assert not is_served()


# ---- coming back


class CallingAgent:
    """An agent that calls its handler as torch's does: what it starts is in its `spec`."""

    def __init__(self, handler, workers, role="trainer"):
        self.handler = handler
        self.spec = SimpleNamespace(role=role, local_world_size=workers)

    def next_rendezvous(self):
        spec = self.spec
        return self.handler.next_rendezvous() if spec else None


def assign(info, workers):
    """Assign the ranks of the only agent's workers, as torch's agent does."""
    spec = SimpleNamespace(role="trainer", local_world_size=workers)
    return SimpleElasticAgent._assign_worker_ranks(None, info.store, 0, 1, spec)


def test_what_the_agent_starts_is_found_where_it_calls_from():
    with Handlers(1, 1) as job:
        handler = job.agent()
        info = CallingAgent(handler, 8).next_rendezvous()
        assert handler._world.worker_ranks == WorkerRanks(0, 8, 0, 8)
        workers = assign(info, 8)
        assert [worker.global_rank for worker in workers] == list(range(8))


def test_another_number_of_workers_than_was_sealed_ends_the_agent():
    with Handlers(1, 1) as job:
        info = CallingAgent(job.agent(), 8).next_rendezvous()
        with pytest.raises(DistStoreError, match="was sealed for another number of workers"):
            assign(info, 4)


def test_what_cannot_be_found_is_learned_in_the_first_round():
    with Handlers(1, 1) as job:
        [handler], [info] = job.form(1)
        assert handler._world.worker_ranks is None
        assign(info, 2)
        job.next(handler)
        assert handler._world.worker_ranks == WorkerRanks(0, 2, 0, 2)


def test_an_agent_that_was_evicted_comes_back_by_itself(monkeypatch):
    with Handlers(1, 1) as job:
        handler = job.agent()
        real, errors = handler._rendezvous.join, [Evicted("job", "a", "it was paused")]
        monkeypatch.setattr(handler._rendezvous, "join", lambda **more: real(**more) if not errors else _raise(errors.pop()))
        [info] = job.next(handler)
        assert info.world_size == 1


def test_a_round_that_ends_before_its_bootstrap_is_served_is_given_all_the_same(monkeypatch):
    """Rank 0 is slow. Meanwhile the other node has come and gone."""
    with Handlers(1, 2, last_call="5") as job:
        agents = [job.agent(), job.agent()]

        def returns_late(join, rendezvous):
            def late(**more):
                world = join(**more)
                if world.size == 2 and world.rank == 0:
                    wait_for(lambda: rendezvous.changed)
                return world

            return late

        for agent in agents:
            monkeypatch.setattr(agent._rendezvous, "join", returns_late(agent._rendezvous.join, agent._rendezvous))

        def come(agent):
            info = agent.next_rendezvous()
            if info.rank == 1:
                agent.shutdown()
            return info

        infos = list(job.pool.map(come, agents))
        assert sorted(info.rank for info in infos) == [0, 1]
        slow = next(agent for agent, info in zip(agents, infos, strict=True) if info.rank == 0)
        assert slow.num_nodes_waiting() > 0, "the agent stops its workers at once, and asks for the next round"
        [again] = job.next(slow)
        assert (again.rank, again.world_size) == (0, 1)


def _raise(error):
    raise error


def test_etcd_v3_is_a_name_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr("rdzv.aio.open_driver", lambda settings: asked.append(str(settings.endpoint)) or MemoryDriver("e"))
    parameters = RendezvousParameters("etcd-v3", "e:2379", "job", 1, 1, None, timeout=900)
    assert plugin.create_etcd_v3(parameters).get_backend() == "etcd-v3"
    assert asked == ["etcd://e:2379"]
