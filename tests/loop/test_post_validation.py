"""Steps that were taken too early, and taken back: weights are those of ranks that wait."""

import copy
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.overrides import _get_current_function_mode  # private: a mode that was left behind

from lightning_pipeoffload import PipeOffloadStrategy, save_pretrained
from tests.support import failing, fits
from tests.support.forked_runs import run_forked
from tests.support.pairs import slow, some

NUM_STEPS, CLIPPED_EACH = 12, 3
SYNCS = "barrier", "post_validation"
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


class Normed(fits.Block):
    """A block that counts its calls, and has statistics, of which it assigns one anew."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.statistics = nn.BatchNorm1d(16)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training:
            self.num_calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.statistics(super().forward(x)) - self.mean


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
        for parameter in own_parameters(self):
            parameter.grad.mul_(2.5)


def own_parameters(module):
    return [p for p in module.parameters() if type(p) is nn.Parameter]


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


class Losses(L.Callback):
    """Reads what was logged, and neither weights nor gradients."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(float(trainer.callback_metrics["train_loss_step"]))


def fit(sync, folder, size, net, watcher, strategy, options):
    """Return what the watcher has seen, calls of blocks, and how many steps were taken back."""
    L.seed_everything(7, verbose=False)
    module, watcher = net(), watcher()
    module.watcher = watcher
    given = {"num_microbatches": 4, "schedule": "zb_h2", **strategy, "optimizer_sync": sync}
    saving = ModelCheckpoint(folder, f"{sync}-{{step}}", every_n_train_steps=4, save_top_k=-1)
    options = {"max_steps": NUM_STEPS, "gradient_clip_val": 6.0, "scale": 0, **options}
    saves, scale = options.pop("saves", False), options.pop("scale")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2)
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=size,
        strategy=PipeOffloadStrategy(**given),
        callbacks=[watcher, saving] if saves else [watcher],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if scale else [],
        enable_checkpointing=saves,
        **options,
    )
    trainer.fit(module, fits.loader(batch_size=8))
    trainer.save_checkpoint(Path(folder, sync))
    calls = [block.calls for block in module.blocks if hasattr(block, "calls")]
    return watcher.seen, calls, trainer.strategy.report()["steps_taken_back"]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def compare(ranks, folder, net=Net, watcher=Losses, size=2, strategy=(), **options):
    """Fit both ways, which is the same; return how many steps were taken back, alike on all."""
    args = str(folder), size, net, watcher, dict(strategy), options
    results = [ranks(size).run(fit, sync, *args) for sync in SYNCS]
    for waiting, early in zip(*results, strict=True):
        assert_same(early[0], waiting[0])
        assert early[1] == waiting[1]
        assert waiting[2] == 0
    assert any(seen for seen, *_ in results[0])
    for path in folder.glob("barrier*"):
        expected = torch.load(path, weights_only=False)
        found = torch.load(folder / path.name.replace(*SYNCS), weights_only=False)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision"):
            if key in expected:
                assert_same(found[key], expected[key])
    (taken_back,) = {taken_back for *_, taken_back in results[1]}
    return taken_back


SHARDED = {"data_parallel_size": 2, "sharding": "optimizer", "schedule": "zb_v"}
F32 = {"dtype": torch.float32}


@pytest.mark.parametrize(
    ("size", "net", "strategy", "options"),
    [
        (2, partial(Net, "nesterov", normed=True, **F32), {"schedule": "zb_v"}, {}),
        slow((4, partial(Net, tie=True), SHARDED, {})),
        slow((2, ClippingTwice, {}, {})),
        slow((2, partial(Net, tie=True), {}, {"gradient_clip_val": 12.0})),
        slow((2, Net, {"offload": "half", "schedule": "zb_2p"}, {"accumulate_grad_batches": 2})),
        slow((2, partial(Net, **F32), {"offload": "full"}, {"precision": "bf16-mixed"})),
        slow((2, Net, {"compile": {"backend": "aot_eager"}}, {"accumulate_grad_batches": 2})),
        slow((4, Net, {"data_parallel_size": 2}, {})),
    ],
)
def test_weights_are_those_of_ranks_that_wait(ranks, tmp_path, size, net, strategy, options):
    taken_back = compare(ranks, tmp_path, net, size=size, strategy=strategy, **options)
    assert NUM_STEPS // CLIPPED_EACH <= taken_back < NUM_STEPS


