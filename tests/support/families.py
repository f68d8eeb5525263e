"""Models that people bring, as they come: each a tiny configuration inside a five-line module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

DEPTH = 8  # blocks: two stages on each of four ranks
VOCABULARY = 16
CLASSES = 3
SIZES = {"hidden_size": 8, "num_hidden_layers": DEPTH, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "intermediate_size": 16, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Task(L.LightningModule):
    """A model and a loss, as a function of the model's output and the batch."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.model, batch)

    def validation_step(self, batch, batch_idx):
        return self.loss(self.model, batch)


def call_step(module, batch):
    return (module.training_step if module.training else module.validation_step)(batch, 0)


@dataclass(frozen=True)
class Family:
    """How to make a model, its loss and its batches.

    Attributes:
        make: the model.
        loss: of the model on a batch.
        batch: so many samples.
        blocks: where the chain has to be named.
        dtype: in which gradients are compared; float32 where a kernel knows no float64.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    blocks: str | tuple[str, ...] | None = None
    dtype: torch.dtype = torch.float64

    @property
    def tolerance(self):
        """Largest error of a gradient, relative to the largest one."""
        return 1e-12 if self.dtype is torch.float64 else 1e-5

    def task(self):
        """Make the module, in the dtype in which it is compared."""
        return Task(self.make(), self.loss).to(self.dtype)

    def samples(self, count):
        """Make a batch, its floating-point tensors in the same dtype."""
        return _to_dtype(self.batch(count), self.dtype)


def _to_dtype(batch, dtype):
    if isinstance(batch, dict):
        return {name: _to_dtype(value, dtype) for name, value in batch.items()}
    return batch.to(dtype) if batch.is_floating_point() else batch


def tokens(count):
    return torch.randint(1, VOCABULARY, (count, 6))


def padded(count):
    mask = (torch.arange(6) < torch.arange(count)[:, None] % 4 + 3).long()
    return {"input_ids": tokens(count), "attention_mask": mask}


def images(count, size=8):
    return {"x": torch.randn(count, 3, size, size), "y": torch.randint(CLASSES, (count,))}


def spectrograms(count):
    return {"x": torch.randn(count, 4, 12), "y": torch.randint(CLASSES, (count,))}


def token_pairs(count):
    return {"x": tokens(count), "y": tokens(count)}


def labelled_tokens(count):
    return {"x": tokens(count), "y": torch.randint(CLASSES, (count,))}


# Hugging Face's causal models compute their loss in float32, so ours is computed outside.


def next_token(model, batch, **options):
    logits = model(input_ids=batch, **options).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def next_token_padded(model, batch):
    logits = model(**batch).logits[:, :-1]
    labels = batch["input_ids"].where(batch["attention_mask"] == 1, -100)[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def masked_tokens(model, batch):
    masked = torch.rand(batch.shape) < 0.5
    labels = batch.masked_fill(~masked, -100)
    return model(input_ids=batch.masked_fill(masked, 1), labels=labels).loss


def next_target(model, batch):
    inputs, targets = batch["x"], batch["y"]
    logits = model(input_ids=inputs, decoder_input_ids=targets[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def with_hidden_states(model, batch):
    output = model(input_ids=batch, use_cache=False, output_hidden_states=True)
    return output.logits.pow(2).mean() + sum(state.pow(2).mean() for state in output.hidden_states)


def with_router_loss(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False, output_router_logits=True).loss


def with_masked_router_loss(model, batch):
    options = {"use_cache": False, "output_router_logits": True}
    mask = torch.ones_like(batch)
    return model(input_ids=batch, attention_mask=mask, labels=batch, **options).loss


def target_likelihood(model, batch):
    return functional.nll_loss(model(batch["x"], batch["y"]), batch["y"].flatten())


def own_loss(model, batch, name):
    return model(**{name: batch["x"]}, labels=batch["y"]).loss


def classify(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def from_transformers(kind, checkpointing=None, **options):
    import transformers

    attention = options.pop("attn_implementation", None)
    config = getattr(transformers, kind.partition("For")[0].replace("LMHeadModel", "") + "Config")
    if attention:
        options["attn_implementation"] = attention
    model = getattr(transformers, kind)(config(**options))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model


def llama(**options):
    heads = {"num_key_value_heads": 1}
    return partial(from_transformers, "LlamaForCausalLM", **{**TEXT, **heads, **options})


def gpt2(**options):
    sizes = {"n_embd": 8, "n_layer": DEPTH, "n_head": 2, "n_positions": 8}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return from_transformers(
        "GPT2LMHeadModel", vocab_size=VOCABULARY, **sizes, **dropouts, **options
    )


class SpeechClassifier(nn.Module):
    """Whisper's encoder, with a head of its own."""

    def __init__(self):
        super().__init__()
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        sizes = {"d_model": 8, "encoder_layers": DEPTH, "encoder_attention_heads": 2}
        more = {"encoder_ffn_dim": 16, "num_mel_bins": 4, "max_source_positions": 6}
        self.encoder = WhisperEncoder(WhisperConfig(**sizes, **more, dropout=0.0))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x).last_hidden_state.mean(1))


