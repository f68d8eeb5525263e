"""Ranks that communicate over NCCL itself on one GPU, for ``gpu_check.py``.

NCCL lets ranks share a GPU from 2.30 on (``NCCL_MULTI_RANK_GPU_ENABLE``), which torch 2.11 does not
come with. So each rank is a new Python that loads a newer one first (``LD_PRELOAD``), from
``.nccl/libnccl.so.2.xz`` in the checkout; docs/gpu.md says where that comes from. A CUDA MPS daemon
of our own lets kernels of several processes run at once, where the machine has it; processes that
are killed share no daemon. The seconds of these parts say nothing of a pipeline's; orders, hangs,
bits and bytes do. On the CPU the same code runs over gloo.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import hashlib
import lzma
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from examples.benchmarks import gpu_fits, gpu_roads
from examples.benchmarks.gpu_parts import difference
from examples.benchmarks.gpu_process import (
    ERROR,
    ROW,
    Function,
    error_of,
    in_one_line,
    is_accelerated,
    rows_of,
    run_two,
)
from examples.benchmarks.gpu_ranks import (
    BUSIEST,
    NUM_MICROBATCHES,
    gradients_of_rank,
    names_for,
)
from examples.benchmarks.torch_pipeline import PEERS, Peer
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.demos import GPT
from lightning_pipeoffload.runtime.comm import RankMesh, transport
from lightning_pipeoffload.runtime.measure import CopySpeed, measure_copy_speed
from lightning_pipeoffload.schedule import COPIES, Action, build

PACKED = Path(__file__).parents[2] / ".nccl" / "libnccl.so.2.xz"
_END = "that was all"
_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "VERSION",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "BACKEND": "",
}  # fmt: skip


def needing_nccl(part: Function) -> Function:
    """Decorate a part, which says so where a GPU is there and the newer NCCL is not."""

    @wraps(part)
    def run(device: torch.device) -> Iterator[str]:
        if is_accelerated(device) and not PACKED.exists():
            yield f"left out: {PACKED} is not there; docs/gpu.md says how to make it and carry it"
        else:
            yield from part(device)

    return run


@contextmanager
def sharing(device: torch.device, mps: bool = True) -> Iterator[dict[str, str]]:
    """Yield the environment of ranks that share a device; with a daemon of MPS meanwhile."""
    if not is_accelerated(device):
        yield {"BACKEND": ""}
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnccl.so.2"
        library.write_bytes(lzma.decompress(PACKED.read_bytes()))
        pipes = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipes",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/logs",
        }
        control = shutil.which("nvidia-cuda-mps-control") if mps else None
        environment = {**_SHARED, "LD_PRELOAD": str(library)}
        if control is None:
            yield environment
            return
        for path in pipes.values():
            Path(path).mkdir()
        own = {**os.environ, **pipes}
        # In the foreground: it is of the part's process group, which ends with the part.
        daemon = subprocess.Popen([control, "-f"], env=own)
        try:
            yield environment | pipes
        finally:
            subprocess.run([control], env=own, check=False, input="quit\n", text=True, timeout=10)
            daemon.kill()
            daemon.wait()


def _version() -> str:
    """Return what this process communicates by; of NCCL the file that is loaded."""
    maps = Path("/proc/self/maps").read_text()
    files = {line.split()[-1] for line in maps.splitlines() if "libnccl" in line}
    mps = "with MPS" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else "without MPS"
    version, loaded = ctypes.c_int(), ctypes.CDLL(None)
    if hasattr(loaded, "ncclGetVersion"):  # of a library that was loaded before torch's
        loaded.ncclGetVersion(ctypes.byref(version))
    names = f"{', '.join(sorted(files)) or 'no NCCL'}, version loaded before {version.value}"
    return f"{names}, {mps}, backend {dist.get_backend()}"


# Every schedule, with and without offload


@needing_nccl
def nccl_ranks(device: torch.device) -> Iterator[str]:
    """Every schedule over two and four ranks, with and without offload: the bits of one rank."""
    alone = dict(map(_parted, _rows(be_alone, device, 1, {}, 60)[0]))
    failed: list[str] = []
    for names in _in_groups(names_for(device)):
        for num_ranks in (2, 4) if is_accelerated(device) else (2,):
            for row in _rows_of_group(device, num_ranks, names, alone):
                yield f"{num_ranks} ranks, {row}"
                failed += [row] * ("OTHER" in row or "did not end" in row)
    if failed:
        raise AssertionError(f"other bits than one rank's, or no end: {failed}")


def _in_groups(names: Sequence[str]) -> list[Sequence[str]]:
    """Divide schedules: each group starts processes, whose rows come when all of it is over."""
    first, size = len(BUSIEST), 6
    return [names[:first], *(names[i : i + size] for i in range(first, len(names), size))]


def _rows_of_group(
    device: torch.device, num_ranks: int, names: Sequence[str], alone: Mapping[str, str]
) -> Iterator[str]:
    """Run schedules one after the other; after one that does not end, go on with the next."""
    while names:
        ranks = _rows(be_rank, device, num_ranks, {"SCHEDULES": " ".join(names)}, 60)
        yield from _verdicts(ranks[0], alone)
        if all(rows[-1:] == [_END] for rows in ranks):
            return
        begun = [row.split(",")[0] for rows in ranks for row in rows if row.endswith(_BEGINS)]
        stuck = max(begun, key=names.index, default=names[0])
        yield f"{stuck} did not end"
        for rank, rows in enumerate(ranks):
            yield f"{stuck}, rank {rank}: {rows[-1] if rows else 'silent'}"
        names = names[names.index(stuck) + 1 :]


def _parted(row: str) -> tuple[str, str]:
    way, _, digest = row.partition(_WEIGHTS)
    return way, digest


def _verdicts(rows: list[str], alone: Mapping[str, str]) -> Iterator[str]:
    for row in rows:
        name, digest = _parted(row)
        if digest:
            is_same = digest == alone[name.partition(", ")[2].replace(_FULL, _AUTO)]
            yield f"{name}: {'one rank' if is_same else 'OTHER than one rank'}'s bits"
        elif row.startswith("by "):
            yield row


def _rows(
    function: Function,
    device: torch.device,
    num_ranks: int,
    environment: Mapping[str, str],
    seconds: float,
    mps: bool = True,
) -> list[list[str]]:
    """Run ranks that share the device; return the rows of each, with its error as the last."""
    with sharing(device, mps) as shared:
        both = run_two(function, device, seconds, {**shared, **environment}, num_ranks, anew=True)
    return [[*rows_of(said), *_errors(said)] for said in both]


def _errors(said: list[str]) -> list[str]:
    """Return the error of a process, or its last line if it has found nothing."""
    has_error = any(line.startswith(ERROR) for line in said)
    return [error_of(said)] if has_error or not rows_of(said) else []


def be_alone(device: torch.device) -> Iterator[str]:
    """Train as one rank, of two stages: a weight that two stages share is summed over stages."""
    for way in (_AUTO, _RESUMED):
        yield f"{way}{_WEIGHTS}{_digest(_run(device, 'zb_v', way, 1))}"


def be_rank(device: torch.device) -> Iterator[str]:
    """Train by one schedule after the other as one rank of several."""
    num_ranks = int(os.environ["NUM_RANKS"])
    for number, name in enumerate(os.environ["SCHEDULES"].split()):
        # Their plans say what is offloaded.
        copies = any(a.kind in COPIES for rank in build(name, num_ranks, 4) for a in rank)
        is_solved = name == "optpipe"
        ways = [_AUTO, *[_FULL] * (not (copies or is_solved)), *[_RESUMED] * (name == "zb_v")]
        for way in ways:
            what = f"{name}, {way}"
            yield f"{what}{_BEGINS}"
            with _ending(what, SECONDS if is_accelerated(device) else SECONDS_ON_CPU):
                trainer = _run(device, name, way, num_ranks)
                digest = _digest(trainer)
            if not number and way == _AUTO:
                yield f"by {_version()}"
            if trainer.global_rank == 0:
                yield f"{what}{_WEIGHTS}{digest}"
    yield _END


# Of one fit; what takes longer hangs.
SECONDS, SECONDS_ON_CPU = 12.0, 300.0
_BEGINS = ": begins"
_AUTO, _FULL, _RESUMED = "offload auto", "offload full", "saved and resumed"
_WEIGHTS = ": weights "


def _run(device: torch.device, name: str, way: str, num_ranks: int) -> Trainer:
    """Train six steps; where it is saved and resumed, three and three in another trainer."""

    def strategy() -> PipeOffloadStrategy:
        offload = "full" if way == _FULL else "auto"
        return PipeOffloadStrategy(schedule=name, num_microbatches=4, offload=offload)

    if way != _RESUMED:
        return _train(device, strategy(), num_ranks)
    half = _train(device, strategy(), num_ranks, max_steps=3)
    with tempfile.TemporaryDirectory() as folder:
        file = half.strategy.broadcast(str(Path(folder) / "half.ckpt"), 0)
        half.save_checkpoint(file)
        return _train(device, strategy(), num_ranks, resume=file)


def _train(
    device: torch.device, strategy: Any, num_ranks: int, max_steps: int = 6, resume: Any = None
) -> Trainer:
    """Train tied weights, clipped, with a short last batch, and evaluations between the steps."""
    torch.manual_seed(0)
    module = GPT(context=32, width=64, depth=8, heads=2, dropout=0.0, tie_weights=True)
    rows: Any = torch.randint(256, (44, 33), generator=torch.Generator().manual_seed(0))
    data: Any = [(row[:-1], row[1:]) for row in rows]
    trainer = Trainer(
        accelerator="auto" if is_accelerated(device) else "cpu", devices=1, num_nodes=num_ranks,
        strategy=strategy, max_steps=max_steps, gradient_clip_val=1.0, val_check_interval=2,
        deterministic=True, logger=False, enable_model_summary=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    _running.append(trainer)
    trainer.fit(module, DataLoader(data, 8), DataLoader(data[:8], 8), ckpt_path=resume)
    return trainer


def _digest(trainer: Trainer) -> str:
    """Return a digest of all weights, on global rank 0; all ranks call it."""
    with tempfile.TemporaryDirectory() as folder:
        file = trainer.strategy.broadcast(str(Path(folder) / "last.ckpt"), 0)
        trainer.save_checkpoint(file, weights_only=True)
        if trainer.global_rank:
            return ""
        state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].float().numpy().tobytes())
    return digest.hexdigest()[:12]


_running: list[Trainer] = []  # the last is the one that a hang is reported of


_UNTIL_ALL_HAVE_SAID = 4.0


def _pending() -> str:
    """Return what NCCL's flight recorder has that is not completed; print all of its end."""
    if not dist.is_nccl_available():
        return ""
    torchs: Any = torch._C._distributed_c10d
    entries = pickle.loads(torchs._dump_nccl_trace()).get("entries", [])
    names = "pg_name", "profiling_name", "state", "collective_seq_id", "p2p_seq_id"
    for entry in entries[-20:]:
        print({name: entry.get(name) for name in names}, file=sys.stderr, flush=True)
    pending = [entry for entry in entries if entry.get("state") != "completed"]
    texts = [f"{e['profiling_name']} {e.get('p2p_seq_id')} ({e['state']})" for e in pending]
    return f", NCCL has {len(texts)} pending: {texts[:_MOST_PENDING]}"


