"""How the costs of a microbatch divide among slices of its sequences, and where they are cut.

Blocks run slice by slice; causal attention of a slice reads the keys and values of all earlier
ones, so later slices of equal length take longer. What follows the blocks runs once, on the whole
sequences, after the last slice. Sources: Li et al., "TeraPipe", ICML 2021; Sun et al., "Seq1F1B",
2024, whose slices take equal time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf, sqrt
from typing import Any

from .actions import ScheduleError

PerStage = float | Sequence[float]

LEAST_TOKENS = 2
"""Tokens of the shortest slice."""


def expand_to_stages(name: str, value: PerStage, num_stages: int) -> tuple[float, ...]:
    """Return a cost for every stage.

    Raises:
        ScheduleError: It is a sequence of another length.
    """
    if not isinstance(value, tuple):
        return (float(value),) * num_stages  # type: ignore[arg-type]
    if len(value) != num_stages:
        raise ScheduleError(
            f"costs.{name} has {len(value)} values, and the schedule {num_stages} stages; "
            f"give one number, or {num_stages}"
        )
    return value


def check_fields(costs: Any, check: Callable[[str, Any], None]) -> None:
    """Check each field of a frozen dataclass, and make tuples of those that are sequences."""
    for field in fields(costs):
        value = getattr(costs, field.name)
        if isinstance(value, Sequence):
            object.__setattr__(costs, field.name, tuple(value))
        check(field.name, value)


@dataclass(frozen=True)
class Slices:
    """How costs of a microbatch divide among its slices.

    All but ``sizes`` are shares of the cost of that name, from 0 to 1; each is one number for all
    stages, or a sequence with one for every stage. What is neither quadratic nor after the blocks
    is in proportion to a slice's tokens.

    Attributes:
        sizes: Tokens of each slice, or their shares; empty: all slices are equal.
        quadratic_forward: The share of F that grows with the square of the length: attention.
        quadratic_backward_input: The same of B.
        end_forward: The share of F that runs once, after the blocks, with the last slice.
        end_backward_input: The same of B, with which the last slice's B begins.
        end_backward_weight: The same of W.
        end_activation: The share of the activation that is saved after the blocks.
        end_weight_residue: The same of the residue.
        end_weight_input: The same of what only W needs.
        key_values: The share of the activation that are keys and values. They stay on the device
            from a slice's F to its B, for later slices attend to them.
        units: What was measured, in place of the shares above: of a cost the share that each slice
            has in the cost of its stage, all slices of a stage, then of the next; of "key_values",
            and of their gradients, the shares in the activation of the stage.
    """

    sizes: tuple[float, ...] = ()
    quadratic_forward: PerStage = 0.0
    quadratic_backward_input: PerStage = 0.0
    end_forward: PerStage = 0.0
    end_backward_input: PerStage = 0.0
    end_backward_weight: PerStage = 0.0
    end_activation: PerStage = 0.0
    end_weight_residue: PerStage = 0.0
    end_weight_input: PerStage = 0.0
    key_values: PerStage = 0.0
    units: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, _check_shares)

    def shares(self, num_slices: int) -> tuple[float, ...]:
        """Return the share of the tokens of each slice.

        Raises:
            ScheduleError: There are sizes of another number of slices.
        """
        if not self.sizes:
            return (1 / num_slices,) * num_slices
        if len(self.sizes) != num_slices:
            raise ScheduleError(
                f"costs.slices.sizes has {len(self.sizes)} values for {num_slices} slices; give "
                f"one for each, or none for equal slices"
            )
        return tuple(size / sum(self.sizes) for size in self.sizes)

    def divide(self, name: str, costs: Sequence[float], num_slices: int) -> list[float]:
        """Return a cost of every slice of every stage: all slices of a stage, then of the next.

        Args:
            name: The name of the cost, such as ``"forward"``.
            costs: The cost of a whole microbatch at each stage.
        """
        measured = dict(self.units).get(name)
        if measured is not None:
            return _costs_of_slices(name, measured, costs, num_slices)
        sizes = self.shares(num_slices)
        ends = [0.0, *accumulate(sizes)]
        squares = [end**2 - start**2 for start, end in zip(ends, ends[1:], strict=False)]
        divided = []
        for cost, quadratic, at_end in zip(costs, *self._shares_of(name, len(costs)), strict=True):
            linear = 1.0 - quadratic - at_end
            of_stage = [
                cost * (linear * size + quadratic * square)
                for size, square in zip(sizes, squares, strict=True)
            ]
            of_stage[-1] += cost * at_end
            divided += of_stage
        return divided

    def key_value_bytes(
        self, activations: Sequence[float], num_slices: int
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return the memory of keys and values, and of their gradients, by stage and slice."""
        if dict(self.units).get("key_values") is not None:
            names = "key_values", "key_value_gradients"
            held, gradients = (self.divide(name, activations, num_slices) for name in names)
            return held, gradients
        shares = expand_to_stages("slices.key_values", self.key_values, len(activations))
        whole = [share * kept for share, kept in zip(shares, activations, strict=True)]
        held = Slices(self.sizes).divide("key_values", whole, num_slices)
        return held, held

    def parts(self, name: str, costs: Sequence[float]) -> tuple[float, float]:
        """Return of a cost of all stages' blocks the linear part and the quadratic one."""
        stages = [*zip(costs, *self._shares_of(name, len(costs)), strict=True)]
        quadratic = sum(cost * share for cost, share, _ in stages)
        return sum(cost * (1 - at_end) for cost, _, at_end in stages) - quadratic, quadratic

    def _shares_of(self, name: str, num_stages: int) -> Iterator[tuple[float, ...]]:
        """Yield the quadratic share at every stage, and that of the code after the blocks."""
        for share in (f"quadratic_{name}", f"end_{name}"):
            yield expand_to_stages(f"slices.{share}", getattr(self, share, 0.0), num_stages)


