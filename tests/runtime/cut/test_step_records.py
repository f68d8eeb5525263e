"""Records of many shapes: the oldest are dropped, and freed; that their shapes ran is not."""

import gc
import weakref
from dataclasses import FrozenInstanceError

import pytest
import torch

from lightning_pipeoffload.runtime.cut import step_records
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import Regression, call_step, linear_blocks


def test_a_dropped_record_is_freed_and_its_shape_is_not_new_again(monkeypatch):
    monkeypatch.setattr(step_records, "_MOST_RECORDS", 2)
    pipeline = InProcessPipeline(Regression(linear_blocks(4)), build("1f1b", 2, 2), call_step)
    news = []
    for length in (3, 4, 5, 6, 3, 7, 3):
        pipeline.run(torch.randn(4, length, 4), 2)
        first, other = (rank.microbatches[0] for rank in pipeline.executors)
        assert first.is_new == other.is_new
        news.append(first.is_new)
        if length == 4:
            dropped = weakref.ref(first.record)
        del first, other
    assert news == [True, True, True, True, False, True, False]
    gc.collect()
    assert dropped() is None


def test_a_record_that_is_in_use_cannot_be_changed():
    pipeline = InProcessPipeline(Regression(linear_blocks(2)), build("1f1b", 2, 2), call_step)
    pipeline.run(torch.randn(4, 3, 4), 2)
    record = pipeline.executors[0].microbatches[0].record
    with pytest.raises(FrozenInstanceError, match="trained"):
        record.trained = set()
    with pytest.raises(FrozenInstanceError, match="training_flops of the record"):
        record.work.training_flops = 0
