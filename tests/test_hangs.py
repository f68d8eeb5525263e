"""Hosts, streams and hardware queues as a model, over plans: what hangs, and what does not."""

from collections import deque
from itertools import product

import pytest

from examples.benchmarks.hangs import (
    QUEUES,
    RUNS,
    RUNS_OF_TENSOR_RANKS,
    Devices,
    Variant,
    every_action,
    first_of_each_stage,
    nowhere,
    outcomes,
    row_of_draws,
    variants,
)
from examples.benchmarks.message_buffers import held, planned
from lightning_pipeoffload.runtime.run import mailbox
from lightning_pipeoffload.schedule import SCHEDULES, OpenReceives
from tests.support.pairs import slow

SAMPLE = ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "uniform"]
ALL_AT_ONCE = {"offloads": True, "num_replicas": 2, "ties_weights": True}


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_hangs_where_hosts_wait_for_their_devices_in_steps_of_new_shapes(name):
    assert [*outcomes(Variant(name, 4, **ALL_AT_ONCE), RUNS, [1])] == [""] * len(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [*product(SCHEDULES, (2, 4, 8))])
def test_no_variant_of_any_schedule_hangs(name, num_ranks):
    for variant in variants(name, num_ranks):
        # With fewer than 7 a run is refused: gis hangs on 8 ranks.
        assert [*outcomes(variant, RUNS, [7, *QUEUES[1:]])] == [""] * len(RUNS)


SHARED = {**ALL_AT_ONCE, "num_tensor_ranks": 2}


@pytest.mark.parametrize("name", ["1f1b", *map(slow, SAMPLE[1:])])
def test_nothing_hangs_where_ranks_share_layers(name):
    waits = RUNS_OF_TENSOR_RANKS
    assert [*outcomes(Variant(name, 2, **SHARED), waits, QUEUES)] == [""] * len(waits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [*product(SCHEDULES, (2, 4))])
def test_no_variant_of_any_schedule_hangs_where_ranks_share_layers(name, num_ranks):
    waits = RUNS_OF_TENSOR_RANKS
    for variant in variants(name, num_ranks, num_tensor_ranks=2):
        assert [*outcomes(variant, waits, [7, *QUEUES[1:]])] == [""] * len(waits)


def test_ranks_that_share_layers_hang_by_two_plans():
    by_two = [Variant(name, 2, num_tensor_ranks=2).enqueue() for name in ("zb_h2", "1f1b")]
    hosts = [by_two[rank % 2][rank] for rank in range(4)]
    assert Devices(hosts, QUEUES[-1], nowhere).run().startswith("hangs at")


class AllThatMayCome(OpenReceives):
    """Posts every receive whose message follows from what this rank has sent."""

    def queue_receives(self, actions):
        super().queue_receives(actions)
        receives = (action for coming in self._coming.values() for action in coming)
        self._left = deque(sorted(receives, key=self._sends_before.__getitem__))

    def count_send(self):
        self._num_sent += 1
        self._post_all()

    def post_expected_receives(self, action):
        pass

    def mark_reached(self, receive):
        self._post_all()

    def pop_receives_up_to(self, receive):
        yield receive

    def _post_all(self):
        while self._left and self._sends_before[self._left[0]] <= self._num_sent:
            self._post(self._left[0], self._sources[self._left.popleft()])


HANGS_AT_ONE_QUEUE = {"zb_v", "interleaved_1f1b"}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
def test_several_open_receives_of_an_edge_hang_where_streams_share_a_queue(monkeypatch, name):
    monkeypatch.setattr(mailbox, "OpenReceives", AllThatMayCome)
    (found,) = outcomes(Variant(name, 2), [nowhere], [1])
    assert bool(found) == (name in HANGS_AT_ONE_QUEUE)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_several_open_receives_hang_where_kernels_are_loaded(monkeypatch, name):
    assert [*outcomes(Variant(name, 4), [first_of_each_stage], [32])] == [""]
    monkeypatch.setattr(mailbox, "OpenReceives", AllThatMayCome)
    (found,) = outcomes(Variant(name, 4), [first_of_each_stage], [32])
    assert found.startswith("hangs at")


@pytest.mark.parametrize("sends_end", [False, True])
@pytest.mark.parametrize("name", [*SAMPLE, slow("1f1b_v"), slow("v_half"), slow("gis")])
def test_buffers_of_messages_are_those_that_are_planned_in_evaluations_too(name, sends_end):
    variant = Variant(name, 4, num_microbatches=32, sends_end=sends_end)
    _, train, evaluation, again = held(variant)
    assert max(train, evaluation) <= planned(variant)
    assert again <= evaluation


def test_where_memory_is_short_ranks_hang_less_if_receives_are_late_and_never_if_it_is_taken():
    early, due, taken = row_of_draws("zb_h1", 2, 60)
    assert early > due > taken == 0


@pytest.mark.parametrize(("name", "waits"), [("gis", first_of_each_stage), ("zb_v", every_action)])
def test_by_the_plan_steps_of_new_shapes_would_hang(name, waits):
    (found,) = outcomes(Variant(name, 4), [waits], [1])
    assert found.startswith("hangs at")


def test_host_memory_is_reserved_before_a_plan_not_in_it(monkeypatch):
    assert not sum(host.num_allocations for host in Variant("zb_v", 4, offloads=True).enqueue())
    as_planned = Variant("zb_v", 4, offloads=True, as_planned=True)
    assert sum(host.num_allocations for host in as_planned.enqueue())
