"""Fits whose stages' layers are shared by tensor ranks are those of one device."""

import logging
import re
from functools import partial
from math import prod
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_pipeoffload import (
    PipelineMonitor,
    PipeOffloadStrategy,
    load_weights,
    tensor_parallel_plan,
)
from lightning_pipeoffload.runtime import forked_randomness
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.schedule import ScheduleError
from tests.support import fits

WIDTH, WORDS = 8, 32
NUM_STEPS = 5
LONG = {"length": 192}  # with tensors that may be offloaded


class Inner(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(self.up(x).tanh() * self.gate(x)))


class Block(nn.Module):
    def __init__(self, inner, after):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner()
        self.dropout = nn.Dropout(after)

    def forward(self, x):
        result = self.dropout(self.inner(self.norm(x)))
        return result if isinstance(result, DTensor) else x + result


INNER = {"inner.up": ColwiseParallel(), "inner.gate": ColwiseParallel()}
BY_ROWS = {"input_layouts": Replicate()}
OF_SEQUENCES = {
    "norm": SequenceParallel(),
    "inner": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **INNER,
    "inner.down": RowwiseParallel(output_layouts=Shard(1)),
}


def around_sequences(**head):
    return {
        "embed": RowwiseParallel(**BY_ROWS, output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), **head),
    }


PLANS = {
    "tensor": ({}, {**INNER, "inner.down": RowwiseParallel()}),
    "sequence": (around_sequences(output_layouts=Replicate()), OF_SEQUENCES),
    "torchtitan": (around_sequences(use_local_output=False), OF_SEQUENCES),
    "no sum": ({}, {"inner.down": RowwiseParallel()}),
    "logits": ({"head": ColwiseParallel(use_local_output=False)}, {}),
    "shard of the head": ({"head": ColwiseParallel()}, {}),
    "a DTensor": (
        {},
        {**INNER, "inner.down": RowwiseParallel(use_local_output=False)},
    ),
}  # fmt: skip


class Net(L.LightningModule):
    """Four blocks over an embedding, with a head; in float64."""

    def __init__(
        self,
        plan="tensor",
        inner=Inner,
        after=0.0,
        optimizer=torch.optim.AdamW,
        dtype=torch.float64,
    ):
        super().__init__()
        self.plan, self.inner, self.after, self.optimizer = plan, inner, after, optimizer
        self.precision = dtype
        self.losses = []

    def configure_model(self):
        if hasattr(self, "blocks"):
            return
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(self.inner, self.after) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.to(self.precision)
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["tensor_parallel"]
        of_module, of_block = PLANS[self.plan]
        parallelize_module(self, mesh, of_module)
        for block in self.blocks:
            parallelize_module(block, mesh, of_block)

    def loss(self, batch):
        x, y = batch
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, *args):
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-2)


