"""What each of the strategy's arguments may be; all else is refused before processes start."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from os import PathLike
from typing import Any

import torch.distributed as dist

from lightning_pipeoffload.runtime.transport import MOST_MICROBATCHES
from lightning_pipeoffload.schedule import Schedule, check_name, offload_share


def check_count(name: str, value: Any) -> None:
    """Check a number of things that may be left to the strategy.

    Raises:
        ValueError: It is neither "auto" nor a positive int.
    """
    if value != "auto" and not (_is_int(value) and value >= 1):
        raise ValueError(f'{name} must be "auto" or a positive int, not {value!r}')


def check_rank_order(value: Any) -> None:
    """Check the argument.

    Raises:
        ValueError: It is no order that there is.
    """
    _check_choice(
        "rank_order",
        value,
        pipeline_inner="neighbouring global ranks are of one pipeline",
        data_inner="they are replicas of one stage",
    )


def check_sharding(value: Any) -> None:
    """Check the argument.

    Raises:
        ValueError: It is nothing that replicas can share out.
    """
    _check_choice("sharding", value, none="", optimizer="replicas share out its state and its step")


def check_optimizer_sync(value: Any) -> None:
    """Check the argument.

    Raises:
        ValueError: It is no way in which ranks end a step.
    """
    _check_choice(
        "optimizer_sync",
        value,
        barrier="ranks wait where a norm, a loss scale or a hook needs all gradients",
        post_validation="a step that was wrong is taken back",
    )


def check_num_microbatches(value: Any) -> None:
    """Check the argument, or the number that a batch's size leads to.

    Raises:
        ValueError: It is neither "auto" nor a number of microbatches that ranks can tell apart.
    """
    check_count("num_microbatches", value)
    if value != "auto" and value > MOST_MICROBATCHES:
        raise ValueError(
            f"num_microbatches ({value}) is more than {MOST_MICROBATCHES}, the most that messages "
            f"between ranks can tell apart, and its plan would take long to build; use fewer, "
            f"larger microbatches: a few for each rank fill a pipeline"
        )


def check_schedule(schedule: Any) -> None:
    """Check the kind of the argument, and that a name is known.

    Raises:
        ValueError: It is none of the kinds that a schedule can be given as.
        ScheduleError: There is no schedule of that name.
    """
    if not (isinstance(schedule, (str, PathLike, Schedule)) or callable(schedule)):
        raise ValueError(
            f"schedule must be a name, a Schedule, a callable (num_ranks, num_microbatches) -> "
            f"Schedule, or the path of a .csv file, not {schedule!r}"
        )
    if is_name(schedule) and schedule != "auto":
        check_name(schedule, "auto", "the path of a .csv file")


def is_name(schedule: Any) -> bool:
    """Whether a schedule is given by its name."""
    return isinstance(schedule, str) and not schedule.endswith(".csv")


def check_blocks(blocks: Any) -> None:
    """Check the kind of the argument.

    Raises:
        ValueError: It is neither a name nor several.
    """
    names = [blocks] if isinstance(blocks, str) else blocks
    if blocks is not None and not _is_filled(names, lambda name: isinstance(name, str) and name):
        raise ValueError(
            f"blocks must be the name of a ModuleList or Sequential, or a list of patterns of "
            f"its blocks' names, not {blocks!r}"
        )


def check_split(split: Any) -> None:
    """Check the kind of the argument.

    Raises:
        ValueError: It is neither a known word nor a list of numbers.
    """
    if split not in ("auto", "even") and not _is_filled(split, _is_int):
        raise ValueError(f'split must be "auto", "even" or a list of block counts, not {split!r}')


def check_offload(offload: Any) -> None:
    """Check the argument.

    Raises:
        ValueError: It is neither a known word nor a share.
    """
    if offload != "auto":
        offload_share(offload)


def check_decides_offload(offload: Any) -> None:
    """Check the argument where a solver decides what is offloaded.

    Raises:
        ValueError: It says how much.
    """
    if offload != "auto":
        raise ValueError(
            f"schedule='optpipe' decides itself what it offloads under memory_limit, and offload="
            f"{offload!r} was asked for; leave that at 'auto'"
        )


def check_plan_cache(folder: Any) -> None:
    """Check the kind of the argument.

    Raises:
        ValueError: It is no path.
    """
    if folder is not None and not isinstance(folder, (str, PathLike)):
        raise ValueError(f"plan_cache must be the path of a folder, or None, not {folder!r}")


def check_microbatch_weight(weight: Any) -> None:
    """Check the kind of the argument.

    Raises:
        ValueError: It is neither "samples" nor "tokens" nor a callable.
    """
    if weight not in ("samples", "tokens") and not callable(weight):
        raise ValueError(
            f'microbatch_weight must be "samples", "tokens" or a callable of the microbatch, not '
            f"{weight!r}"
        )


def check_timeout(timeout: Any) -> None:
    """Check the argument.

    Raises:
        ValueError: It is no positive timedelta.
    """
    is_time = isinstance(timeout, timedelta) and timeout > timedelta()
    if timeout is not None and not is_time:
        raise ValueError(
            f"timeout must be a positive datetime.timedelta, such as timedelta(minutes=30), not "
            f"{timeout!r}"
        )


def check_backend(backend: Any) -> None:
    """Check that torch has the argument, or each of "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: This torch does not have it.
    """
    names = [part.split(":")[-1] for part in str(backend).split(",")]
    if backend is not None and not all(map(dist.is_backend_available, names)):
        raise ValueError(
            f"process_group_backend={backend!r} is not there in this torch.distributed; leave it "
            f"at None, which is gloo on CPUs and nccl on GPUs"
        )


def check_flag(name: str, value: Any) -> None:
    """Check that an argument is True or False.

    Raises:
        ValueError: It is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def _check_choice(name: str, value: Any, **meanings: str) -> None:
    if value not in [*meanings]:
        options = (f'"{o}"' + f" ({meaning})" * bool(meaning) for o, meaning in meanings.items())
        raise ValueError(f"{name} must be {' or '.join(options)}, not {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_filled(values: Any, is_right: Any) -> bool:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    return is_list and len(values) > 0 and all(map(is_right, values))
