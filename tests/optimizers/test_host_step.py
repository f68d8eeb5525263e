"""An optimizer on the host does what it does on the device, to the bit."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import bitsandbytes
import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import sgd
from torch.utils.data import DataLoader, Sampler

from lightning_pipeoffload import PipeOffloadStrategy, data_parallel_rank, data_parallel_size
from lightning_pipeoffload.optimizers import MasterWeights, host_step, master_step, refuse_stand_ins
from lightning_pipeoffload.runtime.device import CopyLanes
from lightning_pipeoffload.runtime.memory import HostMemoryError
from lightning_pipeoffload.schedule import tails
from tests.support import fits
from tests.support.ending_fits import Impatient
from tests.support.offloaded import LastMomentLane
from tests.support.pairs import slow

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
SMALL = 3000  # bytes of a bucket: several on each rank


torch.optim.AdamW([torch.ones(1)])  # from its first on its step has hooks, and a subclass's too


class Counted(torch.optim.AdamW):
    """Counts its steps, and says nothing of how it steps."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)


class CallsItself(torch.optim.AdamW):
    """Calls its closure before its base does."""

    def step(self, closure=None):
        loss = closure()
        super().step()
        return loss


class ByHand(torch.optim.Optimizer):
    """AdamW on float32 copies, as a user would write it."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2})
        self.inner = {}

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.inner:
                    master = nn.Parameter(p.float())
                    self.inner[p] = torch.optim.AdamW([master])
                    self.state[p]["master"] = master.data
                inner = self.inner[p].param_groups[0]
                inner["lr"], (master,) = group["lr"], inner["params"]
                master.grad = p.grad.float()
                self.inner[p].step()
                p.copy_(master)
        return loss


class Net(fits.Net):
    """Every third batch is clipped, where gradients are."""

    def __init__(
        self, optimizer="adamw", dtype=torch.float32, watches=True, grad_dtype=None, **options
    ):
        super().__init__(**options)
        self.optimizer, self.watches, self.seen = optimizer, watches, []
        self.grad_dtype = grad_dtype
        self.to(dtype)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (20.0 if self.trainer.global_step % 3 == 0 else 1.0)

    def configure_optimizers(self):
        groups = [{"params": [*self.blocks.parameters()]}]
        groups += [{"params": [*self.embed.parameters(), *self.norm.parameters()], "lr": 3e-3}]
        if self.head.weight is not self.embed.weight:
            groups += [{"params": [*self.head.parameters()]}]
        make = OPTIMIZERS.get(self.optimizer, self.optimizer)
        optimizer = make(groups)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self):
        for parameter in self.parameters() if self.grad_dtype is not None else ():
            parameter.grad_dtype = self.grad_dtype
        if self.watches:
            self.optimizers().optimizer.register_step_post_hook(self.look)

    def look(self, optimizer, *given):
        known = {id(p) for p in self.parameters()}
        members = [p for group in optimizer.param_groups for p in group["params"]]
        assert known == {*map(id, members)}
        assert {*map(id, optimizer.state)} <= known
        self.seen.append(len(members))


class Late(LastMomentLane):
    """Leaves what is in a target until it copies: the target may be in use."""

    def copy(self, target, source, what):
        self._row.append(partial(target.copy_, source))


class Saving(fits.Record):
    """Saves after the last step, in the middle of an epoch."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, trainer, *given):
        super().on_train_batch_end(trainer, *given)
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.path)


