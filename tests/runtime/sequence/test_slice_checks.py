"""Which blocks are checked on slices in which batch."""

from torch import nn

from lightning_pipeoffload.runtime.sequence import SliceChecks


def checked_in(checks, blocks, classes):
    """Return the blocks that are checked in a batch of two microbatches."""
    found = []
    for unit in (0, 4):
        for index, block in enumerate(blocks):
            if checks.is_due(index, block, unit) and checks.is_selected(index, lambda: classes):
                found.append(index)
    return found


def test_of_alike_blocks_one_is_checked_at_a_time_and_one_that_has_changed():
    checks, blocks = SliceChecks(), [nn.Linear(1, 1) for _ in range(4)]
    found = {}
    for batch in range(1, 9):
        blocks[2].scale = batch > 4
        found[batch] = checked_in(checks, blocks, [0, 0, 1, 0])
    # 0, 1 and 3 are alike; 2 is another, which changes before the fifth.
    assert found == {1: [0, 2], 2: [1, 2], 3: [], 4: [2, 3], 5: [2], 6: [], 7: [], 8: [0, 2]}
