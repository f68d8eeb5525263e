"""Texts are shared out over ranks by their cost, and read once."""

import random
from itertools import chain
from math import prod

import pytest

from lightning_pipeoffload.cli.minibatch_balance import draw_lengths
from lightning_pipeoffload.odc.balance import balances
from lightning_pipeoffload.odc.packing import (
    COSTS,
    MODES,
    check_packing,
    find_cost,
    pack,
    partition,
)

LONGEST = 65536


def speedups(samples_per_rank, cost, minibatches=40, num_ranks=8):
    texts = num_ranks * samples_per_rank * minibatches
    lengths = draw_lengths(texts, 16500, 0.8, LONGEST, seed=1)
    found = balances(lengths, num_ranks, samples_per_rank, LONGEST, COSTS[cost])
    return {(one.communication, one.mode): one for one in found}


@pytest.mark.parametrize(
    ("samples", "least", "cost"), [(4, 1.20, "1.5b"), (4, 1.20, "7b"), (8, 1.25, "1.5b")]
)
def test_on_demand_gains_with_more_texts_than_one_each(samples, least, cost):
    found = speedups(1, cost)
    assert found["on demand", "lb_mini"].speedup == pytest.approx(1.0, abs=0.01)
    found = speedups(samples, cost, 64 // samples)
    assert found["on demand", "lb_mini"].speedup >= least
    assert found["on demand", "lb_mini"].speedup >= found["on demand", "lb_micro"].speedup
    assert found["on demand", "lb_mini"].idle < found["collective", "lb_micro"].idle


def test_lb_mini_is_never_below_lb_micro_in_any_minibatch():
    draws = random.Random(3)
    for _ in range(60):
        ranks, samples = draws.randint(1, 9), draws.randint(1, 6)
        lengths = draw_lengths(ranks * samples, 900, 1.0, 8000, draws.randrange(1000))
        found = balances(lengths, ranks, samples, 8000, draws.choice(list(COSTS.values())))
        by_mode = {one.mode: one.time for one in found if one.communication == "on demand"}
        assert by_mode["lb_mini"] <= by_mode["lb_micro"] * (1 + 1e-12)
        assert all(-1e-12 <= one.idle < 1 for one in found)


def test_a_partition_of_ten_things_is_the_best_one():
    def heaviest(parts, costs):
        return max(sum(costs[i] for i in part) for part in parts)

    draws = random.Random(0)
    worse = []
    for _ in range(20):
        costs = [draws.randint(1, 50) for _ in range(8)]
        best = min(
            max(
                sum(c for i, c in enumerate(costs) if code // 3**i % 3 == part) for part in range(3)
            )
            for code in range(3**8)
        )
        worse.append(heaviest(partition(costs, 3), costs) / best)
    assert prod(worse) ** (1 / 20) < 1.03


@pytest.mark.parametrize("mode", MODES)
def test_every_text_is_in_one_microbatch_that_fits(mode):
    draws = random.Random(mode)
    for _ in range(40):
        ranks, limit = draws.randint(1, 5), draws.randint(50, 200)
        lengths = [draws.randint(1, limit) for _ in range(draws.randint(0, 20))]
        shares = pack(lengths, ranks, limit, COSTS["1.5b"], mode)
        assert len(shares) == ranks
        microbatches = list(chain.from_iterable(shares))
        assert sorted(chain.from_iterable(microbatches)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in part) <= limit for part in microbatches)
        if mode == "lb_micro":
            assert len({len(share) for share in shares}) == 1
            sizes = [sum(map(len, share)) for share in shares]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("lengths", "mode", "message"),
    [
        ([5, 11], "lb_mini", "text 1 has 11 tokens, and max_tokens=10"),
        ([0], "lb_mini", "text 0 has 0 tokens"),
        ([5], "sorted", "mode='sorted' must be one of lb_mini, lb_micro, local_sort"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths, mode, message):
    with pytest.raises(ValueError, match=message):
        check_packing(lengths, 10, mode)


def test_a_cost_is_a_name_or_a_function():
    assert find_cost(len) is len
    with pytest.raises(ValueError, match=r"cost='3b' must be one of tokens, 1\.5b, 7b"):
        find_cost("3b")


def test_too_few_texts_are_refused():
    with pytest.raises(ValueError, match="3 texts make no minibatch of 2 ranks with 2 each"):
        balances([1, 2, 3], 2, 2, 10, COSTS["tokens"])