class Killed(Impatient):
    """Saves after three steps, and kills a rank in the fifth."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *given):
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)

    def on_before_optimizer_step(self, trainer, *given):
        if trainer.global_step == 4 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class OfReplica(Sampler):
    """Gives each replica its part, in order: of all together a step has the same samples."""

    def __len__(self):
        return 40 // data_parallel_size()

    def __iter__(self):
        return iter(range(data_parallel_rank(), 40, data_parallel_size()))


def loader_of_replica(batch_size):
    return DataLoader(fits.samples(), batch_size, sampler=OfReplica(), collate_fn=fits.collate)


def fit(
    size,
    path,
    on_host,
    net,
    strategy=(),
    start=None,
    steps=6,
    is_early=False,
    loader=fits.loader,
    **options,
):
    L.seed_everything(7, verbose=False)
    module, record = net(), Saving(path)
    callbacks = [record, *options.pop("callbacks", ())]
    given = {"num_microbatches": 4, "schedule": "zb_h1", **dict(strategy)}
    given |= {"optimizer_offload": on_host}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_step, "make_lanes", lambda device: CopyLanes(Late(), Late()))
        patch.setattr(host_step, "STAGING_BYTES", SMALL)
        patch.setattr(master_step, "BUCKET_BYTES", SMALL)
        trainer = L.Trainer(
            **{**fits.SILENT, "num_sanity_val_steps": 0},
            devices=size,
            strategy=PipeOffloadStrategy(**given),
            callbacks=callbacks,
            enable_checkpointing=False,
            max_steps=steps,
            **options,
        )
        trainer.fit(module, loader(), ckpt_path=start)
        hosts = [narrowed.stand_ins for narrowed in trainer.strategy.split.parameters._narrowed]
        early = sum(getattr(host, "num_early", 0) for host in hosts)
        assert early or not (on_host and is_early)
    return record.losses, len(module.seen)


def states(path):
    saved = torch.load(path, weights_only=False)
    return {key: saved[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


REPLICAS = {"data_parallel_size": 2}
SHARDED = {**REPLICAS, "sharding": "optimizer"}
EARLY = {"is_early": True, "accumulate_grad_batches": 2}
CLIPS = {"gradient_clip_val": 6.0}
LATE = {"optimizer_sync": "post_validation"}
MASTERS = {"master_weights": "float32"}
BF16 = {"precision": "bf16-true", "gradient_clip_val": 6.0}
TWICE = {**BF16, "accumulate_grad_batches": 2}
AOT = {"backend": "aot_eager"}


@pytest.mark.parametrize(
    ("size", "net", "strategy", "options"),
    [
        (1, partial(Net, "adafactor"), {}, {**CLIPS, "accumulate_grad_batches": 2}),
        (2, partial(Net, "sgd", tie=True, watches=False), {"schedule": "zb_v", **LATE}, CLIPS),
        (2, partial(Net, watches=False), {**SHARDED, **LATE}, CLIPS),
        slow((4, partial(Net, watches=False), {"schedule": "zb_v", **SHARDED, **LATE}, CLIPS)),
        (2, partial(Net, Counted), {"per_parameter_optimizer": True}, {}),
        (1, partial(Net, CallsItself, watches=False), {}, {}),
        (2, partial(Net, "adafactor", tie=True, watches=False), {"schedule": "zb_v"}, EARLY),
        (2, partial(Net, "sgd", tie=True), {"schedule": "zb_v", **MASTERS}, TWICE),
        slow((1, partial(Net, Counted), {"per_parameter_optimizer": True, **MASTERS}, BF16)),
        slow((1, partial(Net, CallsItself), MASTERS, BF16)),
        slow((2, partial(Net, "fused"), {**SHARDED, **MASTERS, "compile": AOT}, BF16)),
        slow((2, partial(Net, "adafactor", tie=True), {**MASTERS, **LATE}, BF16)),
    ],
)
def test_weights_state_and_losses_are_those_of_the_device(
    ranks, tmp_path, size, net, strategy, options
):
    seen = []
    for on_host in (False, True):
        run = partial(fit, net=net, strategy=strategy, **options)
        seen.append(ranks(size).run(run, size, str(tmp_path / str(on_host)), on_host))
    assert_same(seen[1], seen[0])
    assert_same(states(tmp_path / "True"), states(tmp_path / "False"))


def masters_in(path):
    """Return what was kept by hand, by the names of the parameters."""
    saved = torch.load(path, weights_only=False)
    module = Net(ByHand)
    (optimizer,), _ = module.configure_optimizers()
    names = {p: name for name, p in module.named_parameters()}
    members = [p for group in optimizer.param_groups for p in group["params"]]
    states = saved["optimizer_states"][0]["state"]
    return {names[p]: states[place]["master"] for place, p in enumerate(members)}


@pytest.mark.parametrize(
    ("size", "on_host", "strategy", "grad_dtype"),
    [
        (2, True, {"schedule": "zb_h2", **LATE}, torch.float32),
        (2, False, {"schedule": "zb_v", **LATE}, None),
        slow((4, True, {"schedule": "zb_v", **SHARDED}, torch.float32)),
        slow((4, False, {"schedule": "zb_v", **SHARDED, **LATE}, torch.float32)),
        slow((1, True, {}, None)),
        (1, False, {}, torch.float32),
    ],
)
def test_masters_are_those_that_a_user_keeps_by_hand(
    ranks, tmp_path, size, on_host, strategy, grad_dtype
):
    net = partial(Net, watches=False, grad_dtype=grad_dtype)
    by_hand, kept = str(tmp_path / "by hand"), str(tmp_path / "kept")
    plain = {**strategy, "per_parameter_optimizer": True, "optimizer_sync": "barrier"}
    run = partial(fit, net=partial(net, ByHand), strategy=plain, **BF16)
    expected = ranks(size).run(run, size, by_hand, False)
    run = partial(fit, net=net, strategy=strategy | MASTERS, **BF16)
    assert_same(ranks(size).run(run, size, kept, on_host), expected)
    assert_same(torch.load(kept, weights_only=False)["state_dict"], masters_in(by_hand))


@pytest.mark.parametrize(
    ("sizes", "on_host", "strategy", "options"),
    [
        ((2, 1, 2), (True, False, True), {}, {}),
        slow(((2, 2, 4), (True, True, True), {"schedule": "zb_v", **MASTERS}, BF16)),
        slow(((2, 2, 1), (False, True, False), {"save_distributed_checkpoint": True}, {})),
        slow(((4, 2, 2), (True,) * 3, {**MASTERS, "save_distributed_checkpoint": True}, BF16)),
        slow(((2, 2, 4), (False, True, False), {"schedule": "zb_v", **MASTERS}, BF16)),
        slow(((4, 2, 2), (False,) * 3, {**MASTERS, "save_distributed_checkpoint": True}, BF16)),
    ],
)
def test_a_fit_goes_on_with_and_without_it(ranks, tmp_path, sizes, on_host, strategy, options):
    run = partial(fit, net=partial(Net, dropout=0.0), strategy=strategy, **options)
    path = str(tmp_path / "whole")
    size = sizes[0]
    (losses, _), *_ = ranks(size).run(partial(run, steps=9), size, path, on_host[0])
    start, found = None, []
    for size, steps, is_on_host in zip(sizes, (3, 6, 9), on_host, strict=True):
        part = str(tmp_path / str(steps))
        resumed = partial(run, steps=steps, start=start)
        (seen, _), *_ = ranks(size).run(resumed, size, part, is_on_host)
        start, found = part, found + seen
    assert_same(found, losses)
    if "save_distributed_checkpoint" not in strategy:
        assert_same(states(start), states(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy", "batch", "optimizer", "tolerance"),
    [(2, SHARDED, 8, "adamw", 0.0), (4, {"num_microbatches": 8}, 16, "sgd", 1e-3)],
)
def test_a_killed_fit_with_divided_masters_goes_on_with_other_ranks_and_replicas(
    ranks, tmp_path, size, strategy, batch, optimizer, tolerance
):
    """Without replicas other microbatches are rounded to bfloat16, which Adam might make large."""
    whole, saved, rest = (str(tmp_path / name) for name in ("whole", "saved", "rest"))
    net = partial(Net, optimizer, dropout=0.0, watches=False)
    run = partial(fit, on_host=False, net=net, use_distributed_sampler=False, **BF16)
    first = partial(run, strategy={**SHARDED, **MASTERS}, loader=partial(loader_of_replica, 8))
    ranks(4).run(first, 4, whole)
    with pytest.raises(AssertionError, match="its process has ended"):
        ranks(4).run(partial(first, callbacks=[Killed(saved)]), 4, str(tmp_path / "never"))
    goes_on = {"strategy": {**strategy, **MASTERS}, "loader": partial(loader_of_replica, batch)}
    ranks(size).run(partial(run, start=saved, **goes_on), size, rest)
    found, expected = states(rest), states(whole)
    torch.testing.assert_close(
        found["state_dict"], expected["state_dict"], rtol=tolerance, atol=tolerance
    )
    if not tolerance:
        assert_same(found, expected)


def with_eval(optimizer):
    optimizer.eval = None
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, capturable=True), "AdamW counts its steps on the device"),
        (lambda p: bitsandbytes.optim.PagedAdamW8bit(p), "PagedAdamW8bit steps by kernels of the"),
        (torch.optim.LBFGS, "LBFGS keeps more of its parameters than state"),
        (lambda p: with_eval(torch.optim.SGD(p)), "SGD makes weights for evaluation of the"),
    ],
)
def test_what_cannot_step_on_the_host_is_refused(make, reason):
    with pytest.raises(ValueError, match=f"on the host, and {reason}.* use torch.optim.AdamW"):
        refuse_stand_ins(make([nn.Parameter(torch.ones(2))]), on_host=True)


def test_masters_on_the_device_are_stepped_where_capturable_steps():
    weight = [nn.Parameter(torch.ones(2))]
    refuse_stand_ins(torch.optim.AdamW(weight, capturable=True), on_host=False)
    with pytest.raises(ValueError, match='master_weights="float32" steps .*, and LBFGS keeps more'):
        refuse_stand_ins(torch.optim.LBFGS(weight), on_host=False)


class Replacing(torch.optim.SGD):
    """Replaces values, as some optimizers do, instead of writing them in place."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - p.grad


