"""Whether what a module computes depends on the size, and so the number, of microbatches."""

from __future__ import annotations

from torch import nn

from lightning_pipeoffload.runtime.cut.record import Probe
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.users_code.attributes import REGISTRIES

_OVER_A_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def sees_its_size(pipeline: Pipeline) -> bool:
    """Whether a module, trained with other microbatches, may become another one.

    Statistics over a batch do, and dropout, whose draws are seeded for each microbatch, and
    whatever the step draws or keeps.

    Args:
        pipeline: A rank's part of a module, whose step has been looked at.
    """
    trained = [probe for probe in pipeline.probes.known.values() if probe.trained is not None]
    return any(map(_keeps, trained)) or any(map(_depends, pipeline.module.modules()))


def least_samples(module: nn.Module) -> int:
    """Return how many samples a microbatch needs: two where statistics are over a batch."""
    return 1 + any(isinstance(part, _OVER_A_BATCH) for part in module.modules())


def _keeps(probe: Probe) -> bool:
    written = [name for _, name in probe.written_in_place if name not in REGISTRIES]
    return bool(written or probe.written or probe.writes)


def _depends(part: nn.Module) -> bool:
    if isinstance(part, _OVER_A_BATCH):
        return True
    found = {**vars(part), **_numbers_of(getattr(part, "config", None))}
    # By name: functional dropout leaves nothing else to see.
    rates = [rate for name, rate in found.items() if "drop" in name or name == "p"]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _numbers_of(config: object) -> dict[str, object]:
    """Return the attributes of a configuration, as the models of Hugging Face have one."""
    found = getattr(config, "__dict__", {})
    return {str(name): value for name, value in found.items() if "drop" in str(name)}
