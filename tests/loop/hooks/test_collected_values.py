"""Hooks decide alike on all ranks by what steps have collected on some, or are refused."""

from __future__ import annotations

import pytest

from tests.support import collected

# what is set in which hook, by the module, a callback or a scheduler
AT_ENDS = (
    ("lr", "on_train_epoch_end"),
    ("weight_decay", "on_validation_epoch_end", "callback"),
    ("weight", "on_validation_epoch_end", "module", "zb_v"),
    ("attribute", "on_train_epoch_end", "callback"),
    ("lr", "epoch", "scheduler"),
)


def _fit_all():
    return [collected.fit(2, *row) for row in AT_ENDS], collected.fit_with_uses(2)


@pytest.fixture(scope="module")
def found(ranks):
    return ranks(2).run(_fit_all)


@pytest.mark.parametrize("row", AT_ENDS, ids=" ".join)
def test_at_an_epochs_end_all_ranks_have_what_one_device_has(found, row):
    expected = collected.fit(0, *row)
    for fits, _ in found:
        for mine, other in zip(fits[AT_ENDS.index(row)], expected, strict=True):
            assert mine == pytest.approx(other, rel=1e-6)  # torchmetrics counts in float32


def test_between_batches_a_use_is_refused_by_name_where_it_is_not(found):
    on_root, elsewhere = (uses for _, uses in found)
    # Which no rank has all of: refused on all, and what cannot be pickled on the others.
    assert "each of several stages has some of it" in on_root.pop("on_train_epoch_end parts")
    assert "each of several stages has some of it" in elsewhere.pop("on_train_epoch_end parts")
    assert "it cannot be pickled" in elsewhere["on_train_epoch_end made"]
    assert not [value for value in on_root.values() if isinstance(value, str)]
    assert not [hook for hook, value in elsewhere.items() if not isinstance(value, str)]
    assert elsewhere.keys() == on_root.keys() >= {f"{hook} stack" for hook in collected.BETWEEN}
    message = elsewhere["on_train_batch_end stack"]
    assert message.startswith("self.outs is not on global rank 1 between batches: the step writes")
    assert "it on global rank 0. Use self.log in the step and trainer.callback_metrics" in message
    assert elsewhere["on_validation_batch_end nested"].startswith("self.nested")
    assert elsewhere["on_train_batch_start number"].startswith("self.late")
    assert elsewhere["on_train_batch_start compute"].startswith("self.mean")
    assert "of what training_step returns, only numbers are on every rank" in elsewhere["outputs"]


def test_a_replica_has_its_own_lists_and_metrics_over_all_replicas(ranks):
    found = ranks(4).run(collected.fit_replicas)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for one, other in zip(found[0], found[2], strict=True):
        *metrics, _, own, _, _, shared = one[:8]
        assert metrics == other[:3]
        assert (own, shared) != (other[4], other[7])
        assert metrics[1] == pytest.approx(own + other[4])