def test_parameters_with_and_without_masters_get_the_values_that_replace_theirs():
    weights = [nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.bfloat16, torch.float32)]
    optimizer = Replacing(weights)
    step = master_step.MasterStep(optimizer, by_bucket=False, masters=MasterWeights(on_host=False))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    step.step_all_but_last_bucket()
    optimizer.step()
    step.write_back_parameters()
    assert [weight.tolist() for weight in weights] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("on_host", [True, False])
def test_masters_of_float32_are_refused(on_host):
    strategy = PipeOffloadStrategy(num_microbatches=4, optimizer_offload=on_host, **MASTERS)
    trainer = L.Trainer(**fits.SILENT, strategy=strategy, precision="bf16-mixed", max_steps=1)
    with pytest.raises(ValueError, match="those of AdamW are in torch.float32; leave it out"):
        trainer.fit(Net(), fits.loader())


def trained(limit, grad_dtype=None, **options):
    L.seed_everything(7, verbose=False)
    given = {"num_microbatches": 4, "schedule": "zb_h1", "optimizer_offload": True, **options}
    strategy = PipeOffloadStrategy(**given, host_memory_limit=limit)
    module = Net(dropout=0.0, grad_dtype=grad_dtype)
    precision = "bf16-true" if "master_weights" in options else "32-true"
    options = {"max_steps": 2, "enable_checkpointing": False, "precision": precision}
    trainer = L.Trainer(**fits.SILENT, strategy=strategy, **options)
    trainer.fit(module, fits.loader())
    return module, strategy


