"""Models of packages that `pip install lightning-pipeoffload[zoo]` brings, tiny and unchanged.

``python -m tests.models.zoo`` trains each and writes their table, in
docs/models_and_data_reference.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lightning_pipeoffload.planning.balance import work_shares
from lightning_pipeoffload.planning.report import predict_figures
from tests.support.comparison import train, train_plain
from tests.support.families import (
    CLASSES,
    FAMILIES,
    HF,
    SIZES,
    TEXT,
    VOCABULARY,
    Family,
    classify,
    images,
    llama,
    next_token,
    tokens,
)
from tests.support.small_modules import assert_same

PAGE = Path(__file__).parents[2] / "docs" / "models_and_data_reference.md"
BEGIN, END = "<!-- zoo -->\n", "<!-- end of zoo -->\n"


class Pixels(nn.Module):
    """A classifier of transformers, which takes images by name."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(pixel_values=x).logits


def pixels(kind: str, **options: Any) -> Callable[[], nn.Module]:
    make = HF(kind, num_labels=CLASSES, **options)
    return lambda: Pixels(make())


def from_timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)


def x_decoder(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=8, depth=6, heads=2, attn_dim_head=4, **options)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=8, attn_layers=layers)


def litgpt_gpt(**options: Any) -> nn.Module:
    from litgpt import GPT, Config

    sizes = {"n_layer": 6, "n_head": 2, "n_embd": 8, "block_size": 8}
    return GPT(Config(**sizes, padded_vocab_size=VOCABULARY, **options))


def lora_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return get_peft_model(llama()(), settings)


def patch_tst() -> nn.Module:
    from gluonts.torch.model.patch_tst.module import PatchTSTModel

    lengths = {"prediction_length": 4, "context_length": 16, "patch_len": 4, "stride": 2}
    sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "num_encoder_layers": 4}
    return PatchTSTModel(
        **lengths,
        **sizes,
        padding_patch="end",
        num_feat_dynamic_real=0,
        dropout=0.0,
        activation="gelu",
        norm_first=True,
        scaling="mean",
    )


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        attention_head_dim=4,
    )


def next_logits(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def denoise(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"], batch["y"]).sample - batch["x"]).pow(2).mean()


def forecast(model: nn.Module, batch: Any) -> torch.Tensor:
    past = batch["x"]
    return model.loss(past, torch.ones_like(past), batch["y"], torch.ones_like(batch["y"])).mean()


def series(count: int) -> Any:
    return {"x": torch.randn(count, 16), "y": torch.randn(count, 4)}


class LookAndTell(nn.Module):
    """LLaVA with a frozen tower of its own."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
        from transformers import LlavaForConditionalGeneration as Llava

        vision = {"image_size": 8, "patch_size": 4, "projection_dim": 8, "intermediate_size": 16}
        sizes = {**SIZES, "num_hidden_layers": 4}
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**vision, **sizes),
            text_config=LlamaConfig(**{**TEXT, **sizes}),
            image_token_index=VOCABULARY - 1,
        )
        self.model = Llava(config)
        self.model.model.vision_tower.requires_grad_(False)

    def forward(self, batch: Any) -> torch.Tensor:
        x = torch.cat([torch.full((len(batch["x"]), 4), VOCABULARY - 1), batch["x"] % 15], 1)
        logits = self.model(input_ids=x, pixel_values=batch["pixels"], use_cache=False).logits
        return functional.cross_entropy(logits[:, 4:-1].flatten(0, 1), x[:, 5:].flatten())


def images_and_tokens(count: int) -> Any:
    return {"pixels": torch.randn(count, 3, 8, 8), "x": tokens(count)}


def timesteps(count: int) -> Any:
    return {"x": torch.randn(count, 3, 16, 16), "y": torch.randint(100, (count,))}


SMALL = partial(images, size=32)
SWIN = {
    **{"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 6, 2]},
    **{"num_heads": [1, 2, 2, 2], "window_size": 2, "drop_path_rate": 0.0},
}
CONVNEXT = {"hidden_sizes": [8, 16, 32, 64], "depths": [3, 3, 9, 3], "patch_size": 2}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 2, 2]}
TIMM_SWIN = {
    **{"embed_dim": 8, "num_heads": (1, 2, 2, 2), "img_size": 32, "patch_size": 2},
    **{"window_size": 2, "drop_path_rate": 0.0},
}
OLMOE = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}

ZOO = {
    "transformers T5": FAMILIES["t5"],
    "transformers Mixtral, router loss and mask": FAMILIES["mixtral_router_loss_with_mask"],
    "transformers OLMoE, router loss and mask": Family(
        HF("OlmoeForCausalLM", **OLMOE),
        FAMILIES["mixtral_router_loss_with_mask"].loss,
        tokens,
        dtype=torch.float32,
    ),
    "transformers BERT": FAMILIES["bert"],
    "transformers ViT": FAMILIES["vit"],
    "transformers LLaVA, frozen tower": Family(
        LookAndTell, lambda model, batch: model(batch), images_and_tokens
    ),
    "transformers ResNet": Family(
        pixels("ResNetForImageClassification", **RESNET, layer_type="basic"), classify, SMALL
    ),
    "transformers Swin": Family(pixels("SwinForImageClassification", **SWIN), classify, SMALL),
    "transformers ConvNeXt": Family(
        pixels("ConvNextForImageClassification", **CONVNEXT), classify, SMALL
    ),
    "timm resnet18": Family(partial(from_timm, "resnet18"), classify, SMALL),
    "timm swin_tiny": Family(
        partial(from_timm, "swin_tiny_patch4_window7_224", **TIMM_SWIN),
        classify,
        SMALL,
    ),
    "timm convnext_atto": Family(
        partial(from_timm, "convnext_atto", dims=(8, 16, 32, 64), depths=(2, 2, 6, 2)),
        classify,
        SMALL,
    ),
    "timm efficientnet_b0": Family(
        partial(from_timm, "efficientnet_b0", drop_path_rate=0.0), classify, SMALL
    ),
    "x-transformers Decoder": Family(x_decoder, next_logits, tokens),
    "peft LoRA of transformers Llama": Family(
        lora_llama, partial(next_token, use_cache=False), tokens
    ),
    "litgpt Pythia": Family(litgpt_gpt, next_logits, tokens),
    "litgpt Llama": Family(
        partial(
            litgpt_gpt,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            parallel_residual=False,
            intermediate_size=16,
        ),
        next_logits,
        tokens,
    ),
    "gluonts PatchTST": Family(patch_tst, forecast, series),
    "diffusers UNet2DModel": Family(unet, denoise, timesteps),
}


def row_of(name: str) -> str:
    """Train a model over 2 and 4 stages, compared with the plain one; return its row."""
    family = ZOO[name]
    torch.manual_seed(0)
    module, batch = family.task(), family.samples(8)
    plain, cells = train_plain(module, batch), []
    for count in (2, 4):
        pipeline, found = train(module, "zb_h1", count, batch)
        assert_same(found, plain, family.tolerance)
        shares = work_shares(predict_figures(pipeline.plan, pipeline.ranks[0], None, False))
        cells.append(f"{count * max(shares):.2f}")
    names = pipeline.ranks[0].chain.names
    return f"| {name} | {len(names)}: `{names[0]}` to `{names[-1]}` | {' | '.join(cells)} |"


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| model | blocks | 2 ranks | 4 ranks |\n|---|---|---|---|\n"
    rows = "".join(f"{row_of(name)}\n" for name in ZOO)
    PAGE.write_text(f"{before}{BEGIN}{head}{rows}{END}{after}")


if __name__ == "__main__":
    main()
