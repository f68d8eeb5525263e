"""What the rank processes of the tests of replicas run, and the same on one device."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits

NUM_SAMPLES = 64


def samples():
    """Samples whose labels follow from their tokens."""
    tokens = torch.randint(32, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, labels(tokens))


def labels(tokens):
    return (7 * tokens + 3) % 32


class Net(fits.Net):
    """Without dropout, whose noise is another on each replica."""

    def __init__(self, tie=False, frozen=""):
        super().__init__(tie, dropout=0.0)
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)


class Batches(Callback):
    """Keeps the tokens of each batch, and what is logged."""

    def __init__(self):
        self.tokens = []
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, _):
        self.tokens.append(batch["x"].tolist())
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


class SaveAfter(Callback):
    """Saves a checkpoint when so many steps are done."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Decides(Callback):
    """Multiplies the learning rate by what is logged; one rank stops after so many steps."""

    def __init__(self, rank, num_steps):
        self.rank, self.num_steps = rank, num_steps

    def on_train_batch_end(self, trainer, *_):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= float(trainer.callback_metrics["train_loss"])
        if trainer.global_rank == self.rank and trainer.global_step == self.num_steps:
            trainer.should_stop = True


def train(num_replicas, num_ranks, path, **options):
    """Train for some batches of eight samples on each replica; saves what was trained to a file."""
    L.seed_everything(7, workers=True, verbose=False)
    module = options.pop("net", Net)(**options.pop("module", {}))
    callbacks, ckpt_path = options.pop("callbacks", []), options.pop("ckpt_path", None)
    trainer_options = {"max_steps": 5, "gradient_clip_val": 0.5, **options.pop("trainer", {})}
    strategy = PipeOffloadStrategy(
        **{
            "num_microbatches": 4,
            "schedule": "zb_h1",
            "data_parallel_size": num_replicas,
            **options,
        }
    )
    batches = Batches()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_replicas * num_ranks,
        strategy=strategy,
        callbacks=[batches, *callbacks],
        max_epochs=-1,
        enable_checkpointing=False,
        **trainer_options,
    )
    loader = DataLoader(samples(), 8, shuffle=bool(callbacks or ckpt_path), collate_fn=fits.collate)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    group = strategy.group
    state = strategy.lightning_module_state_dict()
    return {
        "replica": group.replica,
        "tokens": batches.tokens,
        "losses": batches.losses,
        "weights": {n: t.tolist() for n, t in state.items() if type(t) is torch.Tensor},
        "rates": [each["lr"] for each in trainer.optimizers[0].param_groups],
    }


def joined(found):
    """Return the tokens of each batch, those of all replicas together."""
    by_replica = {each["replica"]: each["tokens"] for each in found}
    assert all(each["tokens"] == by_replica[each["replica"]] for each in found)
    return [sum(parts, []) for parts in zip(*by_replica.values(), strict=True)]


def train_plain(module, batches, accumulate=1, clip=0.5):
    """Train on one device, in plain torch; return the weights."""
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index, batch in enumerate(batches):
        tokens = torch.tensor(batch)
        (module.loss({"x": tokens, "y": labels(tokens)}) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return {name: value.detach() for name, value in module.state_dict().items()}
