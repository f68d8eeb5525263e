"""``pipeoffload-plan device=h100 model=...`` plans by counted operations and data sheets."""

import json
import re

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_pipeoffload.cli.configuration import build as make
from lightning_pipeoffload.cli.devices import DEVICES, FP16_SUMS, device_named, kind_of_precision
from lightning_pipeoffload.cli.layout_search import LayoutSearch
from lightning_pipeoffload.cli.model_planner import ModelPlanner
from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.schedule import PlanOption, ScheduleError, bytes_text
from tests.support.composed import composed

SMALL = (
    *("model=gpt_tiny", "model.width=64", "model.heads=2", "model.dropout=0", "data.context=32"),
    *("data.batch_size=8", "num_ranks=2", "num_microbatches=4", "format=json", "device=h100"),
)


# One stage on each rank: every other cut is looked at anew.
AUTO = ("schedule=auto", "num_chunks=1")
CLIPPED = "+trainer.gradient_clip_val=1.0"


def plan_config(*overrides):
    return composed("plan", *SMALL, *overrides)


def planned(capsys, *overrides):
    plan(plan_config(*overrides))
    return json.loads(capsys.readouterr().out)


def test_seconds_are_the_operations_of_a_step_on_one_device_over_what_it_reaches():
    config = plan_config("+trainer.precision=bf16-mixed", "efficiency=0.4")
    planner = ModelPlanner(config)
    costs = planner.costs_of(PlanOption("zb_h1", 1, 4), 2)
    seconds = sum(map(sum, costs.seconds_by_kind(2).values()))
    module, batch = make(config, "model"), torch.zeros(2, 33, dtype=torch.long)
    module.log = lambda *args, **more: None
    # Torch counts attention only where it is matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module.training_step((batch[:, :-1], batch[:, 1:]), 0)
    num_unseen = 4 * 2 * 2 * (32 * 31 // 2)  # pairs of layers, samples, heads and tokens
    seen = counter.get_total_flops() - 2 * num_unseen * (32 + 32)
    assert seconds == pytest.approx(3 * seen / (0.4 * 989e12), rel=1e-6)


def test_a_buyer_gets_speed_and_memory_in_one_answer(capsys):
    words = *AUTO, "efficiency=0.5", "+trainer.precision=bf16-mixed"
    told = planned(capsys, *words)
    assert told["tokens_per_second"] == pytest.approx(32 * told["samples_per_second"])
    assert told["samples_per_second"] == pytest.approx(8 / told["period"])
    assert told["mfu"] == pytest.approx(0.5 * (1 - told["period_bubble"]), rel=1e-3)
    assert told["memory"]["device"][0] < 0.9 * 80e9
    plan(plan_config(*words, "format=text", "model.depth=5"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    for part in ("tokens/s, MFU ", "GiB, 7,629.40 MiB stay a reserve: it", "host memory: 0.00 KiB"):
        assert part in text
    assert "is the busiest, with" in text


def test_messages_between_machines_go_over_the_network(capsys):
    words = "schedule=1f1b", "network=1MB", "efficiency=1"
    near, far = (planned(capsys, *words, f"devices_per_machine={n}") for n in (2, 1))
    sent = 2 * 32 * 64 * 4  # bytes of a microbatch's hidden states: each crosses there and back
    assert far["period"] > near["period"] + 2 * sent / 1e6


def test_replicas_add_up_gradients_and_are_counted_together(capsys):
    words = "schedule=1f1b", "efficiency=1", "network=10MB", "+strategy.data_parallel_size=4"
    near, far = (planned(capsys, *words, f"devices_per_machine={n}") for n in (8, 2))
    assert far["samples_per_second"] == pytest.approx(4 * 8 / far["period"])
    assert far["tokens_per_second"] == pytest.approx(32 * far["samples_per_second"])
    sent = 2 * 3 / 4 * max(far["memory"]["gradients"])
    assert far["period"] - near["period"] == pytest.approx(sent / 10e6, rel=0.1)


def test_sums_in_float16_are_twice_as_fast_on_a_card_for_consumers(capsys):
    words = "schedule=1f1b", "device=4090", "+trainer.precision=16-mixed"
    exact, short = (planned(capsys, *words, f"float16_sums={on}") for on in ("false", "true"))
    assert exact["flops_per_second"] == pytest.approx(0.5 * 165.2e12)
    assert short["flops_per_second"] == pytest.approx(0.5 * 330.3e12)
    for on, told in (
        ("false", "float16_sums=true plans products that add up in float16, at 2 times the rate"),
        ("true", "write torch.backends.cuda.matmul.allow_fp16_accumulation = True before"),
    ):
        plan(plan_config(*words, f"float16_sums={on}", "format=text"))
        text = " ".join(capsys.readouterr().out.split())
        assert told in text
        assert "(precision 16-mixed)" in text
    assert hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation")


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [
        ("4090", "bf16-mixed", "float16_sums is for products in float16, and precision is bf16"),
        ("h100", "16-mixed", "float16_sums changes nothing for device=h100"),
    ],
)
def test_sums_in_float16_are_refused_where_they_gain_nothing(device, precision, message):
    words = f"device={device}", f"+trainer.precision={precision}", "float16_sums=true"
    with pytest.raises(ScheduleError, match=message):
        plan(plan_config("schedule=1f1b", *words))


@pytest.mark.parametrize(
    ("name", "rate", "message"),
    [
        ("link", "fast", "link='fast' is no rate; use bytes per second, such as 50GB, which is"),
        ("network", "400Gbit/s", "network='400Gbit/s' is no rate; use bytes per second"),
        ("link", 50, 'link=50 is 50 bytes per second; did you mean "50GB"?'),
    ],
)
def test_a_rate_is_in_bytes_per_second(name, rate, message):
    with pytest.raises(ValueError, match=message):
        device_named("h100", 0.5, **{name: rate})


def test_a_machine_has_the_host_memory_of_its_replicas(capsys):
    words = "schedule=1f1b", "+strategy.optimizer_offload=true", "+strategy.data_parallel_size=2"
    of_ranks = planned(capsys, *words)["memory"]["host"]
    plan(plan_config(*words, "format=text"))
    text = " ".join(capsys.readouterr().out.split())
    assert f"that needs most, {bytes_text(2 * sum(of_ranks))} of a machine" in text


def test_an_optimizer_on_the_host_steps_at_its_share_of_the_machines_memory(capsys):
    on_host = "+strategy.optimizer_offload=true", "host_bandwidth=50GB", "efficiency=0.5"
    config = plan_config(*on_host)
    planner = ModelPlanner(config)
    step = planner.costs_of(PlanOption("zb_h1", 1, 4), 2).step
    module = make(config, "model")
    moved = sum(28 * parameter.numel() for parameter in module.parameters())  # AdamW in float32
    assert sum(step) == pytest.approx(moved / 25e9)
    during, after = planned(capsys, *AUTO, *on_host), planned(capsys, *AUTO, *on_host, CLIPPED)
    assert during["period"] < after["period"]


def test_what_is_told_is_what_it_goes_by(capsys):
    told = planned(capsys, *AUTO, "+trainer.precision=bf16-mixed")
    assert told["device"] == "h100"
    assert told["precision"] == "bf16-mixed"
    assert told["flops_per_second"] == 0.5 * 989e12
    assert told["device_memory"] == 0.9 * 80e9  # the rest is a reserve
    (taken,) = [c for c in told["candidates"] if c["fits"] and not c["reason"]]
    assert [taken["schedule"], taken["period"]] == [told["schedule"], told["period"]]


def test_weights_gradients_and_states_leave_less_for_activations(capsys):
    free = planned(capsys, *AUTO)
    weights = free["taken_by_weights"]
    assert weights > 4 * 4 * 64 * 64 * 12  # four blocks of more than 12 squares, by AdamW, halved
    memory = int(weights + max(free["peak_memory"]) * 0.6)
    tight = planned(capsys, *AUTO, f"device_memory={memory}")
    assert tight["taken_by_weights"] + max(tight["peak_memory"]) <= memory
    assert max(tight["peak_memory"]) < max(free["peak_memory"])
    with pytest.raises(ScheduleError, match=r"h100 has .* MiB, and any such plan needs .* MiB"):
        plan(plan_config(*AUTO, f"device_memory={int(weights * 0.9)}"))


def test_a_refusal_counts_messages(capsys, monkeypatch):
    monkeypatch.setattr(LayoutSearch, "search_advice", lambda *_: "")
    needs = planned(capsys, "schedule=1f1b")["memory"]
    memory = max(needs["device"]) - min(needs["messages"]) // 2
    with pytest.raises(ScheduleError) as refusal:
        plan(plan_config("schedule=1f1b", f"device_memory={memory}"))
    has, needed = map(int, re.findall(r"(\d+) bytes", str(refusal.value)))
    assert has == memory < needed


@pytest.mark.parametrize(
    ("width", "offload", "offloaded"),
    [(64, "none", [0, 0]), (4096, "half", [4, 4])],  # copies last longer than narrow blocks compute
)
def test_what_is_copied_is_told(capsys, width, offload, offloaded):
    half = ("schedule=gpipe", "strategy.offload=half", "efficiency=1", "num_microbatches=8")
    told = planned(capsys, *half, f"model.width={width}")
    assert told["schedule"] == "gpipe"
    report = next(c for c in told["candidates"] if c["fits"])
    assert report["offload"] == offload
    assert told["wanted"] == [4, 4]
    assert told["offloaded"] == offloaded
    assert [a + k for a, k in zip(told["offloaded"], told["kept"], strict=True)] == [4, 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["device=b9"], r"device \(b9\) is unknown; use one of 3060, 3090, 4090, a100, h100, h200"),
        (["efficiency=0"], r"efficiency \(0\) must be a share above 0"),
        (["efficiency=nan"], r"efficiency \(nan\) must be a share"),
        (["memory_limit=3"], r"memory_limit \(3\) is for a plan by costs"),
        (["sweep=memory_limit"], r"sweep \(memory_limit\) has no part in a plan for a device"),
        (["schedule=optpipe"], r"schedule \(optpipe\) cannot be planned for a device"),
        (["+strategy.host_memory_limit=1GiB"], r"host_memory_limit \(1GiB\) changes nothing here"),
        (["num_ranks=1.5"], r"num_ranks \(1\.5\) must be a whole number"),
        (["devices_per_machine=0"], r"devices_per_machine \(0\) must be a whole number from 1 on"),
        (["num_chunks=3", "schedule=zb_v"], r"zb_v does not accept num_chunks \(3\)"),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    with pytest.raises(ScheduleError, match=message):
        plan(plan_config(*overrides))
    with pytest.raises(ScheduleError, match=r"device \(h100\) is for a model"):
        plan(composed("plan", "device=h100"))


class WithoutWeights(LightningModule):
    """Looks for files in configure_model."""

    calls = 0

    def __init__(self, error):
        super().__init__()
        self.error = error

    def configure_model(self):
        WithoutWeights.calls += 1
        raise {"OSError": OSError, "ValueError": ValueError}[self.error]("no weights\nthere")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ValueError", "^no weights\nthere$"),
        (
            "OSError",
            r"^configure_model cannot read .* \(.* model.error=OSError\): no weights there$",
        ),
    ],
)
def test_an_error_of_configure_model_ends_the_command_at_once(error, message):
    WithoutWeights.calls, words = 0, (f"+model._target_={__name__}.WithoutWeights", "device=h100")
    with pytest.raises(ValueError, match=message):
        plan(composed("plan", *words, f"+model.error={error}"))
    assert WithoutWeights.calls == 1


