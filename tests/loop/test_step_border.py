"""Steps that were taken for right, and taken back: weights are those of ranks that wait."""

from __future__ import annotations

import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.overrides import _get_current_function_mode  # private: a mode that was left behind

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import failing, fits
from tests.support.forked_runs import run_forked
from tests.support.pairs import some

NUM_STEPS, CLIPPED_EACH = 20, 3
PATIENCE_SECONDS = 60
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam, maximal": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Normed(fits.Block):
    """A block that counts its calls, and has statistics."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.statistics = nn.BatchNorm1d(16)
        self.register_buffer("num_calls", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training:
            self.num_calls += 1
        return self.statistics(super().forward(x))


class Net(fits.Net):
    """Every third batch has a gradient that is clipped."""

    def __init__(self, optimizer="adamw", tie=False, normed=False, dtype=torch.float64):
        super().__init__(tie=tie)
        if normed:
            self.blocks = nn.ModuleList(Normed(0.1) for _ in self.blocks)
        self.optimizer = optimizer
        self.to(dtype)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (20.0 if self.trainer.global_step % CLIPPED_EACH == 0 else 1.0)

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ClippingTwice(Net):
    """Clips, works on what is clipped, and lets the trainer clip once more."""

    def on_before_optimizer_step(self, optimizer):
        self.trainer.precision_plugin.clip_gradients(optimizer, 3.0)
        for parameter in self.parameters():
            if type(parameter) is nn.Parameter:
                parameter.grad.mul_(2.5)


class Losses(L.Callback):
    """Keeps what was logged, which reads neither weights nor gradients."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, *args):
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))


def fit(sync, folder, size, module=(), strategy=(), options=()):
    L.seed_everything(7, verbose=False)
    options = dict(options)
    net, losses = options.pop("kind", Net)(**dict(module)), Losses()
    given = {"num_microbatches": 4, "schedule": "zb_h1", **dict(strategy)}
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=size,
        strategy=PipeOffloadStrategy(optimizer_sync=sync, **given),
        callbacks=[losses],
        enable_checkpointing=False,
        max_steps=NUM_STEPS,
        gradient_clip_val=6.0,
        **options,
    )
    trainer.fit(net, fits.loader(batch_size=8))
    trainer.save_checkpoint(Path(folder, sync))
    calls = [block.calls for block in net.blocks if hasattr(block, "calls")]
    report = trainer.strategy.report()
    return losses.losses, calls, report["steps_taken_back"]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_as_barrier(ranks, folder, size, *args):
    """Fit both ways; some steps are taken back, alike on all ranks."""
    results = {}
    for sync in ("barrier", "post_validation"):
        results[sync] = ranks(size).run(fit, sync, str(folder), size, *args)
    saved = {sync: torch.load(Path(folder, sync), weights_only=False) for sync in results}
    found, expected = saved["post_validation"], saved["barrier"]
    assert_same(found["state_dict"], expected["state_dict"])
    for key in ("optimizer_states", "lr_schedulers"):
        assert_same(found[key][0], expected[key][0])
    for mine, theirs in zip(results["post_validation"], results["barrier"], strict=True):
        assert mine[:2] == theirs[:2]
        assert theirs[2] == 0
    (taken_back,) = {taken_back for _, _, taken_back in results["post_validation"]}
    assert NUM_STEPS // CLIPPED_EACH <= taken_back < NUM_STEPS


