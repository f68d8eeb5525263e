"""The processes of a run, as replicas of a pipeline and its ranks, and their process groups.

Three terms are defined here only: a process's *global rank* (Lightning's), its *rank* in its
pipeline, and the *root*, the process of a pipeline that holds the last stage and computes the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipeoffload.schedule import Schedule


class RankMesh:
    """The mesh of all processes: replicas times ranks, as one process sees it.

    Two replicas of four ranks, the last of which holds the last stage. Neighbouring global ranks
    are in one pipeline (left), or hold the same stage (``data_inner``, right)::

                   rank  0  1  2  3              rank  0  1  2  3
        replica 0        3  2  1  0                    6  4  2  0     <- global ranks; that of a
        replica 1        7  6  5  4                    7  5  3  1        root is its lowest

    Args:
        schedule: Defines which rank holds which stage.
        timeout: How long members of a group wait for each other; None: torch's default.
        rank_order: Neighbouring global ranks are in one pipeline ("pipeline_inner"), or hold the
            same stage in different replicas ("data_inner").

    Attributes:
        mesh: Torch's DeviceMesh, with the dimensions ``data`` and ``pipeline``.
        replica: The replica of this process.
        rank: The rank of this process in its pipeline.
        global_ranks: The global rank of each rank of its pipeline.
        stage_ranks: The rank of every stage.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        schedule: Schedule,
        global_rank: int,
        timeout: timedelta | None = None,
        num_replicas: int = 1,
        rank_order: str = "pipeline_inner",
    ) -> None:
        self.timeout = timeout
        self.global_rank = global_rank
        self._device_groups: dict[Hashable, Any] = {}
        self._all_groups: list[Any] = []
        weakref.finalize(self, _abandon, self._all_groups).atexit = False
        self._lay_out(schedule, num_replicas, rank_order)

    def _lay_out(self, schedule: Schedule, num_replicas: int, rank_order: str) -> None:
        self._rank_order = rank_order
        self._table = _table_of(schedule, num_replicas, rank_order)
        # Private: torch would make groups of all ranks of a dimension, with its own timeout; those
        # of a pipeline are made by edge, and with the user's.
        self.mesh = DeviceMesh(
            "cpu",
            torch.tensor(self._table),
            mesh_dim_names=("data", "pipeline"),
            _init_backend=False,
            _rank=self.global_rank,
        )
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        self.replica, self.rank = coordinate
        self.global_ranks = self._table[self.replica]
        self.stage_ranks = schedule.placement

    @property
    def num_ranks(self) -> int:
        return len(self.global_ranks)

    @property
    def num_replicas(self) -> int:
        return len(self._table)

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.num_ranks

    def replica_of(self, global_rank: int) -> int:
        return next(n for n, row in enumerate(self._table) if global_rank in row)

    def place_of(self, global_rank: int) -> str:
        """Describe a process, "replica 1, stage 3"; empty where there is one replica."""
        if self.num_replicas == 1:
            return ""
        replica = self.replica_of(global_rank)
        rank = self._table[replica].index(global_rank)
        stages = [str(s) for s, holder in enumerate(self.stage_ranks) if holder == rank]
        return f"replica {replica}, stage{'s' * (len(stages) > 1)} {' and '.join(stages)}"

    @property
    def counterparts(self) -> list[int]:
        """The global ranks of this rank in each replica."""
        return [row[self.rank] for row in self._table]

    @property
    def root(self) -> int:
        """The global rank that has this pipeline's last stage."""
        return self.global_ranks[self.stage_ranks[-1]]

    @property
    def roots(self) -> list[int]:
        """The root of each replica."""
        return [row[self.stage_ranks[-1]] for row in self._table]

    @property
    def first_replica(self) -> list[int]:
        """The global rank of each rank of replica 0."""
        return self._table[0]

    @property
    def is_root(self) -> bool:
        return self.global_rank == self.root

    @property
    def reports(self) -> bool:
        """Whether this process reports on the whole run: replica 0's root."""
        return self.global_rank == 0

    # Groups: all processes make them, in the same order, also those that they are not in

    def make_group(self, ranks: Iterable[int] | None = None, **options: Any) -> Any:
        """Make a process group in each replica, of ``ranks`` of the pipeline; None: of all.

        Args:
            **options: Arguments of ``torch.distributed.new_group``.

        Returns:
            The group of this process; None if it is in none.
        """
        return self._make_groups(self._rows(ranks), options)

    def make_data_group(self, **options: Any) -> Any:
        """Make a process group of each rank's counterparts in all replicas; return this rank's."""
        return self._make_groups(self._columns, options)

    def make_world_group(self, **options: Any) -> Any:
        """Make a process group of all processes."""
        return self._make_groups([[rank for row in self._table for rank in row]], options)

    def edge_group(
        self, edge: tuple[int, int], make_options: Callable[[], Any] | None = None
    ) -> Any:
        """Create the group of ``edge`` in each replica, on the device; return this replica's.

        ``make_options`` makes the backend's options of each, which torch writes the group into.
        """
        return self._device_group("edge", self._rows(edge), make_options, connects=False)

    def device_group(self, ranks: Iterable[int] | None = None) -> Any:
        """Return a group over the device's backend of ``ranks`` of this replica; None: of all.

        It is made once, and runs a collective then: NCCL connects at the first use of a group, and
        waits for all work queued on the device.
        """
        return self._device_group("", self._rows(ranks))

    def device_data_group(self, use: str) -> Any:
        """Return the device group of this rank's counterparts; each ``use`` has its own."""
        return self._device_group(use, self._columns)

    def abort_device_groups(self) -> None:
        """Abort the device groups: their pending collectives would wait for each other for ever."""
        for group in self._device_groups.values():
            if group is not None:
                # Private: the public way to end a group waits for pending collectives.
                distributed_c10d._abort_process_group(group)
                self._all_groups.remove(group)  # pending work ends with the last reference
        self._device_groups.clear()

    def _rows(self, ranks: Iterable[int] | None) -> list[list[int]]:
        chosen = range(self.num_ranks) if ranks is None else [*ranks]
        return [[row[rank] for rank in chosen] for row in self._table]

    @property
    def _columns(self) -> list[tuple[int, ...]]:
        return [*zip(*self._table, strict=True)]

    def _device_group(
        self,
        use: str,
        groups: Iterable[Sequence[int]],
        make_options: Callable[[], Any] | None = None,
        connects: bool = True,
    ) -> Any:
        key = use, tuple(map(tuple, groups))
        if key not in self._device_groups:
            group = self._device_groups[key] = self._make_groups(key[1], {}, make_options)
            if group is not None and connects:  # the transport connects its edges itself
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return self._device_groups[key]

    def _make_groups(
        self,
        groups: Iterable[Sequence[int]],
        options: dict[str, Any],
        make_options: Callable[[], Any] | None = None,
    ) -> Any:
        found = None
        for members in groups:
            if make_options is not None:
                options = {**options, "pg_options": make_options()}
            group = dist.new_group(sorted(members), **{"timeout": self.timeout, **options})
            if self.global_rank in members:
                found = group
                self._all_groups.append(group)
        return found


