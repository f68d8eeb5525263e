"""What the strategy's arguments choose, and the message of each that cannot be."""

from datetime import timedelta

import pytest
from lightning import Trainer

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.planning.limits import parse_limits
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import Schedule, ScheduleError, build, lower

BAD_ARGUMENTS = {
    "rank_order": ("inner", 'rank_order must be "pipeline_inner" .* or "data_inner" '),
    "pipeline_parallel_size": (0, 'pipeline_parallel_size must be "auto" or a positive int, not 0'),
    "tensor_parallel_size": (0, "tensor_parallel_size must be a positive int, not 0"),
    "num_microbatches": ("many", "num_microbatches must be \"auto\" or a positive int, not 'many'"),
    "num_sequence_slices": (0, "num_sequence_slices must be a positive int, not 0"),
    "num_chunks": (1.5, 'num_chunks must be "auto" or a positive int, not 1.5'),
    "schedule": ("1f2b", "schedule '1f2b' does not exist; use .*, auto, the path of a .csv"),
    "blocks": (["a.*", 1], r"or a list of patterns of its blocks' names, not \['a.\*', 1\]"),
    "split": ("evenly", 'split must be "auto", "even" or a list of block counts, not \'evenly\''),
    "offload": (1.5, r"offload \(1.5\) must be none, half, full, auto, or a share"),
    "head_weight_grad": ("BW", 'head_weight_grad must be "W" .* or "B" .* or "auto" .* not \'BW\''),
    "recompute": ("yes", 'recompute must be "none", "cheap" .* or "full" .*, not \'yes\''),
    "optimizer_offload": (1, "optimizer_offload must be True or False, not 1"),
    "master_weights": ("float64", "master_weights must be \"float32\" or None, not 'float64'"),
    "gradient_accumulation_fusion": (None, 'must be "auto", True or False, not None'),
    "derive_lengths": ("auto", "must be True or False, not 'auto'"),
    "sharding": ("gradients", "sharding must be .*, not 'gradients'"),
    "solver_seconds": (-1, "solver_seconds .* must be a number from 0 on"),
    "plan_cache": (5, "plan_cache must be the path of a folder, or None, not 5"),
    "memory_limit": ("10", "memory_limit='10' is 10 bytes; did you mean \"10GiB\""),
    "host_memory_limit": (0, "host_memory_limit=0 is no amount of memory; use bytes"),
    "microbatch_weight": ("words", "or a callable of the microbatch, not 'words'"),
    "save_distributed_checkpoint": ("yes", "must be True or False, not 'yes'"),
    "process_group_backend": ("glo", "'glo' is not there in this torch.distributed; leave"),
    "timeout": (60, "timeout must be a positive datetime.timedelta, .* not 60"),
}
ALSO_BAD = [
    ("num_microbatches", True),
    ("num_microbatches", 0),
    ("schedule", 3),
    ("schedule", lambda num_ranks: None),
    ("blocks", []),
    ("blocks", ""),
    ("split", [4.0, 4.0]),
    ("split", ["4", "4"]),
    ("split", 4),
    ("process_group_backend", "cpu:gloo,cuda:ncc"),
    ("timeout", timedelta(0)),
    ("master_weights", True),
    ("memory_limit", "lots"),
    ("memory_limit", []),
    ("memory_limit", [1 << 30, 0.5]),
    ("host_memory_limit", {"0": "8GiB"}),
]


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused(name):
    value, message = BAD_ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        PipeOffloadStrategy(**{name: value})


LISTS = [
    ({}, 4, r"\['8GiB', '8GiB', '4GiB'\] has 3 entries; write 4, one for each device"),
    (
        {"data_parallel_size": 2},
        4,
        ".* has 3 entries; write 4, .*, or 2, one for each of a replica",
    ),
]