@pytest.mark.parametrize(
    ("size", "schedule", "module"),
    [
        (2, "zb_h2", {"optimizer": "adamw", "tie": True}),
        (2, "zb_v", {"optimizer": "nesterov", "normed": True, "dtype": torch.float32}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (3, "zb_2p", {"optimizer": "adagrad"}),
                (2, "interleaved_1f1b", {"optimizer": "adamw, fused", "normed": True}),
                (4, "zb_v", {"optimizer": "rprop", "normed": True}),
                (4, "zb_h2", {"optimizer": "adamw, one by one", "dtype": torch.float32}),
                (4, "zb_2p", {"optimizer": "sgd", "tie": True}),
                (2, "gpipe", {"optimizer": "adam, maximal", "dtype": torch.float32}),
                (2, "uniform", {"optimizer": "sgd", "normed": True}),
            ]
        ),
    ],
)
def test_weights_are_those_of_ranks_that_wait(ranks, tmp_path, size, schedule, module):
    assert_as_barrier(ranks, tmp_path, size, module, {"schedule": schedule})


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (4, {"data_parallel_size": 2, "sharding": "optimizer", "schedule": "zb_v"}, {}),
        pytest.param(
            *(2, {"offload": "half", "schedule": "zb_2p"}, {"accumulate_grad_batches": 2}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(2, {"schedule": "zb_v", "offload": "full"}, {"precision": "bf16-mixed"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(2, {"compile": {"backend": "aot_eager"}}, {"accumulate_grad_batches": 2}),
            marks=pytest.mark.slow,
        ),
        pytest.param(4, {"data_parallel_size": 2}, {}, marks=pytest.mark.slow),
        (2, {"schedule": "zb_h2"}, {"kind": ClippingTwice}),
    ],
)
def test_so_they_are_with_replicas_offload_and_accumulation(
    ranks, tmp_path, world, strategy, options
):
    module = {"dtype": torch.float32} if options.get("precision") else {}
    assert_as_barrier(ranks, tmp_path, world, module, strategy, options)


class Overflowing(Net):
    """Its first block overflows in every fourth batch, in that stage only."""

    def on_after_backward(self):
        weight = self.blocks[0].linear.weight
        if self.trainer.fit_loop.total_batch_idx % 4 == 1 and weight.grad is not None:
            weight.grad.mul_(float("inf"))


class Scales(L.Callback):
    """Reads the loss scale after each batch, which is then what it is to be."""

    def __init__(self, waits):
        self.waits = waits
        self.scales = []

    def on_train_batch_end(self, trainer, *args):
        if self.waits or trainer.global_step % 2:
            self.scales.append(trainer.precision_plugin.scaler.get_scale())


def fit_scaled(sync, folder, clip, waits):
    L.seed_everything(7, verbose=False)
    module, scales = Overflowing("sgd", dtype=torch.float32), Scales(waits)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=2,
        strategy=PipeOffloadStrategy(num_microbatches=4, schedule="zb_h2", optimizer_sync=sync),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[scales],
        enable_checkpointing=False,
        max_epochs=3,
        gradient_clip_val=clip,
    )
    trainer.fit(module, fits.loader())
    trainer.save_checkpoint(Path(folder, sync))
    return scales.scales, trainer.strategy.report()["steps_taken_back"]


@pytest.mark.parametrize(("clip", "waits"), some([(6.0, False), (None, True)], 2))
def test_steps_that_overflow_on_another_rank_are_skipped(ranks, tmp_path, clip, waits):
    syncs = "barrier", "post_validation"
    results = [ranks(2).run(fit_scaled, sync, str(tmp_path), clip, waits) for sync in syncs]
    assert [scales for scales, _ in results[1]] == [scales for scales, _ in results[0]]
    assert all(taken_back >= 4 for _, taken_back in results[1])
    saved = [torch.load(tmp_path / sync, weights_only=False) for sync in syncs]
    for key in ("state_dict", "optimizer_states", "MixedPrecision"):
        assert_same(saved[1][key], saved[0][key])


class Reader(L.Callback):
    """Looks at weights, gradients or what the optimizer keeps, now and then and on one rank."""

    def __init__(self, what):
        self.what = what
        self.seen = []

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step % 2 or (trainer.global_rank == 0 and trainer.global_step % 5 == 1):
            self.look(trainer.optimizers[0], module)

    def look(self, optimizer, module):
        own = [p for p in module.parameters() if type(p) is nn.Parameter]
        found = {
            "weights": own,
            "gradients": [p.grad for p in own],
            "state": [optimizer.state[p]["exp_avg_sq"] for p in own],
        }[self.what]
        self.seen.append([value.detach().clone() for value in found])


