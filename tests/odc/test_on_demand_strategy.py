import pytest

from tests.support.on_demand_fits import assert_same, fit_rank, plain_fit


@pytest.mark.parametrize("counts", [(3, 1), (3, 1, 2, 0), (0, 0, 1, 4)])
def test_gradients_and_weights_are_those_of_one_process(ranks, counts):
    found = ranks(len(counts)).run(fit_rank, counts, {}, {})
    expected = plain_fit(counts)
    for rank in found:
        assert_same(rank, expected)
        assert rank["logged"]["train_loss"] == pytest.approx(expected["logged"]["train_loss"])