def loader(num_replicas=1, length=6):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(WORDS, (2, 40, length), generator=generator)
    return DataLoader(TensorDataset(x, y), 8 // num_replicas)


def fit(
    sizes,
    folder,
    module=None,
    pipeline=None,
    ckpt_path=None,
    callbacks=(),
    kind=None,
    length=6,
    **options,
):
    """Fit for some steps and save; of sizes (pipeline, tensor, data), or () for one device."""
    L.seed_everything(7, verbose=False)
    strategy, devices = "auto", 1
    if sizes:
        names = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"
        given = {"schedule": "zb_h1", "num_microbatches": 4, **(pipeline or {})}
        strategy = PipeOffloadStrategy(**dict(zip(names, sizes, strict=False)), **given)
        devices = prod(sizes)
    net = (kind or Net)(**(module or {}))
    path = f"{folder}/{'-'.join(map(str, sizes))}.ckpt"
    limits = {"max_steps": NUM_STEPS, "max_epochs": 3, "gradient_clip_val": 0.5, **options}
    trainer = L.Trainer(
        **{**fits.SILENT, **limits}, devices=devices, strategy=strategy, callbacks=[*callbacks],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
    )  # fmt: skip
    num_replicas = sizes[2] if len(sizes) > 2 else 1
    data = loader(num_replicas, length), loader(length=length)
    trainer.fit(net, *data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    return net.losses, float(trainer.callback_metrics.get("val_loss", 0)), path


def read(path):
    checkpoint = torch.load(path, weights_only=False)
    (optimizer,) = checkpoint["optimizer_states"]
    return checkpoint["state_dict"], optimizer


def check_alike(found, expected):
    """Compare losses, weights and the optimizer's state with those of one device."""
    *numbers, found = found
    *expected_numbers, expected = expected
    weights, optimizer = read(found)
    expected_weights, expected_optimizer = read(expected)
    assert list(weights) == list(expected_weights)
    assert optimizer["param_groups"] == expected_optimizer["param_groups"]
    found = numbers, weights, optimizer["state"]
    expected = expected_numbers, expected_weights, expected_optimizer["state"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class LossOfShards(Net):
    def loss(self, batch):
        with loss_parallel():
            return super().loss(batch)

    def backward(self, *args, **kwargs):
        with loss_parallel():
            super().backward(*args, **kwargs)


class Gathers(Net):
    """Sums up squares of weights and gradients, divided and whole, of each stage."""

    def on_train_batch_end(self, *args):
        super().on_train_batch_end()
        gather = getattr(self.trainer.strategy, "gather", torch.clone)
        of_blocks = [self.blocks[index].inner.up.weight for index in (0, 3)]
        for weight in (*of_blocks, self.blocks[0].inner.down.weight, self.norm.weight):
            self.losses += [float(gather(x).detach().square().sum()) for x in (weight, weight.grad)]


slow = pytest.mark.slow
COMPILED = {"compile": {"backend": "aot_eager"}}
CASES = {
    "zb_h1": ((2, 2), {"kind": Gathers}),
    "compiled": ((2, 2), {"pipeline": COMPILED, "limit_val_batches": 0}),
    "compiled sequences": ((2, 2), {"module": {"plan": "sequence"}, "pipeline": COMPILED}),
    "compiled on one stage": ((1, 2, 2), {"pipeline": COMPILED}),
    "compiled and recomputed": (
        (2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {**COMPILED, "recompute": "full"}},
    ),
    "compiled and offloaded": (
        (2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {**COMPILED, "offload": "full"}, **LONG},
    ),
    "compiled loss_parallel": (
        (2, 2),
        {
            "kind": LossOfShards,
            "module": {"plan": "torchtitan"},
            "pipeline": {**COMPILED, "schedule": "auto"},
        },
    ),
    "inductor": ((2, 2), {"pipeline": {"compile": True}}),
    "1f1b": ((2, 2), {"pipeline": {"schedule": "1f1b"}}),
    "zb_v": ((2, 2), {"pipeline": {"schedule": "zb_v"}}),
    "one stage": ((1, 4), {"pipeline": {"schedule": "1f1b"}}),
    "replicas": ((1, 2, 2), {"pipeline": {"schedule": "1f1b"}}),
    "data_inner": ((1, 2, 2), {"pipeline": {"schedule": "1f1b", "rank_order": "data_inner"}}),
    "sequence": ((2, 2), {"module": {"plan": "sequence"}}),
    "divided optimizer": (
        (1, 2, 2),
        {"pipeline": {"schedule": "1f1b", "sharding": "optimizer"}},
    ),
    "divided optimizer on the host": (
        (1, 2, 2),
        {"pipeline": {"sharding": "optimizer", "optimizer_offload": True}},
    ),
    "optimizer on the host": (
        (2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {"optimizer_offload": True}},
    ),
    "loss_parallel": ((2, 2), {"kind": LossOfShards, "module": {"plan": "torchtitan"}}),
    "auto": ((2, 2), {"pipeline": {"schedule": "auto", "num_microbatches": "auto"}}),
    "auto of replicas": ((1, 2, 2), {"pipeline": {"schedule": "auto"}}),
    "auto alone": ((1, 4), {"pipeline": {"schedule": "auto"}}),
    "optpipe": ((2, 2), {"pipeline": {"schedule": "optpipe", "solver_seconds": 0.1}}),
    "offloaded sequences": (
        (2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {"offload": "full"}, **LONG},
    ),
    "recomputed": ((2, 2), {"pipeline": {"recompute": "full"}}),
    "recomputed cheaply": ((2, 2), {"pipeline": {"recompute": "cheap"}}),
    "recomputed sequences": (
        (2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {"recompute": "full"}},
    ),
    "cheaply recomputed sequences": (
        (2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {"recompute": "cheap"}},
    ),
    "dropout after": (
        (1, 2, 2),
        {"module": {"after": 0.3}, "pipeline": {"schedule": "1f1b"}},
    ),
    "loss_parallel in a V, recomputed": (
        (2, 2),
        {
            "kind": LossOfShards,
            "module": {"plan": "torchtitan"},
            "pipeline": {"schedule": "zb_v", "recompute": "full"},
        },
    ),
    "clipped by value": ((2, 2), {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}),
    "accumulated": ((2, 2), {"module": {"plan": "sequence"}, "accumulate_grad_batches": 2}),
    "replicas of two stages": (
        (2, 2, 2),
        {"module": {"plan": "sequence"}, "pipeline": {"sharding": "optimizer"}},
    ),
}


def in_default_run(cases, count):
    """Mark all but the first so many as slow."""
    return [*cases][:count] + [pytest.param(name, marks=slow) for name in [*cases][count:]]


@pytest.mark.parametrize("case", in_default_run(CASES, 2))
def test_a_fit_is_that_of_one_device(ranks, tmp_path, case):
    sizes, options = CASES[case]
    found = ranks(prod(sizes)).run(run, sizes, tmp_path, options)
    if len(sizes) > 2:  # whose data Lightning shuffles
        expected = ranks(2).run(run, (1, 1, sizes[2]), tmp_path, options)[0]
    else:
        one = {name: value for name, value in options.items() if name != "pipeline"}
        expected = fit((), tmp_path, **one)
        assert all(each == found[0] for each in found)
    check_alike(found[0], expected)


def run(sizes, folder, options):
    return fit(sizes, folder, **options)


@slow
@pytest.mark.parametrize("compile", [{}, COMPILED], ids=["as written", "compiled"])
def test_a_fit_has_the_same_bits_with_every_schedule(ranks, tmp_path, compile):
    found = []
    for schedule in ("zb_h1", "1f1b"):
        options = {"module": {"plan": "sequence"}, "pipeline": {**compile, "schedule": schedule}}
        losses, *_, path = ranks(4).run(run, (2, 2), tmp_path, options)[0]
        found.append((losses, *read(path)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Run(L.Callback):
    def on_train_start(self, trainer, module):
        self.strategy, self.counts = trainer.strategy, getattr(module, "counts", None)


def keep_limit(sizes, plan, folder):
    """Fit by the least memory that a refusal names."""
    run, options = Run(), {"module": {"plan": plan}, **LONG}
    with pytest.raises(ScheduleError, match="use at least") as refused:
        fit(sizes, folder, pipeline={"memory_limit": "1000B"}, **options)
    (least,) = re.findall(r"use at least (\d+) bytes", str(refused.value))
    pipeline = {"memory_limit": f"{least}B"}
    found = fit(sizes, folder, pipeline=pipeline, callbacks=[run], **options)
    return found, int(least), run.strategy.report()


@slow
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)], ids=str)
def test_the_least_memory_limit_is_kept_in_local_bytes(ranks, tmp_path, sizes):
    messages = {}
    for plan in ("tensor", "sequence"):
        expected = fit((), tmp_path, module={"plan": plan}, **LONG)
        for found, least, report in ranks(4).run(keep_limit, sizes, plan, tmp_path):
            check_alike(found, expected)
            measured = report["measured"]["peak_activation_bytes"]
            assert measured == report["peak_memory"] == report["memory"]["activations"]
            assert max(measured) <= least
            messages[plan] = report["memory"]["messages"]
        assert sizes[0] == 1 or any(report["offload"]["offloaded"])
    for of_whole, of_shard in zip(*messages.values(), strict=True):
        assert of_shard * sizes[1] == of_whole


def save_at(folder, num_steps=3):
    """Save after the third step, in the middle of an epoch, or after another one."""
    return ModelCheckpoint(
        folder, "middle", every_n_train_steps=num_steps, enable_version_counter=False
    )


def resume(sizes, resumed, folder):
    """Resume a fit that was saved in its middle; return what it and one that is not come to."""
    whole = fit(sizes, folder, callbacks=[save_at(folder)])
    return whole, fit(resumed, folder, ckpt_path=f"{folder}/middle.ckpt")


def in_folder(folder, pipeline=None):
    pipeline = {**(pipeline or {}), "save_distributed_checkpoint": True}
    return {"pipeline": pipeline, "callbacks": [save_at(folder)]}


@slow
def test_a_folder_of_tensor_ranks_is_read_by_any_number_and_one_device(ranks, tmp_path):
    losses, *rest = fit((), tmp_path)
    ranks(4).run(run, (2, 2), tmp_path, in_folder(tmp_path))
    resumed = {"ckpt_path": f"{tmp_path}/middle.ckpt"}
    check_alike(fit((1, 1), tmp_path, **resumed), (losses[3:], *rest))
    for found in ranks(4).run(run, (1, 4), tmp_path, resumed):
        check_alike(found, (losses[3:], *rest))


@slow
def test_a_checkpoint_of_tensor_ranks_resumes_with_other_numbers(ranks, tmp_path):
    for whole, resumed in ranks(4).run(resume, (1, 4), (2, 2), tmp_path):
        check_alike(resumed, (whole[0][3:], *whole[1:]))


MASTERS = {"master_weights": "float32", "schedule": "1f1b"}
HALF = {"module": {"dtype": torch.bfloat16}, "precision": "bf16-true"}


def step_masters(sizes, folder):
    """Fit with masters; then with those on the device, on the host and shared out, and resumed."""
    losses, *_, path = fit(sizes, folder, pipeline=MASTERS, **HALF)
    middle = f"{folder}/middle.ckpt"
    found, shares = [(losses, *read(path))], {"sharding": "optimizer"}
    for options in ({}, shares, {"optimizer_offload": True}, {"optimizer_offload": True, **shares}):
        pipeline = {**MASTERS, **options}
        before, *_ = fit(sizes, folder, **in_folder(folder, pipeline), **HALF)
        after, *_, path = fit(sizes, folder, pipeline=pipeline, ckpt_path=middle, **HALF)
        found.append((before[:3] + after, *read(path)))
    return found


@slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 2)], ids=str)
def test_masters_are_the_same_bits_wherever_they_are_stepped_and_saved(ranks, tmp_path, sizes):
    options = {"pipeline": MASTERS, **HALF}
    losses, *_, path = ranks(2).run(run, (1, 1, 2), tmp_path, options)[0]
    whole = read(path)[0]
    for first, *others in ranks(prod(sizes)).run(step_masters, sizes, tmp_path):
        assert first[0] == pytest.approx(losses, abs=1e-2)  # in bfloat16
        for name, weight in first[1].items():
            assert weight.dtype == torch.float32
            assert (weight - whole[name]).abs().median() < 2e-3
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


