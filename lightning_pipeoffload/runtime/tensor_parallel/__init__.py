"""Layers that several ranks share, a part each."""

from .absent_ranks import fake_process_group, fake_tensor_mesh
from .collectives import gather_whole, sent_bytes, synchronous_collectives
from .hugging_face import tensor_parallel_plan
from .layers import INSTEAD, NothingDistributedError, replace_dtensors, sharding_layers
from .own_parts import sharding_without_scatter
from .shard_draws import ShardDraws
from .shard_initialization import initializing_shards
