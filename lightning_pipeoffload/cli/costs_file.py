"""What a rank's part of a model costs, as a file: written by a rehearsal, read by a plan."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_pipeoffload.schedule import Costs, ScheduleError

__all__ = ["read_costs", "write_costs"]

_SUMMED = (
    *("forward", "backward_input", "backward_weight", "offload", "reload"),
    *("activation", "weight_residue", "weight_input"),
)


def write_costs(path: str, costs: Costs, num_ranks: int, num_stages: int) -> None:
    """Write what a rank's part of the model costs, in seconds and bytes: the mean over the ranks.

    Args:
        path: The file to write.
        costs: Costs of every stage.
        num_ranks: Ranks of the pipeline.
        num_stages: Their stages together.

    Raises:
        ScheduleError: It cannot be written.
    """
    mean = {name: sum(costs.per_stage(name, num_stages)) / num_ranks for name in _SUMMED}
    hops = costs.per_stage("communication", num_stages)
    whole = {**mean, "communication": max(hops), "copy_lanes": costs.copy_lanes}
    try:
        Path(path).write_text(json.dumps({"costs": whole}, indent=1) + "\n")
    except OSError as error:
        raise ScheduleError(f"costs_file ({path}) cannot be written: {error.strerror}") from error


def read_costs(path: str) -> Costs:
    """Read what :func:`write_costs` has written.

    Raises:
        ScheduleError: There is no such file, or it has other things in it.
    """
    try:
        return Costs(**json.loads(Path(path).read_text())["costs"])
    except OSError as error:
        raise ScheduleError(
            f"costs_file ({path}) cannot be read: {error.strerror}; pipeoffload-rehearse writes one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScheduleError(f"costs_file ({path}) has no costs in it: {error}") from error
