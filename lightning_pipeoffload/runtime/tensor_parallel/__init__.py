"""Layers that several ranks share, a part each."""

from .absent_ranks import absent_tensor_ranks, mesh_of_absent_ranks
from .collectives import gather_whole, sent_bytes, waiting_for_collectives
from .hugging_face import tensor_parallel_plan
from .layers import INSTEAD, NothingDistributedError, keep_local_parts, sharing_layers
from .own_parts import keeping_own_parts
from .shard_draws import ShardDraws
from .shard_initialization import initializing_shards
