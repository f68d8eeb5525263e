"""One process reads; every rank has one device's batches, whatever else draws numbers there."""

import os
import random
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import BasePredictionWriter, LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_pipeoffload import reads_data
from lightning_pipeoffload.loop.reading import BatchDistributor
from lightning_pipeoffload.loop.receiving import BatchHeader, Inbox, LoaderStart
from tests.support import fits
from tests.support.pairs import pairs, slow, some

COUNT = 8
DATASET = TensorDataset(torch.arange(COUNT).double())


class Augmented(TensorDataset):
    """Its samples have noise from each of the three libraries."""

    def __init__(self):
        super().__init__(torch.zeros(COUNT).double())

    def __getitem__(self, index):
        return (torch.rand(()).double() + np.random.rand() + random.random(),)


class Stream(IterableDataset):
    """Samples by three libraries' random numbers."""

    def __iter__(self):
        for _ in range(COUNT // 2):
            yield torch.rand(()).double(), np.random.rand(), random.random()


class PickedByNumpy(Sampler):
    """An order of numpy's."""

    def __iter__(self):
        return iter(np.random.permutation(COUNT).tolist())

    def __len__(self):
        return COUNT


class Pairs(Sampler):
    """Batches of Python's choice."""

    def __iter__(self):
        for _ in range(3):
            yield random.sample(range(COUNT), 2)

    def __len__(self):
        return 3


class Handmade:
    """No DataLoader at all."""

    def __iter__(self):
        return iter([[torch.rand(2).double()] for _ in range(3)])


class Numbers(IterableDataset):
    """Workers take turns."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(range(COUNT)[worker.id :: worker.num_workers] if worker else range(COUNT))


class Prefetcher:
    """Is its own iterator, as loaders of other libraries are."""

    def __iter__(self):
        self.batches = iter(DataLoader(DATASET, 2))
        return self

    def __next__(self):
        return next(self.batches)


def shuffled(**options):
    return DataLoader(DATASET, 2, shuffle=True, **options)


def with_init(init):
    return DataLoader(Augmented(), 2, num_workers=1, worker_init_fn=init)


def draw_once(worker):
    """Draw a number, as an init function of a user may."""
    random.random()


# Two passes of each differ: an order or an augmentation that does not stay the same for ever.
RANDOM = {
    "shuffle": shuffled,
    "a sampler of one's own": lambda: DataLoader(DATASET, 2, sampler=PickedByNumpy()),
    "a batch sampler of one's own": lambda: DataLoader(DATASET, batch_sampler=Pairs()),
    "IterableDataset, two workers": lambda: DataLoader(Stream(), 2, num_workers=2),
    "augmentation, two workers": lambda: DataLoader(Augmented(), 2, num_workers=2),
    "augmentation, persistent_workers": lambda: DataLoader(
        Augmented(), 2, num_workers=1, persistent_workers=True
    ),
    "worker_init_fn": lambda: with_init(draw_once),
    "Lightning's worker_init_fn": lambda: with_init(pl_worker_init_function),
    "a generator of its own": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "no DataLoader": Handmade,
    "a dict of loaders": lambda: {"first": shuffled(), "second": DataLoader(Augmented(), 2)},
    "CombinedLoader": lambda: CombinedLoader(
        {"short": shuffled(), "long": DataLoader(Stream(), 1)}, "max_size"
    ),
}


def leaves(batch):
    return torch.cat([x.double() for x in torch.utils._pytree.tree_leaves(batch) if x is not None])


class Draws(L.LightningModule):
    """Draws more random numbers the lower its rank, in a hook and in its first block."""

    def __init__(self, make):
        super().__init__()
        self.make, self.batches = make, []
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2))).double()

    def train_dataloader(self):
        return self.make()

    def on_train_batch_start(self, batch, batch_idx):
        count = 1 + self.global_rank
        torch.rand(count), np.random.rand(count), [random.random() for _ in range(count)]

    def training_step(self, batch, batch_idx):
        return self.blocks(leaves(batch)[:, None]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches.append((self.current_epoch, leaves(batch).tolist()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(num_devices, name, seed=7, **options):
    """Return (epoch, batch) for each batch of a fit of two epochs."""
    if seed is not None:
        L.seed_everything(seed, workers=True, verbose=False)
    module = Draws(LOADERS[name] if isinstance(name, str) else name)
    trainer = fits.trainer(num_devices, {"num_microbatches": 1}, max_epochs=2, **options)
    if num_devices:
        fits.outlive_failures(trainer)
    trainer.fit(module)
    return module.batches


# Further ones, whose batches are the same in each epoch.
PLAIN = {
    "in order": lambda: DataLoader(DATASET, 2),
    "in order, two workers, prefetch_factor": lambda: DataLoader(
        DATASET, 2, num_workers=2, prefetch_factor=3
    ),
    "IterableDataset in order, two workers": lambda: DataLoader(Numbers(), 2, num_workers=2),
    "drop_last": lambda: DataLoader(DATASET, 3, drop_last=True),
    "CombinedLoader in order": lambda: CombinedLoader(
        [DataLoader(DATASET, 2), DataLoader(Numbers(), 1)], "max_size_cycle"
    ),
    "a list of tensors": lambda: [torch.ones(2, 3).double(), torch.zeros(2, 3).double()],
    "a loader that is its own iterator": Prefetcher,
}


LOADERS = {**RANDOM, **PLAIN}


@pytest.mark.parametrize("name", some(LOADERS, 5))
def test_ranks_have_one_devices_batches(ranks, name):
    first, second = ranks(2).run(read, 2, name)
    assert first == second == read(0, name)
    assert (batches_of(0, first) != batches_of(1, first)) is (name in RANDOM)


def batches_of(epoch, found):
    return [batch for at, batch in found if at == epoch]


def read_anew(num_devices):
    return read(num_devices, "shuffle", reload_dataloaders_every_n_epochs=1)


def test_loaders_that_are_made_anew_are_read_as_on_one_device(ranks):
    first, second = ranks(2).run(read_anew, 2)
    assert first == second == read_anew(0)


class ByProcess(TensorDataset):
    """Data that each process makes for itself, without a seed; a sample has its reader's number."""

    def __init__(self):
        super().__init__(torch.zeros(COUNT), torch.rand(COUNT))

    def __getitem__(self, index):
        return float(os.getpid()), self.tensors[1][index].item()


def read_unseeded():
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test
    torch.seed(), np.random.seed(), random.seed()
    batches = read(2, lambda: DataLoader(ByProcess(), 2, shuffle=True), seed=None)
    return os.getpid(), batches


def test_data_that_are_random_by_nature_are_read_by_one_process(ranks):
    (reader, first), (_, second) = ranks(2).run(read_unseeded)
    assert first == second
    assert {pid for _, batch in first for pid in batch[:2]} == {reader}


class Everything(L.LightningModule):
    """Notes the batches of each hook, on each rank."""

    def __init__(self, **loaders):
        super().__init__()
        self.batches = []
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2))).double()

    def training_step(self, batch, batch_idx):
        return self.blocks(leaves(batch)[:, None]).mean()

    def evaluate(self, batch, batch_idx, dataloader_idx=0):
        return self.blocks(leaves(batch)[:, None]).mean()

    validation_step = test_step = predict_step = evaluate

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("train", batch, batch_idx)

    def note(self, kind, batch, batch_idx, loader=0):
        self.batches.append((kind, leaves(batch).tolist(), batch_idx, loader))

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note("validate", batch, batch_idx, dataloader_idx)

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note("test", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Indices(BasePredictionWriter):
    """Notes the samples of each batch that is predicted."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.found = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, *place):
        self.found.append((indices, leaves(batch).tolist(), *place))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.found.append(indices)


def stream():
    return DataLoader(Numbers(), 2)


MODES = ("min_size", "max_size_cycle", "max_size")
EVALUATED = {
    "sequence": lambda: [shuffled(), stream(), DataLoader(DATASET, 3)],
    "workers": lambda: [DataLoader(DATASET, 2, num_workers=1), shuffled(num_workers=1)],
    **{
        mode: lambda mode=mode: CombinedLoader([shuffled(), DataLoader(DATASET, 1)], mode)
        for mode in MODES
    },
}
FITS = {
    "plain": {},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 2},
    "shares": {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "num_sanity_val_steps": -1},
    "overfit": {"overfit_batches": 2},
    "fast_dev_run": {"fast_dev_run": True},
    "no validation": {"limit_val_batches": 0},
    "max_steps": {"max_steps": 7},
}


def run_everything(num_devices, options, evaluated):
    L.seed_everything(7, workers=True, verbose=False)
    module, writer = Everything(), Indices()
    options = {"max_epochs": 2, **FITS[options]}
    trainer = fits.trainer(num_devices, {"num_microbatches": 1}, callbacks=[writer], **options)
    trainer.fit(module, shuffled(num_workers=1), EVALUATED[evaluated]())
    trainer.validate(module, EVALUATED[evaluated](), verbose=False)
    trainer.test(module, EVALUATED[evaluated](), verbose=False)
    if evaluated not in MODES:
        trainer.predict(module, EVALUATED[evaluated]())
    return module.batches, writer.found


@pytest.mark.parametrize(
    ("options", "evaluated"),
    some([("plain", "sequence"), *pairs([*FITS], [*EVALUATED])], 2),
)
def test_each_kind_of_step_has_one_devices_batches(ranks, options, evaluated):
    first, second = ranks(2).run(run_everything, 2, options, evaluated)
    assert first == second == run_everything(0, options, evaluated)


def independent_trials(num_devices):
    """Return what each trial of a loop starts from, reads and loses; seeded once."""
    L.seed_everything(7, verbose=False)
    found = []
    for _ in range(2):
        module, record = fits.Net(), fits.Record()
        start = module.head.weight[0, 0].item()
        trainer = fits.trainer(num_devices, max_epochs=1, callbacks=[record], limit_val_batches=0)
        trainer.fit(module, fits.loader("shuffled"))
        found.append((start, record.batches, record.losses))
    return found


@pytest.mark.slow
def test_trials_in_a_loop_differ_as_on_one_device(ranks):
    (alone,) = ranks(1).run(independent_trials, 1)
    first, second = ranks(2).run(independent_trials, 2)
    assert first == second == alone
    starts, orders, _ = zip(*alone, strict=True)
    assert len(set(starts)) == len(set(map(str, orders))) == 2
    assert independent_trials(0)[0][0] == starts[0]


def stop_and_go_on(num_devices, folder):
    """Return what fits read and lose that resume after others which ``max_steps`` ended."""
    found = []
    for steps, more, accumulated, options in (
        (2, 6, 1, {}),
        (4, 3, 2, {"val_check_interval": 2}),
        (3, 3, 1, {"limit_train_batches": 3}),
    ):
        L.seed_everything(7, verbose=False)
        for limit in (
            {"max_steps": steps},
            {"max_steps": steps + more, "ckpt_path": f"{folder}/ckpt"},
        ):
            module, record = fits.Net(dropout=0.0, depth=2), fits.Record()
            ckpt_path = limit.pop("ckpt_path", None)
            trainer = fits.trainer(
                num_devices,
                callbacks=[record],
                accumulate_grad_batches=accumulated,
                **options,
                **limit,
            )
            trainer.fit(module, fits.loader(), fits.loader(), ckpt_path=ckpt_path)
            trainer.save_checkpoint(f"{folder}/ckpt")
        found.append(
            (trainer.current_epoch, record.batches, [f"{loss:.6f}" for loss in record.losses])
        )
    return found


def test_a_fit_that_goes_on_after_max_steps_begins_the_next_epoch_with_its_first_batch(
    ranks, tmp_path
):
    found, _ = ranks(2).run(stop_and_go_on, 2, str(tmp_path))
    assert found == stop_and_go_on(0, str(tmp_path))


def test_a_rank_says_once_that_it_waits_for_the_reader(capfd):
    waited = 0.0
    channel = SimpleNamespace(seconds_waited=lambda: waited, reader=0)
    reading = BatchDistributor(SimpleNamespace(global_rank=2), channel, None, None, False)
    for waited in (0.0, 59.0, 61.0, 70.0):  # noqa: B007 - what the channel answers
        assert reading.poll(None) is None
    assert capfd.readouterr().err.count("global rank 2 has waited for 60 s for global rank 0") == 1


def receive(sent):
    """Return what a loop within that of training receives, and what is put aside for this one."""
    messages = [(header, []) for header in sent]
    inbox = Inbox(SimpleNamespace(receive=lambda: messages.pop(0), reader=0))
    _, coming = inbox.receive_loader_start()
    header, _ = inbox.receive(LoaderStart)
    return header.number, [header.place[0] for header, _ in coming]


def ahead(number, place=0, is_ahead=True):
    return BatchHeader(number, (place, 0), None, False, is_ahead, True)


def test_a_loop_within_another_puts_aside_what_was_sent_ahead():
    training, validation = LoaderStart(7, 9, False), LoaderStart(8, 2, False)
    assert receive([training, ahead(7, 3), ahead(6), ahead(7, 4), validation]) == (8, [3, 4])
    elsewhere = "come to the next batch, and this rank to the start of a pass"
    for sent in ([ahead(7)] * 3, [ahead(7, is_ahead=False)]):
        with pytest.raises(RuntimeError, match=elsewhere):
            receive([training, *sent, validation])


def readers(num_replicas):
    found = []
    note = LambdaCallback(setup=lambda *_, **__: found.append(reads_data()))
    options = {"num_microbatches": 1, "data_parallel_size": num_replicas}
    trainer = fits.trainer(2, options, max_epochs=1, callbacks=[note])
    trainer.fit(Draws(shuffled))
    return [*found, reads_data()]


@pytest.mark.parametrize("num_replicas", [1, slow(2)])
def test_one_rank_of_each_replica_says_that_it_reads(ranks, num_replicas):
    expected = [[True, True], [num_replicas == 2, True]]
    assert ranks(2).run(readers, num_replicas) == expected
