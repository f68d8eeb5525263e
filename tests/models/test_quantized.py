"""A frozen 4-bit base with adapters over a pipeline, beside one device."""

from functools import partial

import bitsandbytes as bnb
import lightning as L
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipeOffloadStrategy, save_pretrained
from lightning_pipeoffload.runtime.cut.block_chain import find_chain
from lightning_pipeoffload.runtime.cut.trace import StepTrace
from lightning_pipeoffload.runtime.shapes.remote_tensor import explain_remote
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from tests.support.fits import SILENT
from tests.support.pairs import first

WORDS, WIDTH = 64, 64


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
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.to("cpu")  # quantizes
        keep_trainable(self)

    def loss(self, batch):
        x = self.words(batch)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


SIZES = {"vocab_size": WORDS, "max_position_embeddings": 32}
LAYERS = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
}


def config(name):
    if name == "gpt2":
        sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 32}
        return transformers.GPT2Config(**sizes)
    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    return kinds[name](**SIZES, **LAYERS)


ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


def load_base(folder):
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )


class WithPeft(Language):
    """transformers' 4-bit loading and peft's LoRA, as their documentation writes it."""

    def __init__(self, folder, targets):
        super().__init__()
        base = peft.prepare_model_for_kbit_training(load_base(folder))
        lora = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, lora)
        keep_trainable(self)
        self.adapters_to = None

    def on_train_epoch_end(self):
        if self.adapters_to is None:
            return
        with pytest.raises(ValueNeededError) as error:
            self.model.save_pretrained(self.adapters_to)
        assert "lightning_pipeoffload.save_pretrained(module" in explain_remote(error.value)
        save_pretrained(self, self.adapters_to)
        assert {path.name for path in self.adapters_to.iterdir()} >= ADAPTER_FILES

    def loss(self, batch):
        return self.model(input_ids=batch, labels=batch).loss


def saved_base(name, folder):
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config(name)).save_pretrained(folder)
    return str(folder)


def make(name, folder):
    if name == "by hand":
        return ByHand()
    return WithPeft(folder, ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"])


def make_batches():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randint(WORDS, (16, 12), generator=generator), batch_size=8)


def fit(
    name,
    folder,
    num_devices,
    epochs=1,
    seed=7,
    ckpt_path=None,
    save_to=None,
    adapters_to=None,
    **options,
):
    L.seed_everything(seed, verbose=False)
    module = make(name, folder)
    module.adapters_to = adapters_to
    frozen = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    options = {"num_microbatches": 4, "schedule": "zb_h1", **options}
    trainer = L.Trainer(
        **SILENT,
        devices=num_devices or 1,
        strategy=PipeOffloadStrategy(**options) if num_devices else "auto",
        max_epochs=epochs,
        enable_checkpointing=False,
    )
    batches = make_batches()
    trainer.fit(module, batches, batches, ckpt_path=ckpt_path)
    if save_to:
        trainer.save_checkpoint(save_to)
    if not ckpt_path:
        gather = trainer.strategy.gather if num_devices else torch.Tensor.detach
        now = {n: gather(p) for n, p in module.named_parameters() if n in frozen}
        assert all(torch.equal(value, now[n]) for n, value in frozen.items())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


ROWS = [
    ("by hand", 2, {"schedule": "zb_v"}),
    ("llama", 2, {"schedule": "1f1b"}),
    ("gpt2", 2, {"schedule": "zb_h1", "offload": "half"}),
    ("qwen2", 2, {"schedule": "zb_v"}),
    ("llama", 4, {"schedule": "zb_h1"}),
    ("by hand", 2, {"schedule": "auto", "recompute": "full"}),
    ("llama", 2, {"offload": "full", "recompute": "cheap"}),
    ("llama", 2, {"compile": {"backend": "aot_eager"}}),
]


@pytest.mark.parametrize(("name", "num_devices", "options"), first(2, ROWS))
def test_adapters_of_a_4_bit_base_train_as_on_one_device(
    ranks, tmp_path, name, num_devices, options
):
    folder = "" if name == "by hand" else saved_base(name, tmp_path / name)
    expected = fit(name, folder, 0)
    over_ranks = partial(fit, name, folder, num_devices, **options)
    for found in ranks(num_devices).run(over_ranks):
        assert found == pytest.approx(expected, rel=2e-6)


def test_a_checkpoint_resumes_on_another_base_with_another_schedule(ranks, tmp_path):
    """The scales of the checkpoint are loaded, not those that the module was made with."""
    path = str(tmp_path / "4bit.ckpt")
    expected = fit("by hand", "", 0, epochs=2)
    ranks(2).run(partial(fit, "by hand", "", 2, save_to=path))
    assert {*torch.load(path, weights_only=True)["state_dict"]} == {*ByHand().state_dict()}
    options = {"epochs": 2, "seed": 11, "ckpt_path": path, "schedule": "zb_v"}
    for found in ranks(2).run(partial(fit, "by hand", "", 2, **options)):
        assert found == pytest.approx(expected, rel=2e-6)


def test_adapters_are_saved_alone_in_a_hook_and_from_a_checkpoint(ranks, tmp_path):
    folder, path = saved_base("llama", tmp_path / "base"), tmp_path / "4bit.ckpt"
    in_hook, from_checkpoint = tmp_path / "in_hook", tmp_path / "from_checkpoint"
    options = {"adapters_to": in_hook, "save_to": str(path)}
    found = ranks(2).run(partial(fit, "llama", folder, 2, **options))[0]
    read = peft.PeftModel.from_pretrained(load_base(folder), in_hook)
    keep_trainable(read)
    with torch.no_grad():
        losses = [read(input_ids=batch, labels=batch).loss.item() for batch in make_batches()]
    assert sum(losses) / len(losses) == pytest.approx(found["val_loss"], rel=2e-6)

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
    found = trace.trace(lambda: module.loss(torch.zeros(2, 12, dtype=torch.long)))
    base, adapters = 2 * tokens * WIDTH * WIDTH, 2 * tokens * 2 * 4 * WIDTH
    assert found.forward_flops[1] == found.input_flops[1] == base + adapters
    assert found.weight_flops[1] == adapters


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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (EightBits, "blocks.1.base.weight is an 8-bit weight .* use 4 bits"),
        (OfTwoTensors, "blocks.1.base.weight is a TwoTensor, .* use bitsandbytes' 4 bits"),
    ],
)
def test_other_quantized_weights_are_refused_by_name(kind, message):
    strategy = PipeOffloadStrategy(num_microbatches=2)
    trainer = L.Trainer(**SILENT, strategy=strategy, max_epochs=1, enable_checkpointing=False)
    with pytest.raises(ValueError, match=message):
        trainer.fit(kind(), DataLoader(torch.zeros(4, 12, dtype=torch.long), batch_size=4))
