"""How much slower some of a run's devices are, by a product of matrices or by measured blocks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path

import torch

from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.device import Device, Devices, synchronized_time
from lightning_pipeoffload.schedule import PlanCache, device_indices, write_and_prune

_ROUNDS = 100  # of an iteration that comes closer to its end by a factor each time
_NUM_PRODUCTS = 3
_SIZE, _SIZE_ON_CPU = 4096, 512  # of square matrices: a millisecond on an H100, two on a 3090


def measure_devices(group: PipelineGroup, cache: str | None = None) -> Devices:
    """Return the devices of the run's pipelines; all processes call it.

    Where their names differ, they are compared by a product of matrices. Its time is kept in the
    folder of plans by the device's name, so that later starts have the same ratios.

    Args:
        group: The processes.
        cache: The folder; None: the user's.

    Raises:
        ValueError: Devices that share a stage's layers differ.
    """
    device = Device.of(group.device)
    pipelines = group.gather_from_pipelines(device)
    _refuse_mixed_tensor_ranks(group, pipelines)
    counterparts = [*zip(*pipelines, strict=True)]
    joined = [
        of_rank[0]._replace(
            name=" or ".join(sorted({each.name for each in of_rank})),
            memory=min(each.memory for each in of_rank),
        )
        for of_rank in counterparts
    ]
    places = device_indices(group.stage_ranks)
    devices = Devices.of([joined[rank] for rank in places])
    names = {each.name for of_rank in counterparts for each in of_rank}
    if len(names) == 1:
        return devices
    seconds = _seconds_by_name(group, device.name, names, PlanCache(cache).folder / "speeds.json")
    slowest = [max(seconds[each.name] for each in of_rank) for of_rank in counterparts]
    return group.world.broadcast(devices.with_slowness_from([slowest[rank] for rank in places]), 0)


def _refuse_mixed_tensor_ranks(group: PipelineGroup, pipelines: Sequence[Sequence[Device]]) -> None:
    size = group.num_tensor_ranks
    if size == 1:
        return
    # Tables of the first tensor ranks of all replicas come first, then of the second.
    for rank in range(group.num_ranks):
        for replica in range(group.num_replicas):
            sharing = pipelines[replica :: group.num_replicas]
            names = sorted({pipeline[rank].name for pipeline in sharing})
            if len(names) > 1:
                raise ValueError(
                    f"tensor_parallel_size={size} shares the layers of rank {rank} among "
                    f"{' and '.join(names)}, of which the faster would wait in each block; give "
                    f"each stage one of them, with tensor_parallel_size=1, or set "
                    f"CUDA_VISIBLE_DEVICES so that neighbouring devices are alike"
                )


def _seconds_by_name(
    group: PipelineGroup, own: str, names: set[str], path: Path
) -> dict[str, float]:
    """Return the seconds of a product by the device's name, as they were kept or as measured."""
    kept = group.world.broadcast(_read(path) if group.is_global_zero else None, 0)
    if names <= {*kept}:
        return kept
    measured = group.world.gather((own, 0.0 if own in kept else _time_matmul(group.device)))
    found = {name: min(s for other, s in measured if other == name) for name in names - {*kept}}
    if group.is_global_zero:
        write_and_prune(path, json.dumps({**kept, **found}), path.name)
    return {**kept, **found}


def _read(path: Path) -> dict[str, float]:
    try:
        return {name: float(seconds) for name, seconds in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # the next file replaces it


def _time_matmul(device: torch.device) -> float:
    size = _SIZE_ON_CPU if device.type == "cpu" else _SIZE
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    # No random numbers: the run's generators stay as they are.
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    matrix @ matrix  # loads the library
    seconds = []
    for _ in range(_NUM_PRODUCTS):
        started = synchronized_time()
        matrix @ matrix
        seconds.append(synchronized_time() - started)
    return min(seconds)


def fit_slowness(
    seconds: Mapping[tuple[int, int], float], expected: Sequence[float]
) -> list[float]:
    """Return each rank's factor, such that times are a class's time multiplied by a rank's factor.

    Ratios of ranks that share no class, also by way of others, stay as expected. Longer classes
    weigh more.

    Args:
        seconds: The time of a block, by its class and rank.
        expected: The factor of each rank, as it is known so far.
    """
    weights: defaultdict[int, float] = defaultdict(float)
    for (kind, _), time in seconds.items():
        weights[kind] = max(weights[kind], time)
    logs = {key: log(time) for key, time in seconds.items() if time > 0}
    ranks = [*map(log, expected)]
    for _ in range(_ROUNDS):
        kinds = {
            kind: _mean([(t - ranks[r], 1.0) for (k, r), t in logs.items() if k == kind])
            for kind in weights
        }
        ranks = [
            _mean([(t - kinds[k], weights[k]) for (k, r), t in logs.items() if r == rank], before)
            for rank, before in enumerate(ranks)
        ]
    return [*map(exp, ranks)]


def _mean(pairs: Sequence[tuple[float, float]], default: float = 0.0) -> float:
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else default