@slow
def test_one_device_resumes_a_fit_of_tensor_ranks(ranks, tmp_path):
    options = {"kind": LossOfShards, "module": {"plan": "torchtitan"}, "max_steps": 8}
    whole = ranks(4).run(save_after_an_epoch, (2, 2), tmp_path, options)[0]
    resumed = fit((), tmp_path, ckpt_path=f"{tmp_path}/middle.ckpt", **options)
    check_alike(resumed, (whole[0][5:], resumed[1], whole[2]))  # it validated when it had saved


def save_after_an_epoch(sizes, folder, options):
    """Save at an epoch's end, as Lightning does not skip the batches of half an epoch."""
    return fit(sizes, folder, callbacks=[save_at(folder, num_steps=5)], **options)


@slow
def test_tensor_ranks_resume_a_fit_of_one_device(ranks, tmp_path):
    expected = fit((), tmp_path, callbacks=[save_at(tmp_path)])
    found = ranks(4).run(run, (2, 2), tmp_path, {"ckpt_path": f"{tmp_path}/middle.ckpt"})
    check_alike(found[0], (expected[0][3:], *expected[1:]))


class ReadsGradients(L.Callback):
    def on_after_backward(self, *args):
        """Read gradients."""


class LogsShards(LossOfShards):
    def loss(self, batch):
        self.log("logits", self.head(self.embed(batch[0])))
        return super().loss(batch)


