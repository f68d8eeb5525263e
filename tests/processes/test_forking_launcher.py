"""Ranks that an interpreter forks: what comes back to it, and how they end."""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.loop import run_checks
from lightning_pipeoffload.processes.forking_launcher import ForkingLauncher, TracebackOfRank
from tests.support import fits

SILENT = {**fits.SILENT, "enable_checkpointing": False, "max_epochs": 2}


class Net(L.LightningModule):
    """Six small blocks whose steps and hooks write attributes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.history, self.means = [], {"mean": []}
        self.double()

    def forward(self, x):
        return self.norm(self.net(x))

    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).pow(2).sub(0.5).pow(2).mean()
        self.history.append(loss.detach())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        self.count += 1

    def on_train_epoch_end(self):
        self.means["mean"].append(float(torch.stack(self.history).mean()))

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Recorder(L.Callback):
    def __init__(self):
        self.losses, self.trainer, self.reported = [], None, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.trainer = trainer
        self.losses.append(float(outputs["loss"]))

    def on_exception(self, trainer, module, exception):
        self.reported += 1


def make_loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(24, 8, generator=generator, dtype=torch.float64)), 8
    )


def make_trainer(devices=2, **options):
    strategy = PipeOffloadStrategy(start_method="fork", schedule="zb_h1")
    return L.Trainer(**{**SILENT, "devices": devices, "strategy": strategy, **options})


def fit(devices, folder):
    torch.manual_seed(0)
    module, recorder = Net(), Recorder()
    callbacks = [recorder, ModelCheckpoint(folder, monitor="val"), EarlyStopping("val", patience=2)]
    options = {"enable_checkpointing": True, "max_epochs": 5, "log_every_n_steps": 1}
    strategy = {} if devices > 1 else {"strategy": "auto"}
    logger = CSVLogger(folder)
    trainer = make_trainer(devices, callbacks=callbacks, logger=logger, **options, **strategy)
    trainer.fit(module, make_loader(), make_loader())
    return trainer, module, callbacks


def no_children():
    names = (child.name for child in multiprocessing.active_children())
    return not any(name.startswith("global rank") for name in names)


def test_what_a_fit_trains_and_writes_is_in_the_interpreter_afterwards(tmp_path):
    plain_trainer, plain, plain_callbacks = fit(1, tmp_path / "plain")
    trainer, module, (recorder, checkpoint, stopping) = fit(2, tmp_path / "forked")
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], expected, atol=1e-12, rtol=0)
    assert module.count == plain.count
    assert recorder.trainer is trainer
    assert recorder.losses == pytest.approx(plain_callbacks[0].losses, abs=1e-12)
    assert module.means["mean"] == pytest.approx(plain.means["mean"], abs=1e-12)
    assert len(module.history) == 4 * len(plain.history)  # one for each microbatch
    assert trainer.callback_metrics.keys() == plain_trainer.callback_metrics.keys()
    assert (trainer.current_epoch, trainer.global_step) == (
        plain_trainer.current_epoch,
        plain_trainer.global_step,
    )
    assert Path(checkpoint.best_model_path).is_file()
    torch.testing.assert_close(stopping.best_score, plain_callbacks[2].best_score)
    assert (Path(trainer.log_dir) / "metrics.csv").is_file()
    assert trainer.strategy.report()["num_ranks"] == trainer.strategy.plan.num_ranks == 2
    assert no_children()

    # The next cells
    (scores,) = trainer.validate(module, make_loader(), verbose=False)
    (expected,) = plain_trainer.validate(plain, make_loader(), verbose=False)
    assert scores == pytest.approx(expected, abs=1e-12)
    for mine, theirs in zip(
        trainer.predict(module, make_loader()),
        plain_trainer.predict(plain, make_loader()),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    with pytest.raises(RuntimeError, match="this Trainer has fitted once"):
        trainer.fit(module, make_loader())
    with pytest.raises(RuntimeError, match="pass weights_only=True to trainer.save_checkpoint"):
        trainer.save_checkpoint(tmp_path / "later.ckpt")
    trainer.save_checkpoint(tmp_path / "later.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "later.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    make_trainer(3, max_epochs=6).fit(
        module, make_loader(), ckpt_path=checkpoint.best_model_path, weights_only=False
    )


class LaterNet(Net):
    """Layers that the ranks make."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(8, 8).double() for _ in range(4)))


def test_layers_made_in_the_ranks_stay_in_a_checkpoint(tmp_path, caplog):
    module = LaterNet()
    make_trainer(default_root_dir=tmp_path).fit(module, make_loader())
    path = tmp_path / "pipeoffload_notebook.ckpt"
    assert f"their weights are in {path}" in caplog.text
    loaded = torch.load(path, weights_only=False)["state_dict"]
    assert any(name.startswith("net.") for name in loaded)
    assert module.net is None


class TwoArgumentsError(Exception):
    def __init__(self, first, second):
        super().__init__(first)


