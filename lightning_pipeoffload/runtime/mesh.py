"""Who is who among the processes: replicas of a pipeline, its ranks, and the groups of them.

Three questions have an answer of their own, and are asked here only: which *global rank* a process
is (Lightning's), which *rank* of its pipeline it is, and whether it is the *root*, which has the
last stage, computes the loss and so has the step's outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipeoffload.schedule import Schedule


class RankMesh:
    """One process's view of all processes: torch's mesh of replicas times the ranks of a pipeline.

    Four ranks whose last stage is on the last of them::

                   rank  0  1  2  3
        replica 0        3  2  1  0     <- global ranks; that of the root is the lowest

    Args:
        schedule: The schedule, which says which rank holds which stage.
        global_rank: The global rank of this process.
        timeout: How long members of a group wait for each other; None: as torch does.

    Attributes:
        mesh: Torch's DeviceMesh, with the dimensions ``data`` (one replica) and ``pipeline``.
        rank: The rank of this process in its pipeline.
        global_rank: The global rank of this process.
        global_ranks: The global rank of each rank of its pipeline.
        stage_ranks: The rank of every stage.
    """

    def __init__(
        self, schedule: Schedule, global_rank: int, timeout: timedelta | None = None
    ) -> None:
        self._timeout = timeout
        table = torch.tensor([global_ranks_of(schedule)])
        # Private: torch would make groups of all ranks of a dimension, with its own timeout; those
        # of a pipeline are made by edge, and with the user's.
        self.mesh = DeviceMesh(
            "cpu",
            table,
            mesh_dim_names=("data", "pipeline"),
            _init_backend=False,
            _rank=global_rank,
        )
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        replica, self.rank = coordinate
        self.global_rank = global_rank
        self.global_ranks: list[int] = table[replica].tolist()
        self.stage_ranks = schedule.placement

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.global_ranks)

    @property
    def root(self) -> int:
        """The global rank that has the last stage."""
        return self.global_ranks[self.stage_ranks[-1]]

    @property
    def is_root(self) -> bool:
        """Whether this process has the last stage."""
        return self.global_rank == self.root

    def make_group(self, ranks: Iterable[int] | None = None, **options: Any) -> Any:
        """Make a process group, which all processes have to do.

        Args:
            ranks: The ranks of the pipeline; None: all of them.
            **options: The options of ``torch.distributed.new_group``.
        """
        chosen = range(self.num_ranks) if ranks is None else ranks
        members = sorted(self.global_ranks[rank] for rank in chosen)
        return dist.new_group(members, self._timeout, **options)


def global_ranks_of(schedule: Schedule) -> list[int]:
    """Say which global rank each pipeline rank is: the one with the last stage is global rank 0.

    Lightning's loggers, progress bar and rank-zero code are there. In a V the last stage is on
    pipeline rank 0 already.
    """
    last = schedule.rank_of(schedule.num_stages - 1)
    if last == 0:
        return list(range(schedule.num_ranks))
    return [(last - rank) % schedule.num_ranks for rank in range(schedule.num_ranks)]