class Scaled(Inner):
    def __init__(self):
        super().__init__()
        self.scale = nn.LayerNorm(WIDTH)  # of a shard, which is as wide

    def forward(self, x):
        return self.down(self.scale(self.up(x)))


class Around(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return nn.functional.dropout(self.block(x))


class DropsItself(Net):
    def configure_model(self):
        super().configure_model()
        self.blocks = nn.ModuleList(Around(block) for block in self.blocks)


class DropsInStep(Net):
    def loss(self, batch):
        x, y = batch
        hidden = nn.functional.dropout(self.embed(x))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class DropsByGenerator(Inner):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden * torch.empty_like(hidden).bernoulli_(generator=self.generator))


class DropsBoth(Inner):
    def forward(self, x):
        return self.down(nn.functional.dropout(self.up(nn.functional.dropout(x))))


class ReadsApart(Net):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].fill_(self.global_rank % 2)


REFUSED = {
    "a whole weight": (
        {"module": {"inner": Scaled}},
        "scale.* is in no plan .* is used .* on a shard",
    ),
    "dropout in a block": (
        {"module": {"plan": "sequence"}, "kind": DropsItself},
        "Around draws random numbers for a shard of a layer itself, and it is a block",
    ),
    "dropout outside of modules": (
        {"module": {"plan": "sequence"}, "kind": DropsInStep},
        "bernoulli_ .* draws random numbers for a shard of a layer outside of the modules",
    ),
    "dropout of a shard by a generator": (
        {"module": {"inner": DropsByGenerator}},
        "draws random numbers for a shard of a layer by a generator of its own",
    ),
    "dropout of a shard and the whole": (
        {"module": {"inner": DropsBoth}},
        "draws random numbers for a shard of a layer and for what all tensor ranks have",
    ),
    "other batches": (
        {"kind": ReadsApart},
        "ranks that share a stage's layers have another batch in training_step than each other",
    ),
    "no sum": (
        {"module": {"plan": "no sum"}, "num_sanity_val_steps": 0},
        "a and b must have same reduction dim",
    ),
    "a shard of the logits": (
        {"module": {"plan": "shard of the head"}, "num_sanity_val_steps": 0},
        "the loss is computed from a shard of a layer",
    ),
    "a DTensor": (
        {"module": {"plan": "a DTensor"}, "num_sanity_val_steps": 0},
        "blocks.0 returns a DTensor",
    ),
    "a logged DTensor": (
        {"kind": LogsShards, "module": {"plan": "logits"}},
        "the step returns or logs a DTensor placed as",
    ),
    "Adafactor": ({"module": {"optimizer": torch.optim.Adafactor}}, "Adafactor is not known to"),
    "a hook": ({"callbacks": [ReadsGradients()]}, "on_after_backward may read gradients, of which"),
    "averages": (
        {"callbacks": [StochasticWeightAveraging(1e-2)]},
        "StochasticWeightAveraging copies the module before configure_model",
    ),
}


