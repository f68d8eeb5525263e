"""Batches as trees of tensors: number of samples, split into microbatches, merge of results."""

from .packet import Packet, ReceivedPacket
from .parts import (
    compute_microbatch_shares,
    merge_outputs,
    possible_sample_counts,
    shape_signature,
    start_checksum,
    weighted,
    weighted_or_zero,
)
from .structure import (
    BatchParts,
    BatchStructure,
    Collation,
    Samples,
    batch_size,
    refuse_unclear_list,
    tokens_in,
)
from .tree import batch_leaves, map_batch