_MOST_PENDING = 8


@contextmanager
def _ending(what: str, seconds: float) -> Iterator[None]:
    """End this process if the context is not over in time, after saying where it is."""

    def end() -> None:
        strategy: Any = _running[-1].strategy if _running else None
        executor = strategy and strategy.split and strategy.split.executor
        action = executor and executor.current
        receives = (
            [str(receive) for receive in executor.transport.open_receives] if executor else []
        )
        row = f"{what}: HANGS in {action}, open receives {receives}"
        print(f"{ROW}{row}{_pending()}", flush=True)
        faulthandler.dump_traceback()
        time.sleep(_UNTIL_ALL_HAVE_SAID)  # or the others would end because of this one
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 5, exit=True)  # where the timer's thread cannot run
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


# The default road, and other ways


def be_one_by_default(device: torch.device) -> Iterator[str]:
    """Train as one of two processes with default arguments; save, and go on."""
    file = str(Path(os.environ["FOLDER"]) / "half.ckpt")
    run = partial(gpu_fits._train_as_one_of_two, device, schedule="auto")
    yield gpu_fits._loss(gpu_fits._resumed(run, file)[1])


def plain_resumed(device: torch.device) -> Iterator[str]:
    """Plain Lightning, saved and resumed."""
    run = partial(gpu_fits.train, device, strategy="auto")
    yield gpu_fits._loss(gpu_fits._resumed(run, str(Path(os.environ["FOLDER"]) / "plain.ckpt"))[1])


