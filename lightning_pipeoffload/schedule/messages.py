"""Messages between ranks: their SEND and RECV actions, dependencies, and open receives."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from .actions import RECVS, SENDS, Action, Kind
from .schedule import Schedule


def send_after(schedule: Schedule, action: Action) -> Action | None:
    """Return the SEND of an action's result; None if no other rank needs it."""
    if action.kind is Kind.F and schedule.crosses_ranks(action.stage):
        return action._replace(kind=Kind.SEND_F)
    if action.kind in (Kind.B, Kind.BW) and schedule.crosses_ranks(action.stage - 1):
        return action._replace(kind=Kind.SEND_B)
    return None


def recv_before(schedule: Schedule, action: Action) -> Action | None:
    """Return the RECV of an action's input; None if its own rank has it."""
    if action.kind is Kind.F and schedule.crosses_ranks(action.stage - 1):
        return action._replace(kind=Kind.RECV_F)
    if action.kind in (Kind.B, Kind.BW) and schedule.crosses_ranks(action.stage):
        return action._replace(kind=Kind.RECV_B)
    return None


def recv_of(send: Action) -> Action:
    """Return the RECV of a SEND: that of the next stage (SEND_F) or the previous one (SEND_B)."""
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.stage + 1, send.microbatch)
    return Action(Kind.RECV_B, send.stage - 1, send.microbatch)


def send_of(recv: Action) -> Action:
    """Return the SEND of a RECV: that of the previous stage (RECV_F) or the next one (RECV_B)."""
    if recv.kind is Kind.RECV_F:
        return Action(Kind.SEND_F, recv.stage - 1, recv.microbatch)
    return Action(Kind.SEND_B, recv.stage + 1, recv.microbatch)


def peers_of(plan: Schedule, rank: int) -> set[int]:
    """Return the ranks with which a rank exchanges messages."""
    near = {stage + step for stage in plan.stages_of(rank) for step in (-1, 1)}
    return {plan.rank_of(stage) for stage in near if 0 <= stage < plan.num_stages} - {rank}


def delivered_sends_by_recv(plan: Schedule, rank: int) -> Mapping[Action, Sequence[Action]]:
    """Return, for RECVs of a rank, the SENDs of that rank that must have arrived before.

    The peer has received these before it sent the message. Each SEND is listed with the first RECV
    that proves its arrival, after which its buffer is free::

        this rank   SEND_F0 ......................... RECV_B0   so SEND_F0 has arrived
        the peer    ....... RECV_F0 F0 ... B0 SEND_B0
    """
    delivered: dict[Action, list[Action]] = {}
    for peer in sorted(peers_of(plan, rank)):
        arrived: list[Action] = []
        for action in plan[peer]:
            needed = recv_before(plan, action)
            if needed and plan.rank_of(send_of(needed).stage) == rank:
                arrived.append(send_of(needed))
            elif action.kind in SENDS and plan.rank_of(recv_of(action).stage) == rank:
                delivered[recv_of(action)], arrived = arrived, []
    return delivered


def num_required_sends(plan: Schedule) -> Mapping[Action, int]:
    """Return, for each RECV, the number of its rank's SENDs on which the message depends.

    Dependencies may go over other ranks. Once the rank has sent these, the message arrives whatever
    the rank does next. There is no number for a message that never comes because of a deadlock.
    """
    before: dict[Action, int] = {}
    under_way: dict[Action, Sequence[int]] = {}
    walks = [
        _count_send_dependencies(plan, rank, before, under_way) for rank in range(plan.num_ranks)
    ]
    seen, waiting = None, [next(walk, None) for walk in walks]
    while waiting != seen:
        seen, waiting = waiting, [next(walk, None) for walk in walks]
    return before


def _count_send_dependencies(
    plan: Schedule, rank: int, before: dict[Action, int], under_way: dict[Action, Sequence[int]]
) -> Iterator[Action]:
    """Record for each message how many SENDs of every rank it depends on, while it is under way.

    Yield a RECV until its message is sent.
    """
    num_sent = [0] * plan.num_ranks
    for action in plan[rank]:
        if action.kind in SENDS:
            num_sent[rank] += 1
            under_way[recv_of(action)] = [*num_sent]
        elif action.kind in RECVS:
            while action not in under_way:
                yield action
            of_message = under_way.pop(action)
            before[action] = of_message[rank]
            num_sent = [*map(max, num_sent, of_message)]


