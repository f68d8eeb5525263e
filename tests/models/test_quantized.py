"""A frozen 4-bit base with adapters over a pipeline, compared with one device.

The base is quantized before the fit, or each rank quantizes what it has in ``configure_model``.
"""

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
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader
from transformers.integrations import replace_with_bnb_linear

from lightning_pipeoffload import PipeOffloadStrategy, load_weights, save_pretrained
from lightning_pipeoffload.runtime.cut import StepTrace, find_chain
from lightning_pipeoffload.runtime.shapes import (
    ShapeOnly,
    ValueNeededError,
    remote_read_message,
    scales_of,
)
from tests.support.fits import SILENT, outlive_failures
from tests.support.pairs import slow

WORDS, WIDTH = 64, 64
QUANTIZED = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


def keep_trainable(module):
    """Keep bitsandbytes from repacking weights in evaluations on a CPU: they train no more then."""
    for layer in module.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.support_avx512bf16_for_cpu = False


class Language(L.LightningModule):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def loss(self, batch):
        x = self.words(batch)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def make_layers(self, block, count=4):
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WORDS)


class Adapted(nn.Module):
    """A 4-bit linear layer with a low-rank adapter written by hand."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = bnb.nn.Linear4bit(
            WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True
        )
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class ByHand(Language):
    def __init__(self):
        super().__init__()
        self.make_layers(Adapted)
        self.to("cpu")  # quantizes
        keep_trainable(self)


class Later(Language):
    """Makes its layers in ``configure_model``."""

    def __init__(self, path=""):
        super().__init__()
        self.path, self.blocks = path, None

    def configure_model(self):
        if self.blocks is None:
            self.make()


class LoadedByHand(Later):
    """Layers of one's own; the scales are not quantized."""

    def make(self):
        self.make_layers(Adapted)
        for block in self.blocks:
            block.base.weight.compress_statistics = False
        load_weights(self, self.path)
        keep_trainable(self)


def config(name):
    if name.startswith("gpt2"):
        sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 32}
        return transformers.GPT2Config(**sizes)
    return transformers.AutoConfig.for_model(
        name.split()[0],
        vocab_size=WORDS,
        max_position_embeddings=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
    )


def load_base(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=QUANTIZED, dtype=torch.float32, device_map="cpu"
    )


class WithPeft(Language):
    """transformers' 4-bit loading and peft's LoRA, as their documentation writes it."""

    def __init__(self, folder, targets):
        super().__init__()
        self.folder, self.targets, self.adapters_to, self.model = folder, targets, None, None
        self.adapt(load_base(folder))

    def adapt(self, base):
        base = peft.prepare_model_for_kbit_training(base)
        lora = peft.LoraConfig(r=4, target_modules=self.targets, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, lora)
        keep_trainable(self)

    def on_train_epoch_end(self):
        if self.adapters_to is None:
            return
        with pytest.raises(ValueNeededError) as error:
            self.model.save_pretrained(self.adapters_to)
        assert "lightning_pipeoffload.save_pretrained(module" in remote_read_message(error.value)
        save_pretrained(self, self.adapters_to)
        assert {path.name for path in self.adapters_to.iterdir()} >= ADAPTER_FILES

    def loss(self, batch):
        return self.model(input_ids=batch, labels=batch).loss


class Loaded(WithPeft):
    """transformers' layers, replaced before they have values; weights of a folder; peft's LoRA."""

    def __init__(self, folder, targets):
        Language.__init__(self)
        self.folder, self.targets, self.adapters_to, self.model = folder, targets, None, None

    def configure_model(self):
        if self.model is not None:
            return
        config = transformers.AutoConfig.from_pretrained(self.folder)
        config.quantization_config = None  # of a folder that was saved quantized
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        replace_with_bnb_linear(base, ["lm_head"], QUANTIZED)
        load_weights(base, self.folder)
        base.eval().is_loaded_in_4bit = True
        self.adapt(base)


def make(name, path, in_parts):
    if name == "by hand":
        return LoadedByHand(path) if in_parts else ByHand()
    targets = ["c_attn"] if name.startswith("gpt2") else ["q_proj", "v_proj"]
    return (Loaded if in_parts else WithPeft)(path, targets)


def write(name, folder):
    """Write the weights that a module loads, packed or in full."""
    torch.manual_seed(1)
    if name == "by hand":
        plain = nn.Module()
        Language.make_layers(plain, Adapted)
        torch.save(plain.state_dict(), folder)
        return str(folder)
    transformers.AutoModelForCausalLM.from_config(config(name)).save_pretrained(folder)
    if name.endswith("packed"):
        load_base(folder).save_pretrained(folder)
    return str(folder)


def make_batches():
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