class Overflowing(Net):
    """Its first block overflows in every fourth batch, in that stage only."""

    def on_after_backward(self):
        weight = self.blocks[0].linear.weight
        if self.trainer.fit_loop.total_batch_idx % 4 == 1 and weight.grad is not None:
            weight.grad.mul_(float("inf"))


class Scales(L.Callback):
    """Reads the loss scale after each batch, or after some, which waits for the right one."""

    def __init__(self, waits):
        self.waits, self.seen = waits, []

    def on_train_batch_end(self, trainer, *args):
        if self.waits or trainer.global_step % 2:
            self.seen.append(trainer.precision_plugin.scaler.get_scale())


@pytest.mark.parametrize(("clip", "waits"), some([(6.0, False), (None, True)], 2))
def test_steps_that_overflow_on_another_rank_are_skipped(ranks, tmp_path, clip, waits):
    net, scales = partial(Overflowing, "sgd", **F32), partial(Scales, waits)
    options = {"scale": 2.0**10, "gradient_clip_val": clip, "max_steps": 15}
    assert compare(ranks, tmp_path, net, scales, **options) >= 4


class Reader(L.Callback):
    """Reads weights, gradients or optimizer state now and then, and on one rank."""

    def __init__(self, kind):
        self.kind, self.seen = kind, []

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step % 2 or (trainer.global_rank == 0 and trainer.global_step % 5 == 1):
            own, state = own_parameters(module), trainer.optimizers[0].state
            found = {
                "weights": lambda: own,
                "gradients": lambda: [p.grad for p in own],
                "state": lambda: [state[p]["exp_avg_sq"] for p in own],
            }[self.kind]
            self.seen.append(copies(found()))


class Stepping(Net):
    """Reads its weights right after a step, on one rank, with a mode of its own around it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        with torch.device("cpu"):
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.watcher.seen.append(
                self.norm.weight.detach().tolist() if self.trainer.is_global_zero else 0.0
            )


@pytest.mark.parametrize("kind", some(["step", "gradients", "state", "weights"], 4))
def test_readers_between_two_steps_see_what_is_right(ranks, tmp_path, kind):
    steps = kind == "step"
    net, watcher = (Stepping, Losses) if steps else (Net, partial(Reader, kind))
    options = {"strategy": {"schedule": "zb_v"}, "saves": steps}
    assert compare(ranks, tmp_path, net, watcher, **options) >= 4


class Registers(L.Callback):
    """Registers hooks at the steps of one rank, and at forwards of the other, in the fit."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, *args):
        own = own_parameters(module)
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
        self.seen.append(copies(tensors))


@pytest.mark.parametrize(("is_scaled", "num_wrong"), some([(False, 3), (True, 6)], 2))
def test_hooks_that_one_rank_registers_while_it_trains_see_what_is_right(
    ranks, tmp_path, is_scaled, num_wrong
):
    net = partial(Net, "sgd", **F32) if is_scaled else Net
    options = {"scale": 2.0**22, "gradient_clip_val": None} if is_scaled else {}
    # The step at which all hear of the hooks is the last one that is taken back.
    assert compare(ranks, tmp_path, net, Registers, max_steps=10, **options) == num_wrong


