"""The main road: a first fit of any batch size on any number of devices, killed and resumed."""

from itertools import combinations, product

import pytest

from tests.generated.choices import plain
from tests.generated.verdict import judge_choices
from tests.support.pairs import slow

ROAD = {"entry": "resume_in_epoch", "short_last": True, "shape": "dict", "validation": "metric"}
AXES = [
    [{"batch_size": size} for size in (1, 2, 3, 4, 5, 8)],
    [{"devices": number} for number in (2, 3, 1)],
    [
        {"schedule": "auto"},
        {"schedule": "zb_h1"},
        {"schedule": "zb_v"},
        {"schedule": "auto", "option": "memory_limit"},
    ],
    [
        {},
        {"input": "tokens_tied"},
        {"block": "batchnorm"},
        {"block": "dropout"},
        {"model": "gpt2", "input": "tokens"},
    ],
    [{"package": "lightning"}, {"package": "pytorch_lightning"}],
]


def rows():
    """Return rows in which each pair of two axes' values meets, those with most new pairs first."""
    places = list(product(*(range(len(axis)) for axis in AXES)))
    missing = {pair for place in places for pair in _pairs(place)}
    while missing:
        best = max(places, key=lambda place: len(missing & _pairs(place)))
        missing -= _pairs(best)
        yield {
            name: value
            for axis, i in zip(AXES, best, strict=True)
            for name, value in axis[i].items()
        }


def _pairs(place):
    return set(combinations(enumerate(place), 2))


def _rows_of_both_runs():
    """Rows that find least are slow, and those whose many candidates take longest."""
    for number, row in enumerate(rows()):
        is_long = ("option" in row or "model" in row) and row["devices"] == 3
        yield slow(row) if is_long or number >= 8 else row


@pytest.mark.parametrize(
    "row", list(_rows_of_both_runs()), ids=lambda row: "-".join(map(str, row.values()))
)
def test_a_first_fit_is_killed_and_resumed(pools, row):
    verdict = judge_choices({**plain(), **ROAD, **row}, pools)
    assert verdict.outcome == "equal", "\n".join(verdict.lines[-30:])
