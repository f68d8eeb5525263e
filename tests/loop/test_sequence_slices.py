"""Fits of real processes whose blocks run on slices of the sequence, compared with one device."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload.demos import GPT
from tests.support import fits
from tests.support.pairs import slow

EXACT = {"rel": 1e-10, "abs": 1e-12}
SIZES = {"vocab_size": 16, "context": 12, "width": 8, "depth": 8, "heads": 2, "dropout": 0.0}


class Counting(GPT):
    """The demo's GPT in float64, whose steps count before the blocks."""

    def __init__(self, **options):
        super().__init__(**{**SIZES, **options})
        self.double()
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        self.log("count", float(self.num_steps), reduce_fx="max", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


REPORTS = []


class Losses(L.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.found.append(float(trainer.callback_metrics["train_loss"]))


def loader(length=12):
    tokens = torch.randint(16, (18, length + 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 8)  # the last has 2


def fit(num_ranks, path, ckpt_path=None, max_epochs=2, sizes=SIZES, **pipeline):
    L.seed_everything(7, verbose=False)
    losses = Losses()
    pipeline = {"schedule": "seq_zb", "num_sequence_slices": 3, **pipeline}
    trainer = fits.trainer(num_ranks, pipeline, callbacks=[losses], max_epochs=max_epochs)
    module, data = Counting(tie_weights=True, **sizes), loader(sizes["context"])
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    if num_ranks:
        REPORTS[:] = [trainer.strategy.report()]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses.found, metrics


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fit(0, tmp_path_factory.mktemp("plain") / "end.ckpt")


LARGER = {**SIZES, "context": 48, "width": 32}  # tensors of a slice that may be offloaded


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return fit(0, tmp_path_factory.mktemp("larger") / "end.ckpt", sizes=LARGER)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"schedule": "seq_1f1b", "recompute": "full"}),
        slow({"offload": "full"}),
        slow({"schedule": "auto"}),
        slow({"schedule": "seq_v", "num_sequence_slices": 2}),
        slow({"optimizer_sync": "post_validation"}),
        slow({"recompute": "cheap", "num_sequence_slices": 6}),
    ],
    ids=str,
)
def test_a_fit_in_slices_is_that_of_one_device(ranks, plain, tmp_path, options):
    losses, metrics = plain
    for found in ranks(2).run(_fit, 2, str(tmp_path / "end.ckpt"), options):
        assert found[0] == pytest.approx(losses, **EXACT)
        assert found[1]["val_loss"] == pytest.approx(metrics["val_loss"], **EXACT)
        assert found[1]["count"] == 18  # microbatches of two samples


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "seq_zb"},
        {"schedule": "seq_zb", "recompute": "full"},
        {"schedule": "seq_1f1b"},
        {"schedule": "seq_v"},
        {"schedule": "auto"},
    ],
    ids=str,
)
def test_a_fit_in_slices_keeps_a_memory_limit(ranks, larger, tmp_path, options):
    path, options = str(tmp_path / "end.ckpt"), {**options, "sizes": LARGER}
    free = ranks(2).run(_fit_and_report, 2, path, {**options, "memory_limit": "1GiB"})[0][1]
    limit = int(0.85 * max(free["peak_memory"]))
    given = {**options, "memory_limit": limit}
    for losses, report in ranks(2).run(_fit_and_report, 2, path, given):
        assert losses == pytest.approx(larger, **EXACT)
        measured = [peak for peak in report["measured"]["peak_activation_bytes"] if peak]
        assert max(report["peak_memory"]) <= limit
        assert max(measured) == pytest.approx(max(report["peak_memory"]), rel=0.1)
        assert max(report["memory"]["activations"]) == pytest.approx(max(measured), rel=0.1)
    with pytest.raises(Exception, match=r"(?s)memory_limit.*use at least"):
        ranks(2).run(_fit, 2, path, {**options, "memory_limit": "1000B"})


@pytest.mark.slow
def test_a_fit_in_slices_goes_on_where_it_was_saved(ranks, plain, tmp_path):
    path = str(tmp_path / "middle.ckpt")
    ranks(2).run(_fit, 2, path, {"max_epochs": 1})
    resumed = {"ckpt_path": path, "num_sequence_slices": 4, "schedule": "seq_1f1b"}
    for found in ranks(2).run(_fit, 2, str(tmp_path / "end.ckpt"), resumed):
        assert found[0] == pytest.approx(plain[0][3:], **EXACT)


def _fit(num_ranks, path, options):
    return fit(num_ranks, path, **options)


def _fit_and_report(num_ranks, path, options):
    losses, _ = fit(num_ranks, path, **options)
    return losses, REPORTS.pop()
