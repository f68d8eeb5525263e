"""``pipeoffload-plan devices=8`` searches the sizes of layouts, and names the fastest that fits."""

import json
import random
from math import inf

import pytest
import torch.distributed as dist

from lightning_pipeoffload.cli import layout_search
from lightning_pipeoffload.cli.devices import DEVICES
from lightning_pipeoffload.cli.machine_links import Links
from lightning_pipeoffload.plan import add_auto_overrides, plan
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import ScheduleError
from tests.support.composed import composed
from tests.test_tensor_parallel import Net

GPT = (
    *("model=gpt_tiny", "model.width=64", "model.heads=2", "model.dropout=0", "data.context=32"),
    *("data.batch_size=8", "num_microbatches=4", "device=h100", "format=json"),
)
QUICK = ("schedule=zb_h1", "offload=none")  # one option
SIZES = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"


def searched(capsys, *overrides, base=GPT):
    sizes = () if base is NET else ("num_ranks=auto",)
    plan(composed("plan", *base, *sizes, *overrides))
    assert not dist.is_initialized()
    return json.loads(capsys.readouterr().out)


def sizes_of(layout):
    return tuple(layout[name] for name in SIZES)


def test_layouts_are_those_of_all_devices_and_the_first_is_planned_as_by_its_sizes(capsys):
    found = searched(capsys, *QUICK, "devices=2", "num_nodes=2", "tensor_parallel_size=auto")
    layouts = [*map(sizes_of, found["layouts"])]
    assert layouts
    others = [tuple(map(int, n.split(" x "))) for n in found["left_out"] if " x " in n]
    assert {*layouts, *others} == {(1, 1, 4), (2, 1, 2), (4, 1, 1)}
    assert "distributes no layer" in found["left_out"]["several tensor ranks"]
    periods = [layout["period"] for layout in found["layouts"]]
    assert periods[1:] == sorted(periods[1:])
    assert periods[0] <= 1.01 * min(periods)
    ranks, _, replicas = layouts[0]
    sizes = [f"num_ranks={ranks}", f"+strategy.data_parallel_size={replicas}"]
    sizes += [f"data.batch_size={8 // replicas}", f"num_microbatches={4 // replicas}"]
    order = found["layouts"][0].get("rank_order", "pipeline_inner")
    sizes += ["devices_per_machine=2", f"+strategy.rank_order={order}"]
    plan(composed("plan", *GPT, *QUICK, *sizes))
    alone = json.loads(capsys.readouterr().out)
    assert found["memory"] == alone["memory"]
    for name in ("period", "tokens_per_second", "samples_per_second", "mfu"):
        assert found[name] == pytest.approx(alone[name]), name


def test_what_is_given_is_kept_and_the_answer_says_how_to_train(capsys):
    given = "num_ranks=2", "+strategy.data_parallel_size=2", "format=text"
    plan(composed("plan", *GPT, *QUICK, "devices=4", *given))
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "fastest: 1",
        "to train so: Trainer(devices=4, num_nodes=1, strategy=",
        "PipeOffloadStrategy(pipeline_parallel_size=2, tensor_parallel_size=1, "
        'data_parallel_size=2, schedule="zb_h1", num_chunks=1, num_microbatches=2, '
        'recompute="none", offload="none")',
        "each of the 2 replicas reads batches of 4 samples",
        "with 8 samples a step",
    ):
        assert part in text


