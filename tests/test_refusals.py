"""What cannot be pipelined is refused before the first step; the message says what would do."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits


class Manual(fits.Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Averaged(fits.Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.BatchNorm1d(16)

    def configure_callbacks(self):
        return [StochasticWeightAveraging(swa_lrs=1e-2)]


class Grows(fits.Net):
    def on_fit_start(self):
        self.teacher = copy.deepcopy(self).requires_grad_(False)


class TakesIterator(fits.Net):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class ValidatesIterator(fits.Net):
    def validation_step(self, dataloader_iter):
        self.loss(next(dataloader_iter)[0])


class Skips(fits.Net):
    def training_step(self, batch, batch_idx):
        return None


class SkipsSecond(fits.Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)


class Empties(fits.Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {name: batch[name][:0] for name in ("x", "y")} if self.training else batch


class Fails(fits.Net):
    def training_step(self, batch, batch_idx):
        raise RuntimeError(f"no {len(batch)} columns for me")


class Normalized(fits.Net):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(16)
        self.double()

    def training_step(self, batch, batch_idx):
        hidden = self.batch_norm(self.embed(batch["x"]))
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch["y"])


class Waits(fits.Net):
    def training_step(self, batch, batch_idx):
        self.trainer.strategy.barrier()
        return self.loss(batch)


class Gathers(fits.Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert self.all_gather(loss) is loss
        return loss


class NoOptimizer(fits.Net):
    def configure_optimizers(self):
        return None


class WholeGradient(fits.Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Shallow(fits.Net):
    def __init__(self):
        super().__init__(depth=1)


def compiled():
    return torch.compile(fits.Net(), backend="eager")


NO_LOSS = (
    "the training step returned None without a loss; a pipeline cannot skip a batch, whose "
    "backward the other stages wait for: call the blocks all the same, and return a loss times 0"
)
WAITING_LINE = Waits.training_step.__code__.co_firstlineno + 1

CASES = [
    (
        Manual,
        {},
        "manual optimization cannot be pipelined: training_step runs once for every stage and "
        "microbatch, an optimizer step inside it would run as often; use automatic optimization",
    ),
    (
        Averaged,
        {},
        "StochasticWeightAveraging runs one more epoch without backwards where a module has "
        "BatchNorm, which cannot be pipelined; use WeightAveraging(), which averages the "
        "statistics with the weights, or another norm",
    ),
    (
        Grows,
        {},
        "teacher.embed.weight and 19 more came into the module after it was set up, when its "
        "parameters had been shared out: make it in __init__ or configure_model, or keep a copy "
        "that averages weights apart from the module's parts, in a callback or a list "
        "(self.averages = [copy.deepcopy(self)])",
    ),
    (
        TakesIterator,
        {},
        "training_step(self, dataloader_iter) cannot be pipelined: each batch has to be cut into "
        "microbatches; use training_step(self, batch, batch_idx)",
    ),
    (
        ValidatesIterator,
        {},
        "validation_step(self, dataloader_iter) cannot be pipelined: each batch has to be cut into "
        "microbatches; use validation_step(self, batch, batch_idx)",
    ),
    (Skips, {}, NO_LOSS),
    (SkipsSecond, {}, NO_LOSS),
    (Fails, {}, "no 3 columns for me"),
    (
        Empties,
        {},
        "training_step got a batch without samples, which makes no microbatch; leave it out where "
        "batches are made (batch_sampler, collate_fn, or the dataset)",
    ),
    (
        Normalized,
        {"num_microbatches": 8},
        "training_step fails with a microbatch, and not with the whole batch of 8 samples that was "
        "cut into 8: ValueError: Expected more than 1 value per channel when training, got input "
        "size torch.Size([1, 16]); set a smaller num_microbatches or a larger batch_size, or leave "
        "out a short last batch with drop_last=True",
    ),
    (
        Waits,
        {},
        "barrier() inside a step would wait for ever: the other ranks have left the step, or are "
        f"not there yet ({__file__}:{WAITING_LINE}: self.trainer.strategy.barrier()); call it in a "
        "hook such as on_train_batch_end",
    ),
    (
        compiled,  # Lightning's own message
        {},
        "Using a compiled model is incompatible with the current strategy: `PipeOffloadStrategy`. "
        "Only SingleDeviceStrategy, DDPStrategy, FSDPStrategy support compilation. Either switch "
        "to one of the supported strategies or avoid passing in compiled model.",
    ),
    (
        Shallow,
        {},
        "blocks has 1 blocks for 2 stages; use fewer devices or num_chunks, or a model of at least "
        "2 blocks",
    ),
    (
        WholeGradient,
        {},
        "LBFGS computes over all its parameters, and each of the 2 ranks has a part of them only; "
        "use an optimizer that treats each parameter by itself, such as AdamW, or devices=1",
    ),
    (Gathers, {}, None),  # over the replicas, of which there is one
    (NoOptimizer, {}, None),  # Lightning warns, and nothing trains
]


@pytest.mark.parametrize(("module", "options", "message"), CASES)
def test_it_is_refused(ranks, module, options, message):
    refusals = ranks(2).run(_refusal, module, options)
    assert refusals == [message] * 2


def _refusal(module, options):
    """Return the message that a fit is refused with; None if it ran."""
    try:
        trainer = L.Trainer(
            **fits.SILENT,
            max_steps=2,
            enable_checkpointing=False,
            devices=2,
            strategy=fits.strategy(2, **options),
        )
        fits.outlive_failures(trainer)
        trainer.fit(module(), fits.loader(), fits.loader())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("devices", "size", "message"),
    [
        (3, 2, r"devices \(3\) are not pipeline_parallel_size \(2\) times data_parallel_size"),
        (4, 2, r"devices \(4\) are not pipeline_parallel_size \(2\) times data_parallel_size"),
    ],
)
def test_devices_that_do_not_fit_are_refused_before_processes_start(devices, size, message):
    strategy = PipeOffloadStrategy(pipeline_parallel_size=size)
    with pytest.raises(ValueError, match=message):
        L.Trainer(**fits.SILENT, devices=devices, strategy=strategy)
