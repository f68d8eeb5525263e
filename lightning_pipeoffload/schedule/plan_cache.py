"""A folder of plans that took long to find; a similar question finds a plan as a hint.

Plans depend only on ratios of times and of memory, so these are rounded: times to 2 % of a forward,
memory to a sixteenth of an activation. A question that differs by less finds the same entry; one
that differs by more gets it as a hint.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from .actions import ScheduleError
from .costs import COMPUTE_TIMES, Costs
from .schedule import Schedule
from .validate import validate

log = logging.getLogger(__name__)

_TIMES = (*COMPUTE_TIMES, "communication", "offload", "reload")
_MEMORY = ("activation", "weight_residue", "weight_input")
_TIME_STEP, _MEMORY_STEP = 0.02, 1 / 16
_UNLIMITED = 10**9
_MOST_OF_A_FAMILY = 64  # files
# What reading a file raises whose JSON is of other types, nested too deeply, or beyond a float.
_DAMAGES = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class PlanCacheKey:
    """The problem that a plan solves.

    Attributes:
        purpose: The caller, and all conditions that are no numbers, such as ``"optpipe 0,1,1,0"``
            with the rank of every stage.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages per rank; 0 if the plan decides on them.
        costs: The costs of the stages, or of the blocks that the plan divides into stages.
        memory_limit: The most memory of a rank, in the unit of the costs; None: any.
    """

    purpose: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int
    costs: Costs
    memory_limit: float | None = None

    @property
    def family(self) -> str:
        """The prefix of the names of the files with its plan or hints."""
        topology = f"{self.purpose} {self.costs.copy_lanes}"
        sizes = f"p{self.num_ranks}-m{self.num_microbatches}-v{self.num_chunks}"
        return f"{sizes}-{_digest(topology)[:12]}"

    @property
    def numbers(self) -> list[int]:
        """The rounded costs and the limit."""
        second = _mean(self.costs.forward) * _TIME_STEP or 1.0
        unit = _mean(self.costs.activation) * _MEMORY_STEP or 1.0
        times = [value / second for name in (*_TIMES, "reduce") for value in self._all(name)]
        sizes = [value / unit for name in _MEMORY for value in self._all(name)]
        limit = _UNLIMITED if self.memory_limit is None else self.memory_limit / unit
        return [round(number) for number in (*times, *sizes, min(limit, _UNLIMITED))]

    def _all(self, name: str) -> tuple[float, ...]:
        value = getattr(self.costs, name)
        return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class CachedPlan:
    """A plan of the cache.

    Attributes:
        schedule: The plan; it is valid, but not checked against a limit.
        is_exact: Whether it solves the same question; else it is a hint.
        remarks: The remarks that were stored with it.
    """

    schedule: Schedule
    is_exact: bool
    remarks: Mapping[str, Any] = field(default_factory=dict)


class PlanCache:
    """A folder of plans, which several processes may read and write at once."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Open a folder, which need not exist yet.

        Args:
            folder: The folder; None: one in the user's cache folder.
        """
        self.folder = _users_folder() if folder is None else Path(folder)

    def find(self, question: PlanCacheKey) -> CachedPlan | None:
        """Return the plan of a question or of the most similar one; None if there is none.

        A damaged file is ignored, with a warning.
        """
        numbers = question.numbers
        exact = self._path(question, numbers)
        if exact.is_file() and (plan := _read(exact, numbers)):
            return plan
        near = (path for path in self._paths_of_family(question) if path != exact)
        hints = ((path, _numbers_in(path)) for path in near)
        closest = sorted(
            (_distance(numbers, there), path)
            for path, there in hints
            if there is not None and len(there) == len(numbers)
        )
        return next(filter(None, (_read(path, numbers) for _, path in closest)), None)

    def store(
        self, question: PlanCacheKey, schedule: Schedule, remarks: Mapping[str, Any] | None = None
    ) -> None:
        """Store a plan in place of an earlier one; a folder that cannot be written is logged.

        Args:
            question: The problem.
            schedule: The plan, before it is lowered.
            remarks: Values to store with it, of types that JSON has.
        """
        numbers = question.numbers
        text = _file_text(schedule, numbers, remarks or {})
        # Measured costs differ in every run, so each run adds one.
        write_and_prune(self._path(question, numbers), text, f"{question.family}-*.json")

    def _path(self, question: PlanCacheKey, numbers: list[int]) -> Path:
        return self.folder / f"{question.family}-{_digest(json.dumps(numbers))[:16]}.json"

    def _paths_of_family(self, question: PlanCacheKey) -> Iterator[Path]:
        return self.folder.glob(f"{question.family}-*.json")


def write_and_prune(path: Path, text: str, family: str) -> None:
    """Write a file in place of an earlier one, and delete the oldest of the files like it.

    A folder that cannot be written is logged.

    Args:
        path: The file.
        text: What to write.
        family: The pattern of the names of the files that count as like it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)  # whoever reads has the old file or the new one
        newest_first = sorted(path.parent.glob(family), key=lambda other: -other.stat().st_mtime)
        for old in newest_first[_MOST_OF_A_FAMILY:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the plan is not kept for the next run: %s", error)


def _users_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(caches) if caches else Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        folder = Path(tempfile.gettempdir())
    return folder / "pipeoffload" / "plans"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _mean(cost: Any) -> float:
    return sum(cost) / len(cost) if isinstance(cost, tuple) else cost


def _distance(numbers: list[int], others: list[int]) -> int:
    return max(abs(one - other) for one, other in zip(numbers, others, strict=True))


def _file_text(schedule: Schedule, numbers: list[int], remarks: Mapping[str, Any]) -> str:
    plan = json.dumps(
        {
            "name": schedule.name,
            "remarks": dict(remarks),
            "num_sequence_slices": schedule.num_sequence_slices,
            "actions": str(schedule),
        }
    )
    # The short line of numbers comes first: a search for hints reads only that line.
    return f"{json.dumps(numbers)}\n{_digest(plan)}\n{plan}\n"


def _numbers_in(path: Path) -> list[int] | None:
    try:
        with path.open() as file:
            numbers = json.loads(file.readline())
        return [int(number) for number in numbers]
    except _DAMAGES as error:
        _warn_of_damage(path, error)
        return None


def _read(path: Path, wanted: list[int]) -> CachedPlan | None:
    try:
        numbers, digest, plan = path.read_text().splitlines()
        if _digest(plan) != digest:
            raise ScheduleError("its contents are not what was written")
        return _parsed(json.loads(plan), is_exact=json.loads(numbers) == wanted)
    except _DAMAGES as error:
        _warn_of_damage(path, error)
        return None


def _parsed(plan: Mapping[str, Any], is_exact: bool) -> CachedPlan:
    num_slices = plan.get("num_sequence_slices", 1)
    schedule = Schedule.parse(plan["actions"], plan["name"], num_slices)
    validate(schedule)
    return CachedPlan(schedule, is_exact, plan["remarks"])


def _warn_of_damage(path: Path, error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    log.warning("the plan in %s is damaged, and is ignored: %s", path, reason)
