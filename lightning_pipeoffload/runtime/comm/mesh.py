"""The processes of a run, as replicas of a pipeline and its ranks, and their process groups.

Three terms are defined here only: a process's *global rank* (Lightning's), its *rank* in its
pipeline, and the *root*, the process of a pipeline that holds the last stage and computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug

from lightning_pipeoffload.schedule import Schedule, device_indices

_CPU = torch.device("cpu")


class GroupLayout(NamedTuple):
    """Properties that trainers must have in common to share process groups.

    Attributes:
        num_replicas: The number of replicas.
        num_ranks: The number of ranks of each pipeline.
        num_tensor_ranks: The number of ranks of a stage.
        rank_order: Which global ranks are neighbours.
        global_rank: The global rank of this process.
        device: The device of the device groups.
        timeout: How long members of a group wait for each other; None: torch's default.
    """

    num_replicas: int
    num_ranks: int
    num_tensor_ranks: int
    rank_order: str
    global_rank: int
    device: torch.device
    timeout: timedelta | None


class ProcessGroups:
    """The process groups of one layout of ranks, which the trainers of a process share in turn.

    Groups take resources (gloo's three threads each, a device's buffers), and a trainer that has
    ended lives until Python collects it. So the groups end when a run of another layout begins, or
    any run after a failed one, whose messages may still be pending.

    Args:
        layout: The layout.
    """

    _current: ClassVar[ProcessGroups | None] = None
    _ended: ClassVar[list[Any]] = []
    _pending: ClassVar[list[Any]] = []

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout
        self._groups: dict[tuple[str, tuple[int, ...], str], Any] = {}

    @classmethod
    def for_layout(cls, layout: GroupLayout) -> ProcessGroups:
        """Return the groups of a layout; end those of any other layout."""
        groups = cls._current
        if groups is None or groups._layout != layout or not groups._exist():
            cls.retire_current()
            groups = cls._current = cls(layout)
        return groups

    @classmethod
    def retire_current(cls, has_failed: bool = False) -> None:
        """Share the current groups with no later run; :meth:`abort_ended` aborts them.

        Args:
            has_failed: Whether collectives may be pending. Then groups of gloo are kept: one that
                is freed waits for its collectives, which may need a process that keeps it.
        """
        if cls._current is None:
            return
        for (_, _, backend), group in cls._current._groups.items():
            if group is not None:
                (cls._pending if has_failed and backend == "gloo" else cls._ended).append(group)
        cls._current = None

    @classmethod
    def abort_ended(cls) -> None:
        """Abort groups that no run uses any more.

        Aborting waits for no other process. To be called when all processes have begun another run,
        so that none of them still waits for a message of an ended one, and before the first
        collective on the device, which waits for all that is queued there.
        """
        while cls._ended:
            group = cls._ended.pop()  # pending work ends with the last reference
            if _exists(group):
                # Private: the public way to end a group waits for pending collectives.
                distributed_c10d._abort_process_group(group)

    @classmethod
    def abandon_inherited(cls) -> None:
        """Leave the groups that a forked process has inherited as they are.

        To abort or free such a group would wait for its threads, which only the parent has.
        """
        cls.retire_current()
        cls._pending += cls._ended
        cls._ended.clear()

    @property
    def are_current(self) -> bool:
        """Whether the next trainer of this layout would use these groups too."""
        return ProcessGroups._current is self and self._exist()

    def get_or_create(
        self,
        use: str,
        members: tuple[int, ...],
        options: Mapping[str, Any],
        connects: bool = False,
        make_options: Callable[[], Any] | None = None,
    ) -> Any:
        """Return the group of a use and members; all processes call this in the same order.

        Args:
            use: The purpose of the group.
            members: Global ranks; the two directions of an edge are two groups.
            options: Arguments of ``torch.distributed.new_group``; the same for the same use.
            connects: Whether it runs a collective on the device when it is made.
            make_options: Makes the backend's own options, which torch writes the group into.

        Returns:
            The group; None in a process that is no member.
        """
        key = use, members, options.get("backend", "")
        if key not in self._groups:
            options = {"timeout": self._layout.timeout, **options}
            if make_options is not None:
                options["pg_options"] = make_options()
            group = dist.new_group(sorted(members), **options)
            is_member = self._layout.global_rank in members
            self._groups[key] = group if is_member else None
            if is_member and connects:
                dist.all_reduce(torch.zeros(1, device=self._layout.device), group=group)
        return self._groups[key]

    def _exist(self) -> bool:
        return all(group is None or _exists(group) for group in self._groups.values())


def _exists(group: Any) -> bool:
    # Private: nothing public says whether a group still exists.
    return group in distributed_c10d._world.pg_map


MESH_DIMENSIONS = "replicas", "pipeline_parallel", "data_parallel", "tensor_parallel"
"""The dimensions of the mesh that ``configure_model`` gets; that of data has one rank."""


class RankMesh:
    """The mesh of all processes: replicas times ranks, as one process sees it.

    Two replicas of four ranks, the last of which holds the last stage. Neighbouring global ranks
    are in one pipeline (left), or hold the same stage (``data_inner``, right)::

                   rank  0  1  2  3              rank  0  1  2  3
        replica 0        3  2  1  0                    6  4  2  0     <- global ranks; that of a
        replica 1        7  6  5  4                    7  5  3  1        root is its lowest

    Tensor ranks share the layers of a stage. With several of them, each entry of the table is a
    group of neighbouring global ranks; the first ranks of all groups in a row are one pipeline, the
    second ranks another. Two replicas of two ranks, with two tensor ranks each::

                   rank    0     1
        replica 0        2, 3  0, 1        <- pipelines 2, 0 and 3, 1
        replica 1        6, 7  4, 5

    Args:
        schedule: Defines which rank holds which stage.
        global_rank: The global rank of this process.
        timeout: How long members of a group wait for each other; None: torch's default.
        rank_order: Neighbouring global ranks are in one pipeline ("pipeline_inner"), or hold the
            same stage in different replicas ("data_inner").
        device: The device on which this rank computes.
        num_tensor_ranks: The number of processes that share a stage's layers.
        fail: Ends the run because of an error in a thread that does something; None: nothing does.

    Attributes:
        mesh: Torch's DeviceMesh of this tensor rank, with the dimensions ``data`` and ``pipeline``.
        num_replicas: The number of replicas.
        replica: The replica of this process.
        rank: The rank of this process in its pipeline.
        tensor_rank: The rank of this process among those that share its stages' layers.
        global_ranks: The global rank of each rank of its pipeline.
        stage_ranks: The rank of every stage.
    """

    def __init__(
        self,
        schedule: Schedule,
        global_rank: int,
        timeout: timedelta | None = None,
        num_replicas: int = 1,
        rank_order: str = "pipeline_inner",
        device: torch.device = _CPU,
        num_tensor_ranks: int = 1,
        fail: Callable[[BaseException, str], None] | None = None,
    ) -> None:
        self.fail = fail
        self.num_tensor_ranks = num_tensor_ranks
        self.tensor_rank = global_rank % num_tensor_ranks
        self.timeout = timeout
        self.device = device
        self.global_rank = global_rank
        self._lay_out(schedule, num_replicas, rank_order)
        self.select_process_groups()

    def _lay_out(self, schedule: Schedule, num_replicas: int, rank_order: str) -> None:
        self._rank_order = rank_order
        self._cells = assign_global_ranks(schedule.placement, num_replicas, rank_order)
        self._table = self._table_of_tensor_rank(self.tensor_rank)
        self.num_replicas = len(self._table)
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

    def _table_of_tensor_rank(self, tensor_rank: int) -> list[list[int]]:
        size = self.num_tensor_ranks
        return [[cell * size + tensor_rank for cell in row] for row in self._cells]

    def select_process_groups(self) -> None:
        """Use the process groups of this layout; end those of any other layout."""
        layout = GroupLayout(
            self.num_replicas,
            self.num_ranks,
            self.num_tensor_ranks,
            self._rank_order,
            self.global_rank,
            self.device,
            self.timeout,
        )
        self.groups = ProcessGroups.for_layout(layout)

    @property
    def is_connected(self) -> bool:
        """Whether its groups are still those that trainers of this process share."""
        return self.groups.are_current

    @property
    def num_ranks(self) -> int:
        return len(self.global_ranks)

    @property
    def num_pipelines(self) -> int:
        return self.num_replicas * self.num_tensor_ranks

    @property
    def pipeline_index(self) -> int:
        """The number of this process's pipeline, among those of all replicas."""
        return self.replica * self.num_tensor_ranks + self.tensor_rank

    @property
    def world_size(self) -> int:
        return self.num_pipelines * self.num_ranks

    @property
    def device_place(self) -> int:
        """The place of this process's device among those of its pipeline."""
        return device_indices(self.stage_ranks)[self.rank]

    def replica_of(self, global_rank: int) -> int:
        cell = global_rank // self.num_tensor_ranks
        return next(n for n, row in enumerate(self._cells) if cell in row)

    def describe_rank(self, global_rank: int) -> str:
        """Describe a process, "replica 1, stage 3"; empty where there is one pipeline."""
        if self.num_pipelines == 1:
            return ""
        replica, size = self.replica_of(global_rank), self.num_tensor_ranks
        rank = self._cells[replica].index(global_rank // size)
        stages = [str(s) for s, holder in enumerate(self.stage_ranks) if holder == rank]
        described = [f"replica {replica}"] if self.num_replicas > 1 else []
        described.append(f"stage{'s' * (len(stages) > 1)} {' and '.join(stages)}")
        described += [f"tensor rank {global_rank % size}"] if size > 1 else []
        return ", ".join(described)

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
        """The global rank of each replica's root, among its first tensor ranks."""
        return [row[self.stage_ranks[-1]] for row in self._table_of_tensor_rank(0)]

    @property
    def first_replica_ranks(self) -> list[int]:
        """The global ranks of replica 0, of its first tensor ranks, by rank."""
        return self._table_of_tensor_rank(0)[0]

    @property
    def is_root(self) -> bool:
        return self.global_rank == self.root

    @property
    def reader(self) -> int:
        """The global rank that reads the data of this process's replica."""
        return self.roots[self.replica]

    @property
    def is_reader(self) -> bool:
        return self.global_rank == self.reader

    @property
    def members_of_replica(self) -> tuple[int, ...]:
        """The global ranks of this process's replica, of all its tensor ranks."""
        return self._replicas[self.replica]

    @property
    def is_global_zero(self) -> bool:
        """Whether this process reports on the whole run: replica 0's root."""
        return self.global_rank == 0

    # Groups: all processes make them, in the same order, also those that they are not in. Of each
    # ``use`` and members there is one, which a later trainer of this layout uses too.

    def make_pipeline_group(
        self, use: str, ranks: Iterable[int] | None = None, **options: Any
    ) -> Any:
        """Return a process group in each pipeline, of ``ranks`` of it; None: of all.

        Args:
            use: The group's purpose: collectives of different groups must not overlap.
            **options: Arguments of ``torch.distributed.new_group``.

        Returns:
            The group of this process; None if it is in none.
        """
        return self._make_groups(use, self._rows(ranks), options)

    def make_replica_group(self, use: str, **options: Any) -> Any:
        """Return the group of this replica's processes; all processes of all replicas call it."""
        return self._make_groups(use, self._replicas, options)

    def make_data_group(self, use: str, **options: Any) -> Any:
        """Return a process group of this rank's counterparts in all replicas."""
        return self._make_groups(use, self._columns, options)

    def make_world_group(self, use: str, **options: Any) -> Any:
        """Return a process group of all processes."""
        return self._make_groups(use, [[rank for row in self.pipelines for rank in row]], options)

    def make_edge_group(
        self, edge: tuple[int, int], make_options: Callable[[], Any] | None = None
    ) -> Any:
        """Create the group of ``edge`` in each pipeline, on the device; return this pipeline's.

        ``make_options`` makes the backend's options of each, which torch writes the group into.
        """
        return self._make_groups("edge", self._rows(edge), {}, make_options=make_options)

    def make_device_group(self, ranks: Iterable[int] | None = None) -> Any:
        """Return a group over the device's backend of ``ranks`` of this pipeline; None: of all.

        It runs a collective when it is made: NCCL connects at the first use of a group, and waits
        for all work queued on the device.
        """
        return self._make_groups("device", self._rows(ranks), {}, connects=True)

    def make_device_data_group(self, use: str) -> Any:
        """Return the device group of this rank's counterparts; each ``use`` has its own."""
        return self._make_groups(use, self._columns, {}, connects=True)

    def make_tensor_group(self) -> Any:
        """Return the device group of the processes that share this one's layers."""
        return self._make_groups("tensor", self._tensor_rank_groups, {}, connects=True)

    def make_device_mesh(self) -> DeviceMesh:
        """Make the mesh of all processes with its groups, for ``configure_model``."""
        clear_dtensor_caches()
        alone = [(rank,) for row in self.pipelines for rank in row]
        groups = [
            self._make_groups("mesh", self._columns, {}),
            self._make_groups("mesh", self._rows(None), {}),
            self._make_groups("mesh", alone, {}),
            self.make_tensor_group(),
        ]
        shape = self.num_replicas, self.num_ranks, 1, self.num_tensor_ranks
        ranks = torch.tensor(self._tensor_rank_groups).view(shape)
        return DeviceMesh.from_group(
            groups, self.device.type, ranks, mesh_dim_names=MESH_DIMENSIONS
        )

    @property
    def _tables(self) -> list[list[list[int]]]:
        return [self._table_of_tensor_rank(rank) for rank in range(self.num_tensor_ranks)]

    @property
    def pipelines(self) -> list[list[int]]:
        """The global ranks of each pipeline, in pipeline order."""
        return [row for table in self._tables for row in table]

    @property
    def _tensor_rank_groups(self) -> list[tuple[int, ...]]:
        """The tensor ranks of each rank of each replica."""
        size = self.num_tensor_ranks
        return [tuple(range(cell * size, (cell + 1) * size)) for row in self._cells for cell in row]

    @property
    def _replicas(self) -> list[tuple[int, ...]]:
        rows = zip(*self._tables, strict=True)
        return [tuple(rank for pipeline in row for rank in pipeline) for row in rows]

    def _rows(self, ranks: Iterable[int] | None) -> list[tuple[int, ...]]:
        chosen = range(self.num_ranks) if ranks is None else [*ranks]
        return [tuple(row[rank] for rank in chosen) for row in self.pipelines]

    @property
    def _columns(self) -> list[tuple[int, ...]]:
        return [column for table in self._tables for column in zip(*table, strict=True)]

    def _make_groups(
        self,
        use: str,
        groups: Iterable[Sequence[int]],
        options: dict[str, Any],
        connects: bool = False,
        make_options: Callable[[], Any] | None = None,
    ) -> Any:
        group_of_rank = None
        for members in groups:
            group = self.groups.get_or_create(use, tuple(members), options, connects, make_options)
            group_of_rank = group if self.global_rank in members else group_of_rank
        return group_of_rank


def clear_dtensor_caches() -> None:
    """Clear torch's DTensor caches, which may hold equal meshes of ended runs."""
    # Private: DTensors are placed by the first of all meshes that are equal, whose groups may have
    # ended with an earlier run.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def assign_global_ranks(
    placement: Sequence[int], num_replicas: int, rank_order: str
) -> list[list[int]]:
    """Return the global rank of each pipeline rank of each replica.

    A pipeline's lowest global rank has the last stage, as Lightning's loggers, progress bar and
    rank-zero code are there. In a V the last stage is on pipeline rank 0 already.

    Args:
        placement: The rank of every stage.
        num_replicas: The number of replicas.
        rank_order: As of :class:`RankMesh`.

    Returns:
        Global ranks, by replica and pipeline rank. With T tensor ranks, n stands for the group of
        global ranks nT to nT + T - 1.
    """
    positions = device_indices(placement)
    num_ranks = len(positions)
    if rank_order == "data_inner":
        return [[place * num_replicas + n for place in positions] for n in range(num_replicas)]
    return [[n * num_ranks + place for place in positions] for n in range(num_replicas)]
