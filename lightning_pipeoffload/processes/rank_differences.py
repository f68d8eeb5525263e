"""Compares modules, optimizers, options and plans of all ranks before a run, and in each step.

Ranks with different settings would train wrongly or wait for each other for ever. Values of
weights, devices, ranks and paths may differ.
"""

from __future__ import annotations

import hashlib
import inspect
import marshal
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers import GroupNames
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime import late_values, map_operands
from lightning_pipeoffload.runtime.comm import reporting_lost_peers
from lightning_pipeoffload.runtime.shapes import describe_4bit, is_4bit
from lightning_pipeoffload.schedule import Schedule

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Names of attributes that differ between processes or machines.
_OF_RANK = re.compile("rank|device|seed|host_memory")
_LONGEST = 200
_PLAIN = (bool, int, float, str, type(None))
_OF_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
)
_MAKE_ALIKE = (
    "make module, optimizers and arguments alike in every process, whatever its rank or environment"
)

Described = dict[str, str]


def refuse_differences(described: Mapping[str, str], group: Any, advice: str = _MAKE_ALIKE) -> None:
    """Compare descriptions with the other ranks; all ranks call it and raise the same error.

    Args:
        described: Descriptions by name.
        group: A process group of gloo.
        advice: The end of the error.

    Raises:
        ValueError: The message has the first name whose description differs, and two descriptions.
    """
    text = repr(sorted(described.items())).encode()
    digests = _gather(hashlib.blake2b(text, digest_size=16).digest(), group)
    if len(set(digests)) == 1:
        return
    first, *others = _gather(dict(described), group)
    other_rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    other = others[other_rank - 1]
    name = next(n for n in (*first, *other) if first.get(n) != other.get(n))
    raise ValueError(
        f"the ranks of a pipeline have to run the same, but {name} is "
        f"{_truncate(first.get(name))} on global rank {dist.get_global_rank(group, 0)} and "
        f"{_truncate(other.get(name))} on global rank {dist.get_global_rank(group, other_rank)}; "
        f"{advice}"
    )


def _gather(obj: Any, group: Any) -> list[Any]:
    objects: list[Any] = [None] * dist.get_world_size(group)
    with reporting_lost_peers("lost a rank while comparing modules and options"):
        dist.all_gather_object(objects, obj, group=group)
    return objects


def _truncate(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def describe_settings(settings: PipelineSettings, schedule: Schedule) -> Described:
    """Describe a strategy's arguments: the schedule by its actions, a callable by its name."""
    arguments = {**vars(settings), "schedule": schedule}
    return {
        f"the strategy's {name}": _described(value)
        for name, value in arguments.items()
        if not _OF_RANK.search(name)
    }


def describe_trainer(trainer: Trainer) -> Described:
    """Describe the trainer's options that decide on steps, and its precision."""
    # Lightning has no attribute for an interval that is given in seconds.
    options = {name: getattr(trainer, name, None) for name in _OF_TRAINER}
    described = {f"the Trainer's {name}": repr(value) for name, value in options.items()}
    described["the Trainer's precision"] = str(trainer.precision)
    return described


def describe_module(module: nn.Module) -> Described:
    """Describe a module's tree: classes, settings, and its tensors without their values."""
    described = {}
    for path, part in module.named_modules():
        where = f"{path} of the module" if path else "the module"
        # An extra_repr of the user's may contain values, such as those of weights.
        is_of_torch = type(part).extra_repr.__module__.startswith("torch.")
        options = _described(part.extra_repr()) if is_of_torch else ""
        described[where] = f"{type(part).__qualname__}({options})"
        for name, value in _settings_of(part):
            described[f"{name} of {where}"] = repr(value)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        trains = "trained" if tensor.requires_grad else "not trained"
        described[f"{name} of the module"] = f"{tuple(tensor.shape)} {tensor.dtype}, {trains}"
        if is_4bit(tensor):
            described[f"{name} of the module"] += f", {describe_4bit(tensor)}"
    return described


def _settings_of(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a module's constructor takes and stores, but no counters."""
    for name in inspect.signature(type(part).__init__).parameters:
        value = vars(part).get(name)
        if isinstance(value, bool | int | float) and not _OF_RANK.search(name):
            yield name, value


def describe_optimizers(
    optimizers: Sequence[Optimizer], names: Sequence[GroupNames], schedulers: Sequence[Any]
) -> Described:
    """Describe optimizers and the schedulers of their learning rates.

    Args:
        optimizers: The trainer's optimizers.
        names: The parameter names of each optimizer's groups.
        schedulers: Lightning's ``lr_scheduler_configs``.
    """
    described = {}
    for i, (optimizer, groups) in enumerate(zip(optimizers, names, strict=True)):
        described[f"optimizer {i}"] = type(optimizer).__qualname__
        for j, (group, members) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    described[f"{name} in group {j} of optimizer {i}"] = _described(value)
            described |= {f"the group of {name}": f"{j} of optimizer {i}" for name in members}
    for i, config in enumerate(schedulers):
        kind = type(config.scheduler).__qualname__
        described[f"scheduler {i}"] = f"{kind} per {config.frequency} {config.interval}s"
    return described


def _described(value: Any) -> str:
    if isinstance(value, Schedule):
        return f"{value.name} of {[tuple(map(str, rank)) for rank in value]}"
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if callable(value):
        value = getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", value if isinstance(value, str) else repr(value))


class StepOptions:
    """The current options of optimizers' groups, trained parameters and number of steps.

    Args:
        optimizers: The trainer's optimizers.
        trained: For each parameter of the module 1 if it trains, else 0.
        num_steps: The number of calls of ``optimizer.step``.
    """

    def __init__(self, optimizers: Sequence[Optimizer], trained: bytes, num_steps: int) -> None:
        self._trained, self._num_steps = trained, num_steps
        self._groups: Any = [
            [
                {**group, "params": len(group["params"]), "param_names": None}
                for group in optimizer.param_groups
            ]
            for optimizer in optimizers
        ]
        self._encoded = b""
        try:
            # The quickest bytes of numbers and strings; version 2 has no references.
            self._encoded = marshal.dumps((self._groups, trained, num_steps), 2)
        except ValueError:
            self._groups = map_operands(_start_reading, self._groups)

    def digest(self) -> int:
        """Return a checksum; waits for tensors of an accelerator."""
        if not self._encoded:
            self._encoded = marshal.dumps((self._read(), self._trained, self._num_steps), 2)
        return zlib.crc32(self._encoded)

    def _read(self) -> Any:
        return map_operands(lambda leaf: leaf() if callable(leaf) else leaf, self._groups)

    def describe(self, names: Sequence[str]) -> dict[str, str]:
        """Describe each of them, given the names of the module's parameters."""
        described = {
            f"{'the number of ' if key == 'params' else ''}{key} in group {j} of optimizer {i}":
            repr(value)
            for i, groups in enumerate(self._read())
            for j, group in enumerate(groups)
            for key, value in group.items()
        }  # fmt: skip
        trained = zip(names, self._trained, strict=True)
        described |= {name: "trained" if trains else "frozen" for name, trains in trained}
        return {**described, "the number of calls of optimizer.step": str(self._num_steps)}


def _start_reading(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        read: Callable[[], Tensor] = late_values.start_host_copy(leaf)
        return lambda: read().tolist()
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