def refusal(case, folder):
    options, message = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit((2, 2), folder, **options)


@pytest.mark.parametrize("case", in_default_run(REFUSED, 3))
def test_what_would_be_wrong_is_refused(ranks, tmp_path, case):
    ranks(4).run(refusal, case, tmp_path)


def fit_again(folder):
    """Fit one module with one Trainer twice, and with another."""
    L.seed_everything(7, verbose=False)
    net, sizes = Net(), {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}

    def make(max_epochs):
        pipeline = {**sizes, "schedule": "1f1b"}
        return fits.trainer(4, pipeline, max_epochs=max_epochs, gradient_clip_val=0.5)

    trainer = make(1)
    trainer.fit(net, loader(), loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, loader(), loader())
    trainer.save_checkpoint(f"{folder}/twice.ckpt")
    with pytest.raises(ValueError, match="the module was trained by another Trainer over tensor_"):
        make(1).fit(net, loader())
    return net.losses, float(trainer.callback_metrics["val_loss"]), f"{folder}/twice.ckpt"


@slow
def test_one_trainer_fits_again_and_another_one_is_refused(ranks, tmp_path):
    found = ranks(4).run(fit_again, tmp_path)[0]
    first = fit((), tmp_path, max_steps=-1, max_epochs=1)
    assert found[0][: len(first[0])] == pytest.approx(first[0], abs=1e-12)
    assert len(found[0]) > len(first[0])
    assert read(found[2])[0]["blocks.0.inner.up.weight"].shape == (2 * WIDTH, WIDTH)