@pytest.mark.parametrize("name", ["memory_limit", "host_memory_limit"])
@pytest.mark.parametrize(("options", "world_size", "message"), LISTS)
def test_a_list_of_another_length_is_refused(name, options, world_size, message):
    settings = PipelineSettings(**{name: ["8GiB", "8GiB", "4GiB"]}, **options)
    with pytest.raises(ValueError, match=f"{name}={message}"):
        settings.check_world(world_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": ["8GiB", -5]}, r"memory_limit\[1\]=-5 is no amount of memory; use bytes"),
        (
            {"memory_limit": ["8GiB", "4GiB"], "tensor_parallel_size": 2},
            "is a list, and tensor_parallel_size=2: .* write one number for all",
        ),
    ],
)
def test_a_list_that_cannot_be_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        PipeOffloadStrategy(**options)


@pytest.mark.parametrize(
    ("value", "order", "limits"),
    [
        (None, "pipeline_inner", None),
        (4096, "pipeline_inner", [4096, 4096]),
        ([4096, 2048], "pipeline_inner", [4096, 2048]),
        ([4096, 2048, 8192, 1024], "pipeline_inner", [4096, 1024]),
        ([4096, 2048, 8192, 1024], "data_inner", [2048, 1024]),
    ],
)
def test_limits_are_by_place_and_of_replicas_the_least(value, order, limits):
    assert parse_limits(value, "memory_limit", 2, order) == limits
    settings = PipelineSettings(memory_limit=value, rank_order=order, data_parallel_size=2)
    settings.check_world(4)
    assert settings.device_limits(2) == limits


@pytest.mark.parametrize(("name", "value"), ALSO_BAD)
def test_other_bad_arguments_are_refused_as_well(name, value):
    with pytest.raises(ValueError, match=f"{name}( must|=)"):
        PipeOffloadStrategy(**{name: value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("zbh1", "zb_h1"), ("note_book", "notebook"), ("interleaved", "interleaved")],
)
def test_an_unknown_name_of_a_strategy_is_refused_with_ours(name, meant):
    with pytest.raises(ValueError, match=f"did you mean .pipeoffload_{meant}.*, v_half"):
        Trainer(strategy=f"pipeoffload_{name}")
    with pytest.raises(ValueError, match="Example choices: auto, ddp"):
        Trainer(strategy="dpp")


@pytest.mark.parametrize(
    ("ranks", "replicas", "found"),
    [
        ("auto", 1, (1, 4)),
        (4, 1, (1, 4)),
        ("auto", "auto", (1, 4)),
        (2, "auto", (2, 2)),
        ("auto", 2, (2, 2)),
        (1, 4, (4, 1)),
    ],
)
def test_replicas_and_ranks_of_four_devices(ranks, replicas, found):
    settings = PipelineSettings(pipeline_parallel_size=ranks, data_parallel_size=replicas)
    assert (settings.num_replicas(4), settings.num_ranks(4)) == found


@pytest.mark.parametrize(
    ("ranks", "replicas", "found"), [("auto", 1, (1, 4)), (2, "auto", (2, 2)), (4, 1, (1, 4))]
)
def test_replicas_and_ranks_of_eight_devices_that_share_layers_by_two(ranks, replicas, found):
    sizes = {"pipeline_parallel_size": ranks, "data_parallel_size": replicas}
    settings = PipelineSettings(**sizes, tensor_parallel_size=2)
    assert (settings.num_replicas(8), settings.num_ranks(8)) == found
    with pytest.raises(ValueError, match=r"times tensor_parallel_size \(2\); use"):
        settings.num_ranks(9)


NOT_OF_TENSOR_RANKS = {
    "optimizer_sync": "post_validation",
    "num_sequence_slices": 2,
}


@pytest.mark.parametrize("name", NOT_OF_TENSOR_RANKS)
def test_what_is_not_built_with_tensor_ranks_is_refused(name):
    options = {name: NOT_OF_TENSOR_RANKS[name]}
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=2.*{name}|{name}.*_size=2"):
        PipeOffloadStrategy(tensor_parallel_size=2, **options)


