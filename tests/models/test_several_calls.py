"""Steps that call blocks several times train, validate and resume through the Trainer.

One device, which calls the step for each microbatch, tells what is right.
"""

import copy
from functools import cache, partial
from tempfile import TemporaryDirectory

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.runtime.cut.test_repeated_calls import (
    Momentum,
    Twice,
    loss_network,
    preference,
    residual_and_skip,
    tied,
    two_heads,
    two_views,
)
from tests.support import fits
from tests.support.families import NO_DROPOUT, SIZES, VOCABULARY, llama
from tests.support.pairs import slow

NUM_BATCHES, NUM_MICROBATCHES, SIZE = 2, 4, 5  # of an epoch, of a batch, of a microbatch
# Two batches: Lightning shuffles what replicas share out, and each of two gets one in any order.


class Program(L.LightningModule):
    """A model, and a loss of the model and a batch."""

    def __init__(self, make, loss, batch):
        super().__init__()
        self.model, self.loss, self.batch = make(), loss, batch
        self.double()

    def training_step(self, batch, index):
        loss = self.loss(self.model, batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(self.model, batch))

    def configure_optimizers(self):
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, 0.05, momentum=0.9)


def numbers():
    return torch.randn(NUM_MICROBATCHES * SIZE, 4).double()


def tokens():
    return torch.randint(1, VOCABULARY, (NUM_MICROBATCHES * SIZE, 6))


def barlow_twins(m, x):
    a, b = (functional.normalize(m.encode(each), dim=0) for each in (x, x.flip(-1)))
    return (a.T @ b - torch.eye(4)).pow(2).sum()


def siamese(m, x):
    """Each block has a BatchNorm, which sees both views."""
    return (m.encode(x) - m.encode(x.roll(1, -1))).abs().mean() + m.head(m.encode(-x)).mean()


def with_batchnorm():
    make = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(6)]
    return Twice(None, make)


def log_likelihood(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return -functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


def dpo(policy, reference, ids):
    chosen, rejected = ids, ids.flip(1)
    with torch.no_grad():
        goal = reference(chosen) - reference(rejected)
    return -functional.logsigmoid(policy(chosen) - policy(rejected) - goal).mean()


class PolicyAndReference(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = llama()()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)


def dpo_of_two(m, ids):
    return dpo(partial(log_likelihood, m.policy), partial(log_likelihood, m.reference), ids)


def adapted():
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama()(), settings)


def dpo_of_adapters(model, ids):
    def reference(some):
        with model.disable_adapter():
            return log_likelihood(model, some)

    return dpo(partial(log_likelihood, model), reference, ids)


def albert():
    from transformers import AlbertConfig, AlbertModel

    sizes = {**SIZES, **NO_DROPOUT, "vocab_size": VOCABULARY, "intermediate_size": 16}
    return AlbertModel(AlbertConfig(**sizes, embedding_size=8, num_hidden_groups=4))


def contrast(model, ids):
    return model(input_ids=ids).last_hidden_state.pow(2).mean()


def momentum(m, x):
    return m.step(x)


PROGRAMS = {
    "simclr": (partial(Twice, None), two_views, numbers),
    "barlow_twins": (partial(Twice, None), barlow_twins, numbers),
    "siamese_with_batchnorm": (with_batchnorm, siamese, numbers),
    "perceptual": (partial(Twice, None), loss_network, numbers),
    "two_heads": (partial(Twice, None), two_heads, numbers),
    "tied": (partial(Twice, None), tied, numbers),
    "residual_and_skip": (partial(Twice, None), residual_and_skip, numbers),
    "own_reference": (partial(Twice, None), preference, numbers),
    "byol": (partial(Momentum, True, 2), momentum, numbers),
    "dpo": (PolicyAndReference, dpo_of_two, tokens),
    "dpo_of_adapters": (adapted, dpo_of_adapters, tokens),
    "albert": (albert, contrast, tokens),
}
PLANS = [
    (1, {"schedule": "1f1b"}),
    (2, {"schedule": "zb_h1", "recompute": "full"}),
    (2, {"schedule": "zb_v", "offload": "full"}),
    (3, {"schedule": "1f1b"}),
    (4, {"schedule": "gpipe"}),
    (4, {"schedule": "zb_h1", "data_parallel_size": 2}),
]


class Update(L.Callback):
    """Moves BYOL's target after each batch that ends a step."""

    def __init__(self, every):
        self.every = every

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if (index + 1) % self.every or not isinstance(module.model, Momentum):
            return
        with torch.no_grad():
            pairs = module.model.online.parameters(), module.model.target.parameters()
            for new, own in zip(*pairs, strict=True):
                own.mul_(0.9).add_(new, alpha=0.1)


def fit(count, name, options, folder, replicas=1):
    """Fit for an epoch, and, from a checkpoint, for another; return losses and all tensors."""
    settings = {"num_microbatches": NUM_MICROBATCHES, **options}
    limits = {"gradient_clip_val": 0.5, "precision": settings.pop("precision", None)}
    every = 1 if count else NUM_MICROBATCHES * replicas
    for epochs in (1, 2):
        L.seed_everything(7, verbose=False)
        module = Program(*PROGRAMS[name])
        if limits["precision"]:
            module.float()
        loaders = (DataLoader([*batches(module, count)], batch_size=None) for _ in range(2))
        limits |= {"max_epochs": epochs, "accumulate_grad_batches": every}
        trainer = fits.trainer(count, settings, callbacks=[Update(every)], **limits)
        path = f"{folder}/1.ckpt" if epochs > 1 else None
        trainer.fit(module, *loaders, ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    state = torch.load(f"{folder}/2.ckpt", weights_only=False)["state_dict"]
    losses = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses, state, {name for name, _ in module.named_parameters()}


def batches(module, count):
    """Yield batches, or, for one device, their microbatches."""
    for _ in range(NUM_BATCHES):
        batch = module.batch()
        yield from [batch] if count else batch.split(SIZE)


@cache
def fit_on_one_device(name, replicas, precision):
    with TemporaryDirectory() as folder:
        return fit(0, name, {"precision": precision}, folder, replicas)


ROWS = [(name, *plan) for name in PROGRAMS for plan in PLANS]
ROWS += [
    ("byol", 3, {"schedule": "zb_h1", "split": "even"}),
    ("simclr", 2, {"schedule": "zb_h1", "optimizer_sync": "post_validation"}),
    ("dpo", 2, {"schedule": "zb_v", "optimizer_sync": "post_validation"}),
    ("dpo_of_adapters", 2, {"schedule": "zb_h1", "precision": "bf16-mixed"}),
]


@pytest.mark.parametrize(("name", "count", "options"), map(slow, ROWS))
def test_a_program_trains_validates_and_resumes(ranks, tmp_path, name, count, options):
    replicas, precision = options.get("data_parallel_size", 1), options.get("precision")
    tolerance = 2**-8 if precision else 1e-12
    losses, weights, _ = fit_on_one_device(name, replicas, precision)
    for found, state, trained in ranks(count).run(fit, count, name, options, str(tmp_path)):
        assert state.keys() == weights.keys()
        if replicas == 1:  # else each has its own losses, and statistics of BatchNorm
            assert found == pytest.approx(losses, rel=tolerance)
            trained = state.keys()
        for key in trained & state.keys():
            torch.testing.assert_close(
                state[key], weights[key], rtol=tolerance, atol=tolerance, msg=key
            )
