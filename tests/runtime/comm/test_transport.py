"""Messages between real processes over gloo; one pool of three for the whole file.

The pipeline's rank r is global rank 2 - r, so that a mistaken one for the other shows.
"""

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeoffload.processes import free_port
from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import (
    PeerLostError,
    ProcessGroupTransport,
    RankMesh,
    is_lost_peer_error,
    reporting_lost_peers,
)
from lightning_pipeoffload.runtime.comm import transport as transport_module
from lightning_pipeoffload.runtime.comm.transport import CommunicationThread, _first_tag
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.device import ActionTimer
from lightning_pipeoffload.runtime.measure import echo_messages, link_speed, measure_latency
from lightning_pipeoffload.runtime.run import (
    ActivationMemory,
    Executor,
    Pipeline,
    split_into_microbatches,
)
from lightning_pipeoffload.runtime.step import set_indices_and_weights
from lightning_pipeoffload.schedule import Action, Kind, build, lower
from tests.support.forks import FORKS, fork
from tests.support.in_process import InProcessTransport
from tests.support.rank_pool import RankPool
from tests.support.small_modules import Outcome, Regression, assert_same, run_plain, users_step

CPU = torch.device("cpu")
SIZE = 3
EDGES = set(itertools.permutations(range(SIZE), 2))


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(SIZE)
    yield pool
    pool.close()


def connect():
    """Return this process's pipeline rank, and a new transport."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    mesh = RankMesh(build("1f1b", SIZE, SIZE), dist.get_rank())
    return mesh.rank, ProcessGroupTransport(mesh, EDGES, CPU)


def specs_of(tensors):
    return [TensorSpec.of(tensor) for tensor in tensors]


def parse(*texts):
    return [Action.parse(text) for text in texts]


def make_message():
    return [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(10, dtype=torch.int32)[::2],
        torch.empty(0, 4),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ]


def exchange_message():
    rank, transport = connect()
    message = make_message()
    down_send, down, up_send, up = parse("0SEND_F3", "1RECV_F3", "1SEND_B3", "0RECV_B3")
    if rank == 0:
        transport.post(up, 1, specs_of(message))
        transport.send(down_send, 1, message)
        return transport.wait(up)
    if rank == 1:
        transport.post(down, 0, specs_of(message))
        transport.send(up_send, 0, transport.wait(down))
        transport.drain_sends(0, 0)
    return None


class OpenReceives:
    """A transport on which nothing may wait for the device while a receive is open, as NCCL's."""

    def __init__(self):
        self.open = set()

    def post(self, receive, peer, specs):
        self.open.add(receive)

    def wait(self, receive):
        self.open.remove(receive)
        return []

    def send(self, send, peer, tensors):
        pass

    def free_unused_buffers(self):
        assert not self.open

    def synchronized_time(self):
        assert not self.open
        return time.perf_counter()


@pytest.mark.parametrize("measure", [measure_latency, echo_messages])
def test_measuring_it_waits_for_no_receive_that_is_open(monkeypatch, measure):
    transport = OpenReceives()
    monkeypatch.setattr(link_speed, "synchronized_time", transport.synchronized_time)
    measure(transport, 1, 2, [])


def test_a_message_of_any_tensors_there_and_back(pool):
    *_, found = pool.run(exchange_message)
    torch.testing.assert_close(found, make_message())


def release_what_has_arrived():
    rank, transport = connect()
    sends, receives = parse("0SEND_F0", "0SEND_F1"), parse("1RECV_F0", "1RECV_F1")
    kept = []
    for send, receive in zip(sends, receives, strict=True):
        message = [torch.ones(1)]
        if rank == 0:
            kept.append(StorageWeakRef(message[0].untyped_storage()))
            transport.send(send, 1, message)
        if rank == 1:
            transport.post(receive, 0, specs_of(message))
            transport.wait(receive)
    del message
    for _ in range(2 * (rank == 0)):  # the second time it is gone
        transport.drain_sends(1, 1)
    alive = [not ref.expired() for ref in kept]
    if rank == 0:
        transport.drain_sends(1, 0)
    return alive


def test_what_has_arrived_is_let_go_of(pool):
    assert pool.run(release_what_has_arrived)[2] == [False, True]


def receive_out_of_order():
    rank, transport = connect()
    receives = parse("1RECV_F0", "1RECV_F1", "1RECV_B0")
    if rank == 1:
        peers = [0, 0, 2]
        for receive, peer in zip(receives, peers, strict=True):
            transport.post(receive, peer, specs_of([torch.ones(1)]))
        return [float(transport.wait(receive)[0]) for receive in receives]
    sends = parse("0SEND_F1", "0SEND_F0") if rank == 0 else parse("2SEND_B0")
    for send in sends:
        transport.send(send, 1, [torch.tensor([10.0 * send.stage + send.microbatch])])
    transport.drain_sends(1, 0)
    return None


def test_messages_are_told_apart_by_their_action(pool):
    assert pool.run(receive_out_of_order)[1] == [0.0, 1.0, 20.0]


def run_ahead():
    """Rank 0 is in its second step before rank 1 begins its first; return what came."""
    rank, transport = connect()
    send, receive = parse("0SEND_F0", "1RECV_F0")
    if rank == 0:
        transport.send(send, 1, [torch.zeros(1)])
        transport.send(send, 1, [torch.ones(1)])
    dist.barrier()
    received = []
    if rank == 1:
        for _ in range(2):
            transport.post(receive, 0, specs_of([torch.ones(1)]))
            received.append(float(transport.wait(receive)[0]))
    if rank == 0:
        transport.drain_sends(1, 0)
    return received


