"""With sharding="optimizer" a gradient is on the replica that steps its parameter, and only there.

What sums, clips, measures and gathers gradients finds what it does where each replica has them all.
"""

from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipelineMonitor
from lightning_pipeoffload.runtime.shapes import RemoteGradient
from tests.support import fits, replica_fits
from tests.support.pairs import slow

SHARDED = {"data_parallel_size": 2, "sharding": "optimizer"}
WHOLE = {"data_parallel_size": 2}


class Wide(nn.Module):
    """A block whose weight is larger than the embedding."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.1, 0.1, 64 * 16).view(64, 16).sin())

    def forward(self, x):
        return x + (x @ self.weight.T).tanh().view(-1, 4, 16).sum(1)


class Net(replica_fits.Net):
    """Keeps what its hooks find of gradients.

    Args:
        zeroed: What zero_grad leaves: "none", "zeros" or everything ("all").
        nan_at: A batch whose loss is NaN.
    """

    def __init__(self, zeroed="none", nan_at=-1, wide=False, dtype=torch.float64, **options):
        super().__init__(**options)
        self.zeroed, self.nan_at, self.found = zeroed, nan_at, []
        if wide:
            self.blocks[0] = Wide().double()
        self.to(dtype)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == self.nan_at else loss

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.zeroed != "all":
            optimizer.zero_grad(set_to_none=self.zeroed == "none")


class Hooked(Net):
    """Measures, gathers and clips gradients, in hooks."""

    def on_after_backward(self):
        self.num_remote = sum(isinstance(p.grad, RemoteGradient) for p in self.parameters())
        norms = grad_norm(self, 2)
        self.found.append([float(norms[name]) for name in sorted(norms)])
        gathered = self.trainer.strategy.gather(self.blocks[1].linear.weight.grad)
        self.found.append(gathered.tolist())

    def on_before_optimizer_step(self, optimizer):
        self.found.append(all(bool(p.grad.isfinite().all()) for p in self.parameters()))
        self.found.append(float(clip_grad_norm_(self.parameters(), 0.3)))


class Reading(L.Callback):
    """Reads a gradient where it is not known."""

    def on_train_batch_end(self, trainer, module, *args):
        for parameter in module.parameters():
            float(parameter.grad.mean())


def fit(num_devices, pipeline, path="", net=Net, callbacks=(), **options):
    L.seed_everything(7, workers=True, verbose=False)
    module = net()
    given = {"max_steps": 4, "max_epochs": -1, "limit_val_batches": 0, **options}
    trainer = fits.trainer(num_devices, pipeline, callbacks=[*callbacks], **given)
    trainer.fit(module, DataLoader(replica_fits.samples(), 8, collate_fn=fits.collate))
    if path:
        trainer.save_checkpoint(path)
    return module.found, getattr(module, "num_remote", 0)


def fit_both(num_devices, folder, options, **pipeline):
    """Fit with gradients divided and whole; both save."""
    kinds = {"shared": SHARDED, "whole": WHOLE}
    return [
        fit(num_devices, {**kinds[name], **pipeline}, f"{folder}/{name}.ckpt", **options)
        for name in kinds
    ]


def assert_same_bits(folder):
    found, expected = (
        torch.load(f"{folder}/{name}.ckpt", weights_only=False) for name in ("shared", "whole")
    )
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, equal_nan=True)


BY_VALUE = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
POST_VALIDATION = {"optimizer_sync": "post_validation"}
ROWS = [
    (2, partial(Net, dtype=torch.bfloat16), {"gradient_clip_val": 0.1}, {}),
    (2, partial(Net, nan_at=2, zeroed="zeros"), BY_VALUE, {}),
    slow((2, partial(Net, nan_at=2, dtype=torch.float32), {"gradient_clip_val": 0.1}, {})),
    slow((2, partial(Net, zeroed="zeros"), {"accumulate_grad_batches": 2}, {})),
    slow((2, partial(Net, frozen="embed"), {}, {"optimizer_offload": True})),
    slow((4, partial(Net, tie=True, dtype=torch.float32), BY_VALUE, {"schedule": "zb_v"})),
    slow((4, partial(Net, tie=True), {"gradient_clip_val": 0.1}, POST_VALIDATION)),
]


@pytest.mark.parametrize(("num_devices", "net", "options", "pipeline"), ROWS)
def test_weights_are_those_of_whole_gradients(ranks, tmp_path, num_devices, net, options, pipeline):
    given = {"net": net, **options}
    ranks(num_devices).run(partial(fit_both, **pipeline), num_devices, str(tmp_path), given)
    assert_same_bits(tmp_path)


@pytest.mark.parametrize(
    ("num_devices", "net"), [(2, Hooked), slow((4, partial(Hooked, tie=True)))]
)
def test_hooks_find_what_they_find_in_whole_gradients(ranks, tmp_path, num_devices, net):
    found = ranks(num_devices).run(fit_both, num_devices, str(tmp_path), {"net": net})
    for shared, whole in found:
        assert shared[0] == whole[0] == found[0][0][0]  # to the bit, on every rank
        assert shared[1] > whole[1]
    assert_same_bits(tmp_path)


def logged_norms(num_devices):
    """Return the norms that the monitor logs, with gradients divided and whole."""
    found = []
    for pipeline in (SHARDED, WHOLE):
        journal = fits.Journal()
        options = {"logger": journal, "log_every_n_steps": 1, "callbacks": [PipelineMonitor()]}
        fit(num_devices, pipeline, **options)
        figures = (figures for _, figures in journal.entries)
        found.append([each[NORM] for each in figures if NORM in each])
    return found


NORM = "pipeline/grad_norm"


def test_the_monitor_logs_the_norm_over_all_replicas(ranks):
    (shared, whole), _ = ranks(2).run(logged_norms, 2)
    assert len(whole) == 4
    assert shared == pytest.approx(whole, rel=1e-9)


def refusal(num_devices):
    trainer = fits.trainer(num_devices, SHARDED, callbacks=[Reading()], max_steps=1)
    fits.outlive_failures(trainer)
    with pytest.raises(RuntimeError) as refused:
        trainer.fit(Net(), DataLoader(replica_fits.samples(), 8, collate_fn=fits.collate))
    return str(refused.value)


def test_a_gradient_that_another_replica_has_is_refused_by_name(ranks):
    pool = ranks(2)
    found = pool.run(refusal, 2)
    pool.is_broken = True  # its ranks have stopped in the middle
    for replica, message in enumerate(found):
        assert "needs the value of something computed from the gradient of " in message
        assert f"(of replica {1 - replica}) (" in message
        assert "float(parameter.grad.mean())), which is not on this rank: its 2-norm" in message
        assert "trainer.strategy.gather(parameter.grad)" in message


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {"wide": True, "tie": True}),
        slow((4, {"wide": True, "tie": True})),
        slow((2, {"zeroed": "all", "tie": True})),
    ],
)
def test_weights_are_those_of_one_device(ranks, tmp_path, replicas, options):
    """The tied weight is not the largest on one of its ranks, and has one owner all the same."""
    path = str(tmp_path / "trained.ckpt")
    train = partial(replica_fits.train, sharding="optimizer", net=Net, module=options)
    found = ranks(2 * replicas).run(train, replicas, 2, path)
    L.seed_everything(7, workers=True, verbose=False)
    batches, net = replica_fits.joined(found), Net(**options)
    keeps = options.get("zeroed") == "all"
    expected = train_plain(net, batches) if keeps else replica_fits.train_plain(net, batches)
    state = torch.load(path, weights_only=False)["state_dict"]
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def train_plain(module, batches):
    """Train without zero_grad."""
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for batch in batches:
        tokens = torch.tensor(batch)
        module.loss({"x": tokens, "y": replica_fits.labels(tokens)}).backward()
        clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return {name: value.detach() for name, value in module.state_dict().items()}