class OpenReceives:
    """The receives of one rank in one step.

    Args:
        post: Called with each receive when it is posted, and with the rank of its sender.
        expected: For compute actions, the receives whose messages may come from then on; None: any
            may at any time.
        before: Those of :func:`num_required_sends`, if they are known.

    Attributes:
        during: For compute actions, the receives to post when they :meth:`post_expected_receives`.
    """

    def __init__(
        self,
        plan: Schedule,
        rank: int,
        post: Callable[[Action, int], None],
        expected: Mapping[Action, Sequence[Action]] | None = None,
        before: Mapping[Action, int] | None = None,
    ) -> None:
        receives = [action for action in plan[rank] if action.kind in RECVS]
        self._sources = {receive: plan.rank_of(send_of(receive).stage) for receive in receives}
        known = num_required_sends(plan) if before is None else before
        self._sends_before = {receive: known.get(receive, 0) for receive in receives}
        self._post = post
        self.during = expected or {}
        self._at_any_time = frozenset(self._sources) if expected is None else frozenset()
        self.start_step()

    def start_step(self) -> None:
        """Start a step: nothing is sent or received."""
        self._num_sent = 0
        self._expected = {*self._at_any_time}
        self._open: dict[int, Action] = {}
        self._coming: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._reached: set[Action] = set()

    def queue_receives(self, actions: Iterable[Action]) -> None:
        """Add the receives of the next actions, in the order of each edge's messages."""
        for action in actions:
            if action.kind in RECVS:
                self._coming[self._sources[action]].append(action)

    def count_send(self) -> None:
        """Count a SEND, on which messages may depend."""
        self._num_sent += 1
        for source in self._coming:
            self._post_next(source)

    def post_expected_receives(self, action: Action) -> None:
        """Record that a compute action begins, during which messages may come."""
        for receive in self.during.get(action, ()):
            self._expected.add(receive)
            self._post_next(self._sources[receive])

    def mark_reached(self, receive: Action) -> None:
        """Record that the plan has reached a RECV, whose message may come from then on."""
        self._reached.add(receive)
        self._post_next(self._sources[receive])

    def pop_receives_up_to(self, receive: Action) -> Iterator[Action]:
        """Yield the open receives of an edge to wait for, in order, up to ``receive``."""
        source, next_receive = self._sources[receive], None
        while next_receive != receive:
            if source not in self._open:
                self._post_next(source, is_due=True)
            next_receive = self._open.pop(source)
            yield next_receive
            self._post_next(source)

    def pop_remaining_receives(self) -> Iterator[Action]:
        """Yield all remaining receives to wait for."""
        for source, coming in self._coming.items():
            last = coming[-1] if coming else self._open.get(source)
            if last is not None:
                yield from self.pop_receives_up_to(last)

    def _post_next(self, source: int, is_due: bool = False) -> None:
        coming = self._coming[source]
        if source in self._open or not coming:
            return
        receive = coming[0]
        follows = self._sends_before[receive] <= self._num_sent and receive in self._expected
        if follows or is_due or receive in self._reached:
            self._open[source] = coming.popleft()
            self._post(receive, source)


class PendingSends:
    """The messages of one rank that may be on their way: sent, and not delivered to have arrived.

    Each edge is a queue, so their number says which they are. A message that the peer sends proves
    what the peer had received before; its first one in a step proves all of earlier steps. In an
    evaluation the peer may send nothing: then the number that a training step needs is the limit,
    at which the oldest is waited for. No rank waits for ever there: an evaluation runs the forwards
    in the order of training, in which each of these messages had arrived by then.

    Args:
        release: Called with a peer, and how many of the newest messages to it stay pending.
        most: By peer, how many may be pending; no entry: any number.
    """

    def __init__(
        self,
        plan: Schedule,
        rank: int,
        release: Callable[[int, int], None],
        most: Mapping[int, int] | None = None,
    ) -> None:
        self._release = release
        self._most = {} if most is None else most
        self._delivered = _num_delivered(plan, rank)
        self._sources = {
            receive: plan.rank_of(send_of(receive).stage) for receive in self._delivered
        }
        self._peers = peers_of(plan, rank)
        self._sent: Counter[int] = Counter()  # in this step

    def start_step(self) -> None:
        """Start a step: nothing is sent in it."""
        self._sent.clear()

    def add(self, peer: int) -> None:
        """Count a SEND, before it is sent."""
        self._sent[peer] += 1
        if peer in self._most:
            self._release(peer, self._most[peer] - 1)

    def release_delivered(self, receive: Action) -> None:
        """Release the sends that the peer had received before it sent this received message."""
        if receive in self._delivered:
            peer = self._sources[receive]
            self._release(peer, self._sent[peer] - self._delivered[receive])

    def end_step(self) -> None:
        """Release what was sent before this step: it has arrived, or its peer is a step behind."""
        for peer in self._peers:
            self._release(peer, self._sent[peer])

    def release_all(self) -> None:
        """Release all, when the peers have received all of them."""
        for peer in self._peers:
            self._release(peer, 0)


