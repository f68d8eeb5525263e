"""A microbatch that is larger than any planned for: the plan is made anew, and the limit holds."""

import pytest

from tests.support.outgrown_fits import fit

LIMIT = 12 * 2**20
SHORT, LONG = 256, 1024
LIMITED = {"schedule": "zb", "memory_limit": LIMIT}


def plans_of(result):
    return list(dict.fromkeys(result["plans"]))


def test_longer_sequences_keep_the_memory_limit_by_the_new_plan(ranks):
    found = ranks(2).run(fit, 2, [SHORT] * 6 + [LONG] * 6, LIMITED)[0]
    before, after = plans_of(found)[-2:]
    assert found["plans"][6] == before
    assert found["plans"].index(after) in (8, 9)  # every other batch is counted, and read one later
    report = found["report"]
    assert max(report["peak_memory"]) <= LIMIT
    assert report["measured"]["peak_activation_bytes"] == report["peak_memory"]


def test_one_long_microbatch_among_short_ones_counts(ranks):
    lengths = [SHORT] * 4 + [LONG] + [SHORT] * 4
    found = ranks(2).run(fit, 2, lengths, LIMITED)[0]
    assert found["plans"][-1] != found["plans"][4]
    assert max(found["report"]["peak_memory"]) <= LIMIT


@pytest.mark.parametrize("options", [{"memory_limit": "100MiB"}, {}], ids=["room", "no limit"])
def test_a_plan_that_keeps_its_limit_stays(ranks, options):
    options = {"schedule": "zb", **options}
    found = ranks(2).run(fit, 2, [SHORT] * 5 + [LONG] * 4, options)[0]
    assert len(set(found["plans"][3:])) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"schedule": "auto", "num_chunks": 1, "memory_limit": LIMIT // 2}),
        (3, {"num_microbatches": 8, "memory_limit": LIMIT // 2}),
        (2, {"schedule": "zb_v"}),
    ],
    ids=["auto", "three ranks", "a V"],
)
def test_losses_are_the_same_to_the_bit_by_another_plan(ranks, size, options):
    lengths = [SHORT] * 5 + [LONG] * 5
    changed = ranks(size).run(fit, size, lengths, {**LIMITED, **options})[0]
    same = ranks(size).run(fit, size, lengths, {**LIMITED, **options, "memory_limit": "1GiB"})[0]
    assert changed["plans"][-1] != same["plans"][-1]
    assert changed["losses"] == same["losses"]
