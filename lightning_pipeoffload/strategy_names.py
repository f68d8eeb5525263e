"""The strategies' names in Lightning's registry, and the refusal of names like these."""

from __future__ import annotations

from difflib import get_close_matches

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipeoffload.odc import OnDemandStrategy
from lightning_pipeoffload.schedule import SCHEDULES
from lightning_pipeoffload.strategy import PipeOffloadStrategy

_PREFIX = "pipeoffload"


class _SuggestingNames(list[str]):
    """The registered names; looking for an unknown one that begins like ours raises with ours.

    Lightning would list its own names, without those of schedules.
    """

    def __contains__(self, name: object) -> bool:
        is_there = super().__contains__(name)
        if not is_there and isinstance(name, str) and name.startswith(_PREFIX):
            ours = [each for each in self if each.startswith(_PREFIX)]
            similar = get_close_matches(name, ours, n=1, cutoff=0.0)[0]
            raise ValueError(
                f'strategy="{name}" is no strategy; did you mean "{similar}"? After pipeoffload_ '
                f"comes the name of a schedule: {', '.join(SCHEDULES)}"
            )
        return is_there


def register_strategies() -> None:
    """Register the strategies, and one name for each schedule."""
    StrategyRegistry.register(
        _PREFIX, PipeOffloadStrategy, description="Zero-bubble pipeline parallelism"
    )
    StrategyRegistry.register(
        f"{_PREFIX}_notebook",
        PipeOffloadStrategy,
        description="Pipeline parallelism from a notebook, whose kernel forks the ranks",
        start_method="fork",
    )
    StrategyRegistry.register(
        "odc", OnDemandStrategy, description="Sharded data parallelism with on-demand communication"
    )
    for name in SCHEDULES:
        StrategyRegistry.register(
            f"{_PREFIX}_{name}",
            PipeOffloadStrategy,
            description=f"Pipeline parallelism with the schedule {name}",
            schedule=name,
        )
    StrategyRegistry.available_strategies = lambda: _SuggestingNames(StrategyRegistry)  # type: ignore[method-assign]
