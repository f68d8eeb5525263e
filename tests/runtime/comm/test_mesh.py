"""Who is who: pipeline ranks, global ranks and the root, by the placement of the stages."""

import pytest
import torch.distributed as dist

from lightning_pipeoffload.runtime.comm import ProcessGroups, RankMesh
from lightning_pipeoffload.schedule import build


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "global_ranks"),
    [("zb_h1", 4, [3, 2, 1, 0]), ("interleaved_1f1b", 2, [1, 0]), ("zb_v", 3, [0, 1, 2]),
     ("gpipe", 1, [0])],
)  # fmt: skip
def test_the_last_stage_is_on_global_rank_0(schedule, num_ranks, global_ranks):
    plan = build(schedule, num_ranks, 2 * num_ranks)
    for rank, global_rank in enumerate(global_ranks):
        mesh = RankMesh(plan, global_rank)
        assert mesh.global_ranks == global_ranks
        assert (mesh.rank, mesh.num_ranks) == (rank, num_ranks)
        assert (mesh.root, mesh.is_root) == (0, global_rank == 0)
        assert mesh.stage_ranks[-1] == global_ranks.index(0)


@pytest.mark.parametrize(
    ("schedule", "order", "table"),
    [
        ("1f1b", "pipeline_inner", [[2, 1, 0], [5, 4, 3]]),
        ("1f1b", "data_inner", [[4, 2, 0], [5, 3, 1]]),
        ("zb_v", "pipeline_inner", [[0, 1, 2], [3, 4, 5]]),
        ("zb_v", "data_inner", [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_a_replica_after_the_other_or_next_to_it(schedule, order, table):
    plan = build(schedule, 3, 6)
    for replica, row in enumerate(table):
        for rank, global_rank in enumerate(row):
            mesh = RankMesh(plan, global_rank, num_replicas=2, rank_order=order)
            assert (mesh.replica, mesh.rank, mesh.global_ranks) == (replica, rank, row)
            assert (mesh.root, mesh.is_global_zero) == (min(row), global_rank == 0)
            assert mesh.counterparts == [other[rank] for other in table]
            assert mesh.replica_of(global_rank) == replica
            stages = f"stages {rank} and {5 - rank}" if schedule == "zb_v" else f"stage {rank}"
            assert mesh.describe_rank(global_rank) == f"replica {replica}, {stages}"


@pytest.mark.parametrize(
    ("order", "table"),
    [
        ("pipeline_inner", [[[2, 0], [6, 4]], [[3, 1], [7, 5]]]),
        ("data_inner", [[[4, 0], [6, 2]], [[5, 1], [7, 3]]]),
    ],
)
def test_tensor_ranks_are_neighbours_and_make_a_pipeline_each(order, table):
    plan, sizes = build("1f1b", 2, 2), {"num_replicas": 2, "num_tensor_ranks": 2}
    for tensor_rank, replicas in enumerate(table):
        for replica, row in enumerate(replicas):
            for rank, global_rank in enumerate(row):
                mesh = RankMesh(plan, global_rank, rank_order=order, **sizes)
                assert (mesh.replica, mesh.rank, mesh.tensor_rank) == (replica, rank, tensor_rank)
                assert (mesh.global_ranks, mesh.world_size) == (row, 8)
                assert (mesh.root, mesh.is_global_zero) == (row[1], global_rank == 0)
                assert mesh.counterparts == [other[rank] for other in replicas]
                assert (mesh.first_replica_ranks, mesh.roots) == (
                    table[0][0],
                    [r[1] for r in table[0]],
                )
                described = f"replica {replica}, stage {rank}, tensor rank {tensor_rank}"
                assert mesh.describe_rank(global_rank) == described
                assert mesh.pipeline_index == 2 * replica + tensor_rank


def test_it_is_torchs_mesh_of_replicas_times_ranks():
    mesh = RankMesh(build("1f1b", 3, 6), global_rank=2).mesh
    assert mesh.mesh_dim_names == ("data", "pipeline")
    assert mesh.mesh.tolist() == [[2, 1, 0]]
    assert [*mesh.get_coordinate()] == [0, 0]


def test_each_edge_has_options_of_its_own(monkeypatch):
    given = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: given.append(options))
    mesh = RankMesh(build("1f1b", 2, 2), 0, num_replicas=2)
    for edge in [(0, 1), (1, 0)]:
        mesh.make_edge_group(edge, object)
    assert len({id(options["pg_options"]) for options in given}) == len(given) == 4


def test_a_forked_process_frees_no_group_of_its_parent(monkeypatch):
    group = object()  # its threads are the parent's
    monkeypatch.setattr(ProcessGroups, "_current", None)
    monkeypatch.setattr(ProcessGroups, "_ended", [group])
    monkeypatch.setattr(ProcessGroups, "_pending", [])
    ProcessGroups.abandon_inherited()
    ProcessGroups.abort_ended()
    assert ProcessGroups._pending == [group]