def plain(device: torch.device) -> Iterator[str]:
    """Plain Lightning."""
    yield gpu_fits._loss(gpu_fits.train(device, strategy="auto"))


@needing_nccl
def nccl_default(device: torch.device) -> Iterator[str]:
    """Two processes by default arguments, saved and resumed: plain Lightning's loss."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"FOLDER": folder}
        found = _rows(be_one_by_default, device, 2, given, 40)
        (expected,) = _rows(plain_resumed, device, 1, given, 30)
    losses = [rows[-1] for rows in found]
    yield gpu_fits.compared("default arguments, resumed", losses, expected[-1], 1e-3)


@needing_nccl
def nccl_ways(device: torch.device) -> Iterator[str]:
    """Replicas, masters, tensor ranks, steps that are taken back, and strategy="odc"."""
    # What runs, over how many ranks, what one process runs, and how far losses may be apart.
    ways: list[tuple[Function, int, Function, float]] = [
        (gpu_fits.be_one_of_two_replicas, 4, plain, 1e-3),
        (gpu_fits.be_one_of_two_in_float16, 2, plain, 2e-2),
        (gpu_fits.be_one_of_two_with_masters, 2, plain, 5e-2),
        (gpu_roads.be_one_of_two_tensor_ranks, 2, gpu_roads.llama_alone, 1e-3),
        (gpu_roads.be_one_of_two_compiled_tensor_ranks, 2, gpu_roads.llama_alone, 1e-3),
    ]
    expected: dict[Function, str] = {}
    for function, num_ranks, of_one, tolerance in ways:
        if of_one not in expected:
            expected[of_one] = _rows(of_one, device, 1, {}, 30)[0][-1]
        losses = [rows[-1] for rows in _rows(function, device, num_ranks, {}, 30)]
        try:
            yield gpu_fits.compared(function.__name__, losses, expected[of_one], tolerance)
        except (AssertionError, ValueError) as error:
            yield f"{function.__name__}: FAILED: {losses}, {error}"
    losses = [rows[-1] for rows in _rows(gpu_fits.be_one_on_demand, device, 2, {}, 30)]
    yield f"be_one_on_demand: losses {losses}"


@needing_nccl
def nccl_killed(device: torch.device) -> Iterator[str]:
    """A rank is killed, or asserts, in the middle of a step: the other one ends, and names it."""
    with sharing(device, mps=False) as shared:  # a daemon's processes fail together
        both = run_two(gpu_fits.be_one_that_is_killed, device, 30, shared, anew=True)
        ended = time.monotonic()
        (killed,) = rows_of(both[1])
        seconds = ended - float(killed.removeprefix("killed at "))
        yield f"all have ended {seconds:.1f} s after global rank 1 was killed: {_blamed(both[0])}"
        both = run_two(gpu_fits.be_one_with_an_assert_in_a_step, device, 30, shared, anew=True)
    yield f"after an assert on the device in a step: {_blamed(both[0])}"


def _blamed(said: list[str]) -> str:
    """Return the line by which a rank has named global rank 1; raise where it has none."""
    lines = [line for line in said if line.startswith("[pipeo")]
    named = [line for line in lines if "because of global rank 1" in line]
    if not named:
        raise AssertionError(f"global rank 1 is not named: {lines[-2:]}")
    return named[-1]


# What an open receive takes of its device


@needing_nccl
def nccl_open_receives(device: torch.device) -> Iterator[str]:
    """Products during no, one and two open receives of NCCL's, of so many channels."""
    rows, _ = _rows(be_receiver, device, 2, {}, 40)
    yield from rows[:-1]
    if rows[-1] != _END:
        raise RuntimeError(f"it ended with {rows[-1]}")


