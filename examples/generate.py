"""Train a model and validate it by the text that it generates, each layer on the rank that owns it.

    pip install transformers peft
    python examples/generate.py
    python examples/generate.py --model llama --devices 4 --schedule zb_v

A T5 learns to write a number's digits in reverse order, or adapters (``peft``'s LoRA) make a frozen
Llama do so. A validation step generates greedily, with a key-value cache, and counts the texts that
are right. No weights are sent for it: each rank runs its own layers, token by token.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from lightning_pipeoffload import PipeOffloadStrategy

PAD, EQUALS, NUM_TOKENS = 0, 11, 12  # digits are the tokens 1 to 10


class Reverser(L.LightningModule):
    """Writes digits in reverse order.

    Args:
        name: "t5" or "llama".
        width: The width of the model.
        layers: The number of its layers; of a T5, of each of its two stacks.
        lora: The rank of the Llama's adapters; 0: all weights are trained.
    """

    def __init__(self, name: str, width: int, layers: int, lora: int) -> None:
        super().__init__()
        self.is_t5 = name == "t5"
        self.model = make_t5(width, layers) if self.is_t5 else make_llama(width, layers, lora)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the answer, in nats per digit."""
        digits, answer = batch
        if self.is_t5:
            loss = self.model(input_ids=digits, labels=answer).loss
        else:
            question = with_equals(digits)
            labels = torch.cat([torch.full_like(question, -100), answer], 1)
            loss = self.model(input_ids=torch.cat([question, answer], 1), labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Generate the answers, and log which share of their digits is right."""
        digits, answer = batch
        prompt = digits if self.is_t5 else with_equals(digits)
        length = answer.shape[1]
        written = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
        )
        right = (written[:, -length:] == answer).double().mean()
        self.log("right", right, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW of what is trained."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


def with_equals(digits: Tensor) -> Tensor:
    """Return digits with the token for "=" after them."""
    return torch.cat([digits, torch.full_like(digits[:, :1], EQUALS)], 1)


def make_t5(width: int, layers: int) -> Any:
    """Return a T5 with random weights."""
    config = T5Config(
        vocab_size=NUM_TOKENS,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=4,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=None,
    )
    return T5ForConditionalGeneration(config)


def make_llama(width: int, layers: int, lora: int) -> Any:
    """Return a Llama with random weights, frozen but for adapters if ``lora`` is not 0."""
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only where it is used

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=lora, target_modules=names))


def make_loader(num_samples: int, batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """Return digits ``[samples, 6]`` and the same in reverse order."""
    digits = torch.randint(1, 11, (num_samples, 6))
    return DataLoader(TensorDataset(digits, digits.flip(1)), batch_size, shuffle=shuffle)


def main(arguments: Namespace) -> None:
    """Train, and validate after each epoch."""
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(schedule=arguments.schedule),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
    )
    lora = arguments.lora if arguments.model == "llama" else 0
    model = Reverser(arguments.model, arguments.width, arguments.layers, lora)
    samples, batch_size = arguments.samples, arguments.batch_size
    training, validation = (
        make_loader(samples, batch_size, shuffle=True),
        make_loader(2 * batch_size, batch_size, shuffle=False),
    )
    trainer.fit(model, training, validation)
    if trainer.is_global_zero:
        print(f"right digits: {float(trainer.callback_metrics['right']):.0%}")


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="t5", choices=("t5", "llama"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--lora", type=int, default=8, help="rank of a Llama's adapters; 0: none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