def test_replicas_are_neighbours_where_that_spares_the_network(capsys):
    sizes = *QUICK, "num_ranks=2", "+strategy.data_parallel_size=2", "network=1MB"
    (near,) = searched(capsys, *sizes, "devices=2", "num_nodes=2")["layouts"]
    assert near["rank_order"] == "data_inner"
    given = "+strategy.rank_order=pipeline_inner", "devices=2", "num_nodes=2"
    (far,) = searched(capsys, *sizes, *given)["layouts"]
    assert "rank_order" not in far
    assert near["period"] < far["period"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["devices=0"], r"devices \(0\) must be a whole number from 1 on"),
        (["devices=4", "num_nodes=0"], r"num_nodes \(0\) must be a whole number from 1 on"),
        (["devices=8", "tensor_parallel_size=3"], r"size \(3\) must divide devices \(8\), so that"),
        (["devices=4", "num_ranks=3"], r"num_ranks \(3\) makes no layout of 4 devices \(devices=4"),
        (["devices=4", "num_ranks=0"], r"num_ranks \(0\) must be a whole number from 1 on"),
        (
            ["devices=4", "device=null"],
            r"devices \(4\) is for a model and a device, .* device=h100",
        ),
        (["devices=4", "devices_per_machine=2"], r"_machine \(2\) is devices \(4\) where layouts"),
        (["num_nodes=2"], r"num_nodes \(2\) is for a search of layouts: add devices=8"),
        (["devices=4", "seconds=0"], r"seconds \(0\) must be a number above 0, as in seconds=60"),
        (["seconds=9"], r"seconds \(9\) is for a search of layouts: add devices=8"),
        (["num_ranks=auto"], r"num_ranks \(auto\) is searched for a number of devices: add"),
        (["+strategy.data_parallel_size=auto"], r"_size \(auto\) is searched for a number of dev"),
        (
            ["devices=3", "+strategy.data_parallel_size=3"],
            r"1 x 1 x 3: the replicas cannot divide num_microbatches \(4\)",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(given, message):
    has_devices = any(word.startswith("devices=") for word in given)
    sizes = ("num_ranks=auto", "tensor_parallel_size=auto") if has_devices else ()
    with pytest.raises(ScheduleError, match=message) as refused:
        plan(composed("plan", *GPT, *QUICK, *sizes, *given))
    assert "\n" not in str(refused.value)
    assert not dist.is_initialized()


LAYOUTS = "devices=2", "num_nodes=2", "tensor_parallel_size=1"


def interrupt_at(monkeypatch, name):
    plan_one = layout_search.LayoutSearch._plan

    def plan_or_stop(self, place, *arguments):
        if str(place.layout) == name:
            raise KeyboardInterrupt
        return plan_one(self, place, *arguments)

    monkeypatch.setattr(layout_search.LayoutSearch, "_plan", plan_or_stop)


def test_a_search_that_is_stopped_answers_with_the_best_so_far(capsys, monkeypatch):
    whole = searched(capsys, *QUICK, *LAYOUTS)
    assert whole["not_planned"] == []
    interrupt_at(monkeypatch, "4 x 1 x 1")
    found = searched(capsys, *QUICK, *LAYOUTS)
    assert "4 x 1 x 1" in found["not_planned"]
    assert found["layouts"]
    for layout in found["layouts"]:
        assert sizes_of(layout) != (4, 1, 1)
        assert " x ".join(map(str, sizes_of(layout))) not in found["not_planned"]
    plan(composed("plan", *GPT, *QUICK, *LAYOUTS, "num_ranks=auto", "format=text"))
    text = " ".join(capsys.readouterr().out.split())
    assert "The search was stopped. Not planned yet, or not with copies, are" in text
    assert "4 x 1 x 1." in text


def test_a_search_that_is_stopped_before_a_plan_has_no_answer(capsys, monkeypatch):
    with pytest.raises(
        ScheduleError, match=r"of 3 layouts none is planned after seconds \(0.001\)"
    ):
        searched(capsys, *QUICK, *LAYOUTS, "seconds=0.001")
    monkeypatch.setattr(layout_search.LayoutSearch, "_planner_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        searched(capsys, *QUICK, *LAYOUTS)


def interrupted(*_):
    raise KeyboardInterrupt


def test_progress_says_which_layout_of_how_many(monkeypatch):
    config = composed("plan", *GPT, *QUICK, *LAYOUTS, "num_ranks=auto", "strategy.recompute=none")
    shown = []
    layout_search.LayoutSearch(config, [1], shown.append).run()
    numbers = {text.partition(",")[0] for text in shown if text.startswith("layout")}
    assert numbers == {f"layout {number} of 3" for number in (1, 2, 3)}


def period_of(monkeypatch, words, **constants):
    with monkeypatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(layout_search, name, value)
        config = composed("plan", *GPT, *words)
        try:
            return (
                layout_search.LayoutSearch(config, [1], lambda text: None).run().layouts[0].period
            )
        except ScheduleError:
            return None


def drawn_words(seed, counts, machines, depths, networks, links, memories):
    draw = random.Random(seed)
    count = draw.choice(counts)
    devices, nodes = draw.choice(machines)
    return (
        *("num_ranks=auto", "schedule=auto", "offload=auto", "strategy.recompute=auto"),
        *(f"devices={devices}", f"num_nodes={nodes}", f"model.depth={draw.choice(depths)}"),
        *(f"num_microbatches={count}", f"data.batch_size={2 * count}"),
        *(f"network={draw.choice(networks)}GB", f"link={draw.choice(links)}GB"),
        f"device_memory={draw.choice(memories)}MiB",
    )


def check_that_nothing_is_faster(monkeypatch, words):
    everything = {"SHOWN": 1e9, "_WORTH_A_PLAN": inf}  # no bound leaves a plan out
    with monkeypatch.context() as patch:
        patch.setattr("lightning_pipeoffload.cli.layouts._MANY_FORWARDS", 1e9)
        best = period_of(monkeypatch, words, **everything, _SHORTLY=layout_search._ALONE)
    found = period_of(monkeypatch, words)
    assert (found is None) == (best is None)
    assert found is None or found <= 1.01 * best


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 200))]
)
def test_what_is_left_out_would_not_be_faster(monkeypatch, seed):
    machines = [(2, 2), (4, 1), (4, 2), (2, 4), (8, 1)]
    sizes = [2, 4, 8, 16], machines, [8, 10, 16]
    words = drawn_words(seed, *sizes, [1, 10, 100], [10, 100], [1.7, 2.2, 3, 8])
    check_that_nothing_is_faster(monkeypatch, words)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 4])