DROPPING = {
    "tensor": {"inner": partial(Inner, dropout=0.3), "after": 0.3},
    "sequence": {"plan": "sequence", "inner": partial(Inner, dropout=0.3), "after": 0.3},
}


def run_dropping(sizes, folder, plan, pipeline):
    """Return the losses, and the mask of each dropout on this rank."""
    masks, plain = [], nn.functional.dropout

    def dropout(x, *args, **kwargs):
        dropped = plain(x, *args, **kwargs)
        if type(x) is torch.Tensor and torch.is_grad_enabled():
            masks.append((dropped == 0).flatten().tolist())
        return dropped

    nn.functional.dropout = dropout
    try:
        losses, *_ = fit(sizes, folder, module=DROPPING[plan], pipeline=pipeline)
    finally:
        nn.functional.dropout = plain
    return losses, masks


OTHERS = {
    "1f1b": {"schedule": "1f1b"},
    "zb_v": {"schedule": "zb_v"},
    "full": {"recompute": "full"},
    "cheap": {"recompute": "cheap"},
}


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=slow) for plan in DROPPING])
def test_dropout_of_shards_is_the_same_for_every_p_and_schedule(ranks, tmp_path, plan):
    found = ranks(4).run(run_dropping, (2, 2), tmp_path, plan, {})
    losses, masks = found[0]
    assert masks
    for number, (mask, other) in enumerate(zip(masks, found[1][1], strict=True)):
        is_after = number % 2 == 1  # in each block that of its inner part comes first
        assert (mask == other) == (plan == "tensor" and is_after)
    others = [ranks(4).run(run_dropping, (2, 2), tmp_path, plan, each) for each in OTHERS.values()]
    others.append(ranks(2).run(run_dropping, (1, 2), tmp_path, plan, {"schedule": "1f1b"}))
    for other in others:
        assert [each for each, _ in other] == [pytest.approx(losses, abs=1e-12)] * len(other)


class Norms(L.Callback):
    """Keeps the norm of all gradients before they are clipped, on one device."""

    def __init__(self):
        self.found = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.found.append(float(get_total_norm([p.grad for p in module.parameters()])))


def log_norms(folder):
    journal = fits.Journal()
    fit((2, 2), folder, callbacks=[PipelineMonitor()], logger=journal, log_every_n_steps=1)
    logged = [numbers for _, numbers in journal.entries]
    return [numbers["pipeline/grad_norm"] for numbers in logged if "pipeline/grad_norm" in numbers]


@slow
def test_the_logged_norm_is_that_of_whole_gradients(ranks, tmp_path):
    norms = Norms()
    fit((), tmp_path, callbacks=[norms])
    found = ranks(4).run(log_norms, tmp_path)
    assert found[0] == pytest.approx(norms.found, abs=1e-12)


