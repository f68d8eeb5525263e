"""Fits of a Trainer on one GPU, in one process and in two, for ``gpu_check.py``."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import BitsandbytesPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from examples.benchmarks.gpu_process import (
    ROW,
    Function,
    error_of,
    is_accelerated,
    needing,
    rows_of,
    run_two,
)
from lightning_pipeoffload import Minibatch, OnDemandStrategy, PipeOffloadStrategy
from lightning_pipeoffload.demos import GPT


def _module() -> GPT:
    torch.manual_seed(0)
    return GPT(context=64, width=64, depth=8, heads=2, dropout=0.0)


def _rows() -> Any:
    tokens = torch.randint(256, (64, 65), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in tokens]


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Return batches of rows: inputs and targets."""
    rows = _rows()
    return [rows[start : start + 8] for start in range(0, len(rows), 8)]


def train(
    device: torch.device,
    *callbacks: Callback,
    resume: str | None = None,
    num_replicas: int = 1,
    **options: Any,
) -> Trainer:
    """Train a small GPT in this process for some batches; return the trainer."""
    arguments = {"strategy": "pipeoffload_zb_v", "max_steps": 6, "devices": 1, "logger": False}
    trainer = Trainer(
        accelerator="auto" if is_accelerated(device) else "cpu",
        callbacks=[*callbacks],
        gradient_clip_val=1.0,
        val_check_interval=2,
        use_distributed_sampler=num_replicas == 1,
        enable_model_summary=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        **{**arguments, **options},
    )
    # Each replica's own: what Lightning shares out it shuffles too.
    first = 0
    if num_replicas > 1:
        first = int(os.environ["NODE_RANK"]) * num_replicas // int(os.environ["NUM_RANKS"])
    training, validation = _rows()[first::num_replicas], _rows()
    loaders = DataLoader(training, 8 // num_replicas), DataLoader(validation, 8)
    trainer.fit(_module(), *loaders, ckpt_path=resume)
    return trainer


def fits(device: torch.device) -> Iterator[str]:
    """A fit in bf16-mixed with default arguments, saved and resumed: plain Lightning's losses."""
    losses: list[list[float]] = []
    for strategy in ("pipeoffload", "auto"):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run = partial(train, device, strategy=strategy, precision="bf16-mixed")
            both = _resumed(run, str(Path(folder) / "half.ckpt"))
        losses.append([float(trainer.callback_metrics["val_loss"]) for trainer in both])
        yield (
            f'strategy="{strategy}": losses {losses[-1][0]:.4f} after 6 steps, '
            f"{losses[-1][1]:.4f} after 12, resumed; {time.perf_counter() - started:.1f} s"
        )
    assert all(abs(own - plain) < _OF_BFLOAT16 for own, plain in zip(*losses, strict=True))


_OF_BFLOAT16 = 2e-2


def _resumed(run: Callable[..., Trainer], file: str) -> tuple[Trainer, Trainer]:
    """Train, save, and go on in another trainer; return both."""
    first = run()
    first.save_checkpoint(file)
    second = run(resume=file, max_steps=12)
    assert second.global_step == 12
    return first, second


def _train_as_one_of_two(device: torch.device, *callbacks: Callback, **options: Any) -> Trainer:
    names = "precision", "num_replicas", "resume", "max_steps"
    more = {name: options.pop(name) for name in names if name in options}
    given = {"schedule": "zb_h1", "process_group_backend": backend(), **_host(device), **options}
    num_nodes = int(os.environ["NUM_RANKS"])
    return train(
        device, *callbacks, strategy=PipeOffloadStrategy(**given), num_nodes=num_nodes, **more
    )


def backend() -> str | None:
    """Return the backend of ranks that share a device: gloo, unless the part says otherwise."""
    return os.environ.get("BACKEND", "gloo") or None


def _host(device: torch.device) -> dict[str, Any]:
    """Return what each of two ranks may take of a machine that tells of less than it has."""
    return {"host_memory_limit": "45GiB"} if is_accelerated(device) else {}


def _loss(trainer: Trainer) -> str:
    return f"{float(trainer.callback_metrics['val_loss']):.6f}"


def be_one_of_two(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, save, and go on."""
    file = str(Path(os.environ["FOLDER"]) / "half.ckpt")
    yield _loss(_resumed(partial(_train_as_one_of_two, device), file)[1])


def be_one_of_two_in_float16(device: torch.device) -> Iterator[str]:
    """Train with scaled losses, and with steps that may be taken back."""
    ways = {"optimizer_sync": "post_validation", "precision": "16-mixed"}
    yield _loss(_train_as_one_of_two(device, **ways))


def be_one_of_two_with_masters(device: torch.device) -> Iterator[str]:
    """Train weights of bfloat16 by masters on the host."""
    ways = {"optimizer_offload": True, "master_weights": "float32", "precision": "bf16-true"}
    yield _loss(_train_as_one_of_two(device, **ways))


def be_one_of_two_replicas(device: torch.device) -> Iterator[str]:
    """Train half of each batch, and hold half of the optimizer's state."""
    ways = {"data_parallel_size": 2, "sharding": "optimizer", "schedule": "auto"}
    yield _loss(_train_as_one_of_two(device, **ways, num_replicas=2))


def two_processes(device: torch.device) -> Iterator[str]:
    """A fit of two processes on one device, over gloo, saved and resumed: the loss of one."""
    with tempfile.TemporaryDirectory() as folder:
        found = losses_of_two(be_one_of_two, device, {"FOLDER": folder})
        # Afterwards: processes are forked from one that has not used the device.
        plain = partial(train, device, strategy="auto")
        expected = _loss(_resumed(plain, str(Path(folder) / "plain.ckpt"))[1])
    yield compared("trained, saved, resumed", found, expected, 1e-3)


def ways_of_two_processes(device: torch.device) -> Iterator[str]:
    """Post-validation in float16, and replicas that share the optimizer's state out."""
    tolerances: dict[Function, float] = {
        be_one_of_two_in_float16: 2e-2, be_one_of_two_replicas: 1e-3,
    }  # fmt: skip
    losses = {function: losses_of_two(function, device) for function in tolerances}
    expected = _loss(train(device))
    for function, tolerance in tolerances.items():
        yield compared(function.__name__, losses[function], expected, tolerance)


def losses_of_two(
    function: Function, device: torch.device, environment: dict[str, str] | None = None
) -> list[str]:
    """Return the loss that each of two processes yields; raise its error where one has none."""
    return [*map(_row_of, run_two(function, device, 40, environment))]


def compared(name: str, found: list[str], expected: str, tolerance: float) -> str:
    """Return a row of two losses; raise it as an ``AssertionError`` where one is another."""
    row = f"{name}: losses {found}, of one process {expected}"
    if any(abs(float(loss) - float(expected)) >= tolerance for loss in found):
        raise AssertionError(row)
    return row


def _row_of(said: list[str]) -> str:
    rows = rows_of(said)
    if not rows:
        raise RuntimeError(f"a process has found nothing: {error_of(said)}")
    return rows[0]


class _OnAnyDevice(Precision):
    """Lightning's 4-bit plugin where a Trainer does not take it."""

    def __init__(self, plugin: BitsandbytesPrecision) -> None:
        self._plugin = plugin

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers by some that train after an evaluation on a CPU, too."""
        for layer in self._plugin.convert_module(module).modules():
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        return module


@needing("bitsandbytes")
def quantized(device: torch.device) -> Iterator[str]:
    """Lightning's 4-bit plugin, with a frozen base that moves to the device, comes to its loss."""
    losses = []
    for strategy in ("auto", "pipeoffload_zb_v"):
        plugin: Any = BitsandbytesPrecision("nf4", torch.float32, {"head"})
        plugin = plugin if is_accelerated(device) else _OnAnyDevice(plugin)
        losses.append(_loss(train(device, strategy=strategy, plugins=plugin)))
    yield f"validation losses on one device {losses[0]}, of the pipeline {losses[1]}"
    assert abs(float(losses[0]) - float(losses[1])) < 1e-3


class _Steps(Callback):
    """When each step begins, once the device has ended the one before."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Note it."""
        if is_accelerated(trainer.strategy.root_device):
            torch.accelerator.synchronize()
        self.starts.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Seconds of a step, by the plan that is made after the fourth."""
        return median(after - before for before, after in pairwise(self.starts[5:]))


class _WithSGD(GPT):
    """The same blocks, whose optimizer keeps nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def host_step(device: torch.device) -> Iterator[str]:
    """An eighth of 8B parameters in 24 GiB: what AdamW with masters on the host takes of a step."""
    width, context, count = (4096, 2048, 16) if is_accelerated(device) else (32, 8, 2)
    if is_accelerated(device):
        module = torch.get_device_module(device)
        memory = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, 24 * 2**30 / memory))
    row = torch.randint(256, (context + 1,))
    rows: Any = [(row[:-1], row[1:])] * (10 * count)
    on_host: dict[str, Any] = {"optimizer_offload": True, "master_weights": "float32"}
    size: dict[str, Any] = {"context": context, "width": width, "depth": 4, "dropout": 0.0}
    found = []
    for kind, options in ((_WithSGD, {}), (GPT, on_host)):
        steps = _Steps()
        strategy = PipeOffloadStrategy(
            schedule="zb_h1", num_microbatches=count, recompute="full", **options
        )
        trainer = Trainer(
            accelerator="auto" if is_accelerated(device) else "cpu", devices=1, strategy=strategy,
            precision="bf16-true", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[steps],
        )  # fmt: skip
        with device:
            module = kind(heads=max(1, width // 128), **size)
        trainer.fit(module, DataLoader(rows, count))
        del module
        found.append(steps.seconds)
    took = strategy.split.parameters.host_step_seconds()
    peak = torch.accelerator.max_memory_allocated() if is_accelerated(device) else 0
    yield (
        f"peak {peak / 2**30:.1f} GiB; a step of {found[0]:.3f} s takes "
        f"{found[1] - found[0]:.3f} s more for a STEP of {took:.3f} s"
    )


class Shards(IterableDataset[Minibatch]):
    """The microbatches of one of two ranks: each second row of each batch."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self) -> Iterator[Minibatch]:
        """Yield a minibatch for each batch."""
        for batch in batches():
            rows = [tuple(part[None] for part in row) for row in batch[self._rank :: 2]]
            yield Minibatch(rows, [1 / len(batch)] * len(rows), len(batch))


def be_one_on_demand(device: torch.device) -> Iterator[str]:
    """Train as one of two ranks that read each other's weights where they lie."""
    rank = os.environ["LOCAL_RANK"] = os.environ.pop("NODE_RANK")
    os.environ["WORLD_SIZE"] = "2"
    strategy = OnDemandStrategy(process_group_backend=backend())
    if is_accelerated(device):
        strategy.parallel_devices = [torch.device(device.type, 0)] * 2
    trainer = Trainer(
        accelerator="auto" if is_accelerated(device) else "cpu",
        devices="auto" if is_accelerated(device) else 2,
        strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = _module()
    trainer.fit(module, DataLoader(Shards(int(rank)), batch_size=None))
    yield f"{float(trainer.callback_metrics['train_loss']):.6f}"


def on_demand(device: torch.device) -> Iterator[str]:
    """strategy="odc" over memory that two processes of a device share comes to the loss of one."""
    losses = [_row_of(said) for said in run_two(be_one_on_demand, device, 30)]
    module = _module().to(device)
    module.log = lambda *args, **options: None  # type: ignore[method-assign]
    optimizers: Any = module.configure_optimizers()
    optimizer, scheduler = optimizers["optimizer"], optimizers["lr_scheduler"]["scheduler"]
    loss = torch.zeros(())
    for batch in batches():
        rows: Any = torch.utils.data.default_collate(batch)
        loss = module.training_step(tuple(part.to(device) for part in rows), 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    yield f"losses of two ranks: {losses}, of a plain loop: {float(loss):.6f}"
    assert all(abs(float(found) - float(loss)) < 1e-3 for found in losses)


class Fail(Callback):
    """Fails on the process of node 1, in a way of accelerators, while the other one trains."""

    def __init__(self, fail: Callable[[torch.device], None]) -> None:
        self._fail = fail

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Fail in the third batch."""
        if trainer.global_rank == 1 and batch_idx == 2:
            self._fail(trainer.strategy.root_device)


def _assert_on_device(device: torch.device) -> None:
    torch.zeros(2, device=device)[torch.tensor([7], device=device)]


def _use_up_memory(device: torch.device) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


def _be_killed(device: torch.device) -> None:
    print(f"{ROW}killed at {time.monotonic()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class FailInStep(Fail):
    """Fails in the middle of the third step, before its first backward."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Do nothing yet."""
        self._batch = batch_idx

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        """Fail."""
        if trainer.global_rank == 1 and self._batch == 2:
            self._fail(trainer.strategy.root_device)


def be_one_that_is_killed(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, of which one is killed in the middle of a step."""
    _train_as_one_of_two(device, FailInStep(_be_killed))
    yield "nothing has happened"


def be_one_with_an_assert_in_a_step(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, of which one asserts on the device in the middle of a step."""
    _train_as_one_of_two(device, FailInStep(_assert_on_device))
    yield "nothing has happened"


def be_one_with_an_assert(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, of which one asserts on the device."""
    _train_as_one_of_two(device, Fail(_assert_on_device))
    yield "nothing has happened"


def be_one_out_of_memory(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, of which one asks for too much memory."""
    _train_as_one_of_two(device, Fail(_use_up_memory))
    yield "nothing has happened"


def blame(device: torch.device) -> Iterator[str]:
    """Who fails on the device is named, on both processes."""
    failing: list[Function] = [be_one_with_an_assert, be_one_out_of_memory]
    for function in failing:
        lines = [line for line in run_two(function, device, 18)[0] if line.startswith("[pipeo")]
        yield f"{function.__name__}: {lines[-1:]}"
        assert any("because of global rank 1: " in line for line in lines)