def test_large_layouts_that_are_left_out_would_not_be_faster(monkeypatch, seed):
    sizes = [32, 64], [(8, 2), (4, 4)], [16, 20]
    # Links are as fast beside this small model as those of an H100 beside a large one.
    links = [1000, 10000, 100000], [10000, 100000]
    words = drawn_words(seed, *sizes, *links, [1.6, 1.8, 2, 2.2, 2.4])
    check_that_nothing_is_faster(monkeypatch, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "network", "link", "memory"),
    [
        (128, 10_000, 100_000, 2.4),  # by gis
        (32, 10, 10, 8),  # by zb, over links slower than computing
    ],
)
def test_a_large_layout_that_is_the_fastest_is_found(monkeypatch, count, network, link, memory):
    words = drawn_words(0, [count], [(8, 2)], [16], [network], [link], [memory])
    check_that_nothing_is_faster(monkeypatch, words)


def test_with_devices_what_is_not_given_is_searched():
    given = ["model=gpt_tiny", "devices=8", "+schedule=zb_v", "strategy.recompute=full"]
    auto = ["num_ranks=auto", "tensor_parallel_size=auto", "offload=auto"]
    assert add_auto_overrides(given) == [*auto, *given]
    assert add_auto_overrides(["devices=null"]) == ["devices=null"]
    assert add_auto_overrides(["num_ranks=4"]) == ["num_ranks=4"]


LOOP, V = (0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)
DEVICE = DEVICES["h100"]._replace(link_rate=100, network_rate=1)