def _costs_of_slices(
    name: str, shares: Sequence[float], costs: Sequence[float], num_slices: int
) -> list[float]:
    if len(shares) != len(costs) * num_slices:
        raise ScheduleError(
            f"costs.slices has {name} of {len(shares)} slices of stages, and the schedule has "
            f"{len(costs)} stages with {num_slices} slices each; measure these, or leave it out"
        )
    each = (cost for cost in costs for _ in range(num_slices))
    return [cost * share for cost, share in zip(each, shares, strict=True)]


def _check_shares(name: str, value: Any) -> None:
    if name == "units":
        return
    numbers = value if isinstance(value, Sequence) else (value,)
    least, most = (0, 1) if name != "sizes" else (1e-100, inf)
    if not all(isinstance(n, (int, float)) and least <= n <= most for n in numbers):
        words = "numbers above 0" if name == "sizes" else "from 0 to 1, one number or one a stage"
        raise ScheduleError(f"costs.slices.{name} ({value}) must be {words}")


def slice_ends(
    num_tokens: int, num_slices: int, linear: float = 1.0, quadratic: float = 0.0
) -> tuple[int, ...]:
    """Return where each slice of a sequence ends, so that all cost about the same.

    Args:
        num_tokens: Tokens of the sequence.
        num_slices: The slices to cut it into.
        linear: The cost of the whole sequence that is in proportion to its tokens.
        quadratic: The cost of the whole sequence that grows with their square: causal attention.

    Raises:
        ScheduleError: The slices would have less than ``LEAST_TOKENS``.
    """
    if num_tokens < LEAST_TOKENS * num_slices:
        raise ScheduleError(
            f"num_sequence_slices ({num_slices}) leaves less than {LEAST_TOKENS} of {num_tokens} "
            f"tokens for a slice; use at most {max(1, num_tokens // LEAST_TOKENS)}"
        )
    ends: list[int] = []
    for number in range(1, num_slices + 1):
        share = _position(number / num_slices, linear, quadratic)
        least = (ends[-1] if ends else 0) + LEAST_TOKENS
        most = num_tokens - LEAST_TOKENS * (num_slices - number)
        ends.append(min(most, max(least, round(num_tokens * share))))
    return tuple(ends)


def _position(done: float, linear: float, quadratic: float) -> float:
    """Return the share of the tokens up to which that share of the cost is done."""
    cost = done * (linear + quadratic)
    if not quadratic:
        return done
    # The root of quadratic * x**2 + linear * x = cost, in the form that does not cancel.
    return 2 * cost / (linear + sqrt(linear**2 + 4 * quadratic * cost))