def fit(
    name, path, num_devices, in_parts=False, seed=7, resume=None, save_to=None, adapters_to=None,
    **options,
):  # fmt: skip
    L.seed_everything(seed, verbose=False)
    module, trainer = make(name, path, in_parts), trainer_of(num_devices, **options)
    module.adapters_to = adapters_to
    trainer.fit(module, make_batches(), make_batches(), ckpt_path=resume)
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
            rounding = 3e-5 if "lora_" in name else 2e-6
            assert torch.dist(values[name][0], value) <= rounding * value.norm(), name


def assert_quantized_as_by_transformers(values, folder):
    packed = {n: p for n, p in load_base(folder).named_parameters() if hasattr(p, "quant_state")}
    assert packed
    for name, weight in packed.items():
        layer, _, attribute = name.rpartition(".")
        names = f"base_model.model.{name}", f"base_model.model.{layer}.base_layer.{attribute}"
        own = next(values[f"model.{n}"] for n in names if f"model.{n}" in values)
        assert all(map(torch.equal, own, [weight, *scales_of(weight)])), name


QUANTIZED_BEFORE, QUANTIZED_BY_RANKS = False, True
ROWS = [
    slow(("llama", 2, QUANTIZED_BEFORE, {"schedule": "1f1b"})),
    ("llama", 2, QUANTIZED_BY_RANKS, {"schedule": "zb_v"}),
    slow(("qwen2 packed", 2, QUANTIZED_BY_RANKS, {"schedule": "1f1b"})),
    slow(("gpt2", 2, QUANTIZED_BEFORE, {"schedule": "zb_h1", "offload": "half"})),
    slow(("by hand", 2, QUANTIZED_BEFORE, {"schedule": "auto", "recompute": "full"})),
    slow(("llama", 2, QUANTIZED_BEFORE, {"offload": "full", "recompute": "cheap"})),
    slow(("llama", 2, QUANTIZED_BEFORE, {"compile": {"backend": "aot_eager"}})),
    slow(("gpt2 packed", 2, QUANTIZED_BY_RANKS, {"schedule": "zb_v"})),
    slow(("qwen2", 4, QUANTIZED_BY_RANKS, {"schedule": "1f1b"})),
    slow(("llama", 1, QUANTIZED_BY_RANKS, {"schedule": "1f1b"})),
]


@pytest.mark.parametrize(("name", "num_devices", "in_parts", "options"), ROWS)
def test_adapters_of_a_4_bit_base_train_as_on_one_device(
    ranks, tmp_path, name, num_devices, in_parts, options
):
    path = write(name, tmp_path / "base")
    expected = fit(name, path, 0, in_parts)
    if in_parts and name != "by hand":
        assert_quantized_as_by_transformers(expected[1], path)
    over_ranks = partial(fit, name, path, num_devices, in_parts, **options)
    for found in ranks(num_devices).run(over_ranks):
        assert_alike(found, expected)


class Writes(WithPeft):
    """Validated by what it generates."""

    def validation_step(self, batch, batch_idx):
        self.texts += self.model.generate(
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        ).tolist()


def fit_and_write(path, num_devices):
    L.seed_everything(7, verbose=False)
    module, trainer = Writes(path, ["q_proj", "v_proj"]), trainer_of(num_devices)
    module.texts = []
    trainer.fit(module, make_batches(), make_batches())
    return module.texts


@pytest.mark.slow
def test_a_4_bit_base_with_adapters_generates_the_tokens_of_one_device(ranks, tmp_path):
    path = write("llama", tmp_path / "base")
    expected = fit_and_write(path, 0)
    for texts in ranks(2).run(partial(fit_and_write, path, 2)):
        assert texts == expected


@pytest.mark.parametrize(
    ("in_parts", "fewer"), [(QUANTIZED_BEFORE, 2), slow((QUANTIZED_BY_RANKS, 1))]
)
def test_a_checkpoint_resumes_on_another_base_and_schedule(ranks, tmp_path, in_parts, fewer):
    """The scales of the checkpoint are loaded, not those that the module was made with."""
    path, checkpoint = write("by hand", tmp_path / "base"), str(tmp_path / "last.ckpt")
    expected = fit("by hand", path, 0, in_parts, epochs=2)
    ranks(2).run(partial(fit, "by hand", path, 2, in_parts, save_to=checkpoint))
    names = {*torch.load(checkpoint, weights_only=True)["state_dict"]}
    assert in_parts or names == {*ByHand().state_dict()}
    options = {"epochs": 2, "seed": 11, "resume": checkpoint, "schedule": "zb_v"}
    for found in ranks(fewer).run(partial(fit, "by hand", path, fewer, in_parts, **options)):
        assert_alike(found, expected)


