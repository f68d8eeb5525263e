"""Values of microbatches, combined as Lightning would see the batch's; and metrics' values."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torchmetrics.classification import MulticlassF1Score

from lightning_pipeoffload.metrics import LogCapture, MicrobatchCapture


class Module(L.LightningModule):
    """Keeps what reaches its log, which adds a prefix."""

    def __init__(self):
        super().__init__()
        self.metric = MulticlassF1Score(4, average="macro")
        self.logged = []
        self._trainer = SimpleNamespace(training=True)

    def log(self, name, value, **kwargs):
        self.logged.append((f"my_{name}", value, kwargs))


@pytest.fixture
def module():
    return Module()


def run(module, *microbatches, sizes, weights=None):
    capture = LogCapture(module)
    for log in microbatches:
        with MicrobatchCapture(capture, keep=True):
            log()
    capture.log_combined(sizes, weights or sizes)
    return module.logged


def test_a_name_that_a_step_logs_twice_is_logged_twice(module):
    def log():
        module.log("x", 1.0)
        module.log("x", 3.0)

    assert [float(value) for _, value, _ in run(module, log, log, sizes=[1, 1])] == [1.0, 3.0]


def test_a_name_that_some_microbatches_log_has_their_weights(module):
    logged = run(module, lambda: None, lambda: module.log("x", 2), sizes=[3, 5])
    assert (float(logged[0][1]), logged[0][2]["batch_size"]) == (2.0, 5)


def test_bfloat16_is_combined_in_float32(module):
    logs = [lambda v=v: module.log("x", torch.tensor(v).bfloat16()) for v in (256.0, 257.0, 256.0)]
    ((_, value, _),) = run(module, *logs, sizes=[1, 1, 2])
    assert value.dtype == torch.float32


def test_what_cannot_be_combined_is_lightnings_to_refuse(module):
    ((_, value, _),) = run(module, lambda: module.log("x", torch.ones(2)), sizes=[1])
    assert value.shape == (2,)


F1_OF = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 1, 1, 2, 0]])


def log_f1(module, start, change=lambda value: value):
    found, target = F1_OF[:, start : start + 3]
    module.log("f1", change(module.metric(found, target)))


def f1_of(module, change):
    microbatches = [lambda s=start: log_f1(module, s, change) for start in (0, 3)]
    ((_, value, _),) = run(module, *microbatches, sizes=[3, 3])
    return value


@pytest.mark.parametrize("change", [lambda value: value, lambda value: value.detach()[None]])
def test_what_a_metric_returns_is_logged_over_the_batch(module, change):
    assert f1_of(module, change) == MulticlassF1Score(4, average="macro")(*F1_OF)


def test_what_a_step_makes_of_it_is_made_of_the_batchs():
    whole = MulticlassF1Score(4, average="macro")(*F1_OF)
    assert f1_of(Module(), lambda value: 1 - value * 100) == 1 - whole * 100


def test_what_a_step_writes_into_it_is_combined(module):
    metric = MulticlassF1Score(4, average="macro")
    halves = [float(metric(*F1_OF[:, start : start + 3])) for start in (0, 3)]
    found = f1_of(module, lambda value: value.mul_(100))
    assert found == pytest.approx(100 * sum(halves) / 2)


def test_means_weigh_as_the_loss_unless_a_size_is_given(module):
    def log(loss, rows):
        module.log("loss", torch.tensor(loss))
        module.log("by_rows", rows, batch_size=4)

    logged = run(
        module,
        lambda: log(float("nan"), 1.0),
        lambda: log(2.0, 4.0),
        sizes=[4, 4],
        weights=[0.0, 1.0],
    )
    assert [(float(v), options["batch_size"]) for _, v, options in logged] == [(2.0, 8), (2.5, 8)]