class StepFails(LightningModule):
    """Multiplies shapes that do not fit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch, batch_idx):
        return nn.Sequential(*self.blocks)(torch.ones(len(batch[0]), 9)).mean()


def test_a_step_that_does_not_run_is_refused_with_its_error():
    message = "the step of StepFails does not run without values: RuntimeError: .*; train a few"
    words = f"+model._target_={__name__}.StepFails", *SMALL[5:]
    with pytest.raises(ScheduleError, match=message) as refused:
        plan(composed("plan", *words))
    assert "\n" not in str(refused.value)


def test_a_precision_has_its_rate():
    kinds = {"32-true": "fp32", "bf16-true": "bf16", "16-mixed": "fp16", "64-true": "fp64"}
    kinds["transformer-engine"] = "bf16"
    assert {name: kind_of_precision(name) for name in kinds} == kinds
    assert all({*kinds.values(), FP16_SUMS} == {*device.flops} for device in DEVICES.values())


LONG = (
    *("model.width=64", "model.heads=2", "data.context=8192", "data.batch_size=2"),
    *("num_ranks=4", "num_microbatches=2", "num_chunks=1"),
)


def test_slices_of_long_sequences_are_proposed_with_their_gain_and_planned(capsys):
    before = planned(capsys, *LONG, "schedule=zb_h1")
    proposal = before["sequence_slices"]
    count = proposal["num_sequence_slices"]
    assert count > 1
    assert proposal["period"] == pytest.approx((1 - proposal["gain"]) * before["period"])
    sliced = planned(capsys, *LONG, "schedule=seq_zb", f"num_sequence_slices={count}")
    # Of about equal ones that with less memory is taken.
    assert sliced["period"] == pytest.approx(proposal["period"], rel=2e-3)
    assert "sequence_slices" not in sliced
    assert sliced["memory"]["activations"][0] <= before["memory"]["activations"][0]
    plan(plan_config(*LONG, "schedule=zb_h1", "format=text"))
    proposed = "less, if short slices are computed as fast: num_sequence_slices="
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"{proposed}{count} schedule=seq_zb " in shown
    assert "schedule=seq_zb num_chunks" not in shown
    chunked = "num_ranks=2", "schedule=interleaved_1f1b", "num_chunks=2"
    plan(plan_config(*LONG, *chunked, "format=text"))
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.search(rf"{proposed}\d+ schedule=seq_zb num_chunks=1 ", shown)


def test_slices_of_a_model_take_equal_time_by_its_attention():
    planner = ModelPlanner(plan_config(*LONG, "num_sequence_slices=4"))
    costs = planner.costs_of(PlanOption("seq_zb", 1, 2, num_sequence_slices=4), 4)
    seconds = [
        sum(of)
        for of in zip(
            *(costs.per_slice(n, 4, 4) for n in ("forward", "backward_input", "backward_weight")),
            strict=True,
        )
    ]
    assert seconds[:4] == pytest.approx([sum(seconds[:4]) / 4] * 4, rel=0.05)
    first, *_, last = costs.slices.sizes
    assert first > 1.5 * last  # 8192 tokens in blocks as narrow as this are mostly attention
    assert costs.slices.end_forward[:3] == (0, 0, 0) < costs.slices.end_forward[3:]


@pytest.mark.slow
def test_advice_for_slices_that_do_not_fit_can_be_followed(capsys):
    sizes = (*AUTO, "num_sequence_slices=4")
    memory = 0.9 * max(planned(capsys, *sizes)["memory"]["device"])
    limited = (*sizes, "strategy.offload=none", f"device_memory={memory:.0f}")
    with pytest.raises(ScheduleError, match="use .*num_sequence_slices=1") as refusal:
        plan(plan_config(*limited))
    words = str(refusal.value).partition("use ")[2].partition(": a step")[0].split()
    assert planned(capsys, *limited, *words)["num_microbatches"]


def test_slices_without_a_device_or_a_family_that_has_them_are_refused():
    for words, message in {
        ("num_sequence_slices=4", "schedule=zb_v"): r"must be 1 for zb_v, .* schedule=seq_1f1b",
        ("schedule=seq_zb",): "seq_zb is for slices of sequences; set num_sequence_slices=8",
        ("num_sequence_slices=4", "device=null", "schedule=seq_zb"): "add device=h100",
    }.items():
        with pytest.raises(ScheduleError, match=message):
            plan(plan_config(*words))


MIXTURE = "device=[rtx4090,rtx3090,rtx3060]"


def mixed(capsys, *overrides):
    plan(plan_config("num_ranks=3", *AUTO, *overrides))
    return json.loads(capsys.readouterr().out)


def test_a_list_of_one_kind_is_that_kind(capsys):
    one, three = (mixed(capsys, device) for device in ("device=4090", "device=[4090,4090,4090]"))
    for name in ("schedule", "period", "tokens_per_second", "mfu", "memory"):
        assert one[name] == three[name]


def test_each_card_of_a_mixture_has_its_share(capsys):
    found = mixed(capsys, MIXTURE, "model.depth=12")
    assert found["devices"] == ["4090", "3090", "3060"]
    slow, middle, fast = found["memory"]["parameters"]  # the last stage is on the first device
    assert slow < middle < fast
    alike = mixed(capsys, "device=3060", "model.depth=12")
    assert found["period"] < 0.7 * alike["period"]


def test_layers_that_configure_model_makes_are_cut_for_each_card_of_a_mixture(capsys):
    deep = "+model._target_=tests.cli.test_tensor_parallel_plan.Deep"
    data = "data._target_=tests.cli.test_tensor_parallel_plan.Data"
    sizes = "num_ranks=3", "num_microbatches=4", "format=json"
    plan(composed("plan", deep, data, *sizes, *AUTO, MIXTURE))
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == ["4090", "3090", "3060"]
    assert all(found["memory"]["parameters"])


def test_a_small_card_of_a_mixture_has_what_fits():
    config = plan_config("num_ranks=3", *AUTO, MIXTURE, "device_memory=null")
    planner = ModelPlanner(config)
    assert planner.memories_of((0, 1, 2)) == pytest.approx([0.9 * n * 2**30 for n in (12, 24, 24)])
    assert planner.memories_of((0, 1, 2, 2, 1, 0))[0] == planner.memories_of((0, 1, 2))[2]
    kept = {option.num_kept for option in planner.options("zb_h1", [4], ["none"])}
    assert kept == {0, 1, 3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num_ranks=2"], r"num_ranks \(2\) is not the number of entries of device \(rtx4090,"),
        (["tensor_parallel_size=2"], r"tensor_parallel_size \(2\) shares layers .* is a list"),
        (["devices=8"], r"is a list, and layouts are searched for one kind .* leave out devices"),
        (["device=[rtx4090,rtx3080]"], r"device \(rtx3080\) is unknown; use one of 3060, 3090,"),
        (
            ["device_memory=1MiB"],
            r"room for activations \(none, .*of rank \d, on device \d \(\d+\), is less .* strategy",
        ),
    ],
)
def test_what_a_mixture_cannot_be_is_refused(words, message):
    with pytest.raises(ScheduleError, match=message):
        plan(plan_config("num_ranks=4", *AUTO, MIXTURE, *words))