class Failing(Net):
    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.fail(self.trainer.global_rank)


def divide(rank):
    if rank == 1:
        1 / 0  # noqa: B018 - it raises


def raise_unpicklable(rank):
    raise TwoArgumentsError("mine", 2)


def die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(rank):
    os._exit(0)


@pytest.mark.parametrize(
    ("fail", "error", "message", "is_raised"),
    [
        (divide, ZeroDivisionError, "division by zero", True),
        (raise_unpicklable, RuntimeError, "TwoArgumentsError: mine", True),
        (die, RuntimeError, "global rank 1 was killed by SIGKILL", False),
        (leave, RuntimeError, r"global rank [01] ended with status 0", False),
    ],
)
def test_an_error_in_a_rank_is_raised_in_the_interpreter(fail, error, message, is_raised):
    recorder = Recorder()
    with pytest.raises(error, match=message) as raised:
        make_trainer(callbacks=[recorder]).fit(Failing(fail), make_loader())
    assert not is_raised or isinstance(raised.value.__cause__, TracebackOfRank)
    assert not is_raised or "on_train_batch_start" in str(raised.value.__cause__)
    assert recorder.reported == 0
    assert "on_exception" not in vars(recorder)
    assert no_children()


def wait_for_ever(rank):
    Path(os.environ["STARTED"]).touch()
    time.sleep(1000)


def test_an_interrupt_ends_the_ranks_and_leaves_the_interpreters_handler(monkeypatch, tmp_path):
    started = tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))

    def interrupt():
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    def handler(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)  # pytest's workers ignore it
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            make_trainer().fit(Failing(wait_for_ever), make_loader())
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert no_children()


def test_a_rank_closes_ports_that_a_restarted_kernel_binds_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = os.readlink(f"/proc/self/fd/{server.fileno()}")

        def find(rank):
            files = [*Path("/proc/self/fd").iterdir()]
            held = {os.readlink(file) for file in files if file.exists() or file.is_symlink()}
            raise RuntimeError(f"{len(held & {port})} ports")

        with pytest.raises(RuntimeError, match="0 ports"):
            make_trainer().fit(Failing(find), make_loader())


def test_a_rank_frees_nothing_that_is_garbage_in_the_interpreter():
    freed = []

    class Circle:  # such as an ended trainer, whose process groups have threads
        def __init__(self):
            self.own = self

        def __del__(self):
            freed.append(self)

    def collect(rank):
        gc.collect()
        raise RuntimeError(f"freed: {len(freed)}")

    gc.disable()
    try:
        Circle()
        with pytest.raises(RuntimeError, match="freed: 0"):
            make_trainer().fit(Failing(collect), make_loader())
    finally:
        gc.enable()


SCRIPT = """\
from tests.processes.test_forking_launcher import *

def wait(rank):
    print(os.getpid(), flush=True) if rank == 0 else print(end="")
    time.sleep(1000)

make_trainer().fit(Failing(wait), make_loader())
"""


def test_ranks_end_with_the_interpreter():
    words = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rank = next(int(line) for line in process.stdout if line.strip().isdigit())
    process.kill()
    process.communicate(timeout=100)  # until every rank has closed it
    assert rank


@pytest.mark.slow
def test_a_fork_after_threads_of_torch_trains():
    code = """\
from tests.processes.test_forking_launcher import *

torch.set_num_threads(2)
x = torch.randn(1000, 1000, requires_grad=True)
(x @ x).sum().backward()
make_trainer().fit(Net(), make_loader())
print("trained")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "trained" in done.stdout, done.stderr


def test_an_interactive_interpreter_forks(monkeypatch):
    options = {**SILENT, "devices": 2}
    monkeypatch.setattr(sys, "ps1", ">>>", raising=False)
    assert isinstance(
        L.Trainer(**options, strategy="pipeoffload").strategy.launcher, ForkingLauncher
    )


def test_forks_are_refused_where_something_else_starts_the_ranks():
    with pytest.raises(ValueError, match="start_method='fork' starts the ranks of one machine"):
        make_trainer(num_nodes=2)
    with pytest.raises(ValueError, match="start_method='spawn' is unknown; use 'fork'"):
        PipeOffloadStrategy(start_method="spawn")


def test_a_device_that_was_used_before_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"a cell has used cuda, .* restart the kernel"):
        make_trainer().fit(Net(), make_loader())


def test_one_rank_runs_in_the_interpreter():
    module = Net()
    trainer = make_trainer(1)
    trainer.fit(module, make_loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, make_loader())
    assert len(module.history) == 2 * 9  # one for each microbatch
    make_trainer().fit(module, make_loader())  # forks have no threads of that run
    trainer.validate(module, make_loader(), verbose=False)


def test_a_gpu_without_bfloat16_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy, precision="bf16-mixed")
    with pytest.warns(UserWarning, match="Tesla T4 has no bfloat16, .* use precision='16-mixed'"):
        run_checks._warn_of_slow_bfloat16(trainer)
