"""Layers that several ranks share, a part each."""

from .absent_ranks import absent_tensor_ranks, mesh_of_absent_ranks
from .collectives import gather_whole, install_collectives, remove_collectives, sent_bytes
from .hugging_face import tensor_parallel_plan
from .layers import INSTEAD, NothingDistributedError, keep_local_parts, sharing_layers
from .own_parts import keeping_own_parts
from .shard_draws import ShardDraws
from .shard_initialization import install_shard_initialization, remove_shard_initialization