def be_receiver(device: torch.device) -> Iterator[str]:
    """On rank 0 multiply while receives are open; on rank 1 send when that is over."""
    kind = "nccl" if is_accelerated(device) else "gloo"
    backends = f"cpu:gloo,{device.type}:nccl" if is_accelerated(device) else "gloo"
    dist.init_process_group(backends, rank=int(os.environ["NODE_RANK"]), world_size=2)
    for channels in (1, 4, None):
        groups = [
            dist.new_group([0, 1], backend=kind, pg_options=_options(device, channels))
            for _ in range(2)
        ]
        for row in _products_during(groups, device):
            yield f"{channels or 'channels as NCCL chooses'}: {row}"
    yield _END


def _options(device: torch.device, channels: int | None) -> Any:
    if not is_accelerated(device) or channels is None:
        return None
    options = transport.nccl_options(None)
    options.config.max_ctas = channels
    return options


def _products_during(groups: list[Any], device: torch.device) -> Iterator[str]:
    is_sender = dist.get_rank() == 1
    size, pause = (4096, 1.0) if is_accelerated(device) else (64, 0.0)
    factor, message = torch.randn(2, size, size, device=device).unbind()
    for group in groups:  # a first message, at which both ends wait for each other
        if is_sender:
            dist.send(message, 0, group=group)
        else:
            dist.recv(message, 1, group=group)
    factor @ factor  # its kernel is loaded
    alone = 0.0
    for count in (0, 1, 2):
        if is_sender:
            _meet()  # the products are over
            works = [dist.isend(message, 0, group=group) for group in groups[:count]]
        else:
            works = [dist.irecv(message.clone(), 1, group=group) for group in groups[:count]]
            time.sleep(pause)  # until the kernels spin
            started = time.perf_counter()
            for _ in range(20):
                factor @ factor
            if is_accelerated(device):
                torch.accelerator.current_stream().synchronize()
            seconds = time.perf_counter() - started
            alone = alone or seconds
            yield f"{count} open receives, products take {seconds / alone:.2f} of their time"
            _meet()
        for work in works:
            assert work is not None
            work.wait()


