"""When the messages of a rank are sent, in terms of its own actions."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..actions import COMPUTE, Action, Kind
from ..costs import Costs
from ..messages import recv_before, send_of
from ..schedule import Schedule
from .simulate import simulate

# Estimates of costs err: a message is expected by this share of its computation earlier.
_MARGIN = 0.05


def receives_to_post(plan: Schedule, rank: int, costs: Costs) -> Mapping[Action, Sequence[Action]]:
    """Return, for compute actions of a rank, the RECVs to post when they begin.

    On a GPU a receive is a kernel that spins until its message is sent, and slows down what is
    computed meanwhile; so is a send until its receive is posted. So a receive is posted with the
    last action that begins before its message is sent, and never with the one that needs it, which
    would wait for the whole transfer::

        the peer     | F2 |  SEND_F2
        this rank    | B0    | W0  | F2 |     RECV_F2 is posted when B0 begins

    Args:
        plan: A lowered plan.
        costs: Seconds of its stages, in any unit.
    """
    timed = {e.action: e for e in simulate(plan, costs).events if e.action.kind in COMPUTE}
    events = sorted((timed[a] for a in plan[rank] if a.kind in COMPUTE), key=lambda e: e.start)
    starts = [event.start for event in events]
    receives: defaultdict[Action, list[Action]] = defaultdict(list)
    for index, event in enumerate(events):
        receive = recv_before(plan, event.action)
        if receive is None:
            continue
        sender = next(timed[a] for a in _producers(send_of(receive)) if a in timed)
        sent = sender.end - _MARGIN * (sender.end - sender.start)
        before = min(bisect_left(starts, sent), index) - 1
        receives[events[max(0, before)].action].append(receive)
    return receives


def _producers(send: Action) -> list[Action]:
    """Return the actions that may compute a message."""
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.BW)
    return [send._replace(kind=kind) for kind in kinds]
