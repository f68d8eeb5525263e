"""Programs that read their data in thirteen ways, each with one device's batches and losses."""

import os
import random
from dataclasses import dataclass

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.support import fits
from tests.support.pairs import first

COUNT = 24


def reader():
    """Return the process that reads: the one that has started this worker, if it is one."""
    return os.getppid() if get_worker_info() else os.getpid()


def sample(index, noise=0.0):
    x = torch.sin(torch.arange(4.0).double() * (1 + index)) + noise
    return {"x": x, "y": x.sum(), "index": index, "reader": reader()}


class Samples(Dataset):
    """Samples by their index, with noise of three libraries where they are augmented."""

    def __init__(self, count=COUNT, is_augmented=False):
        self.count, self.is_augmented = count, is_augmented

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = 0.0
        if self.is_augmented:
            noise = torch.rand(()).item() + np.random.rand() + random.random()
        return sample(index, noise)


class Stream(IterableDataset):
    """Samples of which each worker has its part, of a length that nobody knows."""

    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id if worker else 0, 20, worker.num_workers if worker else 1):
            yield sample(index)


class Unseeded(Samples):
    """Samples that each process makes for itself."""

    def __init__(self):
        super().__init__()
        self.noise = torch.rand(COUNT, generator=torch.Generator().manual_seed(os.getpid()))

    def __getitem__(self, index):
        return sample(index, self.noise[index].item())


class Broken(Samples):
    """Its fourth batch cannot be read."""

    def __getitem__(self, index):
        assert index != 13, "a broken file"
        return super().__getitem__(index)


class Images(Samples):
    """Has what is too large for a header."""

    def __getitem__(self, index):
        return {**sample(index), "image": torch.full((1 << 14,), index)}


class BlockSampler(Sampler):
    """Draws the order of each eight samples when it comes to them."""

    def __iter__(self):
        for start in range(0, COUNT, 8):
            yield from (start + torch.randperm(8)).tolist()

    def __len__(self):
        return COUNT


@dataclass
class Target:
    """What a batch may hold in addition to tensors."""

    y: torch.Tensor
    names: list


def of_random_length(samples):
    """Pad each batch by another number of columns."""
    width = 4 + int(torch.randint(3, ()))
    x = torch.zeros(len(samples), width).double()
    x[:, :4] = torch.stack([one["x"] for one in samples])
    others = {key: torch.tensor([one[key] for one in samples]) for key in ("index", "reader")}
    return {"x": x[:, -4:], "y": torch.stack([one["y"] for one in samples]), **others}


def with_objects(samples):
    y = torch.stack([one["y"] for one in samples])
    others = {key: torch.tensor([one[key] for one in samples]) for key in ("index", "reader")}
    names = [f"sample {one['index']}" for one in samples]
    x = torch.stack([one["x"] for one in samples])
    return {"x": x, "target": Target(y, names), **others}