def _num_delivered(plan: Schedule, rank: int) -> dict[Action, int]:
    """Return, for RECVs of a rank, how many of its SENDs to their sender have arrived before."""
    delivered: dict[Action, int] = {}
    totals: Counter[int] = Counter()
    for receive, sends in delivered_sends_by_recv(plan, rank).items():  # edge by edge, in order
        peer = plan.rank_of(send_of(receive).stage)
        totals[peer] += len(sends)
        delivered[receive] = totals[peer]
    return delivered


def max_pending_sends(plan: Schedule, rank: int) -> dict[int, int]:
    """Return for each peer how many messages of a rank are pending at once in a plan's steps."""
    pending: Counter[int] = Counter()
    most: Counter[int] = Counter()

    def release(peer: int, left: int) -> None:
        pending[peer] = min(pending[peer], left)

    sends = PendingSends(plan, rank, release)
    for _ in range(2):  # what a step leaves pending counts in the next one
        sends.start_step()
        for action in plan[rank]:
            if action.kind in SENDS:
                peer = plan.rank_of(recv_of(action).stage)
                sends.add(peer)
                pending[peer] += 1
                most[peer] = max(most[peer], pending[peer])
            elif action.kind in RECVS:
                sends.release_delivered(action)
        sends.end_step()
    return dict(most)


_STARTS = {Kind.SEND_F, Kind.OFFLOAD}


def speculative_actions(plan: Schedule) -> list[list[Action]]:
    """Return the actions of each rank that may run before all ranks have ended the previous step.

    Only when all ranks have ended it is it known whether its gradients are clipped; if that changes
    the weights, these actions run again. So every message between these actions is both sent and
    received by them, and none is of the last stage, where the user's step ends::

        rank 0   step n  . F0 F1 F2 | B0 ...     | what is known of step n on all ranks
        rank 1   step n    . F0 F1  | B0 ...       by then, as F0 and B0 have come through all
        rank 2   step n      .      | F0 B0 ...

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4 (post-validation).
    """
    lists = [plan[rank] for rank in range(plan.num_ranks)]
    received: set[Action] = set()
    ahead: list[list[Action]] = [[] for _ in lists]
    walks = [
        _collect_speculative_actions(plan, *each, received)
        for each in zip(lists, ahead, strict=True)
    ]
    before = None
    while before != [*map(len, ahead)]:
        before = [*map(len, ahead)]
        for walk in walks:
            next(walk, None)
    return [_with_receives(*each, received) for each in zip(lists, ahead, strict=True)]


def _collect_speculative_actions(
    plan: Schedule, actions: Sequence[Action], ahead: list[Action], received: set[Action]
) -> Iterator[None]:
    """Move the actions that may run to ``ahead``; yield while one waits for a message."""
    for action in actions:
        if action.kind is Kind.F and action.stage < plan.num_stages - 1:
            needed = recv_before(plan, action)
            while needed is not None and needed not in received:
                yield
        elif action.kind in (Kind.RECV_F, Kind.RECV_B):
            continue
        elif action.kind not in _STARTS:
            return
        ahead.append(action)
        if action.kind is Kind.SEND_F:
            received.add(recv_of(action))


def _with_receives(
    actions: Sequence[Action], ahead: Sequence[Action], received: set[Action]
) -> list[Action]:
    """Insert the receives in plan order; append those that come later in the plan."""
    chosen = received.union(ahead)
    before = [action for action in actions if action in chosen]
    last = max(map(before.index, ahead), default=-1) + 1
    return before[:last] + [action for action in before[last:] if action in received]
