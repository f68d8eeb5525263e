"""A 4-bit base whose layers are made in ``configure_model``: each rank quantizes what it reads."""

from functools import partial

import bitsandbytes as bnb
import lightning as L
import peft
import pytest
import torch
import transformers
from lightning.pytorch.plugins import BitsandbytesPrecision, Precision
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers.integrations import replace_with_bnb_linear

from lightning_pipeoffload import PipeOffloadStrategy, load_weights
from lightning_pipeoffload.runtime.shapes.quantized_weight import scales_of
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from tests.models.test_quantized import (
    WIDTH,
    WORDS,
    Adapted,
    ByHand,
    Language,
    WithPeft,
    config,
    keep_trainable,
    saved_base,
)
from tests.support.fits import SILENT, outlive_failures
from tests.support.pairs import first

QUANTIZED = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)


class Loaded(Language):
    """transformers' layers, replaced before they have values; weights of a folder; peft's LoRA."""

    def __init__(self, folder, targets):
        super().__init__()
        self.folder, self.targets, self.model = folder, targets, None

    def configure_model(self):
        if self.model is not None:
            return
        config = transformers.AutoConfig.from_pretrained(self.folder)
        config.quantization_config = None  # of a folder that was saved quantized
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        replace_with_bnb_linear(base, ["lm_head"], QUANTIZED)
        load_weights(base, self.folder)
        base.eval().is_loaded_in_4bit = True
        base = peft.prepare_model_for_kbit_training(base)
        lora = peft.LoraConfig(r=4, target_modules=self.targets, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, lora)
        keep_trainable(self)

    loss = WithPeft.loss


class LoadedByHand(ByHand):
    """Layers of one's own; the scales are not quantized."""

    def __init__(self, path):
        L.LightningModule.__init__(self)
        self.path, self.blocks = path, None

    def configure_model(self):
        if self.blocks is None:
            self.words = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Adapted() for _ in range(4))
            for block in self.blocks:
                block.base.weight.compress_statistics = False
            self.head = nn.Linear(WIDTH, WORDS)
            load_weights(self, self.path)
            keep_trainable(self)


def make(name, path):
    if name == "by hand":
        return LoadedByHand(path)
    return Loaded(path, ["c_attn"] if name.startswith("gpt2") else ["q_proj", "v_proj"])


def write(name, folder):
    """Write the weights that a module loads, packed or in full."""
    torch.manual_seed(1)
    if name == "by hand":
        plain = nn.Module()
        plain.words, plain.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        plain.blocks = nn.ModuleList(Adapted() for _ in range(4))
        torch.save(plain.state_dict(), folder)
        return str(folder)
    saved = saved_base(name.removesuffix(" packed"), folder)
    if name.endswith("packed"):
        read = transformers.AutoModelForCausalLM.from_pretrained
        read(saved, quantization_config=QUANTIZED, device_map="cpu").save_pretrained(saved)
    return saved


def batches():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randint(WORDS, (16, 12), generator=generator), batch_size=8)


def trainer_of(num_devices, epochs=1, plugins=None, accelerator="cpu", **options):
    options = {"num_microbatches": 4, "schedule": "zb_h1", **options}
    return L.Trainer(
        **{**SILENT, "accelerator": accelerator},
        devices=num_devices or 1,
        strategy=PipeOffloadStrategy(**options) if num_devices else "auto",
        max_epochs=epochs,
        enable_checkpointing=False,
        plugins=plugins,
    )


def results(trainer, module, num_devices):
    """Return metrics, and each parameter with the scales of its quantization."""
    found = {}
    for name, parameter in module.named_parameters():
        value = trainer.strategy.gather(parameter) if num_devices else parameter
        found[name] = [each.detach().clone() for each in (value, *scales_of(value))]
        if isinstance(parameter, ShapeOnly):
            assert all(isinstance(scale, ShapeOnly) for scale in scales_of(parameter))
    for layer in module.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            assert layer.quant_state is layer.weight.quant_state
            assert isinstance(layer.weight, bnb.nn.Params4bit)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, found


