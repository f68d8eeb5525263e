"""Labels of -100 and weights of classes: gradients and what is logged are one device's."""

import logging
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss
from torch.utils.data import DataLoader
from transformers import BartConfig, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.models.bart.modeling_bart import BartForCausalLM

from lightning_pipeoffload import chunked_loss
from lightning_pipeoffload.loop.microbatches import count_tokens, drops_first_label
from tests.support import fits
from tests.support.pairs import first

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LLAMA = LlamaConfig(**SMALL, num_hidden_layers=2, use_cache=False)
BERT = BertConfig(
    **SMALL, num_hidden_layers=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
BART = BartConfig(vocab_size=32, d_model=16, decoder_layers=1, decoder_attention_heads=2)
MODELS = {"causal": (LlamaForCausalLM, LLAMA), "masked": (BertForMaskedLM, BERT)}


class Model(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        make, config = MODELS[kind]
        self.model = make(config).double()

    def loss(self, batch):
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("by_samples", batch["labels"].double().mean(), batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def texts():
    """Return texts with a fifth of their labels, and some with none, or with the first alone."""
    tokens = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.where(torch.rand(16, 6, generator=torch.Generator().manual_seed(2)) < 0.4, -100)
    labels[:2], labels[2:4, 0], labels[4:7, 0] = -100, 3, -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def fit(num_devices, kind, weight="samples"):
    L.seed_everything(7, verbose=False)
    module = Model(kind)
    trainer = fits.trainer(
        num_devices, {"microbatch_weight": weight}, num_sanity_val_steps=0, max_epochs=1
    )
    loader = DataLoader(texts(), batch_size=8)
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("kind", first(1, [*MODELS]))
def test_weighed_by_tokens_a_fit_is_one_devices(ranks, kind):
    expected = fit(0, kind)  # its last loss and its validation come after steps
    for found in ranks(2).run(fit, 2, kind, "tokens"):
        assert found == pytest.approx(expected, rel=1e-6)


def test_ignored_labels_are_noted_once_where_samples_weigh(caplog):
    with caplog.at_level(logging.WARNING, "lightning_pipeoffload"):
        fit(1, "masked")
    assert caplog.text.count("the batch has labels of -100") == 1


CLASS_WEIGHTS = torch.tensor([1.0, 9.0, 0.1], dtype=torch.float64)


class Classes(L.LightningModule):
    def __init__(self, weight):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
        self.weight = weight

    def training_step(self, batch, index):
        loss = cross_entropy(self.blocks(batch["x"]), batch["labels"], weight=self.weight)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


class Chunked(Classes):
    """Has a head, with a loss over chunks."""

    def __init__(self, weight):
        super().__init__(weight)
        self.head = nn.Linear(3, 3).double()

    def training_step(self, batch, index):
        x, loss = self.blocks(batch["x"]), nn.CrossEntropyLoss
        return chunked_loss(self.head, x, batch["labels"], loss(weight=self.weight), 2)


def count_class_weights(batch):
    return CLASS_WEIGHTS[batch["labels"]].sum()


def fit_classes(num_devices, weight=CLASS_WEIGHTS, microbatch_weight="samples", make=Classes):
    L.seed_everything(7, verbose=False)
    module = make(weight)
    samples = [{"x": x, "labels": i % 3} for i, x in enumerate(torch.randn(16, 3).double())]
    options = {"microbatch_weight": microbatch_weight}
    trainer = fits.trainer(num_devices, options, max_epochs=1)
    trainer.fit(module, DataLoader(samples, batch_size=8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_weighed_by_classes_a_fit_is_one_devices(ranks):
    expected = fit_classes(0)
    for found in ranks(2).run(fit_classes, 2, CLASS_WEIGHTS, count_class_weights):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "weight", "microbatch_weight", "count"),
    [
        (Classes, CLASS_WEIGHTS, "samples", 1),
        (Classes, None, "samples", 0),
        (Classes, CLASS_WEIGHTS, count_class_weights, 0),
        (Chunked, CLASS_WEIGHTS, "samples", 1),
        (Chunked, None, "samples", 0),
    ],
)
def test_class_weights_are_noted_once_where_samples_weigh(
    caplog, make, weight, microbatch_weight, count
):
    with caplog.at_level(logging.WARNING, "lightning_pipeoffload"):
        fit_classes(1, weight, microbatch_weight, make)
    assert caplog.text.count("the loss weighs classes (") == count
    assert caplog.text.count("weight=self.weight") == count


class Negatives(Classes):
    """Each sample against the others of the batch, or against as many classes as samples."""

    def training_step(self, batch, index):
        x = self.blocks(batch["x"])
        others = x if self.weight is None else self.weight
        return cross_entropy(x @ others.T, torch.arange(len(x)) % len(others))


@pytest.mark.parametrize(
    ("make", "size", "count"),
    [
        (lambda: Negatives(None), 2, 1),
        (lambda: Negatives(None), 1, 1),
        (lambda: Negatives(torch.ones(2, 3).double()), 2, 0),
        (lambda: Classes(None), 2, 0),
    ],
)
def test_samples_that_a_loss_compares_are_noted_once(caplog, make, size, count):
    trainer = fits.trainer(1, {"num_microbatches": 8 // size}, max_epochs=1)
    samples = [{"x": torch.randn(3).double(), "labels": i % 3} for i in range(16)]
    with caplog.at_level(logging.WARNING, "lightning_pipeoffload"):
        trainer.fit(make(), DataLoader(samples, batch_size=8))
    text = "the loss compares each sample with the others of its microbatch ("
    assert caplog.text.count(text) == count
    assert caplog.text.count("cross_entropy(x @ others.T") == count


SUM, COUNT, NORM = "the loss is a sum over the samples", "the loss divides by a count", "statistics"


def per_token(module, batch, **options):
    logits = module.blocks(batch["x"])
    return cross_entropy(logits, batch["labels"], **options)


def of_boxes(module, batch):
    """A sum over the boxes of all images, divided by their number, as in DETR."""
    logits, counts = module.blocks(batch["x"]), batch["labels"].tolist()
    image = torch.tensor([i for i, count in enumerate(counts) for _ in range(count)])
    return logits[image].abs().sum() / max(1, sum(counts))


def of_sounds(module, batch):
    logits = module.blocks(batch["x"]).expand(4, -1, -1).log_softmax(-1)
    lengths = torch.full((len(batch["x"]),), 4)
    return ctc_loss(
        logits, batch["labels"][:, None].clamp(1), lengths, lengths // 4, reduction="sum"
    )


def of_experts(module, batch):
    """The fractions of samples that choose each class, as in Mixtral."""
    logits = module.blocks(batch["x"])
    counts = torch.zeros(3) + torch.histc(logits.argmax(-1).float(), bins=3, min=0, max=2)
    return (counts / len(logits) * logits.softmax(-1).sum(0) / len(logits)).sum()


LOSSES = {
    "mean": (per_token, ""),
    "sum": (partial(per_token, reduction="sum"), SUM),
    "sum / n": (lambda *a: per_token(*a, reduction="none").sum() / len(a[1]["x"]), ""),
    "sum / 8": (lambda *a: per_token(*a, reduction="none").sum() / 8, SUM),
    "masked": (
        lambda m, b: (m.blocks(b["x"])[:, 0] * b["labels"]).sum() / b["labels"].sum(),
        COUNT,
    ),
    "selected": (lambda m, b: m.blocks(b["x"])[b["labels"] > 0].mean(), COUNT),
    "selected, over all": (lambda m, b: m.blocks(b["x"])[b["labels"] > 0].sum() / len(b["x"]), ""),
    "boxes": (of_boxes, COUNT),
    "a small sum": (lambda *a: per_token(*a) + 1e-3 * a[0].blocks(a[1]["x"]).square().sum(), SUM),
    "ctc": (of_sounds, SUM),
    "experts": (of_experts, ""),
    "a product": (lambda m, b: (x := m.blocks(b["x"]))[:, 0] @ x[:, 1] / len(x), ""),
}


class AnyLoss(Classes):
    def __init__(self, loss):
        super().__init__(None)
        self.loss = loss

    def training_step(self, batch, index):
        return self.loss(self, batch)


def notices(caplog, module):
    trainer = fits.trainer(1, {"num_microbatches": 4}, max_epochs=1)
    samples = [{"x": torch.randn(3).double(), "labels": (i + 1) % 3} for i in range(16)]
    with caplog.at_level(logging.WARNING, "lightning_pipeoffload"):
        trainer.fit(module, DataLoader(samples, batch_size=8))
    return [text for text in (SUM, COUNT, NORM) for _ in range(caplog.text.count(text))]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_mean_over_samples_is_noted_once(caplog, name):
    loss, text = LOSSES[name]
    assert notices(caplog, AnyLoss(loss)) == [text] * bool(text)


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_running_statistics_are_those_of_accumulated_gradients(momentum):
    found = []
    for devices, size, more in ((0, 2, {"accumulate_grad_batches": 4}), (1, 8, {})):
        L.seed_everything(7, verbose=False)
        module = AnyLoss(per_token)
        module.blocks.append(nn.BatchNorm1d(3, momentum=momentum).double())
        samples = [{"x": x, "labels": i % 3} for i, x in enumerate(torch.randn(16, 3).double())]
        trainer = fits.trainer(devices, {"num_microbatches": 4}, max_epochs=2, **more)
        trainer.fit(module, DataLoader(samples, batch_size=size))
        found.append(module.state_dict())
    assert found[0]["blocks.4.num_batches_tracked"] == 16
    torch.testing.assert_close(*found, rtol=0, atol=1e-15)


class Stateful(AnyLoss):
    """Adds what it has kept, by the step before, to what its blocks compute."""

    def __init__(self, keep):
        super().__init__(lambda module, batch: keep(module, module.blocks(batch["x"])))
        self.tensor, self.named, self.listed = None, {}, []


def in_a_tensor(module, x):
    x = x if module.tensor is None else x + module.tensor
    module.tensor = x.detach()
    return x.mean()


def in_a_dict(module, x):
    x = x + module.named.get("x", 0)
    module.named["x"] = x.detach()
    return x.mean()


def in_a_list(module, x):
    x = x + module.listed[-1] if module.listed else x
    module.listed.append(x.detach())
    return x.mean()


def only_the_mean(module, x):
    module.listed.append(x.detach().mean(0))
    return x.mean()


@pytest.mark.parametrize("keep", [in_a_tensor, in_a_dict, in_a_list, only_the_mean])
def test_rows_of_samples_that_a_step_keeps_are_noted_once(caplog, keep):
    notices(caplog, Stateful(keep))
    text = "gets a row for each sample of a microbatch"
    assert caplog.text.count(text) == (keep is not only_the_mean)


ORDERS = {
    "flipped": lambda m, x: m.blocks(x + x.flip(0)),
    "rolled": lambda m, x: (y := m.blocks(x)) * y.roll(1, 0),
    "rolled as one row": lambda m, x: (y := m.blocks(x)) * y.roll(3),
    "drawn": lambda m, x: m.blocks(x + x[torch.randperm(len(x))]),
    "within samples": lambda m, x: m.blocks(x + x.flip(1) + x.roll(1, -1)),
    "a number": lambda m, x: m.blocks(x) + x.mean().roll(1),
    "of another table": lambda m, x: m.blocks(x) + torch.eye(2, 3).flip(0).sum(),
}


@pytest.mark.parametrize("name", ORDERS)
def test_samples_that_a_step_reorders_are_noted_once(caplog, name):
    notices(caplog, AnyLoss(lambda module, batch: ORDERS[name](module, batch["x"]).mean()))
    text = "the step puts the samples of a microbatch in another order ("
    assert caplog.text.count(text) == (name in ("flipped", "rolled", "rolled as one row", "drawn"))


@pytest.mark.parametrize("dim", [0, 1])
def test_samples_that_may_be_columns_are_noted_once(caplog, dim):
    trainer = fits.trainer(1, {"num_microbatches": 4}, max_epochs=1)
    module = AnyLoss(lambda module, batch: module.blocks(batch).mean())
    samples = [torch.randn(12, 3).double() for _ in range(16)]
    with caplog.at_level(logging.WARNING, "lightning_pipeoffload"):
        trainer.fit(module, DataLoader(samples, 8, collate_fn=lambda s: torch.stack(s, dim)))
    assert caplog.text.count("each tensor of the batch has 8 columns") == dim


@pytest.mark.parametrize("trains", [True, False])
def test_a_norm_over_the_batch_is_noted_once(caplog, trains):
    module = AnyLoss(per_token)
    norms = [nn.BatchNorm1d(3).double() for _ in module.blocks]
    blocks = zip(module.blocks, norms, strict=True)
    module.blocks = nn.Sequential(*(nn.Sequential(*pair) for pair in blocks))
    module.on_train_epoch_start = lambda: [norm.train(trains) for norm in norms]
    assert notices(caplog, module) == [NORM] * trains
    assert ("blocks.0.1 (BatchNorm1d)" in caplog.text) == trains


def test_which_models_drop_the_first_label():
    kinds = [LlamaForCausalLM(LLAMA), BertForMaskedLM(BERT), BartForCausalLM(BART)]
    assert [*map(drops_first_label, kinds)] == [True, False, False]
    assert not drops_first_label(fits.Net())


def test_a_batch_without_labels_is_refused():
    with pytest.raises(
        ValueError, match=r'counts batch\["labels"\].*give microbatch_weight a call'
    ):
        count_tokens((torch.ones(2), torch.ones(2)), drops_first=False)
