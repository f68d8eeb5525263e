"""Replicas that share out the optimizer's step train what one device would."""

from types import SimpleNamespace
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipelineMonitor, PipeOffloadStrategy
from lightning_pipeoffload.optimizers.narrowed_optimizer import (
    NarrowedOptimizer,
    OptimizerPartition,
)
from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.comm import PendingParameters
from lightning_pipeoffload.runtime.run import Executor
from lightning_pipeoffload.runtime.shapes import GradientChanges
from tests.support import fits, replica_fits
from tests.support.pairs import slow

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-1}),  # has a state before its first step
}


class Net(replica_fits.Net):
    """With an optimizer by its name, of two groups."""

    def __init__(self, optimizer="adamw", infinite_at=-1, **options):
        super().__init__(**options)
        self.kind = optimizer
        self.infinite_at = infinite_at

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == self.infinite_at else loss

    def configure_optimizers(self):
        members = list(self.named_parameters())
        kind, options = OPTIMIZERS[self.kind]
        groups = [
            {"params": [p for n, p in members if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in members if not n.endswith("weight")], "weight_decay": 0.0},
        ]
        optimizer = kind(groups, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def train(num_replicas, num_ranks, module, fits_in_turn):
    """Run fits, each of which may go on with what the one before has saved.

    Args:
        num_replicas: Replicas of the pipeline.
        num_ranks: Ranks of each.
        module: Arguments of the module.
        fits_in_turn: The strategy's options of each fit; but ``steps``, the step to which it
            trains, ``scaled`` for 16-mixed, ``save``, a path to save to, ``resume``, one to go on
            with, and ``callbacks``, classes instead of one that notes the batches.
    """
    batches = replica_fits.Batches()
    numbers = []
    for options in fits_in_turn:
        L.seed_everything(7, workers=True, verbose=False)
        given = dict(options)
        steps, save, resume = given.pop("steps", 5), given.pop("save"), given.pop("resume", None)
        trainer_options = {"gradient_clip_val": 0.5, **given.pop("trainer", {})}
        callbacks = [make() for make in given.pop("callbacks", [lambda: batches])]
        if given.pop("scaled", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            trainer_options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        strategy = PipeOffloadStrategy(
            **{
                "num_microbatches": 4,
                "schedule": "zb_h1",
                "data_parallel_size": num_replicas,
                **given,
            }
        )
        trainer = L.Trainer(
            **fits.SILENT,
            devices=num_replicas * num_ranks,
            strategy=strategy,
            callbacks=callbacks,
            max_steps=steps,
            enable_checkpointing=False,
            **trainer_options,
        )
        loader = DataLoader(replica_fits.samples(), 8, collate_fn=fits.collate)
        plain = Executor._await_pending_parameters
        with patch.object(
            Executor, "_await_pending_parameters", autospec=True, side_effect=plain
        ) as waits:
            trainer.fit(Net(**module), loader, ckpt_path=resume)
        trainer.save_checkpoint(save)
        numbers.append(
            {
                "kept": sum(t.nbytes for t in tensors_in([*trainer.optimizers[0].state.values()])),
                "estimated": sum(strategy.report()["memory"]["optimizer"]),
                "late": waits.call_count,
            }
        )
    return {"replica": strategy.group.replica, "tokens": batches.tokens, "numbers": numbers}


def train_plain(batches, accumulate=1, **options):
    """Train on one device, in plain torch; return weights and the optimizer's state."""
    L.seed_everything(7, workers=True, verbose=False)
    module = Net(**options)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index, batch in enumerate(batches):
        tokens = torch.tensor(batch)
        loss = module.loss({"x": tokens, "y": replica_fits.labels(tokens)})
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return {
        "state_dict": {name: value.detach() for name, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }


SHARED = {"sharding": "optimizer"}


def test_a_state_that_another_fit_has_shared_out_is_refused():
    replicas = SimpleNamespace(replica=0, num=2, pending=PendingParameters())
    replicas.start_broadcast = lambda tensor, source: lambda: None
    group = SimpleNamespace(replica=0, num_replicas=2, replicas=replicas)
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, 2)]
    narrowed = NarrowedOptimizer(optimizer := torch.optim.AdamW(parameters), GradientChanges())
    narrowed.partition_step(OptimizerPartition(group))
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    narrowed.partition_step(OptimizerPartition(group))  # over as many replicas: goes on
    with pytest.raises(RuntimeError, match="AdamW keeps is shared out over 2 replicas"):
        narrowed.partition_step(None)


def run(ranks, replicas, num_ranks, module, *fits_in_turn):
    """Run fits; return what each process found, and what one device makes of the same batches."""
    pool = ranks(replicas * num_ranks)
    found = pool.run(train, replicas, num_ranks, module, list(fits_in_turn))
    accumulate = fits_in_turn[0].get("trainer", {}).get("accumulate_grad_batches", 1)
    return found, train_plain(replica_fits.joined(found), accumulate, **module)


def assert_same(path, expected):
    """Compare a checkpoint's weights, and what its optimizer keeps, with those of one device."""
    found = torch.load(path, weights_only=False)
    state, plain = found["optimizer_states"][0], expected["optimizer"]
    assert state["state"].keys() == plain["state"].keys()
    assert [g["params"] for g in state["param_groups"]] == [
        g["params"] for g in plain["param_groups"]
    ]
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], **close)
    torch.testing.assert_close(state["state"], plain["state"], **close)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("foreach", {}),
        ("sgd", {"trainer": {"accumulate_grad_batches": 2}}),
        ("adafactor", {}),
        ("adagrad", {}),
        slow(("fused", {})),
    ],
)
def test_replicas_of_one_rank_train_what_one_device_does(ranks, tmp_path, optimizer, options):
    path = str(tmp_path / "trained.ckpt")
    module = {"optimizer": optimizer, "frozen": "embed"}
    found, expected = run(ranks, 2, 1, module, {**SHARED, "save": path, "steps": 4, **options})
    assert_same(path, expected)
    kept = sum(t.nbytes for t in tensors_in(expected["optimizer"]["state"]))
    of_each = [each["numbers"][0]["kept"] for each in found]
    assert sum(of_each) == kept
    assert max(of_each) < 0.6 * kept