def fit(name, path, num_devices, resume=None, save_to=None, **options):
    L.seed_everything(7, verbose=False)
    module, trainer = make(name, path), trainer_of(num_devices, **options)
    trainer.fit(module, batches(), batches(), ckpt_path=resume)
    if save_to:
        trainer.save_checkpoint(save_to)
    return results(trainer, module, num_devices)


def assert_alike(found, expected):
    (metrics, values), (expected_metrics, expected_values) = found, expected
    assert metrics == pytest.approx(expected_metrics, rel=2e-6)
    assert values.keys() == expected_values.keys()
    for name, (value, *scales) in expected_values.items():
        if scales:
            assert all(map(torch.equal, values[name], [value, *scales])), name
        else:
            # One device differs so from itself where it accumulates the batch in parts: a lora_A's
            # gradients begin at 0, and Adam enlarges what rounds in small ones.
            rounding = 1e-5 if "lora_" in name else 2e-6
            assert torch.dist(values[name][0], value) <= rounding * value.norm(), name


def assert_quantized_as_by_transformers(values, folder):
    read = transformers.AutoModelForCausalLM.from_pretrained
    base = read(folder, quantization_config=QUANTIZED, dtype=torch.float32, device_map="cpu")
    packed = {n: p for n, p in base.named_parameters() if hasattr(p, "quant_state")}
    assert packed
    for name, weight in packed.items():
        layer, _, attribute = name.rpartition(".")
        names = f"base_model.model.{name}", f"base_model.model.{layer}.base_layer.{attribute}"
        own = next(values[f"model.{n}"] for n in names if f"model.{n}" in values)
        assert all(map(torch.equal, own, [weight, *scales_of(weight)])), name


ROWS = [
    ("llama", 2, "zb_v"),
    ("by hand", 2, "zb_h1"),
    ("qwen2 packed", 2, "1f1b"),
    ("gpt2", 2, "zb_h1"),
    ("qwen2", 4, "1f1b"),
    ("gpt2 packed", 2, "zb_v"),
    ("llama", 1, "1f1b"),
    ("llama", 4, "zb_h1"),
]


@pytest.mark.parametrize(("name", "num_devices", "schedule"), first(3, ROWS))
def test_what_ranks_quantize_trains_as_on_one_device(ranks, tmp_path, name, num_devices, schedule):
    path = write(name, tmp_path / "base")
    expected = fit(name, path, 0)
    if name != "by hand":
        assert_quantized_as_by_transformers(expected[1], path)
    for found in ranks(num_devices).run(partial(fit, name, path, num_devices, schedule=schedule)):
        assert_alike(found, expected)


def test_it_resumes_on_fewer_ranks(ranks, tmp_path):
    path, checkpoint = write("by hand", tmp_path / "base"), str(tmp_path / "last.ckpt")
    expected = fit("by hand", path, 0, epochs=2)
    ranks(2).run(partial(fit, "by hand", path, 2, save_to=checkpoint))
    found = fit("by hand", path, 1, resume=checkpoint, epochs=2, schedule="1f1b")
    assert_alike(found, expected)


class Plain(Language):
    """Frozen layers that a precision plugin replaces, with adapters that are no layers."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.adapters = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 64 for _ in range(4))
        self.blocks = nn.ModuleList(map(Pair, self.layers, self.adapters))
        del self.layers, self.adapters

    loss = ByHand.loss


class Pair(nn.Module):
    def __init__(self, layer, adapter):
        super().__init__()
        self.layer, self.adapter = layer.requires_grad_(False), nn.Parameter(adapter)

    def forward(self, x):
        return x + torch.tanh(self.layer(x) + functional.linear(x, self.adapter))


class OnAnyDevice(Precision):
    """Lightning's 4-bit plugin, which a Trainer takes on CUDA only."""

    def convert_module(self, module):
        return BitsandbytesPrecision("nf4", torch.float32, {"head"}).convert_module(module)