@pytest.mark.parametrize("options", [{}, MASTERS])
def test_the_host_s_memory_is_counted_before_training(options):
    module, strategy = trained("200KiB", **options)
    memory = strategy.report()["memory"]
    parameters = [*module.parameters()]
    weights = sum(p.nbytes for p in parameters)
    kept = [v for s in strategy.optimizers[0].state.values() for v in s.values() if v.dim()]
    kept += [*strategy._masters._masters.values()] if options else []
    on_host = sum(tensor.nbytes for tensor in kept) + 2 * weights
    assert (memory["optimizer"], memory["host_optimizer"]) == ([0], [on_host])
    assert memory["device"][0] == 2 * weights + memory["activations"][0] + memory["messages"][0]
    with pytest.raises(HostMemoryError, match=r"\(state.*, .* is 40.00 KiB; allow"):
        trained("40KiB", **options)


def test_staging_buffers_have_room_for_gradients_in_float32():
    weights = sum(p.nbytes for p in Net(dtype=torch.bfloat16).parameters())
    limit = "54KiB"
    assert 8 * weights < 54 * 1024 < 9 * weights  # of which state and masters take six
    trained(limit, **MASTERS)
    with pytest.raises(HostMemoryError, match="staging buffers .* host_memory_limit is 54.00 KiB"):
        trained(limit, torch.float32, **MASTERS)