def links(per_machine, replicas=1, tensor=1, order="pipeline_inner"):
    sizes = {"data_parallel_size": replicas, "tensor_parallel_size": tensor, "rank_order": order}
    return Links(DEVICE, PipelineSettings(**sizes), per_machine)


def test_messages_cross_machines_where_neighbours_of_the_pipeline_are_apart():
    near, far = 1, 100
    cases = [  # the last stage is on global rank 0, in a V on pipeline rank 0
        (LOOP, links(4), [near, near, near, near]),
        (LOOP, links(3), [far, near, near, near]),
        (V, links(3), [near, near, far, near, far, near, near, near]),
        (LOOP, links(4, tensor=2), [near, far, near, near]),
        (LOOP, links(6, replicas=2), [near, far, near, near]),  # those of replica 1
        (LOOP, links(4, replicas=2, order="data_inner"), [near, far, near, near]),
    ]
    for placement, of, expected in cases:
        assert of.message_seconds([100] * len(placement), placement) == expected


def test_gradients_cross_machines_where_replicas_are_apart():
    for of, expected in [
        (links(8, replicas=2), [1] * 4),
        (links(4, replicas=2), [100] * 4),
        (links(4, replicas=2, order="data_inner"), [1] * 4),
        (links(6, replicas=2, order="data_inner"), [1] * 4),
        (links(3, replicas=2, order="data_inner"), [1, 1, 100, 1]),
        (links(4, replicas=2, tensor=2, order="data_inner"), [1] * 4),
    ]:
        assert of.reduce_seconds([100] * 4, LOOP) == expected


def test_a_machine_has_what_its_ranks_have():
    amounts = [1, 10, 100, 1000]
    assert links(8, replicas=2).most_of_a_machine(amounts, LOOP) == 2222
    assert links(2).most_of_a_machine(amounts, LOOP) == 1100
    assert links(2, replicas=2, order="data_inner").most_of_a_machine(amounts, LOOP) == 2000
    assert links(4, tensor=2).most_of_a_machine(amounts, LOOP) == 2200


class Halved(Net):
    """Cannot be divided among more than two ranks."""

    def configure_model(self):
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 2:
            raise TypeError("heads are two")
        super().configure_model()


NET = (
    *("device=h100", *QUICK, f"+model._target_={__name__}.Halved", "num_microbatches=4"),
    *("data._target_=tests.cli.test_tensor_parallel_plan.Data", "tensor_parallel_size=auto"),
    *("devices=4", "num_ranks=2", "format=json", "+strategy.sharding=none"),
    "+strategy.head_weight_grad=W",
)


@pytest.mark.slow
def test_tensor_ranks_are_taken_where_they_are_fast_or_nothing_else_fits(capsys):
    found = searched(capsys, "link=10GB", base=NET)
    assert "times as long" in found["left_out"]["more than 2 tensor ranks"]
    assert sizes_of(found["layouts"][0]) == (2, 1, 2)
    fast = searched(capsys, "link=1000000GB", base=NET)
    memory = {sizes_of(each): each["device"] for each in fast["layouts"]}
    assert {*memory} == {(2, 1, 2), (2, 2, 1)}
    limit = int(1.1 * memory[2, 2, 1])
    assert limit < memory[2, 1, 2]
    divided = searched(capsys, "link=10GB", f"device_memory={limit}", base=NET)
    assert [*map(sizes_of, divided["layouts"])] == [(2, 2, 1)]
    assert divided["left_out"]["4 tensor ranks"] == "TypeError: heads are two"


@pytest.mark.slow
def test_what_would_fit_is_named(capsys):
    found = searched(capsys, *QUICK, "devices=2", "num_ranks=2")
    memory = f"device_memory={int(0.8 * found['layouts'][0]['device'])}"
    with pytest.raises(
        ScheduleError, match="any layout needs .* or more of a device, as 2 x 1 x 1 .*; use "
    ):
        searched(capsys, *QUICK, "devices=2", "num_ranks=2", memory)
