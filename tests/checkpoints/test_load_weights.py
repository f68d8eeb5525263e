"""Weights of files of every kind get into a module, or are refused in one line."""

import json

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import save
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_pipeoffload import load_weights, save_pretrained
from lightning_pipeoffload.runtime import StoredTensor
from tests.support import fits
from tests.support.pairs import slow


class Loaded(L.LightningModule):
    """Makes its layers where its weights are loaded."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.model = None

    def configure_model(self):
        if self.model is None:
            config = AutoConfig.from_pretrained(self.folder)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            load_weights(self.model, self.folder)

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data():
    return torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(0))


def fit(size, folder, options, kind=Loaded, num_steps=2):
    """Fit; return the losses, sizes of what was read, and the stages."""
    losses = []
    read = []
    value = StoredTensor.value

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            losses.append(float(trainer.callback_metrics["loss"]))

    def value_counted(stored):
        read.append(stored.numel())
        return value(stored)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTensor, "value", value_counted)
        trainer = fits.trainer(size, options, max_steps=num_steps, callbacks=[Losses()])
        L.seed_everything(7, workers=True, verbose=False)
        trainer.fit(kind(folder), DataLoader(data(), 8))
    stages = trainer.strategy.report()["stages"] if size else []
    return {"losses": losses, "read": sum(read), "stages": stages}


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "merged": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)),
    "cut": lambda: HrmTextForCausalLM(HrmTextConfig(**{**LLAMA, "num_key_value_heads": 4})),
    "renamed": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, **SPECIAL)
    ),
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def drawn(seed=1):
    """Return a state dict with values that no module has at first."""
    torch.manual_seed(seed)
    state = make().state_dict()
    return {k: torch.randn_like(v) if v.is_floating_point() else v + 3 for k, v in state.items()}


def assert_has(module, state):
    torch.testing.assert_close(dict(module.state_dict()), dict(state), rtol=0, atol=0)


def write_index(folder, state, count=2):
    """Write a folder of shards."""
    places = {key: f"part-{i % count}.safetensors" for i, key in enumerate(state)}
    for name in {*places.values()}:
        save_file({k: v for k, v in state.items() if places[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("kind", ["ckpt", "pt", "safetensors", "shards", "model", "folder"])
def test_every_kind_of_file_is_read(tmp_path, kind):
    state = drawn()
    path = tmp_path / f"file.{kind}"
    if kind == "ckpt":
        torch.save({"state_dict": state, "epoch": 3, "loops": {}}, path)
    elif kind == "pt":
        torch.save(state, path)
    elif kind == "safetensors":
        save_file(state, path)
    elif kind == "shards":
        write_index(tmp_path, state)
        path = tmp_path
    elif kind == "model":
        save_file(state, tmp_path / "model.safetensors")
        path = tmp_path
    else:
        save({"model": state}, checkpoint_id=path)
        torch.save({"epoch": 3}, path / "meta.pt")
    module = make()
    load_weights(module, path)
    assert_has(module, state)


def test_names_are_mapped_and_values_cast(tmp_path):
    state = drawn()
    path = tmp_path / "file.pt"
    torch.save({"other": torch.ones(1)} | {f"net.{k}": v for k, v in state.items()}, path)
    module = make().double()
    load_weights(module, path, prefix="net.")
    assert_has(module, {k: v.to(module.state_dict()[k].dtype) for k, v in state.items()})
    torch.save({f"layer{k}": v for k, v in state.items()}, path)
    for mapping in ({"^layer": ""}, lambda key: key.removeprefix("layer")):
        module = make()
        load_weights(module, path, key_mapping=mapping)
        assert_has(module, state)


def refuse(path, text, module=None, **options):
    with pytest.raises((ValueError, FileNotFoundError), match=text) as caught:
        load_weights(module or make(), path, **options)
    assert "\n" not in str(caught.value)


def test_wrong_weights_are_refused_in_one_line(tmp_path):
    path = tmp_path / "file.pt"
    state = drawn()
    refuse(tmp_path / "none.pt", "there is no file or folder .*none.pt")
    refuse(tmp_path, "has no meta.pt, which a checkpoint has")
    path.write_text("no weights")
    refuse(path, "is no file of torch.save")
    torch.save({"numbers": [1, 2]}, path)
    refuse(path, "has no 'state_dict', and no tensors")
    torch.save({f"model.{k}": v for k, v in state.items()}, path)
    refuse(
        path,
        r"no key of .*, such as model\.0\.weight, is a name in .*, such as 0\.weight; .*prefix=",
    )
    torch.save({**state, "0.weight": torch.ones(5, 3)}, path)
    refuse(path, r"0\.weight has shape \(5, 3\) in .* and shape \(4, 3\) in Sequential")
    torch.save({k: v for k, v in state.items() if k != "2.bias"}, path)
    refuse(path, r"lacks 2\.bias of Sequential")
    load_weights(make(), path, strict=False)
    torch.save({**state, "3.weight": torch.ones(1)}, path)
    refuse(path, r"has 3\.weight, which Sequential does not have")
    load_weights(make(), path, strict=False)
    write_index(tmp_path, state)
    (tmp_path / "part-1.safetensors").unlink()
    refuse(
        tmp_path, r"part-1\.safetensors is listed in the index, but missing in .*; download it too"
    )
    (tmp_path / "part-1.safetensors").write_bytes(b"half a file")
    refuse(tmp_path, r"part-1\.safetensors cannot be read")
    save_file({"x": torch.ones(1)}, tmp_path / "part-1.safetensors")
    refuse(tmp_path, r"lists .* in part-1\.safetensors, which has no such key")


def test_a_tied_weight_has_one_value(tmp_path):
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    path = tmp_path / "file.pt"
    torch.save({"b.weight": torch.ones(2, 2)}, path)
    load_weights(module, path)
    assert module["a"].weight.eq(1).all()
    torch.save({"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(2, 2)}, path)
    refuse(path, r"a\.weight and b\.weight are one tied tensor in ModuleDict, but differ", module)


@pytest.mark.parametrize("kind", MODELS)
def test_a_models_folder_goes_there_and_back(tmp_path, kind):
    torch.manual_seed(0)
    model = MODELS[kind]().to(torch.bfloat16)
    state = model.state_dict()
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    again = MODELS[kind]().to(torch.bfloat16)
    load_weights(again, tmp_path / "hub")
    assert_has(again, state)
    load_weights(again.get_decoder(), tmp_path / "hub", strict=False)

    torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}}, tmp_path / "last.ckpt")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "tokenizer.json").write_text("stays")
    for size in ("1GB", "20KB"):
        save_pretrained(
            tmp_path / "last.ckpt", tmp_path / "back", model.config, max_shard_size=size
        )
    hub, back = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())["weight_map"]
        for name in ("hub", "back")
    )
    assert hub.keys() == back.keys()
    assert not (tmp_path / "back" / "model.safetensors").exists()
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "stays"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert read.dtype == torch.bfloat16
    assert_has(read, state)


def test_a_plain_modules_weights_are_written_too(tmp_path):
    state = drawn()
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    save_pretrained(tmp_path / "last.ckpt", tmp_path / "folder", max_shard_size="50B")
    module = make()
    load_weights(module, tmp_path / "folder")
    assert_has(module, state)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    torch.save({"state_dict": drawn()}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt lacks .* of LlamaForCausalLM; give"):
        save_pretrained(tmp_path / "last.ckpt", tmp_path / "folder", LlamaConfig(**LLAMA))


def test_a_model_in_place_of_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(TypeError, match="got a Linear; give it the path of a checkpoint"):
        save_pretrained(nn.Linear(1, 1), tmp_path / "folder")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of several shards, tied, in bfloat16; the loss; the number of its elements."""
    folder = str(tmp_path_factory.mktemp("hub"))
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": 6}, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    batch = data()[:8]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = plain(input_ids=batch, labels=batch).loss
    return folder, float(loss), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "options"), [(1, {}), (2, {"schedule": "zb_v"}), slow((4, {"schedule": "zb_h1"}))]
)
def test_each_rank_loads_its_own_part(ranks, hub, size, options):
    folder, loss, num_elements = hub
    found = ranks(size).run(fit, size, folder, options)
    assert found[0]["losses"][0] == pytest.approx(loss, rel=1e-5)
    read = [rank["read"] for rank in found]
    assert sum(read) <= num_elements + 2 * 64 * 32  # the embedding is on two ranks
    assert max(read) < 0.8 * num_elements or size == 1
