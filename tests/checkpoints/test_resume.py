"""A fit that goes on within an epoch does what the uninterrupted one does, to the bit."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.fsdp import fully_shard

from lightning_pipeoffload import load_weights
from tests.support import fits, replica_fits
from tests.support.pairs import first, slow
from tests.support.saving_fits import consolidate, count_values, fit_from


class Sharded(fits.Net):
    """Each of its parts is shared out; the step calls them, not the module."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for part in (self.embed, *self.blocks, self.norm, self.head):
            fully_shard(part, mesh=mesh)


class SavesAsFSDP(ModelParallelStrategy):
    """Writes what FSDPStrategy writes."""

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        path = Path(self.broadcast(filepath))
        state = {"model": checkpoint.pop("state_dict")}
        for place, optimizer in enumerate(checkpoint.pop("optimizer_states")):
            state[f"optimizer_{place}"] = optimizer
        save(state, checkpoint_id=path)
        if self.is_global_zero:
            torch.save(checkpoint, path / "meta.pt")


def fit(kind, path, resumes, options):
    """Fit an epoch and save, sharded over two processes or not, or go on for a second one."""
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    size = 1 if kind == "plain" else 2
    strategy = {
        "plain": lambda: "auto",
        "sharded": lambda: SavesAsFSDP(data_parallel_size=2, tensor_parallel_size=1),
        "pipeline": lambda: fits.strategy(2, **options),
    }[kind]()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=strategy,
        max_epochs=2 if resumes or kind == "plain" else 1,
        callbacks=[record],
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    module = (Sharded if kind == "sharded" else fits.Net)(dropout=0.0)
    trainer.fit(module, fits.loader(), ckpt_path=path if resumes else None)
    if kind == "sharded":
        trainer.save_checkpoint(path)
    return record.losses


# As (ranks, options of the strategy); the schedule of each has other stages, and elsewhere.
FORMS = {
    "1": (1, {}),
    "zb_h1": (2, {}),
    "1f1b": (2, {"schedule": "1f1b"}),
    "folder": (2, {"save_distributed_checkpoint": True}),
    "interleaved": (2, {"schedule": "interleaved_1f1b"}),
    "v": (2, {"schedule": "zb_v", "save_distributed_checkpoint": True}),
    "split": (2, {"split": [2, 6]}),
}
EPOCH = 5


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """Fits with dropout and a shuffled loader, as the form of their strategy; kept."""
    made = {}

    def fit(form):
        if form not in made:
            folder = str(tmp_path_factory.mktemp(form))
            size, options = FORMS[form]
            made[form] = folder, ranks(size).run(fit_from, size, folder, None, options)[0]
        return made[form]

    return fit


def path_after(folder, step):
    return f"{folder}/epoch={(step - 1) // EPOCH}-step={step}.ckpt"


@pytest.mark.parametrize(
    ("written", "read", "step"),
    [
        ("zb_h1", "zb_h1", 3),
        ("zb_h1", "1", 3),
        slow(("v", "interleaved", 3)),
        ("v", "split", 5),  # saved in the last batch of an epoch
        slow(("1", "1f1b", 6)),
        slow(("1f1b", "zb_h1", 3)),
        slow(("interleaved", "v", 6)),
        slow(("split", "folder", 6)),
    ],
)
def test_the_rest_of_the_fit_is_the_same(ranks, uninterrupted, tmp_path, written, read, step):
    folder, whole = uninterrupted(written)
    size, options = FORMS[read]
    path = path_after(folder, step)
    rest = ranks(size).run(fit_from, size, str(tmp_path), path, options)[0]
    assert rest == {name: values[step:] for name, values in whole.items()}


@pytest.mark.parametrize("step", first(1, [3, 6, 9]))
def test_a_plain_fit_goes_on_within_an_epoch(ranks, tmp_path_factory, tmp_path, step):
    folder = str(tmp_path_factory.mktemp("plain"))
    whole = fit_from(0, folder, None, {}, shuffled=False)
    path = path_after(folder, step)
    rest = ranks(2).run(fit_from, 2, str(tmp_path), path, {}, False)[0]
    assert rest["losses"] == pytest.approx(whole["losses"][step:], rel=1e-12)
    assert rest["batches"] == whole["batches"][step:]


def test_a_checkpoint_may_have_no_states_of_optimizers(ranks, tmp_path):
    fit_from(0, str(tmp_path), None, {}, shuffled=False)
    path = path_after(str(tmp_path), EPOCH)
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "optimizer_states": []}, path)
    expected = fit_from(0, str(tmp_path / "plain"), path, {}, False)
    rest = ranks(2).run(fit_from, 2, str(tmp_path / "rest"), path, {}, False)[0]
    assert rest["losses"] == pytest.approx(expected["losses"], rel=1e-12)


def test_one_device_goes_on_from_a_folder(ranks, tmp_path):
    folder, options = str(tmp_path / "folder"), {"save_distributed_checkpoint": True}
    whole = ranks(2).run(fit_from, 2, folder, None, options, False)[0]
    path = consolidate(path_after(folder, EPOCH))
    rest = fit_from(0, str(tmp_path / "rest"), path, {}, False)
    assert rest["losses"] == pytest.approx(whole["losses"][EPOCH:], rel=1e-12)


