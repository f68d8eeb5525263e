"""Fits with on-demand communication, in rank processes and as a plain loop next to them."""

import os

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_pipeoffload import Minibatch, OnDemandStrategy
from tests.support.fits import SILENT, outlive_failures

WIDTH = 6
CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3))  # fewer entries than some have ranks

    def forward(self, x):
        return x + self.scale.mean() * torch.tanh(self.linear(x))


class Texts(L.LightningModule):
    """A mean over tokens, of texts of any length; two matrices are one."""

    def __init__(self, tie=True, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.gradients = []
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def loss(self, tokens):
        return nn.functional.cross_entropy(self(tokens[:-1]), tokens[1:])

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append({n: whole(p.grad) for n, p in self.named_parameters()})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def rank_of():
    return int(os.environ["LOCAL_RANK"])


def whole(tensor):
    """Return a copy on the host of what all ranks have of a tensor."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.to("cpu", copy=True)


def made(kind=Texts, **options):
    torch.manual_seed(5)
    return kind(**options)


def minibatches(counts, steps=4):
    """Make minibatches, each with so many microbatches for each rank, weighed by their tokens."""
    draws = torch.Generator().manual_seed(1)

    def text():
        length = int(torch.randint(3, 9, (), generator=draws))
        return torch.randint(16, (length,), generator=draws)

    made = []
    for _ in range(steps):
        texts = [[text() for _ in range(count)] for count in counts]
        total = sum(len(t) - 1 for rank in texts for t in rank)
        made.append(
            [Minibatch(rank, [(len(t) - 1) / total for t in rank], total) for rank in texts]
        )
    return made


class Loader:
    """Yields minibatches; Lightning takes a bare list for one of loaders."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def trainer(ranks, options, **more):
    """Make a trainer for processes of a pool, which a failure does not end."""
    made = ending_trainer(ranks, options, **more)
    outlive_failures(made)
    return made


def ending_trainer(ranks, options, **more):
    usual = {"max_epochs": 1, "gradient_clip_val": 0.3, "enable_checkpointing": False}
    more = {**SILENT, **usual, "devices": ranks, **more}
    if more["accelerator"] == "cpu":
        return L.Trainer(**more, strategy=OnDemandStrategy(**options))
    strategy = OnDemandStrategy(**{"process_group_backend": _backend(), **options})
    strategy.parallel_devices = devices(ranks)
    return L.Trainer(**{**more, "devices": "auto"}, strategy=strategy)


def devices(ranks):
    """Return a device of each rank: one of its own, or the only one for all."""
    kind = torch.accelerator.current_accelerator()
    count = torch.get_device_module().device_count()  # which starts no driver: others may fork
    return [torch.device("cpu" if kind is None else kind.type, n % count) for n in range(ranks)]


def _backend():
    """NCCL refuses two ranks on one device."""
    return "gloo" if torch.get_device_module().device_count() == 1 else None


def fit_rank(counts, options=None, make=None, call=dict, **more):
    """Fit on one rank, and return what is to be compared.

    Args:
        counts: the microbatches of each rank in each minibatch.
        options: the strategy's.
        make: makes the module.
        call: makes options of the trainer that cannot be sent to another process.
        more: options of the trainer.
    """
    module = made() if make is None else make()
    run = trainer(len(counts), options or {}, **{**more, **call()})
    rank = rank_of()
    run.fit(module, Loader([minibatch[rank] for minibatch in minibatches(counts)]))
    assert "on_run_start" not in vars(run.validate_loop)  # Lightning's own is back
    return outcome(module, run)


def outcome(module, run):
    return {
        "weights": {name: whole(p) for name, p in module.named_parameters()},
        "gradients": getattr(module, "gradients", None),
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
    }


def plain_fit(counts, make=None, clip=0.3, accumulate=1, autocast=None, device=CPU):
    """Train on the same minibatches in one process, the microbatches of all ranks in turn."""
    module = (made() if make is None else make()).to(device)
    optimizer = module.configure_optimizers()
    steps, logged = [], 0.0
    for number, minibatch in enumerate(minibatches(counts), start=1):
        module.on_train_batch_start(minibatch, number - 1)
        logged = 0.0
        for part in minibatch:
            for text, weight in zip(part, part.weights, strict=True):
                with torch.autocast(device.type, autocast, enabled=autocast is not None):
                    loss = module.loss(text.to(device))
                (loss * weight / accumulate).backward()
                logged += float(loss.detach()) * weight
        if number % accumulate == 0:
            steps.append({n: whole(p.grad) for n, p in module.named_parameters()})
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: whole(p) for name, p in module.named_parameters()}
    return {"weights": weights, "gradients": steps, "logged": {"train_loss": logged}}


def fsdp2_fit():
    """Train two microbatches of each of two ranks with FSDP2's own collectives."""
    rank = rank_of()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    module = made()
    for part in (*module.blocks, module):
        fully_shard(part)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    optimizer = module.configure_optimizers()
    steps = []
    for minibatch in minibatches((2, 2)):
        part = minibatch[rank]
        for number, (text, weight) in enumerate(zip(part, part.weights, strict=True)):
            module.set_requires_gradient_sync(number == 1)
            (module.loss(text) * weight).backward()
        steps.append({n: whole(p.grad) for n, p in module.named_parameters()})
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": {n: whole(p) for n, p in module.named_parameters()}, "gradients": steps}


def assert_same(found, expected, relative=1e-12):
    """Compare gradients before clipping, and weights after the last step."""
    assert len(found["gradients"]) == len(expected["gradients"])
    pairs = [*zip(found["gradients"], expected["gradients"], strict=True)]
    for one, other in [*pairs, (found["weights"], expected["weights"])]:
        assert one.keys() == other.keys()
        for name, value in other.items():
            if value is None:
                assert one[name] is None, name
            else:
                error = (one[name] - value).norm() / value.norm().clamp_min(1e-3)
                assert error <= relative, (name, float(error))