def test_a_fit_goes_on_in_either_form_with_the_step_shared_out_or_not(ranks, tmp_path):
    file, folder, shared, last = (str(tmp_path / f"{n}.ckpt") for n in range(4))
    in_folder = {"save_distributed_checkpoint": True}
    found, expected = run(
        ranks,
        2,
        2,
        {"tie": True},
        {**SHARED, "steps": 2, "save": file},
        {**in_folder, "steps": 3, "resume": file, "save": folder},
        {**SHARED, **in_folder, "steps": 4, "resume": folder, "save": shared},
        {**SHARED, "steps": 5, "resume": shared, "save": last},
    )
    assert_same(last, expected)
    largest = 0
    for replicas in ((found[rank], found[rank + 2]) for rank in range(2)):
        (shared, whole, *_), (others, *_) = (each["numbers"] for each in replicas)
        kept = [shared["kept"], others["kept"]]
        assert sum(kept) == whole["kept"]
        assert max(kept) < 0.65 * whole["kept"]
        largest += max(kept)
    assert shared["estimated"] == pytest.approx(largest, rel=0.02)  # but for single numbers


@pytest.mark.parametrize(
    ("callback", "num_ranks", "num_late"),
    [
        (PipelineMonitor, 2, 3),  # of five steps, of which one ends an epoch
        (EMAWeightAveraging, 1, 0),  # which reads them after each step
    ],
)
def test_weights_that_come_with_the_next_batch_are_the_same(
    ranks, tmp_path, callback, num_ranks, num_late
):
    late, at_once = (str(tmp_path / f"{name}.ckpt") for name in ("late", "at_once"))
    watched = {"callbacks": [callback, replica_fits.Batches], "save": at_once}
    fits_in_turn = [{**SHARED, "callbacks": [callback], "save": late}, {**SHARED, **watched}]
    for each in ranks(2 * num_ranks).run(train, 2, num_ranks, {"tie": True}, fits_in_turn):
        assert [numbers["late"] for numbers in each["numbers"]] == [num_late, 0]
    found, expected = (torch.load(path, weights_only=False) for path in (late, at_once))
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)


def test_infinities_skip_the_step_of_every_replica(ranks, tmp_path):
    shared, whole = (str(tmp_path / f"{name}.ckpt") for name in ("shared", "whole"))
    options = {"scaled": True, "steps": 4}
    ranks(2).run(
        train,
        2,
        1,
        {"infinite_at": 2},
        [{**SHARED, **options, "save": shared}, {**options, "save": whole}],
    )
    found, expected = (torch.load(path, weights_only=False) for path in (shared, whole))
    assert {state["step"].item() for state in found["optimizer_states"][0]["state"].values()} == {3}
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


def test_a_trace_shows_the_update_without_the_batch_that_runs_in_its_closure():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    NarrowedOptimizer(optimizer, GradientChanges())

    def closure():
        with record_function("batch"):
            parameter.grad = torch.ones(3)

    with profile(acc_events=True) as profiled:
        optimizer.step(closure)
    spans = {event.name: event.time_range for event in profiled.events()}
    assert spans["batch"].end <= spans["optimizer"].start
    assert spans["optimizer"].end <= spans["Optimizer.step#SGD.step"].end
    assert torch.equal(parameter, torch.full((3,), 0.9))
