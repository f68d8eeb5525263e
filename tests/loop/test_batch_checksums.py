import torch

from lightning_pipeoffload.loop.batch_checksums import BatchChecksums
from lightning_pipeoffload.runtime.microbatch import start_checksum

FIRST, SECOND = torch.ones(2), torch.zeros(2)


def test_a_batch_of_the_host_is_known_at_once():
    checksums = BatchChecksums(are_late=False)
    assert checksums.see(FIRST, "first") == (start_checksum(FIRST)(), "first")
    assert checksums.see_last() == (0, "nothing")


def test_a_batch_of_the_device_is_known_with_the_next():
    checksums = BatchChecksums(are_late=True)
    assert checksums.see(FIRST, "first") == (0, "nothing")
    assert checksums.see(SECOND, "second") == (start_checksum(FIRST)(), "first")
    assert checksums.see_last() == (start_checksum(SECOND)(), "second")
    assert checksums.see_last() == (0, "nothing")


def test_a_batch_is_known_as_it_was_before_the_step_wrote_it():
    batch, checksums = FIRST.clone(), BatchChecksums(are_late=True)
    checksums.see(batch, "it")
    batch.zero_()
    assert checksums.see_last()[0] == start_checksum(FIRST)()