def _meet() -> None:
    """Wait for the other rank, on the hosts."""
    dist.all_reduce(torch.zeros(1))


# torch's schedules, and the link to the host


class Stack(nn.Module):
    """Blocks of one shape, with a step."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)
        )

    def step(self, x: Tensor) -> Tensor:
        """Return the mean square of the last block's output."""
        for block in self.blocks:
            x = block(x)
        return _loss(x)


def _loss(output: Tensor, target: Tensor | None = None) -> Tensor:
    return output.square().mean()


@needing_nccl
def nccl_and_torch(device: torch.device) -> Iterator[str]:
    """Torch's schedules and ours in the same processes: gradients, messages and their bytes."""
    rows, _ = _rows(be_nccl_and_torch, device, 2, {}, 60)
    yield from rows[:-1]
    if rows[-1] != _END:
        raise RuntimeError(f"it ended with {rows[-1]}")


_OURS = {"1F1B": "1f1b", "InterleavedZeroBubble": "interleaved_1f1b", "ZBVZeroBubble": "zb_v"}


def be_nccl_and_torch(device: torch.device) -> Iterator[str]:
    """Run a step of each, as one of two ranks."""
    rank, width = int(os.environ["NODE_RANK"]), 1024 if is_accelerated(device) else 32
    backends = f"cpu:gloo,{device.type}:nccl" if is_accelerated(device) else "gloo"
    dist.init_process_group(backends, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Stack(width, 8).double().to(device)
    batch = torch.randn(NUM_MICROBATCHES, width, device=device, dtype=torch.double)
    for name, own in _OURS.items():
        try:
            theirs, messages = _of_torch(PEERS[name], model, batch)
        except RuntimeError as error:  # torch 2.11 sends to its own rank, which gloo cannot
            yield f"torch's {name} fails: {in_one_line(error)}"
            continue
        yield f"torch's {name}, a step: {messages}"
        schedule = build(own, 2, NUM_MICROBATCHES)
        mesh = RankMesh(schedule, rank)
        mesh.device = device
        carrier = _Counting(mesh, {(0, 1), (1, 0)}, device)
        run = partial(
            gradients_of_rank, mesh.rank, schedule, schedule, carrier, model, batch,
        )  # fmt: skip
        run()
        with _profiled(device) as profiled:
            ours = run()
        sent = f"{carrier.count // 2} messages of {carrier.num_bytes // 2} bytes"  # of one run
        yield f"our {own}, two steps: {sent}; {_messages(profiled)}"
        both = _of_all(ours), _of_all(theirs)
        largest = difference(*both)
        yield f"{own} and torch's {name}: {len(both[0])} gradients differ by {largest:.1e}"
        assert largest < 1e-12  # of float64: we add products to gradients as they are computed
    yield _END


class _Counting(transport.ProcessGroupTransport):
    """Counts what it sends, which a profiler does not see over gloo."""

    num_bytes = count = 0

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Count, and send."""
        self.count += 1
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        super().send(send, peer, tensors)


def _of_all(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of both ranks, whose stages the two runtimes place differently."""
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, {name: each.cpu() for name, each in gradients.items()})
    return ranks[0] | ranks[1]


