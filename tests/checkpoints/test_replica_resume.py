"""A fit of replicas goes on within an epoch at another size, and from either form of checkpoint."""

from functools import partial

import pytest
import torch

from lightning_pipeoffload import load_weights
from tests.support import replica_fits

NUM_STEPS, SAVED = 7, 6  # of four in an epoch
FOLDER = {"save_distributed_checkpoint": True}


@pytest.mark.parametrize(
    ("written", "options", "read", "others"),
    [
        (2, FOLDER | {"schedule": "zb_v"}, 1, {"sharding": "optimizer"}),
        (1, {"sharding": "optimizer"}, 2, FOLDER),
    ],
)
def test_the_rest_is_that_of_the_uninterrupted_fit(ranks, tmp_path, written, options, read, others):
    saved, whole, rest = (str(tmp_path / name) for name in ("saved", "whole", "rest"))
    saving = [replica_fits.SaveAfter(SAVED, saved)]
    train = partial(replica_fits.train, trainer={"max_steps": NUM_STEPS})
    first = ranks(2 * written).run(partial(train, callbacks=saving, **options), 2, written, whole)
    second = ranks(2 * read).run(partial(train, ckpt_path=saved, **others), 2, read, rest)
    for replica in range(2):
        tokens = [
            next(each["tokens"] for each in found if each["replica"] == replica)
            for found in (first, second)
        ]
        assert tokens[1] == tokens[0][SAVED:]
    modules = [replica_fits.Net(), replica_fits.Net()]
    for module, path in zip(modules, (whole, rest), strict=True):
        load_weights(module, path)
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