@pytest.mark.parametrize(
    ("ranks", "replicas", "devices", "use"),
    [
        (2, 1, 3, "devices=2 or pipeline_parallel_size=3"),
        (2, 1, 4, "devices=2 or pipeline_parallel_size=4 or data_parallel_size=2"),
        ("auto", 4, 6, "devices=4 or data_parallel_size=6"),
        (3, 2, 4, "devices=6 or pipeline_parallel_size=2"),
    ],
)
def test_devices_that_make_no_pipelines_are_refused(ranks, replicas, devices, use):
    settings = PipelineSettings(pipeline_parallel_size=ranks, data_parallel_size=replicas)
    with pytest.raises(ValueError, match=rf"^devices \({devices}\) are not .*; use {use}$"):
        settings.num_ranks(devices)
    strategy = PipeOffloadStrategy(pipeline_parallel_size=ranks, data_parallel_size=replicas)
    with pytest.raises(ValueError, match=r"are not pipeline_parallel_size .* times data_parallel"):
        Trainer(accelerator="cpu", devices=devices, strategy=strategy)  # starts no processes


@pytest.mark.parametrize(
    ("options", "num_ranks", "samples", "expected"),
    [
        *(({}, 2, *row) for row in [(8, 4), (12, 4), (10, 5), (1_000_003, 1)]),  # a prime
        *(({}, 4, *row) for row in [(64, 8), (6, 6), (7, 7)]),
        ({}, 1, 1, 1),
        *(({"schedule": "interleaved_1f1b"}, 4, *row) for row in [(24, 8), (36, 12), (4, 4)]),
        ({"num_microbatches": 3}, 4, 6, 3),
        ({"schedule": build("1f1b", 2, 6)}, 2, 12, 6),
    ],
)
def test_the_number_of_microbatches_is_chosen(options, num_ranks, samples, expected):
    settings = PipelineSettings(**{"schedule": "zb_h1", **options})
    assert settings.choose_num_microbatches(num_ranks, samples) == expected


@pytest.mark.parametrize(("num_ranks", "samples", "expected"), [(1, 2, 1), (2, 4, 2), (2, 1, 1)])
def test_as_many_microbatches_as_have_enough_samples(num_ranks, samples, expected):
    settings = PipelineSettings(schedule="zb_h1")
    assert settings.choose_num_microbatches(num_ranks, samples, least_samples=2) == expected


@pytest.mark.parametrize(
    ("options", "num_ranks", "samples", "message"),
    [
        ({"num_microbatches": 4}, 2, 6, "batch of 6 samples cannot be cut into 4 equal microb"),
        (
            {"schedule": build("1f1b", 2, 4)},
            *(2, 6, "batch of 6 samples cannot be cut into 4 equal microb"),
        ),
        (
            {"schedule": "interleaved_1f1b"},
            *(4, 7, "batch of 7 samples cannot be cut .* interleaved_1f1b on 4"),
        ),
    ],
)
def test_a_first_batch_that_cannot_be_cut_is_refused(options, num_ranks, samples, message):
    with pytest.raises(ValueError, match=message):
        PipelineSettings(**options).choose_num_microbatches(num_ranks, samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b"}, "num_sequence_slices .2. must be 1 for 1f1b, .* schedule=seq_1f1b"),
        ({"schedule": build("seq_zb", 2, 4)}, "has 1 slices of each sequence; set num_seq.*=1"),
        ({"schedule": "optpipe"}, "is not planned by a solver; leave out schedule='optpipe'"),
    ],
)
def test_slices_of_sequences_need_a_schedule_of_slices(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineSettings(num_sequence_slices=2, **options).make_schedule(2, 4)


def test_a_schedule_is_a_name_a_function_or_a_file(tmp_path):
    assert PipelineSettings().make_schedule(2, 4) == build("zb_h1", 2, 4)
    settings = PipelineSettings(schedule="interleaved_1f1b", num_chunks=3)
    assert settings.make_schedule(2, 4).num_stages == 6
    by_hand = PipelineSettings(schedule=lambda p, m: build("gpipe", p, m))
    assert by_hand.make_schedule(2, 4) == build("gpipe", 2, 4)
    path = tmp_path / "mine.csv"
    build("zb_h2", 2, 6).to_csv(path)
    for schedule in (path, str(path)):
        settings = PipelineSettings(schedule=schedule)
        assert settings.choose_num_microbatches(2, 6) == 6
        assert settings.make_schedule(2, 6) == build("zb_h2", 2, 6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,0B0 0REDUCE0\n1F0,1B0", "rank 1, 1BW0: other stages have REDUCE"),
        ("0F0,0B0 0REDUCE0\n1F0,1B0 1REDUCE0", "schedule mine has 0REDUCE0, which is put in when"),
        ("0F0\n1F0", "schedule mine has no backward, and trains nothing; give each stage BW"),
        ("0F0 0SEND_F0,0B0\n1F0,1B0", "rank 0, 0F0: another rank needs its result; add 1RECV_F0"),
    ],
)
def test_a_file_whose_actions_cannot_run_is_refused(tmp_path, rows, message):
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    with pytest.raises(ScheduleError, match=message):
        PipelineSettings(schedule=path).make_schedule(2, 1)


