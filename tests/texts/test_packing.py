"""Texts are packed into microbatches of about equal cost."""

import random
from itertools import chain
from math import prod

import pytest

from lightning_pipeoffload.texts.packing import (
    COSTS,
    MODES,
    check_packing,
    find_cost,
    pack,
    partition,
)


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