def test_masters_on_the_device_are_counted_with_the_state():
    module, strategy = trained(None, optimizer_offload=False, **MASTERS)
    memory, parameters = strategy.report()["memory"], [*module.parameters()]
    kept = [v for s in strategy.optimizers[0].state.values() for v in s.values() if v.dim()]
    kept += strategy._masters._masters.values()
    assert sum(tensor.nbytes for tensor in kept) == 6 * sum(p.nbytes for p in parameters)
    assert memory["optimizer"] == [sum(tensor.nbytes for tensor in kept)]
    assert memory["host_optimizer"] == [0]


def masters_of_share(size):
    strategy = {**SHARDED, **MASTERS, "num_microbatches": 4, "schedule": "zb_h1"}
    trainer = fits.trainer(size, strategy, max_steps=2, precision="bf16-true")
    module = Net(watches=False)
    trainer.fit(module, fits.loader())
    stepped = {*trainer.optimizers[0].state}
    assert {*trainer.strategy._masters._masters} == stepped
    return len(stepped), sum(type(p) is nn.Parameter for p in module.parameters())


def test_each_replica_has_the_masters_of_what_it_steps(ranks):
    (first, total), (second, _) = ranks(2).run(masters_of_share, 2)
    assert first + second == total
    assert abs(first - second) < total / 2


def shortest_tail(clip):
    """Train with a step that takes as long as many W's; return how many W's run during it."""
    L.seed_everything(7, verbose=False)
    compute = sgd.sgd

    def slow_step(parameters, *args, **options):
        compute(parameters, *args, **options)
        time.sleep(2e-3 * len(parameters))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sgd, "sgd", slow_step)
        patch.setattr(host_step, "STAGING_BYTES", SMALL)
        given = {"num_microbatches": 8, "schedule": "zb_h1", "optimizer_offload": True}
        trainer = fits.trainer(2, given, max_steps=6, gradient_clip_val=clip)
        trainer.fit(Net("sgd", watches=False), fits.loader(batch_size=16))
    strategy = trainer.strategy
    found = [len(tail.weights) for rank in strategy.plan for tail in tails(rank)]
    return min(found, default=0), strategy.report()["schedule"]


def test_the_plan_postpones_weights_during_which_a_long_step_runs(ranks):
    """By itself each rank of zb_h1 ends with at least one W. STEP after clipping has no tail."""
    for tail, schedule in ranks(2).run(shortest_tail, None):
        assert tail > 1
        assert schedule == "zb_h1"
    assert ranks(2).run(shortest_tail, 6.0) == [(0, "zb_h1")] * 2
