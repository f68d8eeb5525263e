"""What cannot be pipelined is refused before the first step; the message says what would do."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel

from tests.support import fits


def net(init=None, depth=8, **methods):
    """Return what makes a module with other methods, or with more in it."""

    def make():
        module = type("Changed", (fits.Net,), methods)(depth=depth)
        if init is not None:
            init(module)
        return module

    return make


def take_iterator(self, dataloader_iter):
    return self.loss(next(dataloader_iter)[0])


def fail(self, batch, batch_idx):
    raise RuntimeError(f"no {len(batch)} columns for me")


def grow(self):
    self.teacher = copy.deepcopy(self).requires_grad_(False)


def empty(self, batch, dataloader_idx):
    return {name: batch[name][:0] for name in ("x", "y")} if self.training else batch


def normalize(self, batch, batch_idx):
    hidden = self.norm(self.batch_norm(self.embed(batch["x"])))
    for block in self.blocks:
        hidden = block(hidden)
    return nn.functional.cross_entropy(self.head(hidden), batch["y"])


def add_batch_norm(module):
    module.batch_norm = nn.BatchNorm1d(16).double()


def wait(self, batch, batch_idx):
    self.trainer.strategy.barrier()
    return self.loss(batch)


def gather(self, batch, batch_idx):
    loss = self.loss(batch)
    assert self.all_gather(loss) is loss
    return loss


def average_clones(self, *_):
    for average, parameter in zip(self.averages, self.parameters(), strict=True):
        average.lerp_(parameter.detach(), 0.1)


def clone(self):
    self.averages = [parameter.detach().clone() for parameter in self.parameters()]


def update(self):
    self.averages[0].update_parameters(self.blocks)


def average_before_the_fit(module):
    module.averages = [AveragedModel(module.blocks)]


AVERAGES = (
    "averages all weights into averages, and a rank has those of its stages only; use Lightning's "
    "callback EMAWeightAveraging(), or start from copy.deepcopy(pl_module) in on_fit_start, of "
    "which each rank averages a part"
)
NO_LOSS = (
    "the training step returned None without a loss, while the other stages wait for the batch's "
    "backward; return the loss, and to skip a bad batch, zero the gradients in on_after_backward, "
    "or leave out the step in optimizer_step"
)
WAITING_LINE = wait.__code__.co_firstlineno + 1

CASES = [
    (
        net(lambda module: setattr(module, "automatic_optimization", False)),
        {},
        "manual optimization cannot be pipelined: training_step runs once for every stage and "
        "microbatch, an optimizer step inside it would run as often; use automatic optimization",
    ),
    (
        net(
            add_batch_norm,
            configure_callbacks=lambda self: [StochasticWeightAveraging(swa_lrs=1e-2)],
        ),
        {},
        "StochasticWeightAveraging runs one more epoch without backwards where a module has "
        "BatchNorm, which cannot be pipelined; use WeightAveraging(), which averages the "
        "statistics with the weights, or another norm",
    ),
    (
        net(on_fit_start=grow),
        {},
        "the module got teacher.embed.weight and 19 more after its parameters had been assigned to "
        "ranks: make it in __init__ or configure_model; keep a copy that averages "
        "weights outside of the module tree, in a callback or a list "
        "(self.averages = [copy.deepcopy(self)])",
    ),
    (
        net(training_step=take_iterator),
        {},
        "training_step(self, dataloader_iter) cannot be pipelined: each batch has to be cut into "
        "microbatches; use training_step(self, batch, batch_idx)",
    ),
    (
        net(validation_step=take_iterator),
        {},
        "validation_step(self, dataloader_iter) cannot be pipelined: each batch has to be cut into "
        "microbatches; use validation_step(self, batch, batch_idx)",
    ),
    (net(training_step=lambda self, batch, batch_idx: None), {}, NO_LOSS),
    (
        net(training_step=lambda self, batch, i: None if i == 1 else self.loss(batch)),
        *({}, NO_LOSS),
    ),
    (net(training_step=fail), {}, "no 3 columns for me"),
    (
        net(on_after_batch_transfer=empty),
        {},
        "training_step got a batch without samples, which makes no microbatch; leave it out where "
        "batches are made (batch_sampler, collate_fn, or the dataset)",
    ),
    (
        net(add_batch_norm, training_step=normalize),
        {"num_microbatches": 8},
        "training_step fails with a microbatch, and not with the whole batch of 8 samples that was "
        "cut into 8: ValueError: Expected more than 1 value per channel when training, got input "
        "size torch.Size([1, 16]); set a smaller num_microbatches or a larger batch_size, or leave "
        "out a short last batch with drop_last=True",
    ),
    (
        net(training_step=wait),
        {},
        "barrier() inside a step would wait for ever: the other ranks have left the step, or are "
        f"not there yet ({__file__}:{WAITING_LINE}: self.trainer.strategy.barrier()); call it in a "
        "hook such as on_train_batch_end",
    ),
    (
        lambda: torch.compile(fits.Net(), backend="eager"),  # Lightning's own message
        {},
        "Using a compiled model is incompatible with the current strategy: `PipeOffloadStrategy`. "
        "Only SingleDeviceStrategy, DDPStrategy, FSDPStrategy support compilation. Either switch "
        "to one of the supported strategies or avoid passing in compiled model.",
    ),
    (
        net(depth=1),
        {},
        "blocks has 1 blocks for 2 stages; use fewer devices or num_chunks, or a model of at least "
        '2 blocks, or cut more of this one, in the order of its calls: blocks=["embed", "blocks", '
        '"norm", "head"]',
    ),
    (
        net(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters())),
        {},
        "LBFGS computes over all its parameters, and each of the 2 ranks has a part of them only; "
        "use an optimizer that treats each parameter by itself, such as AdamW, or devices=1",
    ),
    (
        net(configure_optimizers=lambda self: [torch.optim.SGD(self.parameters(), 0.1)] * 2),
        {},
        "configure_optimizers returned several optimizers, and one is stepped after each "
        "batch; give one optimizer several groups of parameters: torch.optim.AdamW(["
        '{"params": self.encoder.parameters(), "lr": 1e-4}, {"params": ...}])',
    ),
    (
        net(on_train_start=clone, on_train_batch_end=average_clones),
        *({}, f"Changed.on_train_batch_end {AVERAGES}"),
    ),
    (
        net(average_before_the_fit, on_train_epoch_end=update),
        *({}, f"Changed.on_train_epoch_end {AVERAGES}"),
    ),
    (net(training_step=gather), {}, None),  # over the replicas, of which there is one
    (net(configure_optimizers=lambda self: None), {}, None),  # Lightning warns, and nothing trains
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_it_is_refused(ranks, case):
    assert ranks(2).run(_refusal, case) == [CASES[case][2]] * 2


def _refusal(case):
    """Return the message that a fit is refused with; None if it ran."""
    return _refusal_of(*CASES[case][:2])


def _refusal_of(module, options):
    try:
        trainer = fits.trainer(2, options, max_steps=2)
        fits.outlive_failures(trainer)
        trainer.fit(module(), fits.loader(), fits.loader())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _shard(self):
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(self.embed.weight.detach(), mesh, [Replicate()])
    self.embed.weight = nn.Parameter(shard)


SHARDING = [
    (lambda self: self.device_mesh["tensor_parallel"], "configure_model shards layers (", ", and "),
    (_shard, "is a DTensor, a shard of a weight, and ", "ModelParallelStrategy"),
]


@pytest.mark.parametrize("case", range(len(SHARDING)))
def test_shards_are_refused(ranks, case):
    for refused in ranks(2).run(_refusal_of_shards, case):
        assert all(words in refused for words in SHARDING[case][1:])


def _refusal_of_shards(case):
    return _refusal_of(net(configure_model=SHARDING[case][0]), {})