class PlainInParts(Plain):
    """Layers that the plugin replaces while they are made; here they are quantized at once."""

    def __init__(self):
        L.LightningModule.__init__(self)
        self.blocks = None

    def configure_model(self):
        if self.blocks is None:
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            pairs = (
                Pair(nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH) / 64) for _ in range(4)
            )
            self.blocks = nn.ModuleList(pairs)


def fit_converted(num_devices, kind=Plain, **options):
    L.seed_everything(7, verbose=False)
    module, trainer = kind(), trainer_of(num_devices, **{"plugins": OnAnyDevice(), **options})
    trainer.fit(module, batches())
    assert isinstance(module.blocks[0].layer, bnb.nn.Linear4bit)
    return results(trainer, module, num_devices)


def test_layers_that_the_precision_plugin_replaces_are_quantized_where_they_move(ranks):
    expected = fit_converted(0)
    for found in ranks(2).run(fit_converted, 2):
        assert_alike(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", [Plain, PlainInParts])
def test_lightnings_plugin_quantizes_on_a_gpu(kind):
    def found(num_devices):
        plugin = BitsandbytesPrecision("nf4", torch.float32)
        return fit_converted(num_devices, kind, accelerator="gpu", plugins=plugin)

    (metrics, values), (expected, expected_values) = found(1), found(0)
    assert metrics == pytest.approx(expected, rel=1e-3)
    name = "blocks.0.layer.weight"
    assert all(map(torch.equal, values[name], expected_values[name]))


class NeverLoaded(LoadedByHand):
    def configure_model(self):
        with self.trainer.init_module(empty_init=True):
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.blocks = nn.ModuleList(Adapted() for _ in range(4))
        for module in (self.words, self.head, *self.blocks):
            for name, parameter in module.named_parameters():
                if "base.weight" not in name:
                    nn.init.zeros_(parameter)
        self.blocks.to("cpu")


class Packed(LoadedByHand):
    def configure_model(self):
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        blocks = [Adapted() for _ in range(4)]
        for block in blocks:
            memory = torch.empty(WIDTH * WIDTH // 2, 1, dtype=torch.uint8)
            block.base.weight = bnb.nn.Params4bit(memory, bnb_quantized=True)
        self.blocks = nn.ModuleList(blocks)


class EightBits(LoadedByHand):
    def configure_model(self):
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(bnb.nn.Linear8bitLt(WIDTH, WIDTH) for _ in range(4))


def refusal_of(kind):
    trainer = trainer_of(2)
    outlive_failures(trainer)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        trainer.fit(kind(""), batches())
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NeverLoaded, "nothing has filled blocks."),
        (EightBits, "of Linear8bitLt (5) is an 8-bit weight of bitsandbytes"),
        (Packed, "is a packed 4-bit weight of bitsandbytes (torch.uint8) without a quant_state"),
    ],
)
def test_a_base_without_values_is_refused_before_training(ranks, kind, message):
    for refused in ranks(2).run(refusal_of, kind):
        assert message in refused


def test_files_of_another_kind_are_refused(tmp_path):
    full, packed = write("llama", tmp_path / "full"), write("llama packed", tmp_path / "packed")
    plain = transformers.AutoModelForCausalLM.from_config(config("llama"))
    with pytest.raises(ValueError, match="proj.weight is a packed 4-bit weight .* replace its"):
        load_weights(plain, packed)
    replace_with_bnb_linear(plain, ["lm_head"], QUANTIZED)
    load_weights(plain, packed)
    load_weights(plain, full)  # quantizes anew
    other = config("llama")
    other.intermediate_size *= 2
    larger = transformers.AutoModelForCausalLM.from_config(other)
    replace_with_bnb_linear(larger, ["lm_head"], QUANTIZED)
    for path in (full, packed):
        with pytest.raises(ValueError, match=r"weight .*mlp.* is of shape \(\d+, \d+\) in the fil"):
            load_weights(larger, path)
