"""A step's calls of metrics over microbatches give the values of one device's whole batch."""

from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMetric,
    R2Score,
    RunningMean,
    RunningSum,
    SumMetric,
)
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef
from torchmetrics.text import Perplexity, WordErrorRate
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper

from lightning_pipeoffload.metrics import LogCapture, MicrobatchCapture

SIZES = [2, 2, 1]  # of microbatches, the last one short


class Boxes(Metric):
    """Counts boxes of images, given as a dict for each, and keeps the largest."""

    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("num_boxes", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_updates", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("largest", [], dist_reduce_fx=None)

    def update(self, images):
        self.num_updates += 1
        self.num_boxes += sum(len(image["boxes"]) for image in images)
        self.largest.append(torch.stack([image["boxes"].max() for image in images]).max())

    def compute(self):
        return {"boxes": self.num_boxes / self.num_updates, "largest": max(self.largest)}


class Net(L.LightningModule):
    def __init__(self, step, **metrics):
        super().__init__()
        for name, metric in metrics.items():
            setattr(self, name, metric)
        self.step, self.logged = step, {}
        self._trainer = SimpleNamespace(training=True)

    def log(self, name, value, **kwargs):
        value = value._forward_cache if isinstance(value, Metric) else value
        self.logged.setdefault(name, []).append(torch.as_tensor(value).detach().double())


def batches(num=3):
    """Yield a batch as one device's step gets it, all columns with a row or entry for a sample."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(num):
        logits = torch.rand(5, 3, 4, generator=generator) * 1.3
        yield SimpleNamespace(
            logits=logits,
            binary=logits[:, 0, 0],
            y=torch.randint(0, 4, (5, 3), generator=generator),
            truth=torch.tensor([0, 1, 1, 0, 1]),
            images=torch.rand(5, 1, 16, 16, generator=generator),
            texts=[f"a {'b' * n} c" for n in range(5)],
            boxes=[{"boxes": torch.rand(n, 4, generator=generator)} for n in (1, 3, 2, 4, 1)],
        )


def parts_of(batch):
    starts = np.cumsum([0, *SIZES])
    for start, end in zip(starts, starts[1:], strict=False):
        yield SimpleNamespace(**{name: column[start:end] for name, column in vars(batch).items()})


def run(module, in_parts):
    capture = LogCapture(module)
    for batch in batches():
        for part in parts_of(batch) if in_parts else [batch]:
            if in_parts:
                with MicrobatchCapture(capture, keep=True):
                    module.step(module, part)
            else:
                module.step(module, part)
        if in_parts:
            capture.log_combined(SIZES, [size / sum(SIZES) for size in SIZES])
    return module.logged


def check(step, **metrics):
    """Compare what is logged, and what metrics compute at the epoch's end, with one device."""
    torch.manual_seed(0)
    logged, computed = [], []
    for in_parts in (False, True):
        module = Net(step, **{name: metric() for name, metric in metrics.items()})
        logged.append(run(module, in_parts))
        computed.append(
            [getattr(module, name).compute() for name in metrics if name != "uncomputed"]
        )
    rounding = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(logged[1], logged[0], **rounding)
    torch.testing.assert_close(computed[1], computed[0], **rounding)


BINARY = [BinaryAccuracy, BinaryAUROC, lambda: BinaryCalibrationError(n_bins=3)]


@pytest.mark.parametrize("make", BINARY)
def test_logits_get_a_sigmoid_as_of_the_batch(make):
    def step(self, part):
        self.log("called", self.metric(part.binary, part.truth))
        self.log("itself", self.metric)

    check(step, metric=make)


def test_several_samples_are_needed():
    def step(self, part):
        self.log("r2", self.r2(part.binary, part.truth.float()))
        self.log("pearson", self.pearson(part.binary, part.truth.float()))
        self.auroc.update(part.logits[:, 0], part.y[:, 0])

    check(step, r2=R2Score, pearson=PearsonCorrCoef, auroc=lambda: MulticlassAUROC(4))


def test_scalars_are_the_batchs():
    def step(self, part):
        loss = F.cross_entropy(part.logits.transpose(1, 2), part.y)
        self.mean.update(loss)
        self.by_size.update(loss, len(part.y))
        self.worst.update(loss)
        self.best.update(loss.item())
        self.running.update(loss)
        self.right.update((part.logits.argmax(-1) == part.y).sum())
        self.right_running.update((part.logits.argmax(-1) == part.y).sum())
        self.samples.update(len(part.y))
        self.tokens.update(F.cross_entropy(part.logits.transpose(1, 2), part.y, reduction="none"))

    check(
        step,
        mean=MeanMetric,
        by_size=MeanMetric,
        worst=MaxMetric,
        best=MinMetric,
        running=lambda: RunningMean(2),
        right=SumMetric,
        right_running=lambda: RunningSum(2),
        samples=SumMetric,
        tokens=MeanMetric,
    )


def test_large_arguments_are_not_kept():
    def step(self, part):
        self.log("perplexity", self.perplexity(part.logits, part.y).detach())
        self.log("accuracy", self.accuracy(part.logits.flatten(0, 1), part.y.flatten()))
        kept = [piece.operands for call in self.calls() for piece in call.parts]
        assert kept == [None] * len(kept)

    def make_accuracy():
        return MulticlassAccuracy(4, average="macro")

    torch.manual_seed(0)
    module = Net(step, perplexity=Perplexity(), accuracy=make_accuracy())
    capture = LogCapture(module)
    module.calls = capture.metrics._calls.values
    (batch,) = batches(1)
    for part in parts_of(batch):
        with MicrobatchCapture(capture, keep=True):
            step(module, part)
    capture.log_combined(SIZES, [size / 5 for size in SIZES])
    whole = Net(lambda *_: None, perplexity=Perplexity(), accuracy=make_accuracy())
    whole.calls = list
    step(whole, batch)
    torch.testing.assert_close(module.logged, whole.logged)


def test_collections_group_as_on_one_device():
    def step(self, part):
        self.log_dict(self.called(part.logits.transpose(1, 2), part.y))
        self.updated.update(part.binary, part.truth)
        for name, metric in self.members.items():
            metric.update(part.binary, part.truth)
            self.log(name, metric.compute())

    check(
        step,
        called=lambda: MetricCollection(
            {
                "acc": MulticlassAccuracy(4),
                "by_class": ClasswiseWrapper(MulticlassAccuracy(4, average=None)),
            },
            prefix="val_",
        ),
        updated=lambda: MetricCollection(
            {"low": BinaryAccuracy(0.2), "acc": BinaryAccuracy(), "area": BinaryAUROC()}
        ),
        members=lambda: MetricCollection({"a": BinaryAccuracy(), "b": BinaryAUROC()}),
    )


def test_entries_of_what_a_call_returns():
    def step(self, part):
        found = self.boxes(part.boxes)
        self.log("boxes", found["boxes"])
        self.log_dict(found)
        self.log("words", self.words(part.texts, [text + " c" for text in part.texts]))
        of_class = self.of_class(part.logits.flatten(0, 1), part.y.flatten())
        for label, value in enumerate(of_class):
            self.log(f"class_{label}", value)
        self.log("error", (1 - of_class).mean() * 100)
        self.log("confused", self.confusion(part.logits.flatten(0, 1), part.y.flatten())[1, 2])

    check(
        step,
        boxes=Boxes,
        words=WordErrorRate,
        of_class=lambda: MulticlassAccuracy(4, average=None),
        confusion=lambda: MulticlassConfusionMatrix(4),
    )


def test_wrappers_and_trackers():
    def step(self, part):
        if self.tracker.n_steps == 0:
            self.tracker.increment()
        self.tracker.update(part.binary, part.truth)
        self.log("range", self.range(part.binary, part.truth)["max"])
        self.outputs.update(part.logits[:, 0], part.logits[:, 1])

    check(
        step,
        tracker=lambda: MetricTracker(BinaryAccuracy()),
        range=lambda: MinMaxMetric(BinaryAccuracy()),
        outputs=lambda: MultioutputWrapper(R2Score(), 4),
    )


def test_resets_and_running_values():
    def step(self, part):
        self.fresh.reset()
        self.fresh.update(part.binary, part.truth)
        self.log("fresh", self.fresh.compute())
        self.tokens.reset()
        self.log("of_batch", self.tokens(part.logits, part.y))
        self.log("so_far", self.tokens.compute())
        self.after.update(part.binary, part.truth)
        self.log("after", self.after.compute())
        self.after.reset()
        self.after.update(part.binary, part.truth)

    check(step, fresh=BinaryAccuracy, tokens=Perplexity, after=BinaryAccuracy)


def test_a_metric_of_a_metrics_value_gets_that_of_the_batch():
    def step(self, part):
        area = self.area(part.binary, part.truth)
        self.best.update(area)
        self.total.update(1 - area)
        self.running.update(area * 2)

    check(step, area=BinaryAUROC, best=MaxMetric, total=SumMetric, running=lambda: RunningMean(2))


def test_a_metric_that_some_microbatches_call():
    def step(self, part):
        if len(part.y) > 1:
            self.metric.update(part.binary, part.truth)
            self.log("some", self.metric.compute())
            self.log("either", self.called(part.binary, part.truth))
        else:
            self.log("either", 0.25)

    module = Net(step, metric=BinaryAUROC(), called=BinaryAUROC())
    logged = run(module, in_parts=True)
    areas = [BinaryAUROC()(batch.binary[:4], batch.truth[:4]).double() for batch in batches()]
    expected = [0.8 * area + 0.2 * 0.25 for area in areas]
    torch.testing.assert_close(logged["either"], expected, rtol=1e-5, atol=1e-6)
    assert len(logged["some"]) == 3


def test_metrics_in_lists_and_of_the_cpu():
    def step(self, part):
        for number, metric in enumerate(self.plain):
            self.log(f"{number}", metric(part.binary, part.truth))
        self.on_cpu.update(part.binary, part.truth)

    def make():
        metrics = [BinaryAccuracy(), BinaryAUROC()]
        metrics_list.append(metrics)
        return metrics

    metrics_list = []
    logged = []
    for in_parts in (False, True):
        module = Net(step, plain=make(), on_cpu=BinaryAUROC(compute_on_cpu=True))
        logged.append(run(module, in_parts))
    torch.testing.assert_close(logged[1], logged[0])
    torch.testing.assert_close(*([m.compute() for m in metrics] for metrics in metrics_list))


def test_a_trace_counts_what_is_kept_and_leaves_a_metric_in_a_dict_as_it_was():
    def step(self, part):
        self.named["accuracy"].update(part.binary, part.truth)
        self.log("value", self.named["accuracy"].compute())

    module = Net(step)
    module.named = {"accuracy": BinaryAccuracy()}
    capture, part = LogCapture(module), next(parts_of(next(batches())))
    with MicrobatchCapture(capture, keep=False):
        module.step(module, part)
    assert module.named["accuracy"].update_count == 0
    assert capture.metrics.traced_bytes == part.binary.nbytes + part.truth.nbytes


def test_one_tensor_of_all_microbatches_stays_one():
    class Weighted(MeanSquaredError):
        def update(self, preds, target, weights, name="mse"):
            assert weights.shape == (3,), name
            super().update(preds * weights, target * weights)

    def step(self, part):
        weights = self.weights
        self.log("mse", self.mse(part.logits[..., 0], part.logits[..., 1], weights, name="w"))

    logged = []
    for in_parts in (False, True):
        module = Net(step, mse=Weighted())
        module.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))
        logged.append(run(module, in_parts))
    torch.testing.assert_close(logged[1], logged[0])


