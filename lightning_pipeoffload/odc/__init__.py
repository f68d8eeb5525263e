"""On-demand communication: sharded data parallelism that synchronizes once per minibatch."""

from .on_demand_run import OnDemandRun
from .on_demand_strategy import OnDemandStrategy
from .sharding import ShardedGroup
from .transport import OnDemandTransport, SharedSums
