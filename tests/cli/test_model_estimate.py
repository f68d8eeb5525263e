"""``pipeoffload-plan model=...`` says from shapes what each rank needs."""

import json
import re
from functools import partial

import lightning as L
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.schedule import ScheduleError, build
from tests.support.composed import composed
from tests.support.in_process import InProcessPipeline

SMALL = [
    *("model=gpt_tiny", "model.width=64", "model.heads=2", "model.dropout=0", "data.context=32"),
    *("data.batch_size=8", "num_ranks=2", "num_microbatches=4", "format=json"),
]


def estimate(capsys, *overrides):
    plan(composed("plan", *SMALL, *overrides))
    return json.loads(capsys.readouterr().out)


def test_a_schedule_from_a_file_has_advice_and_no_planned_offload(tmp_path):
    path = tmp_path / "given.csv"
    build("zb_h1", 2, 4).to_csv(path)
    given = f"strategy.schedule={path}", "device_memory=1400KiB"
    advised = r"rank 1 of 2 needs .*; use (strategy\.schedule=.*): it fits$"
    with pytest.raises(ScheduleError, match=advised) as refused:
        plan(composed("plan", *SMALL, *given))
    words = re.fullmatch(advised, str(refused.value)).group(1).split()
    plan(composed("plan", *SMALL, *given, *words))
    with pytest.raises(ScheduleError, match=r"offload=auto is planned for .*; use offload=none"):
        plan(composed("plan", *SMALL, *given, "offload=auto"))


