"""A model generates in steps and hooks: one device's tokens, and no rank gets another's blocks."""

import types
from functools import partial

import lightning as L
import pytest
import torch
import transformers as hf
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

from lightning_pipeoffload import tensor_parallel_plan
from tests.support import fits
from tests.support.pairs import first

_DECODER = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


def _llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, **_HEADS))


def _qwen2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_DECODER, **_HEADS))


def _mixtral():
    config = hf.MixtralConfig(**_DECODER, **_HEADS, num_local_experts=4)
    config._experts_implementation = "eager"  # the default knows no float64
    return hf.MixtralForCausalLM(config)


def _mamba():
    return hf.MambaForCausalLM(hf.MambaConfig(**_DECODER, state_size=8))


def _gpt2(dropout=0.0):
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops))


def _t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "dropout_rate": 0.0}
    config = hf.T5Config(vocab_size=97, num_layers=2, decoder_start_token_id=0, **sizes)
    return hf.T5ForConditionalGeneration(config)


def _bart():
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    config = hf.BartConfig(
        vocab_size=97, d_model=32, max_position_embeddings=64, dropout=0, **sizes
    )
    return hf.BartForConditionalGeneration(config)


def _whisper():
    sizes = {
        "d_model": 32,
        "num_mel_bins": 8,
        "max_source_positions": 6,
        "max_target_positions": 32,
    }
    sizes |= {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(vocab_size=97, dropout=0, **sizes, **tokens)
    config.update({"suppress_tokens": None, "begin_suppress_tokens": None})
    return hf.WhisperForConditionalGeneration(config)


class OwnCache:
    """Keys of each block, in lists that grow, and how many calls have filled them."""

    def __init__(self, depth):
        self.keys = [[] for _ in range(depth)]
        self.num_calls = 0


class OwnBlock(torch.nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.inner, self.outer = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x, cache):
        cache.keys[self.index].append(self.inner(x))
        cache.num_calls += 1
        seen = torch.cat(cache.keys[self.index], 1)
        return x + self.outer(torch.softmax(x @ seen.transpose(1, 2), -1) @ seen)


class OwnModel(torch.nn.Module):
    """Writes by itself; its next token depends on what the cache counts."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(97, 32)
        self.blocks = torch.nn.ModuleList(map(OwnBlock, range(4)))
        self.head = torch.nn.Linear(32, 97)
        self.generation_config = hf.GenerationConfig()

    def logits(self, ids, cache):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids, OwnCache(4))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(loss=loss)

    def generate(self, input_ids, attention_mask, max_new_tokens, do_sample):
        cache, new = OwnCache(4), input_ids
        for _ in range(max_new_tokens):
            new = (self.logits(new, cache)[:, -1:].argmax(-1) + cache.num_calls) % 97
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids


class CountingBlock(OwnBlock):
    """Counts in a buffer that it writes in place, and in one that it assigns and that grows."""

    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(32))
        self.register_buffer("lengths", torch.zeros(1))

    def forward(self, x, cache):
        if not self.training:
            self.seen += x.detach().mean((0, 1))
            self.lengths = torch.cat([self.lengths, self.lengths[-1:] + x.shape[1]])
        return super().forward(x, cache)


class CountingModel(OwnModel):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(CountingBlock, range(4)))
        self.register_buffer("num_calls", torch.zeros(20))

    def logits(self, ids, cache):
        if not self.training:
            self.num_calls += 1
        return super().logits(ids, cache)


_MAKE = {
    "counting": CountingModel,
    "own": OwnModel,
    "whisper": _whisper,
    "llama": _llama,
    "qwen2": _qwen2,
    "mixtral": _mixtral,
    "mamba": _mamba,
    "gpt2": _gpt2,
    "dropping gpt2": partial(_gpt2, 0.1),
    "t5": _t5,
    "bart": _bart,
}


class Writer(L.LightningModule):
    """Generates in a validation step, at an epoch's end and in predictions."""

    def __init__(self, kind, how, in_hooks=None):
        super().__init__()
        self.kind, self.how, self.in_hooks = kind, how, in_hooks or {}
        self.texts = []
        self.at_end = []
        self.make_model()

    def make_model(self):
        torch.manual_seed(3)
        self.model = _MAKE[self.kind]().double()
        self.model.generation_config.update(pad_token_id=0, eos_token_id=96)

    def sounds(self, ids):
        return torch.sin(ids.double()[:, None] * torch.arange(1, 9)[:, None]).repeat(1, 1, 2)

    def write(self, ids, **options):
        padded = torch.ones_like(ids)
        padded[ids[:, 0] % 2 == 0, :2] = 0  # by sample: a batch may be cut
        options = {"max_new_tokens": 4, "do_sample": False} | options
        if self.kind == "whisper":
            return self.model.generate(input_features=self.sounds(ids), **options).tolist()
        return self.model.generate(input_ids=ids, attention_mask=padded, **options).tolist()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx:
            self.at_end.append(self.write(torch.arange(1, 7).view(1, 6), **self.in_hooks))

    def training_step(self, batch, batch_idx):
        if self.kind == "whisper":
            return self.model(input_features=self.sounds(batch), labels=batch).loss
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch, batch_idx):
        self.texts.append(self.write(batch, **self.how))

    def predict_step(self, batch, batch_idx):
        return self.write(batch, **self.how)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.at_end.append(self.write(torch.arange(2, 8).view(1, 6), **self.in_hooks))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SharedWriter(Writer):
    """Its layers are divided over tensor ranks."""

    def make_model(self):
        self.model = None

    def configure_model(self):
        if self.model is None:
            super().make_model()
            if self.device_mesh is not None:
                mesh = self.device_mesh["tensor_parallel"]
                parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))