def _of_torch(peer: Peer, model: Stack, batch: Tensor) -> tuple[dict[str, Tensor], str]:
    """Return this rank's gradients of a step of torch's schedule, and its messages."""
    rank, num_stages = dist.get_rank(), 2 * peer.num_chunks
    indices = [rank + 2 * chunk for chunk in range(peer.num_chunks)]
    if peer.is_v:
        indices[1] = num_stages - 1 - rank
    blocks = copy.deepcopy(model).blocks
    each, sample = len(blocks) // num_stages, batch[:1].clone().requires_grad_()
    stages = [
        PipelineStage(
            nn.Sequential(*blocks[index * each : (index + 1) * each]), index, num_stages,
            batch.device, input_args=sample, output_args=sample,
        )
        for index in indices
    ]  # fmt: skip
    given: Any = stages if peer.num_chunks > 1 else stages[0]
    schedule = peer.make(given, NUM_MICROBATCHES, loss_fn=_loss)
    first, last = (any(getattr(s, name) for s in stages) for name in ("is_first", "is_last"))
    for _ in range(2):
        blocks.zero_grad()
        with _profiled(batch.device) as profiled:
            schedule.step(*((batch,) if first else ()), target=batch if last else None)
    named = blocks.named_parameters()
    gradients = {f"blocks.{name}": p.grad for name, p in named if p.grad is not None}
    return gradients, _messages(profiled)


def _profiled(device: torch.device) -> Any:
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_accelerated(device)]
    return profile(activities=kinds, record_shapes=True, acc_events=True)


def _messages(profiled: Any) -> str:
    """Return how many messages a trace has, and the bytes of those whose shapes it knows."""
    events = profiled.events()
    sends = [e for e in events if "gloo:send" in e.name or "nccl:send" in e.name]
    shapes = [shape for e in sends for shape in e.input_shapes or () if shape]
    kernels = [e for e in events if "ncclDevKernel" in e.name]
    seconds = sum(e.device_time for e in kernels) / 1e3
    return (
        f"{len(sends)} sends, {sum(map(prod, shapes))} elements in {len(shapes)} shapes; "
        f"{len([e for e in events if e.name == 'nccl:coalesced'])} coalesced; "
        f"{len(kernels)} kernels of NCCL, {seconds:.1f} ms"
    )


def shared_link(device: torch.device) -> Iterator[str]:
    """How fast two ranks copy that share one device's link to the host, alone and both at once."""
    for number, rows in enumerate(_rows(be_copier, device, 2, {}, 30)):
        yield from (f"rank {number}: {row}" for row in rows)


def be_copier(device: torch.device) -> Iterator[str]:
    """Copy while the other process does not, then at the same time."""
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=2)
    for turn in (0, 1):
        if dist.get_rank() == turn:
            yield f"alone {_speeds(measure_copy_speed(device))}"
        _meet()
    yield f"both at once {_speeds(measure_copy_speed(device, meet=_meet))}"


def _speeds(speed: CopySpeed) -> str:
    return f"{speed.to_host / 1e9:.1f} GB/s to the host, {speed.to_device / 1e9:.1f} back"