def test_a_step_may_write_what_a_metric_was_given():
    def step(self, part):
        scores = part.binary.clone()
        self.metric.update(scores, part.truth)
        scores.zero_()

    check(step, metric=BinaryAUROC)


class OwnValues(L.LightningModule):
    """Uses a metric's values in its loss, in a branch and in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)
        self.ssim = StructuralSimilarityIndexMeasure(data_range=1.0)
        self.accuracy = BinaryAccuracy()
        self.seen, self.logged = [], {}

    def log(self, name, value, **kwargs):
        self.logged[name] = value

    def training_step(self, part):
        value = self.ssim(self.layer(part.images), part.images)
        accuracy = self.accuracy(part.binary, part.truth)
        self.log("ssim", value)
        self.log("accuracy", accuracy)
        self.seen.append(accuracy)
        if accuracy > 0.5:
            self.log("high", accuracy.item())
        loss = 1 - value
        self.log("loss", loss)
        return {"loss": loss + 0 * self.layer.weight.sum(), "accuracy": accuracy}


def test_a_microbatchs_own_value_is_there_where_the_step_uses_it(caplog):
    caplog.set_level("INFO")
    (batch,) = batches(1)
    module, capture = OwnValues(), None
    capture = LogCapture(module)
    own, losses = [], []
    for part in parts_of(batch):
        with MicrobatchCapture(capture, keep=True):
            result = capture.metrics.resolve_metric_values(module.training_step(part))
        assert type(result["accuracy"]) is torch.Tensor
        losses.append(result["loss"])
        own.append(BinaryAccuracy()(part.binary, part.truth))
    capture.log_combined(SIZES, [size / 5 for size in SIZES])
    torch.testing.assert_close([float(value) for value in module.seen], [*map(float, own)])
    gradients = torch.autograd.grad(sum(losses), module.layer.weight)
    plain = [
        1 - StructuralSimilarityIndexMeasure(data_range=1.0)(module.layer(p.images), p.images)
        for p in parts_of(batch)
    ]
    torch.testing.assert_close(gradients, torch.autograd.grad(sum(plain), module.layer.weight))
    whole = BinaryAccuracy()(batch.binary, batch.truth)
    torch.testing.assert_close(module.logged["accuracy"], whole)
    ssim = StructuralSimilarityIndexMeasure(data_range=1.0)(
        module.layer(batch.images), batch.images
    )
    torch.testing.assert_close(module.logged["loss"], (1 - ssim).detach())
    assert caplog.text.count("own value of a BinaryAccuracy") == 1


def test_a_value_that_is_kept_is_a_plain_number_for_others():
    (batch,) = batches(1)
    module = OwnValues()
    capture = LogCapture(module)
    with MicrobatchCapture(capture, keep=True):
        module.training_step(batch)
    capture.log_combined([5], [1.0])
    (value,) = module.seen
    assert torch.stack(module.seen).mean() == value
    assert f"{value:.2f}" == f"{float(value):.2f}"
