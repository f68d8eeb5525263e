"""Steps that come to take another time: planned anew, without a trace in losses."""

import pytest

from tests.support.drifting_fits import drifting, drifting_and_not, held, longer, slow_rank, solved

LIMITED = {"schedule": "zb", "memory_limit": "100MiB"}
LONG = {**LIMITED, "num_microbatches": 8}


def plans_of(result):
    return list(dict.fromkeys(result["plans"]))


@pytest.mark.parametrize(
    ("size", "options", "trainer", "num_plans"),
    [
        # That which measures, that by its costs, and that by the later ones; on a busy machine the
        # first two may be one, as copies are measured by the clock.
        pytest.param(2, LIMITED, {}, 3, marks=pytest.mark.slow),
        pytest.param(2, {"schedule": "auto", "num_chunks": 1}, {}, 2, marks=pytest.mark.slow),
        pytest.param(2, LIMITED, {"accumulate_grad_batches": 2}, 3, marks=pytest.mark.slow),
        pytest.param(3, LONG, {"gradient_clip_val": 0.1}, 3, marks=pytest.mark.slow),
        pytest.param(2, {**LIMITED, "schedule": "zb_v"}, {}, 3, marks=pytest.mark.slow),
    ],
    ids=["named", "auto", "accumulated", "three ranks, clipped", "a V"],
)
def test_losses_are_the_same_to_the_bit_by_another_plan(ranks, size, options, trainer, num_plans):
    steps = 60 if trainer.get("accumulate_grad_batches") else 32
    changed, same = ranks(size).run(drifting_and_not, size, options, steps, trainer)[0]
    assert len(plans_of(changed)) == num_plans
    assert len(plans_of(same)) == num_plans - (options["schedule"] != "auto")
    assert changed["plans"][5] == same["plans"][5]
    assert changed["losses"] == same["losses"]
    name = changed["report"]["schedule"]
    assert name == options["schedule"] if options["schedule"] != "auto" else name != "1f1b"


def test_deterministic_training_keeps_its_plan(ranks):
    trainer = {"deterministic": True}
    found = ranks(2).run(drifting, 2, LIMITED, 32, trainer)[0]
    assert len(plans_of(found)) == 2  # that which measures, and that by its costs


def test_longer_sequences_keep_the_memory_limit_by_the_new_plan(ranks):
    limit = 12 * 2**20
    found = ranks(2).run(longer, 2, limit, 33)[0]
    before, after = plans_of(found)[-2:]
    assert "OFFLOAD" not in before
    assert "OFFLOAD" in after
    report = found["report"]
    assert max(report["peak_memory"]) <= limit
    assert report["measured"]["peak_activation_bytes"] == report["peak_memory"]


def test_a_rank_that_becomes_slow_is_named_once(ranks):
    found = ranks(2).run(slow_rank, 2, 1, {"schedule": "zb_h1"}, 60)
    (said,) = found[0]["said"]
    assert said.startswith("global rank 1 on host ")
    assert "takes it 90.00 ms where 30.00 ms are planned, 200% more" in said
    assert found[1]["said"] == []
    assert len(plans_of(found[0])) == 1


@pytest.mark.slow
def test_a_solver_is_not_disturbed_and_starts_again_with_the_new_times(ranks):
    found = ranks(2).run(solved, 2, 50)
    assert [result["started"] for result in found] == [2, 0]
    assert found[0]["report"]["schedule"] == "optpipe"


@pytest.mark.parametrize(
    ("schedule", "size"), [("zb_2p", 3), pytest.param("zb_v", 2, marks=pytest.mark.slow)]
)
def test_nobody_waits_where_votes_are_cast_and_read(ranks, tmp_path, schedule, size):
    assert ranks(size).run(held, size, str(tmp_path), schedule) == [11] * size