def test_adapters_are_saved_alone_in_a_hook_and_from_a_checkpoint(ranks, tmp_path):
    folder, path = write("llama", tmp_path / "base"), tmp_path / "4bit.ckpt"
    in_hook, from_checkpoint = tmp_path / "in_hook", tmp_path / "from_checkpoint"
    options = {"adapters_to": in_hook, "save_to": str(path)}
    metrics, _ = ranks(2).run(partial(fit, "llama", folder, 2, **options))[0]
    read = peft.PeftModel.from_pretrained(load_base(folder), in_hook)
    keep_trainable(read)
    with torch.no_grad():
        losses = [read(input_ids=batch, labels=batch).loss.item() for batch in make_batches()]
    assert sum(losses) / len(losses) == pytest.approx(metrics["val_loss"], rel=2e-6)

    with pytest.raises(ValueError, match="has adapters of peft: give the peft model in place of"):
        save_pretrained(path, from_checkpoint, config("llama"))
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config("llama"))
        shapes = peft.get_peft_model(shapes, peft.PeftConfig.from_pretrained(in_hook))
    save_pretrained(path, from_checkpoint, shapes)
    weights = [path / "adapter_model.safetensors" for path in (in_hook, from_checkpoint)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_operations_of_packed_weights_are_counted():
    module, tokens = ByHand(), 2 * 12
    chain = find_chain(module)
    chain.intercept()
    trace = StepTrace(module, chain, torch.device("cpu"))
    found = trace.trace(lambda: module.loss(torch.zeros(2, 12, dtype=torch.long))).work
    base, adapters = 2 * tokens * WIDTH * WIDTH, 2 * tokens * 2 * 4 * WIDTH
    assert found.forward_flops[1] == found.input_flops[1] == base + adapters
    assert found.weight_flops[1] == adapters


# Layers that Lightning's precision plugin replaces


class Pair(nn.Module):
    """A frozen layer that the plugin replaces, with an adapter that is no layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(WIDTH, WIDTH) / 64)

    def forward(self, x):
        return x + torch.tanh(self.layer(x) + functional.linear(x, self.adapter))


class Plain(Language):
    def __init__(self):
        super().__init__()
        self.make_layers(Pair)


class PlainInParts(Later):
    """The plugin replaces layers while they are made; here they are quantized at once."""

    def make(self):
        self.make_layers(Pair)


class OnAnyDevice(Precision):
    """Lightning's 4-bit plugin, which a Trainer takes on CUDA only."""

    def convert_module(self, module):
        return BitsandbytesPrecision("nf4", torch.float32, {"head"}).convert_module(module)


def fit_converted(num_devices, kind=Plain, **options):
    L.seed_everything(7, verbose=False)
    module, trainer = kind(), trainer_of(num_devices, **{"plugins": OnAnyDevice(), **options})
    trainer.fit(module, make_batches())
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


# Refusals


class NeverLoaded(Later):
    def make(self):
        with self.trainer.init_module(empty_init=True):
            self.make_layers(Adapted)
        for name, parameter in self.named_parameters():
            if "base.weight" not in name:
                nn.init.zeros_(parameter)
        self.blocks.to("cpu")


class Packed(Later):
    def make(self):
        self.make_layers(Adapted)
        for block in self.blocks:
            memory = torch.empty(WIDTH * WIDTH // 2, 1, dtype=torch.uint8)
            block.base.weight = bnb.nn.Params4bit(memory, bnb_quantized=True)


class EightBitsLater(Later):
    def make(self):
        self.make_layers(partial(bnb.nn.Linear8bitLt, WIDTH, WIDTH))


class EightBits(ByHand):
    def __init__(self):
        super().__init__()
        self.blocks[1].base = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)


class OfTwoTensors(ByHand):
    def __init__(self):
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        pair = TwoTensor(layer.weight.detach(), torch.ones(WIDTH, WIDTH))
        layer.weight = nn.Parameter(pair, requires_grad=False)
        self.blocks[1].base = layer


def refusal_of(kind):
    trainer = trainer_of(2)
    outlive_failures(trainer)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        trainer.fit(kind(), make_batches())
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NeverLoaded, "nothing has filled blocks."),
        (EightBitsLater, "of Linear8bitLt (3) is an 8-bit weight of bitsandbytes"),
        (Packed, "is a packed 4-bit weight of bitsandbytes (torch.uint8) without a quant_state"),
        (EightBits, "blocks.1.base.weight is an 8-bit weight of bitsandbytes"),
        (OfTwoTensors, "blocks.1.base.weight is a TwoTensor, "),
    ],
)
def test_other_quantized_weights_are_refused_before_training(ranks, kind, message):
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
