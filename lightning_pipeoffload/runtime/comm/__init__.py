"""Communication between ranks: the mesh of processes, messages, sums over replicas."""

from .batch_channel import BatchChannel, ReceivedValue
from .groups import PipelineGroup
from .host_group import HostGroup
from .mesh import (
    MESH_DIMENSIONS,
    GroupLayout,
    ProcessGroups,
    RankMesh,
    assign_global_ranks,
    clear_dtensor_caches,
)
from .replicas import (
    FlatBucket,
    PendingParameters,
    PendingParametersMode,
    PersistentBuffers,
    Replicas,
    assign_owners,
    bucket_keys,
)
from .shared_bytes import OwnerLocks, allocate_shared_memory
from .sums_to_owners import SumsToOwners
from .transport import (
    MOST_MICROBATCHES,
    SMALLEST_BUFFER,
    BufferRing,
    Link,
    PeerLostError,
    ProcessGroupTransport,
    ProfiledTransport,
    Transport,
    as_bytes,
    goes_through_host,
    is_lost_peer_error,
    reporting_lost_peers,
)