class Net(L.LightningModule):
    """A small net; notes what it trains and validates on, what it loses, and who has read it."""

    def __init__(self, loaders, mixes=False):
        super().__init__()
        self.loaders, self.mixes = loaders, mixes
        self.found, self.readers = [], set()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()

    def train_dataloader(self):
        return self.loaders()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.mixes:
            weight = torch.rand(()).double() + random.random()
            batch = {**batch, "x": batch["x"] * weight}
        return batch

    def loss(self, batch):
        if "x" not in batch:
            return self.loss(batch["a"]) + self.loss(batch["b"])
        y = batch["target"].y if "target" in batch else batch["y"]
        return (self.blocks(batch["x"]).sum(-1) - y).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("validated", self.loss(batch))

    def note(self, batch, *numbers):
        parts = [batch] if "x" in batch else [*batch.values()]
        names = [getattr(part.get("target"), "names", []) for part in parts]
        self.found.append(([part["index"].tolist() for part in parts], names, *numbers))
        for part in parts:
            if "image" in part:
                assert (part["image"] == part["index"][:, None]).all()
                part["image"].zero_()
        self.readers |= {pid for part in parts for pid in part["reader"].tolist()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        loss = float(self.trainer.callback_metrics["loss"])
        self.note(batch, self.trainer.global_step, loss)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(batch)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.found.append(float(self.trainer.callback_metrics["validated"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.003)


def loader(data=None, **options):
    return DataLoader(data or Samples(), 4, **options)


def weighted():
    sampler = WeightedRandomSampler([1.0 + index for index in range(COUNT)], COUNT)
    return loader(sampler=sampler, num_workers=1)


AUGMENTED = {"data": Samples(is_augmented=True)}
KINDS = {
    "workers": (lambda: loader(**AUGMENTED, shuffle=True, num_workers=2), {}),
    "stream": (lambda: loader(Stream(), num_workers=2), {}),
    "unseeded": (lambda: loader(Unseeded(), shuffle=True), {}),
    "shuffled": (lambda: loader(shuffle=True), {}),
    "weighted": (weighted, {}),
    "augmented": (lambda: loader(**AUGMENTED), {}),
    "collate": (lambda: loader(shuffle=True, collate_fn=of_random_length), {}),
    "two loaders": (
        lambda: {"a": loader(shuffle=True), "b": loader(Samples(8), num_workers=1)},
        {},
    ),
    "resumed": (lambda: loader(**AUGMENTED, shuffle=True, num_workers=1), {}),
    "hooks of the transfer": (lambda: loader(shuffle=True, num_workers=1), {}),
    "validation": (
        lambda: loader(shuffle=True, num_workers=1),
        {"val_check_interval": 2, "limit_val_batches": 3, "num_sanity_val_steps": 2},
    ),
    "replicas": (lambda: loader(shuffle=True, num_workers=1), {}),
    "objects": (lambda: loader(shuffle=True, collate_fn=with_objects), {}),
    "images": (lambda: loader(Images(), shuffle=True, num_workers=1), {}),
    "images at their turn": (lambda: loader(Images()), {}),
    # Further ones: what Lightning does with loaders in the middle of a run.
    "made anew": (
        lambda: loader(shuffle=True, num_workers=1),
        {"reload_dataloaders_every_n_epochs": 1},
    ),
    "overfit": (lambda: loader(shuffle=True, num_workers=1), {"overfit_batches": 3}),
    "fast_dev_run": (lambda: loader(num_workers=1), {"fast_dev_run": 3}),
    "max_steps": (lambda: loader(shuffle=True, num_workers=1), {"max_steps": 8}),
    "limited": (lambda: loader(shuffle=True, num_workers=1), {"limit_train_batches": 4}),
    "persistent": (lambda: loader(num_workers=1, persistent_workers=True), {}),
    "broken after the last step": (lambda: loader(Broken(), num_workers=1), {"max_steps": 3}),
    "drawn in blocks": (lambda: loader(sampler=BlockSampler(), num_workers=1), {}),
    "learning rate": (lambda: loader(shuffle=True, num_workers=1), {}),
}
SAVED = 9  # a step within the second epoch


def callbacks_of(name, folder, path):
    if name == "learning rate":
        return [L.pytorch.callbacks.LearningRateFinder(1e-5, 1e-3, 5, "linear", None)]
    if name != "resumed" or path:
        return []

    def save(trainer, *_):
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(f"{folder}/saved.ckpt")

    return [L.pytorch.callbacks.LambdaCallback(on_train_batch_end=save)]


class WithRate(Net):
    """Has what the finder of learning rates sets."""

    lr = 0.003

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(name, num_devices, folder, path=None):
    if name == "unseeded":
        os.environ.pop("PL_GLOBAL_SEED", None)
        torch.seed(), np.random.seed(), random.seed()
    else:
        L.seed_everything(7 if path is None else 8, workers=True, verbose=False)
    make, options = KINDS[name]
    module = (WithRate if name == "learning rate" else Net)(make, name == "hooks of the transfer")
    replicas = 2 if name == "replicas" else 1
    trainer = fits.trainer(
        num_devices,
        {"num_microbatches": 2, "data_parallel_size": replicas},
        **{"max_epochs": 3, "callbacks": callbacks_of(name, folder, path), **options},
    )
    validated = loader(num_workers=1) if name == "validation" else None
    trainer.fit(module, val_dataloaders=validated, ckpt_path=path)
    return module.found, [*module.readers]


def fit_twice(name, num_devices, folder):
    """Return what a fit has found, its readers, this process, and what a fit that resumes finds."""
    found, readers = fit(name, num_devices, folder)
    rest = fit(name, num_devices, folder, f"{folder}/saved.ckpt")[0] if name == "resumed" else []
    return found, readers, os.getpid(), rest


def close(found):
    """Let numbers that differ in their last bits be equal."""
    return [
        tuple(pytest.approx(part) if isinstance(part, float) else part for part in each)
        if isinstance(each, tuple)
        else pytest.approx(each)
        for each in found
    ]


@pytest.mark.parametrize("name", first(1, [*KINDS]))
def test_a_program_reads_and_loses_as_on_one_device(ranks, tmp_path, name):
    size = 4 if name == "replicas" else 2
    found = ranks(size).run(fit_twice, name, size, str(tmp_path))
    assert len(found[0][0]) > 2
    for replica in range(0, size, 2):
        (first_found, first_readers, root, rest), (found_there, readers, *_) = found[replica:][:2]
        assert (first_found, first_readers) == (found_there, readers)
        assert first_readers == [root]
    if name == "resumed":
        assert rest == close([each for each in first_found if each[2] > SAVED])
    if name == "replicas":
        check_replicas(found[0][0], found[2][0])
    elif name != "unseeded":
        alone, *_ = fit(name, 0, str(tmp_path))
        assert found[0][0] == close(alone)


def fit_by_parts(num_devices):
    """Return what fits of one process find, which end while batches are read ahead."""
    L.seed_everything(7, workers=True, verbose=False)
    module = Net(lambda: loader(shuffle=True, num_workers=1))
    validated = loader(num_workers=1)
    for steps in (2, 4):
        trainer = fits.trainer(num_devices, {"num_microbatches": 2}, max_steps=steps)
        trainer.fit(module, val_dataloaders=validated)
        trainer.validate(module, validated, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = steps + 3
        trainer.fit(module, val_dataloaders=validated)
    return module.found


def test_a_fit_that_follows_one_that_was_cut_short_reads_its_own_batches(ranks):
    found, other = ranks(2).run(fit_by_parts, 2)
    assert found == other
    assert found == close(fit_by_parts(0))


def columns_or_samples(samples):
    return [torch.stack([one["x"] for one in samples]) for _ in range(2)]


def validate_on_lists():
    loaders = [loader(), DataLoader(Samples(4), 2, collate_fn=columns_or_samples)]
    trainer = fits.trainer(1, {"num_microbatches": 2})
    fits.outlive_failures(trainer)
    with pytest.raises(ValueError, match="a list of 2 entries of like shapes"):
        trainer.validate(Net(loader), loaders, verbose=False)


def test_a_list_of_a_later_loader_is_refused_too(ranks):
    ranks(1).run(validate_on_lists)


def check_replicas(one, other):
    orders = []
    for epoch in range(3):
        of_epoch = [each for found in (one, other) for each in found[3 * epoch : 3 * epoch + 3]]
        order = [index for each in of_epoch for index in each[0][0]]
        assert sorted(order) == [*range(COUNT)]
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