class Failing(L.Callback):
    """Fails after a step that was wrong, and reads the weights then."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == CLIPPED_EACH + 1:
            raise RuntimeError("on purpose")

    def on_exception(self, trainer, module, exception):
        self.seen = copies(own_parameters(module))


def fit_failing(sync):
    L.seed_everything(7, verbose=False)
    watcher = Failing()
    trainer = fits.trainer(
        2,
        {"num_microbatches": 4, "schedule": "zb_h2", "optimizer_sync": sync},
        num_sanity_val_steps=0,
        callbacks=[watcher],
        gradient_clip_val=6.0,
    )
    fits.outlive_failures(trainer)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Net(), fits.loader())
    assert _get_current_function_mode() is None
    return watcher.seen


def test_readers_after_an_error_see_what_is_right(ranks):
    expected, found = (ranks(2).run(fit_failing, sync) for sync in SYNCS)
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
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


def values(state):
    return {name: value.clone() for name, value in state.items() if type(value) is torch.Tensor}


def save(trainer, folder):
    """Return a checkpoint, and the weights that are exported from it."""
    trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.is_global_zero:
        save_pretrained(folder / "last.ckpt", folder / "exported")
    trainer.strategy.barrier()
    exported = [path.read_bytes() for path in sorted(folder.glob("exported/*.safetensors"))]
    assert len(exported) == 1
    state = torch.load(folder / "last.ckpt")
    return state["state_dict"], state["optimizer_states"], list(exported[0])


READERS = (
    lambda trainer, module, folder: save(trainer, folder),
    lambda trainer, module, folder: trainer.strategy.gather(module.head.weight).detach(),
    lambda trainer, module, folder: values(module.state_dict()),
    lambda trainer, module, folder: values(copy.deepcopy(module).state_dict()),
    lambda trainer, module, folder: module.head(torch.ones(1, 16).double()).detach(),
    lambda trainer, module, folder: copy.deepcopy(trainer.optimizers[0].state_dict()),
    lambda trainer, module, folder: None,  # after validation
)


class Walk(L.Callback):
    """Reads in another way after each epoch, which is one step.

    No hook of the user's may run right after a step: replicas would wait for each other there.
    """

    def __init__(self, folder):
        self.folder = folder
        self.seen = []

    def on_train_epoch_end(self, trainer, module):
        read = READERS[trainer.current_epoch]
        self.seen.append(read(trainer, module, self.folder))


def fit_clipped(sync, num_steps, *callbacks):
    """Fit; each step is clipped, and so taken back. Return the trainer."""
    L.seed_everything(7, verbose=False)
    trainer = fits.trainer(
        4,
        {
            **SHARDED,
            "num_microbatches": 4,
            "optimizer_sync": sync,
        },
        num_sanity_val_steps=0,
        enable_checkpointing=len(callbacks) > 1,
        callbacks=[*callbacks],
        max_epochs=num_steps,
        limit_train_batches=1,
        check_val_every_n_epoch=len(READERS),
        gradient_clip_val=1e-3,
    )
    trainer.fit(fits.Net(tie=True), fits.loader(batch_size=4), fits.loader(batch_size=4))
    assert trainer.strategy.report()["steps_taken_back"] == (num_steps if sync != "barrier" else 0)
    return trainer


def read_all(sync, folder):
    folder = Path(folder, sync)
    walk = Walk(folder)
    trainer = fit_clipped(sync, len(READERS), walk)
    average = EMAWeightAveraging(decay=0.5, update_every_n_steps=2)
    saving = ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=3, save_top_k=-1)
    after = fit_clipped(sync, 4, average, saving)
    return {
        "hooks": walk.seen,
        "validation": trainer.callback_metrics["val_loss"],
        "average": values(average._average_model.state_dict()),
        "a save by the step": torch.load(folder / "steps" / "step=3.ckpt")["current_model_state"],
        "a save after the fit": save(after, folder),
    }


@pytest.mark.slow
def test_every_reader_has_the_weights_of_a_step_that_was_taken_back(ranks, tmp_path):
    for found, expected in zip(
        *(ranks(4).run(read_all, sync, str(tmp_path)) for sync in SYNCS[::-1]), strict=True
    ):
        for reader, seen in expected.items():
            assert_same(found[reader], seen)