IMPOSSIBLE = [
    (
        PipelineSettings(schedule=lower(build("1f1b", 2, 4))),
        2,
        4,
        "has 0SEND_F0, which is put in when it is lowered; give it as it was before",
    ),
    (PipelineSettings(schedule="interleaved_1f1b"), 4, 6, r"num_microbatches \(6\) must be a mult"),
    (PipelineSettings(schedule="1f1b", num_chunks=2), 2, 4, r"num_chunks \(2\) must be 1 for 1f1b"),
    (PipelineSettings(schedule=build("1f1b", 2, 6)), 4, 6, "is for 2 ranks and 6 micro.* has 4"),
    (PipelineSettings(schedule=build("1f1b", 2, 6)), 2, 4, "2 ranks and 6 .* run has 2 and 4: set"),
    (PipelineSettings(schedule=lambda p, m: build("1f1b", p, 2 * m)), 2, 4, "2 ranks and 8 microb"),
    (PipelineSettings(schedule=lambda p, m: None), 2, 4, "returned None for 2 ranks .* a Schedule"),
]


@pytest.mark.parametrize(("settings", "num_ranks", "num_microbatches", "message"), IMPOSSIBLE)
def test_a_schedule_that_cannot_be_is_refused(settings, num_ranks, num_microbatches, message):
    with pytest.raises(ScheduleError, match=message):
        settings.make_schedule(num_ranks, num_microbatches)


@pytest.mark.parametrize(
    ("options", "num_microbatches"),
    [({}, 8), ({"num_microbatches": 6}, 6), ({"schedule": build("1f1b", 4, 5)}, 5)],
)
def test_a_schedule_before_the_batch_is_known(options, num_microbatches):
    schedule = PipelineSettings(**options).provisional_schedule(4)
    assert isinstance(schedule, Schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (4, num_microbatches)


@pytest.mark.parametrize(
    ("sharding", "num_replicas", "num_optimizer_shards"),
    [("none", 4, 1), ("optimizer", 4, 4), ("optimizer", 1, 1)],
)
def test_how_many_replicas_share_out_the_optimizer(sharding, num_replicas, num_optimizer_shards):
    assert (
        PipelineSettings(sharding=sharding).num_optimizer_shards(num_replicas)
        == num_optimizer_shards
    )


def test_more_microbatches_than_can_be_told_apart_are_refused_before_a_plan_is_built():
    with pytest.raises(ValueError, match=r"num_microbatches \(1000000\) is more than 4096"):
        PipeOffloadStrategy(num_microbatches=10**6)


def test_optpipe_needs_its_extra_and_plans_its_own_offload(monkeypatch):
    with pytest.raises(ValueError, match="optpipe' plans what it offloads"):
        PipelineSettings(schedule="optpipe", offload="half")
    monkeypatch.setattr(
        "lightning_pipeoffload.schedule.solver.plan_model.find_spec", lambda name: None
    )
    with pytest.raises(ValueError, match=r"pip install 'lightning-pipeoffload\[solver\]'"):
        PipeOffloadStrategy(schedule="optpipe")