def _run(
    num_devices, kind, how, schedule, road, make=Writer, in_hooks=None, train_size=4, **options
):
    L.seed_everything(1, verbose=False)
    module, loader = make(kind, how, in_hooks), DataLoader(torch.randint(1, 96, (8, 6)), 4)
    options |= {"schedule": schedule, "num_microbatches": 2}
    trainer = fits.trainer(num_devices, options, max_epochs=1, num_sanity_val_steps=0)
    if road == "fit":
        trainer.fit(module, DataLoader(loader.dataset, train_size), loader)
    else:
        trainer.validate(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    # A batch whose step is cut for a trial leaves one text for each of its parts.
    texts = [row for text in module.texts for row in text]
    return texts, module.at_end, predicted


BEAMS = {"num_beams": 2}
STATIC = {"cache_implementation": "static"}
ROWS = [
    ("llama", BEAMS, 2, "zb_h1", "fit"),
    ("llama", STATIC, 2, "zb_v", "fit"),
    ("llama", {}, 3, "zb_h1", "validate"),
    *((kind, BEAMS, 2, "zb_h1", "fit") for kind in ("gpt2", "t5", "bart", "mixtral")),
    *((kind, {}, 3, "zb_h1", "fit") for kind in ("t5", "qwen2", "gpt2", "mamba")),
    ("own", {}, 2, "zb_v", "fit"),
    ("whisper", {}, 2, "zb_h1", "fit"),
    ("t5", BEAMS, 2, "zb_v", "validate"),
    ("bart", {}, 2, "zb_v", "validate"),
]
SAMPLED = {"do_sample": True, "top_k": 20}


@pytest.mark.parametrize(("kind", "how", "num_ranks", "schedule", "road"), first(1, ROWS))
def test_the_tokens_are_those_of_one_device(ranks, kind, how, num_ranks, schedule, road):
    (plain,) = ranks(1).run(_run, 0, kind, how, schedule, road)
    of_root, *others = ranks(num_ranks).run(_run, num_ranks, kind, how, schedule, road)
    assert of_root == plain
    for texts, at_end, _ in others:
        assert (texts, at_end) == plain[:2]


def _validated_buffers(num_devices):
    L.seed_everything(1, verbose=False)
    module, loader = Writer("counting", {}), DataLoader(torch.randint(1, 96, (8, 6)), 4)
    trainer = fits.trainer(num_devices)
    for _ in range(2):
        trainer.validate(module, loader, verbose=False)
    return {name: value.clone() for name, value in module.named_buffers()}


def test_what_blocks_write_before_training_is_on_all_ranks(ranks):
    (expected,) = ranks(1).run(_validated_buffers, 0)
    for found in ranks(2).run(_validated_buffers, 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_tensor_ranks_are_one_stage(ranks):
    shared = partial(_run, kind="llama", how=BEAMS, schedule="zb_h1", road="fit", make=SharedWriter)
    (plain,) = ranks(1).run(shared, 0)
    for texts, at_end, _ in ranks(4).run(partial(shared, tensor_parallel_size=2), 4):
        assert (texts, at_end) == plain[:2]


def test_replicas_generate_each_for_its_own_samples(ranks):
    # Samples are shuffled for training in replicas, so one batch has all.
    run = partial(_run, kind="llama", how={}, schedule="zb_h1", road="fit")
    (plain,) = ranks(1).run(partial(run, train_size=8), 0)
    of_ranks = ranks(4).run(partial(run, data_parallel_size=2), 4)
    for rank, (texts, at_end, _) in enumerate(of_ranks):
        assert (texts, at_end) == (plain[0][rank // 2 :: 2], plain[1])


@pytest.mark.slow
def test_tokens_that_a_hook_samples_are_those_of_one_device(ranks):
    run = partial(_run, kind="llama", how={}, schedule="zb_h1", road="fit", in_hooks=SAMPLED)
    (plain,) = ranks(1).run(run, 0)
    for _, at_end, _ in ranks(2).run(run, 2):
        assert at_end == plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "dropping gpt2"])
def test_sampled_tokens_do_not_depend_on_the_number_of_ranks(ranks, kind):
    """The second one draws in hooks too, where the model still drops out."""
    (one,) = ranks(1).run(_run, 1, kind, SAMPLED, "zb_h1", "fit")
    of_root, *_ = ranks(2).run(_run, 2, kind, SAMPLED, "zb_h1", "fit")
    assert of_root == one
