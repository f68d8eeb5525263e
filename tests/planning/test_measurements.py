"""One rank's step in times of its host."""

from lightning_pipeoffload.planning.measurements import times_of
from lightning_pipeoffload.runtime.memory.ledger import Held, Ledger
from lightning_pipeoffload.runtime.timing import TimedStep
from lightning_pipeoffload.schedule import Action, Kind

F0, F1 = (Action(Kind.F, 0, microbatch) for microbatch in range(2))
W0, W1 = (Action(Kind.W, 0, microbatch) for microbatch in range(2))


def test_actions_that_ran_as_one_have_an_even_part_each():
    together, ledger = [(4, 10)], Ledger(lambda action: Held())
    ledger.start_step()
    ledger.record(F0, Held(device=3))
    step = TimedStep(0, 10, [(F0, [(0, 1), (2, 3)], 1), (W0, together, 2), (W1, together, 2)])
    found = times_of(step, ledger, lambda moment: moment + 100.0)
    assert found.actions == [(F0, [(100, 101), (102, 103)]), (W0, [(104, 107)]), (W1, [(107, 110)])]
    assert found.held == [(F0, 3.0)]
