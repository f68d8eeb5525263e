"""Communication between ranks: the mesh of processes, messages, sums over replicas."""

from .batch_channel import BatchChannel, Received
from .groups import PipelineGroup
from .host_group import HostGroup
from .mesh import MESH_DIMENSIONS, GroupLayout, ProcessGroups, RankMesh, cells_of, forget_meshes
from .replicas import (
    Bundle,
    PendingParameters,
    Replicas,
    SavedBuffers,
    WaitingMode,
    in_buckets,
    share_out,
)
from .shared_bytes import OwnerLocks, share_bytes
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
    reporting_lost_peers,
    says_peer_lost,
)