class Stepping(Net):
    """Looks at its weights right after a step, on one rank, with a mode of its own around it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        with torch.device("cpu"):
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.seen.append(self.norm.weight.detach().tolist() if self.is_last else 0.0)

    @property
    def is_last(self):
        return self.trainer.global_rank == 0


def fit_watched(sync, folder, what):
    L.seed_everything(7, verbose=False)
    module, reader = Stepping() if what == "step" else Net(), Reader(what)
    module.seen = []
    saving = ModelCheckpoint(folder, f"{sync}-{{step}}", every_n_train_steps=4, save_top_k=-1)
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=2,
        strategy=PipeOffloadStrategy(num_microbatches=4, schedule="zb_v", optimizer_sync=sync),
        callbacks=[saving] if what in ("step", "saves") else [reader],
        enable_checkpointing=what in ("step", "saves"),
        max_steps=NUM_STEPS,
        gradient_clip_val=6.0,
    )
    trainer.fit(module, fits.loader())
    return module.seen or reader.seen, trainer.strategy.report()["steps_taken_back"]


@pytest.mark.parametrize("what", some(["step", "gradients", "state", "weights", "saves"], 5))
def test_who_looks_between_two_steps_sees_what_is_right(ranks, tmp_path, what):
    syncs = "barrier", "post_validation"
    results = [ranks(2).run(fit_watched, sync, str(tmp_path), what) for sync in syncs]
    assert_same([seen for seen, _ in results[1]], [seen for seen, _ in results[0]])
    assert all(taken_back > 4 for _, taken_back in results[1])
    for path in tmp_path.glob("barrier-*"):
        found, expected = (
            torch.load(tmp_path / path.name.replace("barrier", sync), weights_only=False)
            for sync in syncs[::-1]
        )
        assert_same(found["state_dict"], expected["state_dict"])
        assert_same(found["optimizer_states"], expected["optimizer_states"])


class Registers(L.Callback):
    """Has one rank look at its steps, and the other at its forwards, once training runs."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, *args):
        own = [p for p in module.parameters() if type(p) is nn.Parameter]
        if (trainer.global_rank, trainer.fit_loop.total_batch_idx) == (0, 3):
            module.blocks[0].register_forward_hook(self.see_output)
            module.blocks[-1].register_forward_hook(self.see_output)
        if (trainer.global_rank, trainer.fit_loop.total_batch_idx) == (1, 6):
            (optimizer,) = trainer.optimizers
            optimizer.register_step_pre_hook(lambda *_: self.see(p.grad for p in own))
            optimizer.register_step_post_hook(lambda *_: self.see(own))

    def see_output(self, block, args, output):
        if output.untyped_storage().device.type == "cpu":
            self.see([output])

    def see(self, tensors):
        self.seen.append([tensor.detach().clone() for tensor in tensors])


def fit_registering(sync, folder, is_scaled):
    L.seed_everything(7, verbose=False)
    module, seen = Net("sgd", dtype=torch.float32) if is_scaled else Net(), Registers()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=2,
        strategy=PipeOffloadStrategy(num_microbatches=4, schedule="zb_h2", optimizer_sync=sync),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if is_scaled else [],
        callbacks=[seen],
        enable_checkpointing=False,
        max_epochs=2,
        gradient_clip_val=None if is_scaled else 6.0,
    )
    trainer.fit(module, fits.loader())
    trainer.save_checkpoint(Path(folder, sync))
    return seen.seen, trainer.strategy.report()["steps_taken_back"]


