"""Fits of loaders: texts shared out by MinibatchSampler, checkpoints, evaluation, resumes."""

import errno
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _load_distributed_checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_pipeoffload import MinibatchCollate, MinibatchSampler, PackedRows, PackedRowsSampler
from lightning_pipeoffload.checkpoints import PartWriter
from tests.support import on_demand_fits as fits
from tests.support.on_demand_fits import Texts, assert_same, made, outcome, trainer, whole
from tests.support.pairs import slow

LENGTHS = [3, 9, 4, 4, 7, 3, 5, 8, 6, 3, 4, 9, 3, 3, 7, 5, 4, 6]


class Data(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        return torch.randint(16, (LENGTHS[index],), generator=draws)


class Packed(Texts):
    """Takes several texts at once, and logs values, metrics and what they have in common."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.seen = []

    def loss(self, texts):
        count = sum(len(text) - 1 for text in texts)
        losses = [nn.functional.cross_entropy(self(t[:-1]), t[1:], reduction="sum") for t in texts]
        return torch.stack(losses).sum() / count

    def training_step(self, batch, batch_idx):
        self.seen.append([text.tolist() for text in batch])
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        self.mean(loss.detach(), sum(len(text) - 1 for text in batch))
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss([batch]), batch_size=1, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss([batch]), batch_size=1, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return float(self(batch).sum())


def loader(workers=0, **options):
    counted = [length - 1 for length in LENGTHS]
    options = {"samples_per_rank": 2, "weight": counted, **options}
    sampler = MinibatchSampler(LENGTHS, 12, **options)
    collate = MinibatchCollate(list)
    return DataLoader(Data(), batch_sampler=sampler, collate_fn=collate, num_workers=workers)


def validation_loader():
    return DataLoader(Data(), batch_size=None)


def fit(
    ranks, folder=None, ckpt_path=None, workers=0, options=None, data=None, kind=Packed, **more
):
    saving = ModelCheckpoint(folder, "saved", every_n_train_steps=3, enable_version_counter=False)
    more = {"max_epochs": 2, "enable_checkpointing": folder is not None, **more}
    run = trainer(ranks, options or {}, **more, callbacks=[saving] if folder else [])
    module = made(kind)
    run.fit(module, loader(workers, **data or {}), ckpt_path=ckpt_path)
    return {**outcome(module, run), "seen": module.seen}


def plain_fit():
    """Train on the minibatches of two ranks, of which one packs all."""
    module = made(Packed)
    optimizer = module.configure_optimizers()
    steps = []
    for epoch in range(2):
        sampler = loader(samples_per_rank=4, rank=0, num_ranks=1).batch_sampler
        sampler.set_epoch(epoch)
        losses = []
        for indices in sampler:
            texts = [Data()[i] for i in indices]
            loss = module.loss(texts)
            loss.backward()
            losses.append((float(loss.detach()), sum(len(text) - 1 for text in texts)))
            steps.append({n: whole(p.grad) for n, p in module.named_parameters()})
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    mean = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    weights = {n: whole(p) for n, p in module.named_parameters()}
    return {"weights": weights, "gradients": steps, "mean": mean}


@pytest.mark.parametrize("workers", [0, 1])
def test_texts_of_a_loader(ranks, workers):
    expected = plain_fit()
    for rank in ranks(2).run(partial(fit, 2, workers=workers)):
        assert_same(rank, expected)
        assert rank["logged"]["train_loss"] == pytest.approx(expected["mean"])
        assert rank["logged"]["mean"] == pytest.approx(expected["mean"], rel=1e-6)


def stop_and_go_on(folder, distributed):
    options = {"save_distributed_checkpoint": distributed}
    whole_run = fit(2, options=options)
    fit(2, folder, options=options, max_steps=3)
    return whole_run, fit(2, ckpt_path=f"{folder}/saved.ckpt", options=options)


@pytest.mark.parametrize(("distributed", "others"), [(True, 1), slow((False, 4))])
def test_a_fit_goes_on_within_an_epoch(ranks, tmp_path, distributed, others):
    for rank, (uninterrupted, resumed) in enumerate(
        ranks(2).run(stop_and_go_on, str(tmp_path), distributed)
    ):
        begun = len(uninterrupted["seen"]) - len(resumed["seen"])
        assert uninterrupted["seen"][begun:] == resumed["seen"], rank
        uninterrupted["gradients"] = uninterrupted["gradients"][3:]
        assert_same(resumed, uninterrupted)
    saved = tmp_path / "saved.ckpt"
    assert saved.is_dir() == distributed
    if distributed:
        checkpoint = _load_distributed_checkpoint(saved)  # in ModelParallelStrategy's layout
    else:
        checkpoint = torch.load(saved, weights_only=False)
        assert len(checkpoint["optimizer_states"][0]["state"]) == 10
    module = Packed()
    module.load_state_dict(checkpoint["state_dict"])
    for rank in ranks(others).run(fit_on, str(saved), others, 4):  # with minibatches as large
        assert_same(rank, uninterrupted)
    for told in ranks(others).run(message_of, fit_on, str(saved), others, 8):
        assert "after 3 minibatches of 4 samples of an epoch" in told


def fit_on(path, num_ranks, num_samples):
    return fit(num_ranks, ckpt_path=path, data={"samples_per_rank": num_samples // num_ranks})


class Grouped(Packed):
    """Has its parameters in another order than the optimizer, which looks at whole matrices."""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        others = [{"params": p, "weight_decay": 0.0} for p in self.parameters() if p.ndim != 2]
        return torch.optim.Adafactor([*others, {"params": matrices}])


def save_on_one_device(folder):
    saving = ModelCheckpoint(folder, "saved", every_n_train_steps=3)
    options = {**fits.SILENT, "devices": 1, "max_steps": 3, "gradient_clip_val": 0.3}
    sampler = loader(samples_per_rank=4, rank=0, num_ranks=1).batch_sampler
    texts = DataLoader(Data(), batch_sampler=sampler, collate_fn=list)
    L.Trainer(**options, callbacks=[saving]).fit(made(Grouped), texts)


def save_and_load(folder, plain):
    fit(2, f"{folder}/file", kind=Grouped, max_steps=3)
    parts = {"save_distributed_checkpoint": True}
    fit(2, f"{folder}/parts", kind=Grouped, max_steps=3, options=parts)
    goes_on = [
        fit(2, ckpt_path=f"{saved}/saved.ckpt", kind=Grouped)
        for saved in (f"{folder}/parts", plain)  # which has what is in the file
    ]
    return fit(2, kind=Grouped), goes_on


@pytest.mark.slow
def test_a_file_has_of_an_optimizer_what_it_would_have_on_one_device(ranks, tmp_path):
    save_on_one_device(tmp_path / "plain")
    for whole_run, goes_on in ranks(2).run(save_and_load, str(tmp_path), f"{tmp_path}/plain"):
        for resumed in goes_on:
            assert_same(resumed, {**whole_run, "gradients": whole_run["gradients"][3:]})
    ours, plain = (
        torch.load(tmp_path / name / "saved.ckpt", weights_only=False)["optimizer_states"][0]
        for name in ("file", "plain")
    )
    torch.testing.assert_close(ours["state"], plain["state"], rtol=1e-12, atol=1e-12)
    assert ours["param_groups"] == plain["param_groups"]


def evaluate():
    module = made(Packed)
    run = trainer(2, {}, max_epochs=1, num_sanity_val_steps=2)
    run.fit(module, loader(), validation_loader())
    found = {
        "val": run.validate(module, validation_loader(), verbose=False)[0]["val_loss"],
        "test": run.test(module, validation_loader(), verbose=False)[0]["test_loss"],
        "predict": run.predict(module, validation_loader()),
    }
    # Ranks with different numbers of batches gather without each other.
    uneven = run.predict(module, fits.Loader([Data()[i] for i in range(1 + 3 * fits.rank_of())]))
    return {**outcome(module, run), **found, "uneven": len(uneven)}


def test_evaluation(ranks):
    module = made(Packed)
    found = ranks(2).run(evaluate)
    module.load_state_dict({**module.state_dict(), **found[0]["weights"]})
    losses = [float(module.loss([text])) for text in Data()]
    expected = pytest.approx(sum(losses) / len(losses))
    assert all(rank["val"] == rank["test"] == expected for rank in found)
    assert [rank["uneven"] for rank in found] == [1, 4]
    predicted = [float(module(text).sum()) for text in Data()]
    assert [*found[0]["predict"], *found[1]["predict"]] == pytest.approx(
        [*predicted[::2], *predicted[1::2]]
    )


class Swapping(Packed):
    """Other weights while it is validated, as by an average of them."""

    def on_validation_epoch_start(self):
        self.kept = [p.detach().clone() for p in self.parameters()]
        for parameter in self.parameters():
            parameter.data.zero_()

    def on_validation_epoch_end(self):
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


def swap():
    module = made(Swapping)
    run = trainer(2, {}, max_epochs=2, num_sanity_val_steps=0)
    run.fit(module, loader(), validation_loader())
    return {**outcome(module, run), "val": float(run.callback_metrics["val_loss"])}


def test_weights_that_a_hook_changes_are_those_that_are_gathered(ranks):
    expected = plain_fit()
    for rank in ranks(2).run(swap):
        assert_same(rank, expected)
        assert rank["val"] == pytest.approx(torch.tensor(16.0).log().item())


class Watching(Texts):
    """Runs forwards in hooks, where the weights have just changed, and looks at gradients."""

    def __init__(self):
        super().__init__()
        self.outputs, self.sizes = [], []

    def show(self):
        with torch.no_grad():
            self.outputs.append(self(torch.arange(4)).sum().item())

    def on_before_zero_grad(self, optimizer):
        gradients = [whole(p.grad) for p in self.parameters()]
        self.sizes.append(sum(g.norm().item() for g in gradients if g is not None))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.show()

    def on_train_batch_start(self, batch, batch_idx):
        self.show()

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.show()


def watch():
    module = made(Watching)
    found = fits.fit_rank((3, 1), make=lambda: module, accumulate_grad_batches=2)
    module.show()  # when all is over
    return {**found, "outputs": module.outputs, "sizes": module.sizes}


def plain_watch():
    module = made(Watching)
    optimizer = module.configure_optimizers()
    for number, minibatch in enumerate(fits.minibatches((3, 1)), start=1):
        module.show()
        if number % 2:
            module.on_before_zero_grad(optimizer)
            optimizer.zero_grad()
        for part in minibatch:
            for text, weight in zip(part, part.weights, strict=True):
                (module.loss(text) * weight / 2).backward()
        if number % 2 == 0:
            module.on_before_optimizer_step(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
        module.show()
    module.show()
    weights = {n: whole(p) for n, p in module.named_parameters()}
    return module, {"weights": weights, "gradients": module.gradients}


def test_forwards_in_hooks_see_the_weights_of_that_moment(ranks):
    plain, expected = plain_watch()
    for rank in ranks(2).run(watch):
        assert rank["outputs"] == pytest.approx(plain.outputs, rel=1e-12)
        assert rank["sizes"] == pytest.approx(plain.sizes, rel=1e-12)
        assert_same(rank, expected)


def validate_within_an_accumulation():
    module = made(Packed)
    often = {"val_check_interval": 1, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    run = trainer(2, {}, max_epochs=1, **often)
    run.fit(module, loader(), validation_loader())
    plain = made(Packed)
    trainer(2, {}, max_epochs=1, accumulate_grad_batches=2).fit(plain, loader())
    return outcome(module, run), outcome(plain, run)


def test_a_validation_between_batches_that_accumulate_changes_nothing(ranks):
    for validated, plain in ranks(2).run(validate_within_an_accumulation):
        assert_same(validated, plain)


def validate_minibatches():
    trainer(2, {}).validate(made(Packed), loader())


def train_without_collate():
    sampler = MinibatchSampler(LENGTHS, 12)
    trainer(2, {}).fit(made(Packed), DataLoader(Data(), batch_sampler=sampler))


def train_packed_rows():
    loader = DataLoader(
        Data(), batch_sampler=PackedRowsSampler(LENGTHS, 2, 12), collate_fn=PackedRows(2, 12)
    )
    trainer(2, {}).fit(made(Packed), loader)


def message_of(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (validate_minibatches, "a loader of minibatches is for training"),
        (train_without_collate, "needs collate_fn=MinibatchCollate(...)"),
        (train_packed_rows, "PackedRowsSampler packs rows for a pipeline"),
    ],
)
def test_loaders_that_do_not_fit_are_refused(ranks, call, message):
    for told in ranks(2).run(message_of, call):
        assert message in told


def save_twice(path, folder):
    """Save, and again while nothing can be written; return the second save's error."""
    run = trainer(2, {"save_distributed_checkpoint": folder}, max_epochs=1)
    run.fit(made(Packed), loader())
    run.save_checkpoint(path)
    checkpoint = {**run._checkpoint_connector.dump_checkpoint(), "epoch": 7}
    writer, write = (PartWriter, "write_data") if folder else (torch, "save")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, write, fill_disk)
        try:
            run.strategy.save_checkpoint(checkpoint, path)
        except (OSError, RuntimeError) as error:
            return str(error)
    return ""


def fill_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("folder", [True, False])
def test_a_checkpoint_stays_where_the_next_one_cannot_be_written(ranks, tmp_path, folder):
    path = tmp_path / "last.ckpt"
    errors = ranks(2).run(save_twice, str(path), folder)
    assert "was not saved" in errors[0]
    assert ("No space left" in errors[1]) == folder
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    saved = torch.load(path / "meta.pt" if folder else path, weights_only=False)
    assert saved["epoch"] == 1
