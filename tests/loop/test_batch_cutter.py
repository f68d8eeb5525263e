"""Batches of lists, and batches that ``make_microbatches`` cuts, compared with one device."""

from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeoffload.planning.report import Progress
from tests.support import fits
from tests.support.pairs import slow

NUM = 22  # batches of eight and a last one of six
X = torch.randn(NUM, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(L.LightningModule):
    """Six blocks and a head, in float64."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(8, 1)
        self.double()

    def hidden(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["y"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch["y"]))

    def predict_step(self, batch, batch_idx):
        return self.results(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Detector(Net):
    """Has an image and a dict for each sample; predicts a dict for each."""

    def loss(self, batch):
        out = self.head(self.hidden(batch["x"]))
        pairs = zip(out, batch["y"], strict=True)
        return torch.stack([(o - t["boxes"].sum()).pow(2).sum() for o, t in pairs]).mean()

    def results(self, batch):
        return [{"score": o.sum(), "row": o} for o in self.hidden(batch["x"])]

    @staticmethod
    def collate(rows):
        boxes = [torch.full((row % 4, 4), row / NUM) for row in rows]
        return {
            "x": X[rows],
            "y": [{"boxes": b, "id": r} for r, b in zip(rows, boxes, strict=True)],
        }


class Graphs(Net):
    """Has the nodes of all graphs in one tensor."""

    def loss(self, batch):
        return (self.results(batch) - batch["y"]).pow(2).mean()

    def results(self, batch):
        hidden = self.hidden(batch["x"])
        sums = hidden.new_zeros(len(batch["y"]), 8)
        return self.head(sums.index_add(0, batch["graph"], hidden))

    @staticmethod
    def collate(rows):
        sizes = torch.tensor([2 + row % 3 for row in rows])
        graph = torch.repeat_interleave(torch.arange(len(rows)), sizes)
        return {"x": X[rows].repeat_interleave(sizes, 0), "graph": graph, "y": X[rows, :1]}


def cut_graphs(batch, num_microbatches):
    parts = []
    for graphs in torch.arange(len(batch["y"])).chunk(num_microbatches):
        nodes = torch.isin(batch["graph"], graphs)
        graph = batch["graph"][nodes] - graphs[0]
        parts.append({"x": batch["x"][nodes], "graph": graph, "y": batch["y"][graphs]})
    return parts


CUT = {"make_microbatches": cut_graphs, "microbatch_weight": lambda part: len(part["y"])}
KINDS = {"lists": (Detector, {}), "graphs": (Graphs, CUT)}


def fit(num_devices, path, kind, options):
    """Fit, validate and predict; return what is left on global rank 0."""
    L.seed_everything(7, verbose=False)
    kind, given = KINDS[kind]
    module, loader = kind(), DataLoader(range(NUM), 8, collate_fn=kind.collate)
    trainer = fits.trainer(num_devices, {**given, **options}, max_epochs=2)
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(module, loader)
    trainer.save_checkpoint(path)
    state = {} if trainer.global_rank else torch.load(path, weights_only=False)["state_dict"]
    return {"metrics": metrics, "predictions": predictions, "state": state}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lists", {}),
        ("graphs", {}),
        slow(("lists", {"schedule": "auto", "num_microbatches": "auto"})),
        slow(("graphs", {"schedule": "auto", "num_microbatches": "auto"})),
    ],
)
def test_it_is_as_on_one_device(ranks, tmp_path, kind, options):
    path = str(tmp_path / "a.ckpt")
    expected = fit(0, path, kind, {})
    (found, *_) = ranks(2).run(fit, 2, path, kind, options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Levels(Graphs):
    """Its blocks are those that the step calls."""

    def __init__(self):
        super().__init__()
        self.first, self.second = self.blocks[:3], self.blocks[3:]
        del self.blocks

    def hidden(self, x):
        for block in (*self.first, *self.second):
            x = block(x)
        return x


def test_called_blocks_are_saved_with_a_fit_whose_batches_the_user_cuts(tmp_path):
    trainer = fits.trainer(1, CUT, max_steps=1)
    trainer.fit(Levels(), DataLoader(range(NUM), 8, collate_fn=Levels.collate))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt")["pipeoffload_first_batch"]["blocks"]
    assert found == [f"{level}.{number}" for level in ("first", "second") for number in range(3)]


def test_only_the_first_batch_of_a_kind_of_step_starts_a_timer(monkeypatch):
    timed = []
    monkeypatch.setattr(
        Progress, "print_if_slow", lambda _, text: timed.append(text) or nullcontext()
    )
    loader = DataLoader(range(NUM), 8, collate_fn=Detector.collate)
    trainer = fits.trainer(1)
    trainer.validate(Detector(), loader, verbose=False)
    assert timed == ["tracing"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, r"different lengths .* batch\['x'\] has \d+ rows .*make_microbatches"),
        ({"make_microbatches": cut_graphs}, ValueError, "cannot count the samples of what make_"),
        (
            {**CUT, "make_microbatches": lambda batch, num: cut_graphs(batch, num)[1:]},
            ValueError,
            "returned a list of 3 for num_microbatches=4 in training_step; it must return 4",
        ),
        (
            {**CUT, "make_microbatches": lambda batch, num: cut_graphs(batch, 8)},
            ValueError,
            "returned a list of 8 .*in validation_step; it must return at most 4",
        ),
        (
            {**CUT, "make_microbatches": lambda batch, num: iter(())},
            TypeError,
            "make_microbatches returned a tuple_iterator .*must return a list of 4",
        ),
        ({"make_microbatches": 4}, ValueError, "make_microbatches must be a callable"),
    ],
)
def test_it_is_refused(options, error, message):
    loader = DataLoader(range(NUM), 8, collate_fn=Graphs.collate)
    with pytest.raises(error, match=message):
        fits.trainer(1, options, max_epochs=1).fit(Graphs(), loader, loader)


def test_a_list_of_like_samples_is_refused():
    loader = DataLoader([{"x": row, "y": row} for row in X], 8, collate_fn=list)  # of 8 rows too
    with pytest.raises(ValueError, match="collate_fn returns a list of 8 .* samples or columns"):
        fits.trainer(1, max_epochs=1).fit(Detector(), loader)


class Normed(Net):
    """Has statistics over a microbatch."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.append(nn.BatchNorm1d(8))
        self.double()

    def loss(self, batch):
        return (self.hidden(batch["x"]) - batch["y"]).pow(2).mean()

    @staticmethod
    def collate(rows):
        return {"x": X[rows], "y": X[rows].flip(0)}


def fit_parts(num_devices, folder, first_size, options):
    """Fit an epoch, of which the third batch is short; again from its first batches on."""
    sizes = [first_size, 8, NUM - first_size - 8]
    ends = [sum(sizes[: index + 1]) for index in range(3)]
    batches = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    kept = []
    for resumes in (False, True):
        L.seed_everything(7 + resumes, verbose=False)
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        loader = DataLoader(range(NUM), batch_sampler=batches, collate_fn=Normed.collate)
        module = Normed()
        trainer = fits.trainer(
            num_devices, options, max_epochs=1, enable_checkpointing=True, callbacks=[saving]
        )
        trainer.fit(module, loader, ckpt_path=f"{folder}/step=2.ckpt" if resumes else None)
        path = f"{folder}/{resumes}.ckpt"
        trainer.save_checkpoint(path)
        kept.append(None if trainer.global_rank else torch.load(path)["state_dict"])
    return kept


@pytest.mark.parametrize(
    ("first_size", "options"),
    [(8, {}), slow((10, {"num_microbatches": 5})), slow((8, {"schedule": "auto"}))],
)
def test_a_fit_goes_on_before_a_short_batch(ranks, tmp_path, first_size, options):
    (kept, _) = ranks(2).run(fit_parts, 2, str(tmp_path), first_size, options)
    torch.testing.assert_close(kept[1], kept[0], rtol=0, atol=0)
