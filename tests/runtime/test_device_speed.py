"""How much slower some devices are, by measured blocks, by a product, and what is noise."""

import json
from types import SimpleNamespace

import pytest

from lightning_pipeoffload.runtime.device import Device, Devices
from lightning_pipeoffload.runtime.measure import device_speed, fit_slowness, measure_devices


def devices(*names):
    return Devices.of([Device(name, "", "here") for name in names])


@pytest.mark.parametrize(
    ("names", "times", "slowness"),
    [
        ("aaa", (1.0, 1.05, 1.09), (1, 1, 1)),
        ("aaa", (1.0, 1.0, 2.0), (1, 1, 2)),
        ("aab", (1.0, 1.04, 3.06), (1, 1, 3.0)),
        (("CPU x", "CPU x"), (1.0, 1.4), (1, 1)),
        (("CPU x", "CPU x"), (1.0, 2.0), (1, 2)),
    ],
)
def test_small_ratios_between_devices_of_one_name_are_noise(names, times, slowness):
    assert devices(*names).with_slowness_from(times).slowness == pytest.approx(slowness, rel=1e-3)


def test_of_alike_devices_stages_have_no_factor():
    assert devices("a", "a").with_slowness_from([1.0, 1.05]).slowness_per_stage((0, 1)) == ()
    unlike = devices("a", "a").with_slowness_from([1.0, 2.0])
    assert unlike.slowness_per_stage((0, 1)) == (2.0, 1.0)  # the last stage is at place 0
    assert unlike.slowness_per_stage((0, 1, 1, 0)) == (1.0, 2.0, 2.0, 1.0)


def test_memory_counts_where_devices_have_unlike_amounts():
    def having(*sizes):
        return Devices.of([Device("a", "", "here", size) for size in sizes])

    assert having(24, 12).memory_per_stage((0, 1)) == (12, 24)
    assert having(24, 12).memory_per_stage((0, 1, 1, 0)) == (12, 6, 6, 12)
    assert having(24, 23).memory_per_stage((0, 1)) == ()
    assert having(24, 24).with_slowness_from([1, 2]).memory_per_stage((0, 1)) == (24, 24)
    assert having(0, 0).memory_per_stage((0, 1)) == ()


def test_ratios_are_those_of_shared_classes_and_else_as_expected():
    seconds = {(0, 0): 1.0, (0, 1): 2.0, (1, 1): 6.0, (1, 2): 9.0, (2, 3): 5.0}
    fitted = fit_slowness(seconds, [1.0, 1.0, 1.0, 7.0])
    assert fitted[1] / fitted[0] == pytest.approx(2.0)
    assert fitted[2] / fitted[1] == pytest.approx(1.5)
    assert fitted[3] == pytest.approx(7.0)


class Group:
    """Stands for the processes of a run, of which this is the first one."""

    is_global_zero, num_tensor_ranks, num_replicas, device = True, 1, 1, None

    def __init__(self, names, stage_ranks, **attributes):
        self.names, self.stage_ranks = names, stage_ranks
        self.num_ranks = len(names[0])
        vars(self).update(attributes)
        self.world = SimpleNamespace(
            broadcast=lambda value, source: value,
            gather=lambda pair: [(name, SPEEDS[name]) for row in names for name in row],
        )

    def gather_from_pipelines(self, device):
        return [[Device(name, "", "here") for name in row] for row in self.names]


SPEEDS = {"fast": 0.001, "slow": 0.003}


@pytest.fixture
def measured(monkeypatch):
    calls = []
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: cls("fast", "", "here")))

    def seconds_of_product(device):
        calls.append(device)
        return 0.001

    monkeypatch.setattr(device_speed, "_time_matmul", seconds_of_product)
    return calls


def test_devices_of_two_names_are_compared_once_and_their_times_kept(measured, tmp_path):
    group = Group([["slow", "fast", "fast"]], (0, 1, 2))
    for _ in range(2):
        found = measure_devices(group, str(tmp_path))
        assert found.names == ("fast", "fast", "slow")
        assert found.slowness == pytest.approx((1, 1, 3))
    assert len(measured) == 1
    assert json.loads((tmp_path / "speeds.json").read_text()) == SPEEDS


def test_devices_of_one_name_are_not_compared(measured, tmp_path):
    assert measure_devices(Group([["fast", "fast"]], (0, 1)), str(tmp_path)).are_equally_fast
    assert not measured
    assert not [*tmp_path.iterdir()]


def test_a_replica_is_as_its_slowest_device_at_a_place(measured, tmp_path):
    group = Group([["fast", "fast"], ["fast", "slow"]], (0, 1), num_replicas=2)
    found = measure_devices(group, str(tmp_path))
    assert found.names == ("fast or slow", "fast")
    assert found.slowness == pytest.approx((3, 1))


def test_unlike_devices_do_not_share_layers(measured, tmp_path):
    group = Group([["fast", "fast"], ["fast", "slow"]], (0, 1), num_tensor_ranks=2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 .* rank 1 among fast and slow"):
        measure_devices(group, str(tmp_path))


def test_a_product_takes_time_and_draws_nothing():
    import torch

    before = torch.get_rng_state()
    assert device_speed._time_matmul(torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), before)