class LateGPT(L.LightningModule):
    """Makes its layers in configure_model, and is trained by SGD."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.blocks = None
        self.layer = nn.Linear

    def configure_model(self):
        if self.blocks is None:
            width = self.width
            self.embed = nn.Embedding(256, width)
            self.blocks = nn.Sequential(*(self.layer(width, width) for _ in range(4)))
            self.head = nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = nn.functional.cross_entropy(
            self.head(self.blocks(self.embed(tokens))).flatten(0, 1), targets.flatten()
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FourBits(LateGPT):
    """Has blocks of 4 bits, which nothing has quantized yet."""

    def __init__(self, width):
        super().__init__(width)
        self.layer = partial(Linear4bit, compute_dtype=torch.float32, quant_type="nf4")


@pytest.mark.slow
def test_a_4_bit_base_is_planned_alike_with_its_weights_or_without(capsys, tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, **sizes)
    found = []
    for save in (config.save_pretrained, LlamaForCausalLM(config).bfloat16().save_pretrained):
        save(tmp_path)
        model = ["+model._target_=examples.qlora.QLoRA", f"+model.folder={tmp_path}"]
        plan(composed("plan", *model, *SMALL[4:]))
        found.append(json.loads(capsys.readouterr().out)["memory"])
    assert found[0] == found[1]


def test_figures_are_those_of_a_run(capsys):
    found = estimate(capsys, "schedule=zb_v")
    memory = found["memory"]
    assert (found["schedule"], found["num_ranks"], found["num_microbatches"]) == ("zb_v", 2, 4)
    assert memory["gradients"] == memory["parameters"]
    for parameters, states in zip(memory["parameters"], memory["optimizer"], strict=True):
        assert 0 <= states - 2 * parameters < 400  # and the count of its steps
    sums = [sum(parts) for parts in zip(*(memory[name] for name in PARTS), strict=True)]
    assert memory["device"] == sums
    assert memory["activations"] == activations_of_a_run("zb_v")


PARTS = ("parameters", "gradients", "optimizer", "activations", "messages")


def activations_of_a_run(schedule):
    from lightning_pipeoffload.demos import GPT

    module = GPT(vocab_size=256, context=32, width=64, depth=4, heads=2, dropout=0.0)
    pipeline = InProcessPipeline(
        module, build(schedule, 2, 4), lambda model, part: model.training_step(part, 0)
    )
    tokens = torch.randint(256, (8, 32))
    pipeline.run((tokens, tokens), 2)
    return [executor.memory.ledger.peak_device_bytes for executor in pipeline.executors]


def test_less_is_kept_with_recompute_and_offload_and_half_precision(capsys):
    plain, cheap = estimate(capsys), estimate(capsys, "strategy.recompute=cheap")
    half = estimate(capsys, "+trainer.precision=bf16-true")
    assert max(cheap["memory"]["activations"]) < max(plain["memory"]["activations"])
    assert half["memory"]["parameters"] == [n // 2 for n in plain["memory"]["parameters"]]
    copied = estimate(capsys, "schedule=uniform", "offload=full")["memory"]
    assert max(copied["host"]) > 0


ON_HOST = "+strategy.optimizer_offload=true"


def test_an_optimizer_on_the_host_takes_nothing_of_the_device(capsys):
    plain, found = estimate(capsys), estimate(capsys, ON_HOST)
    assert found["memory"]["optimizer"] == [0, 0]
    assert found["memory"]["gradients"] == plain["memory"]["gradients"]
    parts = zip(plain["memory"]["optimizer"], found["memory"]["parameters"], strict=True)
    # One buffer is enough: a whole rank goes through it.
    assert found["memory"]["host"] == [states + 2 * weights for states, weights in parts]
    half = "+trainer.precision=bf16-true", ON_HOST, "++strategy.master_weights=float32"
    kept = estimate(capsys, *half)["memory"]
    for found, bytes_of_one in (("device", 4), ("host_optimizer", 12 + 4)):
        numbers = [size // 2 for size in kept["parameters"]]
        rest = zip(kept[found], kept["activations"], kept["messages"], numbers, strict=True)
        is_there = found == "device"
        for total, activations, messages, number in rest:
            expected = bytes_of_one * number + is_there * (activations + messages)
            assert total == pytest.approx(expected, abs=400)
    with pytest.raises(ScheduleError, match=r"of its host, and strategy.host_memory_limit is 1MiB"):
        estimate(capsys, ON_HOST, "+strategy.host_memory_limit=1MiB")


LEAST = "strategy.recompute=full", "num_microbatches=8"
REPLICAS = ("+trainer.precision=bf16-mixed", "+strategy.data_parallel_size=4")
MASTERS = "++trainer.precision=bf16-true", "++strategy.master_weights=float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "changes"),
    [((), (ON_HOST,)), (REPLICAS, ("+strategy.sharding=optimizer", *MASTERS))],
)
def test_an_optimizer_steps_masters_or_on_the_host_where_nothing_fits_else(capsys, asked, changes):
    memory = estimate(capsys, *asked, *changes, *LEAST)["memory"]
    advised = re.escape(" ".join(changes))
    with pytest.raises(ScheduleError, match=f"; use .*{advised}: a step"):
        estimate(capsys, *asked, f"device_memory={max(memory['device'])}")


def test_several_plans_stand_side_by_side(capsys):
    found = estimate(capsys, "compare=[zb_h1,zb_v]", "num_ranks=[2,4]")
    named = [(one["schedule"], one["num_ranks"]) for one in found["estimates"]]
    assert named == [("zb_h1", 2), ("zb_v", 2), ("zb_h1", 4)]
    (refused,) = found["refused"]
    assert refused.startswith("zb_v, 4 ranks: blocks has 4 blocks for 8 stages")


def test_a_module_is_made_once_for_all_plans(capsys, monkeypatch):
    made, configure = [], LateGPT.configure_model

    def configure_model(module):
        made.append(module)
        configure(module)

    monkeypatch.setattr(LateGPT, "configure_model", configure_model)
    late = f"+model._target_={__name__}.LateGPT", "+model.width=8", "num_ranks=[2,4]"
    plan(composed("plan", *late, *SMALL[4:6], *SMALL[7:], "compare=[zb_h1,zb_v,1f1b,gpipe]"))
    assert len(json.loads(capsys.readouterr().out)["estimates"]) == 7
    assert len(made) == 2  # first to see whether it is made in parts


def test_a_module_that_cannot_be_made_is_tried_once_for_all_plans(monkeypatch):
    tried = []

    def configure_model(module):
        tried.append(module)
        raise ValueError("no such file")

    monkeypatch.setattr(LateGPT, "configure_model", configure_model)
    late = f"+model._target_={__name__}.LateGPT", "+model.width=8", "num_ranks=[2,4]"
    with pytest.raises(ValueError, match=r"^(?!zb_h1).*no such file"):
        plan(composed("plan", *late, *SMALL[4:6], *SMALL[7:], "compare=[zb_h1,zb_v]"))
    assert len(tried) == 1


@pytest.mark.slow
def test_what_no_change_makes_fit_is_refused(capsys):
    with pytest.raises(ScheduleError, match="use a smaller model, batch or data type"):
        estimate(capsys, "model.depth=2", "device_memory=1KiB")
    needs = max(estimate(capsys)["memory"]["device"])
    assert estimate(capsys, f"device_memory={needs}")["schedule"] == "zb_h1"


SCALES = 4096 * 4096 // 64  # of 8 bits, whose own 256 share one of 32 bits, and a mean


@pytest.mark.parametrize(
    ("kind", "weight"),
    [("LateGPT", 4 * 4096**2), ("FourBits", 4096**2 // 2 + SCALES + 4 * SCALES // 256 + 4)],
)
def test_layers_of_configure_model_are_made_of_shapes(capsys, kind, weight):
    late = f"+model._target_={__name__}.{kind}", "+model.width=4096", "num_ranks=4"
    plan(composed("plan", *late, "data.batch_size=8", "data.context=32", "format=json"))
    memory = json.loads(capsys.readouterr().out)["memory"]
    block = weight + 4 * 4096
    assert memory["parameters"][1:3] == [block, block]
    trained = memory["parameters"] if kind == "LateGPT" else memory["gradients"]
    assert memory["optimizer"] == trained
    assert memory["gradients"][1:3] == [block if kind == "LateGPT" else 4 * 4096] * 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("device_memory=lots", "device_memory='lots' is no amount of memory"),
        ("num_microbatches=3", "cannot be cut into 3 equal microbatches"),
        ("model.heads=5", "heads (5)"),
        ("num_ranks=x", "num_ranks ('x') must be a whole number"),
        ("schedule=auto", "a model's shapes tell no seconds"),
        ("costs_file=costs.json", "a model's shapes tell no seconds"),
        ("strategy.memory_limit=1GiB", "changes nothing here; write device_memory"),
        ("+strategy.num_sequence_slices=8", "changes nothing here; set num_sequence_slices, w"),
        ("+strategy.tensor_parallel_size=2", "changes nothing here; set tensor_parallel_size, w"),
        ("+strategy.widht=1", "strategy.widht (1) is no argument"),
        ("~model", "device_memory (80GiB) is for a model"),
    ],
)
def test_wrong_input_is_refused(override, said):
    words = [word for word in SMALL if "model" not in word] if override == "~model" else SMALL
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(composed("plan", *words, override if words is SMALL else "device_memory=80GiB"))
