"""What replicas log, gather and reduce is what they would under DistributedDataParallel."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits, replica_fits


class Gathering(replica_fits.Net):
    """Gathers before and after the blocks, and in hooks; has a BatchNorm on the first stage."""

    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(16).double()
        self.mean, self.synced_mean = MeanMetric(), MeanMetric(dist_sync_on_step=True)
        self.losses = []
        self.gathered = []

    def loss(self, batch):
        sums = self.all_gather(batch["x"].double().sum())  # in a trace too, where it has a value
        hidden = self.statistics(self.embed(batch["x"])) * (1 + 1e-3 * sums.mean())
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        everyones = self.all_gather(logits.logsumexp(-1), sync_grads=True)
        loss = nn.functional.cross_entropy(logits, batch["y"])
        return loss + 0.1 * (everyones**2 * everyones.mean(1, keepdim=True)).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        logged = {"on_step": True, "on_epoch": True}
        self.log("train_loss", loss, **logged)
        self.log("synced", loss, sync_dist=True, **logged)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", **logged)
        self.log("total", loss, sync_dist=True, reduce_fx="sum", **logged)
        self.log("alone", loss, rank_zero_only=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, **logged)
        self.log("synced_mean", self.synced_mean(loss.detach()))
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("val_own", self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.gathered.append(self.all_gather(batch["x"]).tolist())

    def on_train_epoch_end(self):
        losses = self.all_gather(torch.stack(self.losses))
        self.log("epoch", losses.mean())
        self.gathered.append(losses.tolist())


def fit(strategy, num_ranks, **options):
    """Train two replicas for an epoch on shuffled samples, by this strategy or by Lightning's."""
    L.seed_everything(7, workers=True, verbose=False)
    module = Gathering()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=2 * num_ranks,
        strategy=strategy
        or PipeOffloadStrategy(num_microbatches=1, data_parallel_size=2, **options),
        max_epochs=1,
        enable_checkpointing=False,
        gradient_clip_val=0.5,
    )
    loaders = [
        DataLoader(replica_fits.samples(), 8, shuffle=shuffle, collate_fn=fits.collate)
        for shuffle in (True, False)
    ]
    trainer.fit(module, *loaders)
    state = trainer.strategy.lightning_module_state_dict()
    values = {name: value for name, value in state.items() if type(value) is torch.Tensor}
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "gathered": module.gathered,
        "state": {name: value.clone() for name, value in values.items()},
    }


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks(2).run(fit, "ddp", 1)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "1f1b"), (2, "zb_v")])
def test_it_is_what_ddp_has(ranks, expected, num_ranks, schedule):
    fitting = partial(fit, schedule=schedule)
    found = ranks(2 * num_ranks).run(fitting, "", num_ranks)
    roots = found[::num_ranks]
    assert roots[0]["metrics"] == pytest.approx(expected[0]["metrics"], abs=1e-10)
    # What others decide by is global rank 0's.
    assert {str(each["metrics"]["val_own"]) for each in found} == {
        str(found[0]["metrics"]["val_own"])
    }
    for root, plain in zip(roots, expected, strict=True):
        assert root["gathered"][:-1] == plain["gathered"][:-1]
        torch.testing.assert_close(root["gathered"][-1], plain["gathered"][-1], atol=1e-10, rtol=0)
    for replica in range(2):
        state = {}
        for each in found[replica * num_ranks : (replica + 1) * num_ranks]:
            state |= each["state"]
        assert state.keys() == expected[0]["state"].keys()
        for name, value in expected[0]["state"].items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize(("num_ranks", "stopping"), [(1, 1), (2, 3)])
def test_replicas_decide_alike_by_what_each_logs_for_itself(ranks, tmp_path, num_ranks, stopping):
    train = partial(replica_fits.train, callbacks=[replica_fits.Decides(stopping, 2)])
    found = ranks(2 * num_ranks).run(train, 2, num_ranks, str(tmp_path / "trained.ckpt"))
    one, other = found[:num_ranks], found[num_ranks:]
    assert one[0]["tokens"] != other[0]["tokens"]
    assert {len(each["tokens"]) for each in found} == {3}  # one more: all hear of it there
    assert [each["weights"] for each in one] == [each["weights"] for each in other]
    assert len({str(each["rates"]) for each in found}) == 1
