"""A tied weight trains to the same bits by every plan, with what else depends on all gradients."""

import pytest

from tests.support.auto_fits import by_each, differences

PLANS = [
    {"schedule": "1f1b"},
    {"schedule": "zb_v"},
    {"schedule": "v_half", "optimizer_sync": "post_validation", "offload": "half"},
]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}}),
        (4, {"trainer": {"gradient_clip_val": 0.05}, "data_parallel_size": 2}),
    ],
    ids=["accumulated", "replicas"],
)
def test_weights_do_not_depend_on_the_plan(ranks, tmp_path, size, options):
    first, *others = ranks(size).run(by_each, size, str(tmp_path), options, PLANS)[0]
    for other in others:
        assert differences(first, other) == []