# The groups of runs whose mesh was collected: of gloo with three threads each, of a device perhaps
# with a receive that waits for ever.
_abandoned: list[Any] = []


def _abandon(groups: list[Any]) -> None:
    _abandoned.extend(groups)


def abort_abandoned_groups() -> None:
    """Free the groups of ended runs, which nothing in this process can use any more.

    Aborting waits for no other process. To be called when all processes have begun another run, so
    that none of them still waits for a message of an ended one, and before the first collective on
    the device, which waits for all that is queued there.
    """
    while _abandoned:
        group = _abandoned.pop()
        # Private: nothing public says whether a group still exists.
        if group in distributed_c10d._world.pg_map:
            distributed_c10d._abort_process_group(group)


def _table_of(schedule: Schedule, num_replicas: int, rank_order: str) -> list[list[int]]:
    """Return the global rank of each pipeline rank of each replica.

    A pipeline's lowest global rank has the last stage, as Lightning's loggers, progress bar and
    rank-zero code are there. In a V the last stage is on pipeline rank 0 already.
    """
    num_ranks = schedule.num_ranks
    last = schedule.rank_of(schedule.num_stages - 1)
    positions = [(last - rank) % num_ranks if last else rank for rank in range(num_ranks)]
    if rank_order == "data_inner":
        return [[place * num_replicas + n for place in positions] for n in range(num_replicas)]
    return [[n * num_ranks + place for place in positions] for n in range(num_replicas)]
