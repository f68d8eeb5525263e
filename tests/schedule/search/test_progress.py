from lightning_pipeoffload.schedule import Costs, Kind
from lightning_pipeoffload.schedule.placement import loop
from lightning_pipeoffload.schedule.search.list_schedule import Progress
from lightning_pipeoffload.schedule.search.problem import Problem


def test_what_runs_is_handed_on_after_a_hop():
    progress = Progress(Problem(loop(2, 1), 2, Costs(1, 2, 1, communication=0.5)))
    assert progress.run(0, Kind.F, stage=0, now=0.0) == (1, 1.5)
    assert progress.run(1, Kind.F, stage=1, now=1.5) is None
    assert progress.run(1, Kind.B, stage=1, now=2.5) == (0, 5.0)
    assert progress.next_backward(0) == 5.0


def test_memory_and_waiting_are_counted_per_rank():
    costs = Costs(1, 1, 1, activation=3, weight_residue=2)
    progress = Progress(Problem((0,), 2, costs, memory_limit=5))
    progress.run(0, Kind.F, stage=0, now=0.0)
    progress.run(0, Kind.B, stage=0, now=1.5)
    assert (progress.memory, progress.idle) == ([2], [0.5])
    assert progress.has_room(0, 3)
    assert not progress.has_room(0, 3.1)
    progress.run_weight(0, now=2.5)
    assert progress.memory == [0]