# A module that is written for ModelParallelStrategy, as Lightning's example


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, positions):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        positions = positions[: x.size(1)].view(1, 1, x.size(1), -1)
        y = nn.functional.scaled_dot_product_attention(
            q * positions, k * positions, v, is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.inner_norm, self.inner = nn.LayerNorm(WIDTH), Inner()

    def forward(self, x, positions):
        x = x + self.attention(self.norm(x), positions)
        return x + self.inner(self.inner_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("positions", torch.linspace(0.5, 1.5, 16))
        self.layers = nn.ModuleDict()
        for index in range(4):
            self.layers[str(index)] = AttentionBlock()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.init_weights()

    def init_weights(self):
        nn.init.normal_(self.embed.weight)
        for layer in self.layers.values():
            for linear in (layer.attention.q, layer.inner.up, layer.inner.down):
                nn.init.trunc_normal_(linear.weight, std=0.2)
            layer.attention.out.weight.data.normal_(std=0.2)
            layer.inner.gate.reset_parameters()
        nn.init.trunc_normal_(self.head.weight, std=0.3, a=-1, b=1)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.positions)
        return self.head(self.norm(x))


def parallelize(model, mesh):
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    of_first = {"input_layouts": (Replicate(), None), "desired_input_layouts": (Shard(1), None)}
    plan = {
        "embed": RowwiseParallel(**BY_ROWS),
        "layers.0": PrepareModuleInput(**of_first, use_local_output=True),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tensor, plan)
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    whole_with_positions = {name: (placement, None) for name, placement in whole.items()}
    for layer in model.layers.values():
        plan = {
            "norm": SequenceParallel(),
            "attention": PrepareModuleInput(**whole_with_positions),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "inner_norm": SequenceParallel(),
            "inner": PrepareModuleInput(**whole),
            **INNER,
            "inner.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        layer.attention.num_heads //= tensor.size()
        parallelize_module(layer, tensor, plan)
    if data.size() > 1:
        fully_shard(model, mesh=data)


class MadeWithoutValues(Net):
    """Made as torchtitan does, so that a rank never has more than its shards."""

    def configure_model(self):
        if hasattr(self, "model"):
            return
        with torch.device("meta"):
            self.model = Transformer().double()
        if self.device_mesh is not None:
            parallelize(self.model, self.device_mesh)
        self.model.to_empty(device="cpu")
        self.model.positions.copy_(torch.linspace(0.5, 1.5, 16))
        for part in self.model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        self.model.init_weights()

    def loss(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


class AsInLightningsExample(Net):
    def __init__(self):
        super().__init__()
        self.model = Transformer().double()

    def configure_model(self):
        if self.device_mesh is not None:
            parallelize(self.model, self.device_mesh)

    def on_train_start(self):
        self.model.init_weights()

    def loss(self, batch):
        logits = self.model(batch[0])
        with loss_parallel():  # of whole logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def backward(self, *args, **kwargs):
        with loss_parallel():
            super().backward(*args, **kwargs)


rank_zero_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class Notices(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def run_example(folder):
    notices = Notices()
    rank_zero_log.addHandler(notices)
    try:
        found = fit((2, 2), folder, kind=AsInLightningsExample)
    finally:
        rank_zero_log.removeHandler(notices)
    return found, [line for line in notices.found if "fully_shard" in line]


@slow
def test_lightnings_example_is_that_of_one_device_and_a_notice_replaces_fully_shard(
    ranks, tmp_path
):
    found = ranks(4).run(run_example, tmp_path)
    check_alike(found[0][0], fit((), tmp_path, kind=AsInLightningsExample))
    assert [len(lines) for _, lines in found] == [1, 0, 0, 0]
    assert 'sharding="optimizer" and recompute' in found[0][1][0]


@slow
def test_shards_may_get_memory_and_values_after_parallelize_module(ranks, tmp_path):
    options = {"kind": MadeWithoutValues}
    found = ranks(4).run(run, (2, 2), tmp_path, options)
    check_alike(found[0], fit((), tmp_path, **options))


# Models of Hugging Face's


class Llama(Net):
    """A Llama, which shares its layers by its own plan."""

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH * 2, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip

    def configure_model(self):
        self.model = LlamaForCausalLM(self.config).double()
        self.share_layers()

    def share_layers(self):
        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))

    def loss(self, batch):
        logits = self.model(input_ids=batch[0]).logits  # its own loss is in float32
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Qwen3(Llama):
    """Has norms of heads, and a vocabulary that stays whole."""

    config = Qwen3Config(
        vocab_size=WORDS + 1, hidden_size=WIDTH * 2, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    )  # fmt: skip

    def configure_model(self):
        self.model = Qwen3ForCausalLM(self.config).double()
        self.share_layers()


@slow
@pytest.mark.parametrize("kind", [Llama, Qwen3])
def test_a_model_shares_its_layers_by_its_own_plan(ranks, tmp_path, kind):
    options = {"kind": kind}
    found = ranks(4).run(run, (2, 2), tmp_path, options)
    check_alike(found[0], fit((), tmp_path, **options))


class LoadedLlama(Llama):
    """Weights that are read before a plan divides them, or into shards."""

    def __init__(self, folder, is_divided):
        super().__init__()
        self.folder, self.is_divided = folder, is_divided

    def configure_model(self):
        self.model = LlamaForCausalLM(self.config).double()
        if self.is_divided:
            self.share_layers()
        load_weights(self.model, self.folder)
        if not self.is_divided:
            self.share_layers()


@slow
@pytest.mark.parametrize("is_divided", [False, True])
def test_pretrained_weights_are_read_into_each_ranks_part(ranks, tmp_path, is_divided):
    with forked_randomness():
        LlamaForCausalLM(Llama.config).double().save_pretrained(tmp_path / "model")
    module = {"folder": tmp_path / "model", "is_divided": is_divided}
    options = {"kind": LoadedLlama, "module": module}
    found = ranks(4).run(run, (2, 2), tmp_path, options)
    check_alike(found[0], fit((), tmp_path, **options))


def count_values(module):
    return sum(p.numel() for p in module.parameters() if not isinstance(p, ShapeOnly))


class CountedLlama(Llama):
    """Counts the elements of weights that a rank has before it shares layers, and afterwards."""

    def share_layers(self):
        self.most = count_values(self)
        super().share_layers()

    def on_fit_start(self):
        self.counts = self.most, count_values(self), count_values(LlamaForCausalLM(self.config))


def make_counted(folder):
    run = Run()
    fit((2, 2), folder, kind=CountedLlama, callbacks=[run], max_steps=1)
    return run.counts


@slow
def test_ranks_make_the_layers_of_their_own_stages(ranks, tmp_path):
    for most, shards, whole in ranks(4).run(make_counted, tmp_path):
        assert most < 0.6 * whole
        assert shards < 0.3 * whole


class Unseeded(L.LightningModule):
    """Is made by ``__init__``, on each process from another seed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Inner(), nn.Linear(WIDTH, WIDTH)).double() for _ in range(2)
        )

    def configure_model(self):
        plan = {"0.up": ColwiseParallel(), "0.gate": ColwiseParallel(), "0.down": RowwiseParallel()}
        for block in self.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch, batch_idx):
        hidden = batch[0].double()[..., None].expand(*batch[0].shape, WIDTH).sin()
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_unseeded(_):
    torch.seed()
    module = Unseeded()
    trainer = fits.trainer(2, {"tensor_parallel_size": 2}, max_steps=2)
    trainer.fit(module, loader())
    return [float(block[1].weight.detach().norm()) for block in module.blocks]


@pytest.mark.slow
def test_layers_that_no_plan_names_are_those_of_the_first_tensor_rank_without_a_seed(ranks):
    first, second = ranks(2).run(fit_unseeded, None)
    assert first == second


def config_with(**options):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    return LlamaConfig(**sizes, num_attention_heads=2, **options)


def test_a_tied_head_stays_whole_and_the_base_model_has_names_of_its_own():
    with torch.device("meta"):
        tied, base = (
            LlamaForCausalLM(config_with(tie_word_embeddings=True)),
            LlamaModel(config_with()),
        )
    of_tied, of_base = tensor_parallel_plan(tied), tensor_parallel_plan(base)
    assert of_tied.keys() == {f"model.{name}" for name in of_base}
    assert isinstance(of_base["layers.*.self_attn.o_proj"], RowwiseParallel)


def test_a_plan_leaves_a_vocabulary_whole_and_refuses_heads_that_do_not_divide():
    with torch.device("meta"):
        model = LlamaForCausalLM(config_with(num_key_value_heads=1))
    plan, two_ranks = tensor_parallel_plan(model), SimpleNamespace(size=lambda: 2)
    head = nn.Linear(4, 7)
    assert plan["lm_head"]._apply(head, two_ranks) is head
    assert isinstance(head.weight, nn.Parameter)
    refused = r"tensor_parallel_size=2 does not divide the 1 heads of config.num_key_value_heads"
    with pytest.raises(ValueError, match=refused):
        plan["model.layers.*.self_attn.k_proj"]._apply(nn.Linear(8, 4), two_ranks)


def test_a_model_without_a_plan_or_with_an_unknown_style_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="Linear has no plan of its own"):
        tensor_parallel_plan(nn.Linear(1, 1))
    with torch.device("meta"):
        model = LlamaForCausalLM(config_with())
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {"layers.*.mlp.up_proj": "sideways"})
    with pytest.raises(ValueError, match="shares model.layers.*up_proj as 'sideways', which"):
        tensor_parallel_plan(model)
