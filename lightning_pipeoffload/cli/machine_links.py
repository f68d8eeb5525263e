"""The links between ranks, by the machines that they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_pipeoffload.cli.devices import Device
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.comm import assign_global_ranks


class Links:
    """The links of replicas of a pipeline, whose global ranks fill one machine after the other.

    A rate is that of the slowest link that takes part: all replicas and tensor ranks follow one
    plan, and a ring of replicas is as fast as its slowest part.

    Args:
        device: The rates of the links of a device.
        settings: The sizes of the layout, and its order of ranks.
        devices_per_machine: The devices of a machine.
    """

    def __init__(
        self, device: Device, settings: PipelineSettings, devices_per_machine: int
    ) -> None:
        self._device, self._devices_per_machine = device, devices_per_machine
        self._num_tensor_ranks = settings.tensor_parallel_size
        self._num_replicas, self._order = int(settings.data_parallel_size), settings.rank_order

    @property
    def tensor_rate(self) -> float:
        """Bytes per second that a rank sends to one that shares its layers."""
        return self._rate(self._devices_per_machine % self._num_tensor_ranks == 0)

    def message_seconds(self, sent: Sequence[int], placement: Sequence[int]) -> list[float]:
        """Return the seconds of each stage's message to the next stage, of ``sent`` bytes."""
        cells = assign_global_ranks(placement, self._num_replicas, self._order)
        pairs = zip(placement, [*placement[1:], placement[-1]], strict=True)
        is_near = [all(self._are_near((row[a], row[b])) for row in cells) for a, b in pairs]
        return [size / self._rate(near) for size, near in zip(sent, is_near, strict=True)]

    def reduce_seconds(self, gradients: Sequence[int], placement: Sequence[int]) -> list[float]:
        """Return the seconds in which replicas add up each stage's gradients around a ring."""
        cells = assign_global_ranks(placement, self._num_replicas, self._order)
        is_near = [self._are_near([row[rank] for row in cells]) for rank in placement]
        share = 2 * (self._num_replicas - 1) / self._num_replicas
        pairs = zip(gradients, is_near, strict=True)
        return [share * size / self._rate(near) for size, near in pairs]

    def most_of_a_machine(self, amounts: Sequence[float], placement: Sequence[int]) -> float:
        """Return the sum of the machine that has most, of what each tensor rank of a rank has."""
        sums: Counter[int] = Counter()
        for row in assign_global_ranks(placement, self._num_replicas, self._order):
            for rank, cell in enumerate(row):
                for machine in self._machines_of(cell):
                    sums[machine] += amounts[rank]  # type: ignore[assignment]
        return max(sums.values())

    def _are_near(self, cells: Iterable[int]) -> bool:
        """Whether tensor ranks with the same number, of each of these cells, share a machine."""
        of_tensor_ranks = zip(*map(self._machines_of, cells), strict=True)
        return all(len({*machines}) == 1 for machines in of_tensor_ranks)

    def _machines_of(self, cell: int) -> list[int]:
        """Return the machine of each tensor rank of a cell."""
        first = cell * self._num_tensor_ranks
        ranks = range(first, first + self._num_tensor_ranks)
        return [rank // self._devices_per_machine for rank in ranks]

    def _rate(self, is_near: bool) -> float:
        return self._device.link_rate if is_near else self._device.network_rate
