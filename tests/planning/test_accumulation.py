"""Batches whose gradients add up share a plan where nobody looks in between."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from lightning_pipeoffload.planning.accumulation import Accumulation, JoinedRun, join_batches
from lightning_pipeoffload.planning.machine_limits import MachineLimits
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.planning.training_plan import TrainingPlan
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.schedule import (
    Costs,
    Kind,
    ScheduleError,
    build,
    cut_at_batches,
    lower,
    repeat_batch,
)
from tests.support import fits
from tests.support.pairs import slow


def batches_of(lengths):
    places = [range(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    dataset = fits.samples(sum(lengths))
    return DataLoader(dataset, batch_sampler=places, collate_fn=fits.collate)


class Watching(L.Callback):
    """Looks at gradients after each batch."""

    def __init__(self):
        self.seen = []

    def on_after_backward(self, trainer, module):
        total = get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.seen.append(float(total))


def train(num_devices, lengths, watch=False, precision="64-true", **options):
    """Accumulate three batches at a time.

    Returns: gradients, microbatches of the plan, and what a callback has seen.
    """
    L.seed_everything(7, verbose=False)
    module = fits.Net(dropout=options.pop("dropout", 0.0), depth=4)
    watching = Watching()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, **options),
        accumulate_grad_batches=3,
        max_epochs=1,
        precision=precision,
        enable_checkpointing=False,
        callbacks=[watching] if watch else [],
    )
    trainer.fit(module if precision == "64-true" else module.float(), batches_of(lengths))
    own = {n: p for n, p in module.named_parameters() if not isinstance(p, ShapeOnly)}
    gradients = {name: parameter.grad for name, parameter in own.items()}
    return gradients, num_devices and trainer.strategy.plan.num_microbatches, watching.seen


def train_with(options):
    return train(2, (8, 8, 8), dropout=0.3, **options)


@pytest.mark.parametrize("lengths", [[8, 8, 8, 8, 3], slow([8, 4, 8]), slow([8])], ids=str)
def test_gradients_of_shorter_batches_and_windows_are_exact(ranks, lengths):
    expected, _, _ = train(0, lengths)
    for found, size, _ in ranks(2).run(train, 2, lengths):
        assert size == 12
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "full"},
        slow({"schedule": "po_h"}),
        slow({"precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_one_plan_gives_what_several_give_to_the_bit(ranks, options):
    together = ranks(2).run(train_with, options)
    apart = ranks(2).run(train_with, {"watch": True, **options})
    for (one, common, _), (several, single, _) in zip(together, apart, strict=True):
        assert (common, single) == (12, 4)
        assert all(torch.equal(several[name], gradient) for name, gradient in one.items())


def test_who_looks_in_between_sees_all_gradients(ranks):
    _, _, expected = train(0, (8, 8, 8), True)
    outcomes = ranks(2).run(train, 2, (8, 8, 8), True)
    for _, _, seen in outcomes:
        assert seen == pytest.approx(expected, rel=1e-10)


class Noting:
    """An executor that notes what it is to run."""

    def __init__(self, rank):
        self.rank, self.ran = rank, []

    def begin(self, plan, ends):
        pass

    def go_on(self, actions, microbatches, before_backward=None):
        self.ran += actions
        return []

    def end(self):
        pass


def ran(joined, size, lengths, rank):
    """Run batches of so many microbatches by a plan; return its actions."""
    executor = Noting(rank)
    run = JoinedRun(joined, size, executor)
    for batch, length in enumerate(lengths):
        indices = range(batch * size, batch * size + length)
        run.run([SimpleNamespace(index=index) for index in indices], lambda results: None)
    run.finish()
    return executor.ran


@pytest.mark.parametrize("lengths", [(2, 2, 2), (2, 2, 1), (1, 1, 1), (2, 1), (1,)], ids=str)
@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_gradients_are_reduced_once_and_last_whatever_the_batches(name, lengths):
    joined = cut_at_batches(build(name, 2, 6), 2).with_reductions()
    for rank in range(2):
        actions = ran(joined, 2, lengths, rank)
        reductions = [a for a in actions if a.kind is Kind.REDUCE]
        assert sorted(a.stage for a in reductions) == list(joined.plan.stages_of(rank))
        for reduction in reductions:
            assert [a for a in actions if a.stage == reduction.stage][-1] is reduction
        computed = {a.microbatch for a in actions if a.kind is not Kind.REDUCE}
        assert len(computed) == sum(lengths)


def joined_size(name, num_microbatches, num_batches, make=None):
    make = make or (lambda count: build(name, 2, count))
    joined = join_batches(make, build(name, 2, num_microbatches), num_batches, Costs.unit())
    return joined and joined.plan.num_microbatches


def test_long_accumulations_are_several_plans():
    assert joined_size("1f1b", 4, 5) == 20
    assert joined_size("1f1b", 64, 1000) == 256


@pytest.mark.parametrize("name", ["gpipe", "zb_2p"])
def test_no_plan_that_keeps_more_or_takes_as_long(name):
    assert joined_size(name, 4, 3) is None


def test_no_plan_from_a_schedule_of_fixed_size():
    def refuse(count):
        raise ScheduleError("of another size")

    assert joined_size("1f1b", 4, 3, refuse) is None


def test_a_solvers_plan_of_a_batch_has_to_beat_the_plan_that_batches_share():
    costs = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 2.0, 2.0)
    executor = SimpleNamespace()
    settings = PipelineSettings(schedule="optpipe", memory_limit=34)
    training = TrainingPlan(settings, 4, executor, False, has_barrier=lambda: True)
    training.make(8)
    training.make_by(costs, MachineLimits())
    training.choose(Accumulation(2), costs)
    assert training.plan.num_microbatches == 16
    family, shared = training.schedule, training.plan
    together, apart = training.periods_with(family, costs)
    assert together == training.period(shared, costs) < apart
    assert apart == training.period(lower(repeat_batch(family, 2)), costs)
    training.adopt_for_each(family, costs)
    training.choose(Accumulation(2), costs)
    assert training.plan == lower(family)
    assert training.periods_with(family, costs)[0] < apart / 1.9