def lightning_demo():
    from lightning.pytorch.demos import Transformer

    return Transformer(VOCABULARY, ninp=8, nhead=2, nhid=16, nlayers=4, dropout=0.0)


class ScaledGPT(nn.Module):
    """Blocks with a vector of learned scales in between."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(encoder_layer() for _ in range(DEPTH))
        self.resid_lambdas = nn.Parameter(torch.rand(DEPTH))
        self.head = nn.Linear(8, CLASSES, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(self.resid_lambdas[index] * x)
        return self.head(x.mean(1))


class RecurrentFirst(nn.Module):
    """An LSTM reads the sequence before the blocks do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.blocks = nn.Sequential(*(encoder_layer() for _ in range(DEPTH)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        states, _ = self.lstm(self.embed(x))
        return self.head(self.blocks(states).mean(1))


# torchvision's families in a few lines each.


class DenseLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.convolution = nn.Conv2d(channels, 2, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.convolution(functional.relu(self.norm(x)))], 1)


class DenseConvolutions(nn.Module):
    """As DenseNet: each block adds channels to what it was given."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*(DenseLayer(3 + 2 * index) for index in range(DEPTH)))
        self.classifier = nn.Linear(3 + 2 * DEPTH, CLASSES)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


HF = partial(partial, from_transformers)
MAMBA = {"hidden_size": 8, "num_hidden_layers": DEPTH, "state_size": 4, "vocab_size": VOCABULARY}
CACHED = partial(next_token, use_cache=True)
PLAIN = partial(next_token, use_cache=False)
EXPERTS = {"num_local_experts": 2, "num_key_value_heads": 1}
VISION = {"image_size": 8, "patch_size": 4, "num_labels": CLASSES, **NO_DROPOUT}
PIXELS = partial(own_loss, name="pixel_values")

RELATIVE = {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}

T5 = {
    **{"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 4, "num_heads": 2},
    **{"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0},
}
FAMILIES = {
    "gpt2": Family(gpt2, PLAIN, tokens),
    "llama": Family(llama(), PLAIN, tokens),
    "llama_cache": Family(llama(), CACHED, tokens),
    "llama_padding_mask": Family(llama(), next_token_padded, padded),
    "llama_checkpointed": Family(llama(checkpointing={"use_reentrant": False}), PLAIN, tokens),
    "llama_checkpointed_reentrant": Family(
        llama(checkpointing={"use_reentrant": True}), PLAIN, tokens
    ),
    "qwen3": Family(
        HF("Qwen3ForCausalLM", **TEXT, num_key_value_heads=1, head_dim=4), PLAIN, tokens
    ),
    "mixtral": Family(
        HF("MixtralForCausalLM", **TEXT, **EXPERTS), PLAIN, tokens, dtype=torch.float32
    ),
    "mixtral_router_loss": Family(
        HF("MixtralForCausalLM", **TEXT, **EXPERTS, router_aux_loss_coef=0.1),
        with_router_loss,
        tokens,
        dtype=torch.float32,
    ),
    "mixtral_router_loss_with_mask": Family(
        HF("MixtralForCausalLM", **TEXT, **EXPERTS, router_aux_loss_coef=0.1),
        with_masked_router_loss,
        tokens,
        dtype=torch.float32,
    ),
    "llama_hidden_states": Family(llama(), with_hidden_states, tokens),
    "t5": Family(
        HF("T5ForConditionalGeneration", **T5),
        next_target,
        token_pairs,
        blocks=("model.encoder.block.*", "model.decoder.block.*"),
    ),
    "lightning_demo": Family(
        lightning_demo,
        target_likelihood,
        token_pairs,
        blocks=("model.transformer.encoder.layers.*", "model.transformer.decoder.layers.*"),
    ),
    "bert": Family(HF("BertForMaskedLM", **TEXT, **NO_DROPOUT), masked_tokens, tokens),
    "deberta": Family(
        HF("DebertaV2ForMaskedLM", **TEXT, **NO_DROPOUT, **RELATIVE), masked_tokens, tokens
    ),
    "deberta_v1": Family(  # adds in place to views of products
        HF("DebertaForMaskedLM", **TEXT, **NO_DROPOUT, **RELATIVE, max_relative_positions=8),
        masked_tokens,
        tokens,
    ),
    "vit": Family(
        HF("ViTForImageClassification", **SIZES, **VISION, intermediate_size=16), PIXELS, images
    ),
    "mamba": Family(HF("MambaForCausalLM", **MAMBA), next_token, tokens),
    "whisper_encoder": Family(SpeechClassifier, classify, spectrograms),
    "scaled_gpt": Family(ScaledGPT, classify, labelled_tokens),
    "lstm_first": Family(RecurrentFirst, classify, labelled_tokens),
    "dense_convolutions": Family(DenseConvolutions, classify, images),
}