@pytest.mark.parametrize(("is_scaled", "num_wrong"), some([(False, 3), (True, 6)], 2))
def test_hooks_that_one_rank_has_since_training_runs_see_what_is_right(
    ranks, tmp_path, is_scaled, num_wrong
):
    syncs = "barrier", "post_validation"
    results = [ranks(2).run(fit_registering, sync, str(tmp_path), is_scaled) for sync in syncs]
    assert_same([seen for seen, _ in results[1]], [seen for seen, _ in results[0]])
    assert all(seen for seen, _ in results[0])
    # That at which the hooks are heard of is the last.
    assert {taken_back for _, taken_back in results[1]} == {num_wrong}
    saved = [torch.load(tmp_path / sync, weights_only=False) for sync in syncs]
    assert_same(saved[1]["state_dict"], saved[0]["state_dict"])
    assert_same(saved[1]["optimizer_states"], saved[0]["optimizer_states"])


class Failing(L.Callback):
    """Fails after a step that was wrong, and reads the weights then."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == CLIPPED_EACH + 1:
            raise RuntimeError("on purpose")

    def on_exception(self, trainer, module, exception):
        own = [p for p in module.parameters() if type(p) is nn.Parameter]
        self.seen = [parameter.detach().clone() for parameter in own]


def fit_failing(sync):
    L.seed_everything(7, verbose=False)
    failing = Failing()
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=2,
        strategy=PipeOffloadStrategy(num_microbatches=4, schedule="zb_h2", optimizer_sync=sync),
        callbacks=[failing],
        enable_checkpointing=False,
        gradient_clip_val=6.0,
    )
    fits.outlive_failures(trainer)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Net(), fits.loader())
    assert _get_current_function_mode() is None
    return failing.seen


def test_who_looks_after_an_error_sees_what_is_right(ranks):
    found, expected = (ranks(2).run(fit_failing, s) for s in ("post_validation", "barrier"))
    assert_same(found, expected)


class Held(Net):
    """Global rank 0 ends a step when all other ranks have run forwards of the next."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self.trainer.global_rank == 0 and batch_idx == 1:
            others = range(1, self.trainer.world_size)
            end = time.monotonic() + PATIENCE_SECONDS
            while not all((self.folder / str(rank)).exists() for rank in others):
                assert time.monotonic() < end, "a rank waits for global rank 0"
                time.sleep(0.01)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.strategy.place:
            (self.folder / str(self.trainer.global_rank)).touch()
        return super().training_step(batch, batch_idx)


def fit_held(folder, size, schedule):
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=size,
        strategy=PipeOffloadStrategy(
            num_microbatches=4, schedule=schedule, optimizer_sync="post_validation"
        ),
        enable_checkpointing=False,
        max_steps=4,
        gradient_clip_val=6.0,
    )
    trainer.fit(Held(folder), fits.loader())
    memory = trainer.strategy.report()["memory"]
    trained_and_states = zip(memory["gradients"], memory["optimizer"], strict=True)
    assert memory["step_copies"] == [sum(each) for each in trained_and_states]


@pytest.mark.parametrize(
    ("size", "schedule"),
    some([(3, "1f1b"), (2, "zb_v"), (2, "zb_2p"), (3, "zb_h2"), (2, "interleaved_1f1b")], 5),
)
def test_the_others_run_on_while_global_rank_0_is_in_its_step(ranks, tmp_path, size, schedule):
    ranks(size).run(fit_held, str(tmp_path), size, schedule)


@pytest.mark.parametrize("rank", some([1, 0], 2))
def test_a_kill_while_a_step_is_taken_back_leaves_the_last_checkpoint_and_a_message(tmp_path, rank):
    run = run_forked(
        failing.main,
        *("--hook", failing.TAKEN_BACK, "--act", "kill", "--rank", str(rank)),
        *("--save-to", str(tmp_path)),
    )
    assert run.status != 0
    (line,) = run.lines
    assert line.startswith(
        f"[pipeoffload] global rank {1 - rank} stops because of global rank {rank}, "
    )
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=False)["global_step"] == 5