def test_a_sender_runs_ahead_over_a_step(pool):
    assert pool.run(run_ahead)[1] == [0.0, 1.0]


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)]
    return Regression(blocks).double(), torch.randn(6, 4).double()


def train(name):
    """Run two steps of a schedule on this rank; return its gradients and losses."""
    rank, transport = connect()
    schedule = build(name, SIZE, 6)
    stage_ranks = tuple(schedule.rank_of(stage) for stage in range(schedule.num_stages))
    module, x = make_model()
    pipeline = Pipeline(module, rank, CutSettings(stage_ranks, blocks="blocks"), CPU)
    memory, losses = ActivationMemory.for_device(CPU), []
    executor = Executor(rank, pipeline.stages, transport, ActionTimer(CPU), memory)
    for _ in range(2):
        slices = split_into_microbatches(pipeline, x, 1, users_step(module.step), "train", 0)
        microbatches = set_indices_and_weights(slices, [1 / 12] * len(slices))
        losses = executor.run(lower(schedule), microbatches)
    pipeline.commit()
    pipeline.detach()
    own = pipeline.tensors.local_tensors()
    return {name: p.grad for name, p in own.items()}, losses


def train_as_on_an_accelerator(name, value):
    """Run it by way of other memory of the host, as over gloo, or of buffers, as over NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_module, name, lambda device: value)
        return train("zb_h2")


@pytest.mark.parametrize("way", [("_is_staged", True), ("_backend_for", "of an accelerator")])
def test_the_ways_of_an_accelerator_give_the_plain_gradients(pool, way):
    results = pool.run(train_as_on_an_accelerator, *way)
    gradients = {name: grad for found, _ in results for name, grad in found.items()}
    module, x = make_model()
    assert_same(Outcome(results[0][1], gradients), run_plain(module, x, 1))


def wait_for_the_dead(pipe, rank, port):
    """Rank 0 waits for a message; rank 1 dies."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = RankMesh(build("zb_v", 2, 4), rank)
    transport = ProcessGroupTransport(mesh, {(0, 1), (1, 0)}, CPU)
    receive = Action.parse("0RECV_B0")
    if rank == 0:
        transport.post(receive, 1, specs_of([torch.ones(1)]))
    dist.barrier()
    if rank == 1:
        os._exit(1)
    try:
        transport.wait(receive)
    except PeerLostError as error:
        pipe.send(str(error))
    os._exit(0)


def test_a_dead_peer_is_noticed():
    (ours, theirs), port = FORKS.Pipe(), free_port()
    processes = [fork(wait_for_the_dead, theirs, rank, port) for rank in range(2)]
    theirs.close()
    message = ours.recv()
    for process in processes:
        process.join()
    assert message.startswith("global rank 1, lost in 0RECV_B0: ")


@pytest.mark.parametrize(
    ("exception", "is_so"),
    [
        (PeerLostError("lost"), True),
        (dist.DistNetworkError("gone"), True),
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error"), True),
        (RuntimeError("on purpose"), False),
        (ValueError("gloo/transport"), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_errors_that_only_say_that_another_rank_is_gone(exception, is_so):
    assert is_lost_peer_error(exception) == is_so


def test_an_error_of_a_thread_that_peers_wait_for_ends_the_run():
    ended = []
    thread = CommunicationThread("while sending", lambda error, doing: ended.append((error, doing)))
    errors = [OSError("no space left"), PeerLostError("gone")]

    def work(number):
        raise errors[number]

    for number, error in enumerate(errors):
        assert thread.submit(work, number).exception() is error
    thread.shutdown()
    assert ended == [(errors[0], "while sending")]


GONE = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def test_only_errors_of_the_connection_blame_a_peer():
    with (
        pytest.raises(PeerLostError, match="lost it: .*Connection closed by peer$") as caught,
        reporting_lost_peers("lost it"),
    ):
        raise RuntimeError(f"{GONE}\nsecond line")
    assert isinstance(caught.value.__cause__, RuntimeError)
    for own in (KeyError(), RuntimeError("mine"), torch.OutOfMemoryError("mine")):
        with pytest.raises(type(own)) as found, reporting_lost_peers("lost it"):
            raise own
        assert found.value is own


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "6", r"\(6\) must be at least 7, .*; unset it, or use 32"),
        ("CUDA_LAUNCH_BLOCKING", "1", r"\(1\) lets hosts wait for .*; unset it, or use one device"),
    ],
)
def test_settings_under_which_messages_wait_for_each_other_are_refused(
    monkeypatch, name, value, message
):
    transport_module.check_cuda_variables()
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name} {message}$"):
        transport_module.check_cuda_variables()


def test_waiting_in_process_for_what_was_not_sent_is_an_error():
    with pytest.raises(RuntimeError, match="1RECV_F0 is not there yet; run the rank that sends"):
        InProcessTransport().wait(Action.parse("1RECV_F0"))


def test_what_a_tag_cannot_tell_apart_is_refused():
    last = Action(Kind.RECV_B, 511, 4095)
    assert _first_tag(last, 512) + 511 == 2**31 - 1
    with pytest.raises(ValueError, match="0RECV_F4096 .*: gloo's tags tell at most .* 4096 micro"):
        _first_tag(Action(Kind.RECV_F, 0, 4096), 1)