@pytest.mark.parametrize("form", [slow("zb_h1"), "folder"])
def test_a_rank_has_and_reads_its_own_part_only(ranks, tmp_path, form):
    expected = count_values(0, str(tmp_path / "plain.ckpt"), {})
    size, options = FORMS[form]
    found = ranks(size).run(count_values, size, str(tmp_path / "last.ckpt"), options)
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert max(rank["received"] for rank in found) <= 1
    model, optimizer, tied = 20, 19 * 3, 3
    assert sum(rank["read"] for rank in found) == size * model + optimizer + tied


@pytest.mark.parametrize("options", [{"schedule": "zb_v"}, slow({})], ids=["zb_v", "zb_h1"])
def test_a_fit_goes_on_from_a_folder_of_fsdp(ranks, sharded, options):
    path, losses = sharded
    rest = ranks(2).run(fit, "pipeline", path, True, options)[0]
    assert rest == pytest.approx(losses[EPOCH:], rel=1e-9)


@pytest.fixture(scope="module")
def sharded(ranks, tmp_path_factory):
    """A folder that two processes have written after one epoch, and one device's losses of two."""
    path = str(tmp_path_factory.mktemp("sharded") / "first.ckpt")
    losses = fit("plain", path, False, {})
    found = ranks(2).run(fit, "sharded", path, False, {})
    assert found[0] == pytest.approx(losses[:EPOCH], rel=1e-9)
    return path, losses


class Versioned(fits.Block):
    """A block that loads by its version, as BatchNorm does."""

    _version = 3
    loaded = None

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def fit_versioned(size, epochs, read, written):
    module = fits.Net(depth=2)
    module.blocks = nn.ModuleList(Versioned(0.0).double() for _ in range(2))
    trainer = fits.trainer(size, max_epochs=epochs)
    trainer.fit(module, fits.loader(), ckpt_path=read)
    trainer.save_checkpoint(written)
    return [block.loaded for block in module.blocks if block.loaded]


def test_a_module_loads_by_the_version_that_was_saved(ranks, tmp_path):
    first, second, third = (str(tmp_path / f"{number}.ckpt") for number in range(3))
    fit_versioned(0, 1, None, first)
    assert ranks(2).run(fit_versioned, 2, 2, first, second) == [[3, 3], [3, 3]]
    assert fit_versioned(0, 3, second, third) == [3, 3]


NUM_STEPS, SAVED = 7, 6  # of four in an epoch
FOLDER = {"save_distributed_checkpoint": True}


@pytest.mark.parametrize(
    ("written", "options", "read", "others"),
    [
        (2, FOLDER | {"schedule": "zb_v"}, 1, {"sharding": "optimizer"}),
        (1, {"sharding": "optimizer"}, 2, FOLDER),
    ],
)
def test_the_rest_is_that_of_the_uninterrupted_fit(ranks, tmp_path, written, options, read, others):
    saved, whole, rest = (str(tmp_path / name) for name in ("saved", "whole", "rest"))
    saving = [replica_fits.SaveAfter(SAVED, saved)]
    train = partial(replica_fits.train, trainer={"max_steps": NUM_STEPS})
    first = ranks(2 * written).run(partial(train, callbacks=saving, **options), 2, written, whole)
    second = ranks(2 * read).run(partial(train, ckpt_path=saved, **others), 2, read, rest)
    for replica in range(2):
        tokens = [
            next(each["tokens"] for each in found if each["replica"] == replica)
            for found in (first, second)
        ]
        assert tokens[1] == tokens[0][SAVED:]
    modules = [replica_fits.Net(), replica_fits.Net()]
    for module, path in zip(modules, (whole, rest), strict=True):
        load_weights(module, path)
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Reading(fits.Net):
    """Keeps what its batches hold."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.order = []

    def on_train_batch_start(self, batch, batch_idx):
        self.order.append((self.current_epoch, batch_idx, batch["x"].tolist()))


class Ending(L.Callback):
    """Ends the process within the second epoch."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == EPOCH + 2:
            raise RuntimeError("power cut")


def read(folder, length, monitor, path=None, callbacks=()):
    """Return the order of the batches of a fit over one rank."""
    L.seed_everything(7, verbose=False)
    module, saving = Reading(), ModelCheckpoint(folder, monitor=monitor, save_last=True)
    trainer = L.Trainer(
        **fits.SILENT, strategy=fits.strategy(1), callbacks=[saving, *callbacks], **length
    )
    fits.outlive_failures(trainer)
    with pytest.raises(RuntimeError, match="power cut") if callbacks else nullcontext():
        trainer.fit(module, fits.loader("shuffled"), fits.loader(), ckpt_path=path)
    return module.order


@pytest.mark.parametrize("monitor", ["val_loss", None])
@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_steps": 15, "max_epochs": -1}])
def test_from_an_epochs_end_the_next_epochs_batches_are_read(tmp_path, monitor, length):
    whole = read(tmp_path / "whole", length, monitor)
    read(tmp_path / "cut", length, monitor, callbacks=[Ending()])
    rest = read(tmp_path / "cut", length, monitor, tmp_path / "cut" / "last.ckpt")
    assert rest == whole[EPOCH:]
