"""The fastest layouts of a model over machines: ``pipeoffload-plan devices=8 num_nodes=2``.

The sizes of a layout are its pipeline ranks, tensor ranks and replicas, whose product is the number
of devices. Those whose weights, gradients and optimizer states do not fit are left out before they
are planned. The others are planned with a few schedules and a short search, those with the smallest
bound on the time of a step first; then, where the bound allows a faster plan, with any schedule and
offload, or if they are large with the schedules that are soon built. Plans that cannot become the
fastest are skipped.
The model is traced for each number of tensor ranks, from few to many, until more are slower.

Ctrl-C, or the end of the seconds that are given, ends the search with what it has planned.

All layouts have the same samples in a step, in microbatches of the same size, which replicas
divide. Tensor ranks share a machine.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_pipeoffload.cli.advice import (
    ABOUT_EQUAL,
    OPTIMIZERS,
    describe_step_time,
    planner_with_optimizer,
    simplest_proposal,
)
from lightning_pipeoffload.cli.layouts import (
    Layout,
    LayoutToPlan,
    PlannedLayout,
    SearchResult,
)
from lightning_pipeoffload.cli.model_planner import ModelPlanner, Show
from lightning_pipeoffload.cli.strategy_settings import with_values
from lightning_pipeoffload.planning.limits import bytes_formatter
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.comm import MOST_MICROBATCHES
from lightning_pipeoffload.runtime.tensor_parallel import NothingDistributedError
from lightning_pipeoffload.schedule import (
    FAMILIES,
    RECOMPUTATIONS,
    Kind,
    MemoryLimitError,
    PlanOption,
    PlanRequest,
    Recipe,
    ScheduleError,
    check_positive_integers,
    compute_seconds,
    score_bound_without_copies,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

_RANK_ORDERS = ("pipeline_inner", "data_inner")
SHOWN = 1.2
"""Layouts are shown that take up to so many times as long as the fastest."""
# The schedules that every layout is planned with first, without copies.
_QUICK = ("1f1b", "zb_h1", "zb_v")


class _SearchScope(NamedTuple):
    """How a layout is planned: with which schedules, and whether with copies.

    A whole one has all schedules, and tries both orders of ranks.
    """

    recipes: Mapping[str, Recipe]
    copies: bool = True

    @property
    def is_whole(self) -> bool:
        return len(self.recipes) == len(FAMILIES)


_WHOLE = _SearchScope(FAMILIES)
_ALONE = _SearchScope({name: FAMILIES[name] for name in _QUICK}, copies=False)
# The search of zb_v takes seconds where there are many ranks and microbatches. A tenth of it tells
# which layouts are near the fastest.
_SHORT_ZB_V = replace(FAMILIES["zb_v"], fixed_options={"num_actions": 60_000})
_SHORTLY = _SearchScope({**_ALONE.recipes, "zb_v": _SHORT_ZB_V}, copies=False)
_SMALL = (_ALONE, _WHOLE)
# Of large layouts, with copies those that keep least, then others that are soon built.
_LARGE = (
    _SearchScope({name: FAMILIES[name] for name in ("1f1b", "gis_h")}),
    _SearchScope({name: FAMILIES[name] for name in ("gis", "gis_h", "zb")}, copies=False),
)
# Of a large layout whose schedule is given.
_LARGE_BY_NAME = (_SearchScope({**FAMILIES, "zb_v": _SHORT_ZB_V}),)
# Where twice as many tensor ranks take so many times as long as fewer, even more are not tried:
# they would wait even longer for each other.
_SLOWER = 1.1
# Another plan is looked for that takes so many times as long as the fastest so far, or less.
_WORTH_A_PLAN = 0.99
# Of what is asked for: machines, or ranks where sizes are given.
_MORE = (1, 2, 4, 8, 16)


class OutOfTimeError(KeyboardInterrupt):
    """The time that a search may take is over; as Ctrl-C it ends the search wherever it is."""


@contextmanager
def _stopping_after(seconds: float | None) -> Iterator[None]:
    """Raise :class:`OutOfTimeError` within the context after so many seconds; None: never."""
    if seconds is None:
        yield
        return

    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    # Once more each second: Python drops an exception in a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tensor_parallel_sizes(config: DictConfig) -> list[int]:
    """Return the numbers of tensor ranks to try.

    Raises:
        ScheduleError: The size that is given does not divide the devices of a machine.
    """
    size, devices = config.tensor_parallel_size, config.devices
    if size == "auto":
        powers = (1 << n for n in range(devices.bit_length()))
        return [power for power in powers if devices % power == 0]
    if devices % size:
        raise ScheduleError(
            f"tensor_parallel_size ({size}) must divide devices ({devices}), so that ranks which "
            f"wait for each other in each block share a machine; leave it out, and its powers of "
            f"two that do are tried"
        )
    return [size]


class LayoutSearch:
    """A search over layouts; with ``only`` it is of one layout, which is planned in full.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
        sizes: The numbers of tensor ranks to try.
        show: Shows what is being done.
        only: The only layout; None: all that the configuration allows.
    """

    def __init__(
        self, config: DictConfig, sizes: Sequence[int], show: Show, only: Layout | None = None
    ) -> None:
        self._config, self._show = config, show
        self._sizes, self._only, self._beginning = sizes, only, ""
        asked = config.strategy.recompute
        self._recomputes: tuple[str, ...] = RECOMPUTATIONS if asked == "auto" else (asked,)
        self._schedule = str(config.strategy.schedule)
        self._num_slices = config.get("num_sequence_slices", 1)
        self._multiples: Sequence[int] = (1,)  # of the microbatches
        self._has_sharding = "sharding" in config.strategy
        self._has_order = "rank_order" in config.strategy or only is not None
        self._left_out: dict[str, str] = {}
        self._traced: dict[int, ModelPlanner] = {}  # by the number of tensor ranks
        self._least: tuple[float, Layout] | None = None  # bytes of a device, and the layout's sizes
        self._planned: dict[Layout, PlannedLayout] = {}
        self._open: list[Layout] = []  # that are neither planned nor left out
        self._begun: set[Layout] = set()
        self._num_layouts = 0

    def run(self) -> SearchResult:
        """Search, or name what would fit.

        Raises:
            KeyboardInterrupt: The user has stopped the search before any layout was planned.
            ScheduleError: No layout can be, none fits, or none was planned in time.
        """
        self._layouts(1)  # refuses sizes before the model is traced
        with _stopping_after(self._config.seconds):
            try:
                planned = (
                    self._plan_single_layout()
                    if self._only
                    else self._plan_all(self._yield_traced_planners(), 1)
                )
            except KeyboardInterrupt as stop:
                return self._partial_result(stop)
            if planned:
                return SearchResult(planned, [*self._left_out.items()])
            raise self._no_layout_error()

    def _plan_single_layout(self) -> list[PlannedLayout]:
        """Plan the only layout; all its options, for a table."""
        assert self._only is not None
        planner = ModelPlanner(self._config, self._show)
        self._traced[self._only.num_tensor_ranks] = planner
        try:
            return [self._plan_of(planner, self._only, None, _WHOLE)]
        except MemoryLimitError as error:
            write = bytes_formatter(self._config.device_memory)
            if planner.mixture:
                raise ScheduleError(f"{_no_card_fits(error, write)}; {_OTHER_CARDS}") from None
            self._record_memory_shortage(planner, self._only, error)
            return []

    def _partial_result(self, stop: KeyboardInterrupt) -> SearchResult:
        planned = self._select_shown()
        if planned:
            return SearchResult(planned, [*self._left_out.items()], self._open)
        if not isinstance(stop, OutOfTimeError):
            raise stop
        raise ScheduleError(
            f"of {self._num_layouts} layouts none is planned after seconds "
            f"({self._config.seconds}); allow more, or give sizes, as in tensor_parallel_size=1"
        ) from None

    def _no_layout_error(self) -> ScheduleError:
        if self._least is None:
            size, reason = next(iter(self._left_out.items()))
            return ScheduleError(f"no layout can be planned: {size}: {reason}")
        planner = self._any_planner
        write, (needed, layout) = bytes_formatter(self._config.device_memory), self._least
        assert planner.memory is not None
        try:
            advice = self.search_advice(planner.settings_named(self._schedule))
        except KeyboardInterrupt:
            advice = "the search for what would fit was stopped"
        needs = f"any such plan needs {write(needed)} or more of a device"
        if self._only is None:
            needs = (
                f"any layout needs {write(needed)} or more of a device, as {layout} (ranks x "
                f"tensor ranks x replicas) does"
            )
        return ScheduleError(
            f"{self._config.device} has {write(planner.memory)}, and {needs}; {advice}"
        )

    def search_advice(self, asked: PipelineSettings, planner: ModelPlanner | None = None) -> str:
        """Return the words that ask for a plan that fits.

        Schedules, chunks, recomputation, offload, microbatches and sharding may change, even if
        they are given; where nothing fits so, what the optimizer steps and where; then the number
        of machines, or of ranks. Of plans that take about as long it is that with the fewest
        changes.

        Args:
            asked: The settings that were asked for, with the schedule's name.
            planner: The planner of the only layout, if it has not been planned.
        """
        if planner is not None:
            self._traced = {planner.settings.tensor_parallel_size: planner}
        self._unpin_settings()
        planners: dict[str, list[ModelPlanner]] = {}
        for times in _MORE:
            for optimizer in OPTIMIZERS:
                if optimizer not in planners:
                    planners[optimizer] = self._planners_with_optimizer(optimizer)
                for planned in self._plan_all(planners[optimizer], times)[:1]:
                    words = self._describe_proposal(planned, asked, times)
                    if words:
                        return words
        more = "" if self._only else ", or many more machines"
        return f"use a smaller model, batch or data type{more}"

    def _unpin_settings(self) -> None:
        """Search all but sizes and the order of ranks from now on, by whole sequences."""
        self._num_slices = 1
        self._schedule, self._recomputes, self._has_sharding = "auto", RECOMPUTATIONS, False
        count, batch_size = self._config.num_microbatches, self._any_planner.probe.batch_size
        self._multiples = [
            times
            for times in (1, 2, 4)
            if batch_size % (times * count) == 0 and times * count <= MOST_MICROBATCHES
        ]

    @property
    def _any_planner(self) -> ModelPlanner:
        return next(iter(self._traced.values()))

    def _planners_with_optimizer(self, optimizer: str) -> list[ModelPlanner]:
        """Return traced planners with one of ``OPTIMIZERS`` whose settings are searched."""
        planners = []
        for traced in self._traced.values():
            planner = planner_with_optimizer(traced, optimizer)
            if planner is not None:
                free: Any = {"offload": "auto", "num_chunks": "auto"}
                planners.append(planner.with_settings(replace(planner.settings, **free)))
                self._trace(planners[-1])
        return planners

    def _describe_proposal(
        self, planned: PlannedLayout, asked: PipelineSettings, times: int
    ) -> str:
        """Return the words for a layout, and how long a step takes; "" if it does not fit."""
        if self._only is None:
            sizes = {f"num_nodes={times * self._config.num_nodes}": times > 1}
        else:
            sizes = {f"num_ranks={planned.layout.num_ranks}": times > 1}
        proposal = simplest_proposal(planned, asked, self._config, sizes)
        if proposal is None:
            return ""
        num_ranks = planned.layout.num_ranks // times
        step = describe_step_time(proposal.candidate, planned, asked, num_ranks)
        layout = "" if self._only else f"as {planned.layout} "
        return f"use {' '.join(proposal.words)}: {layout}{step}"

    def _layouts(self, times: int) -> list[Layout]:
        """List the layouts of the asked sizes, on so many times the machines or ranks.

        Raises:
            ScheduleError: There is none.
        """
        if self._only is not None:
            return [self._only._replace(num_ranks=times * self._only.num_ranks)]
        config, num_nodes = self._config, self._config.num_nodes * times
        num_devices = config.devices * num_nodes
        replicas = config.strategy.get("data_parallel_size", "auto")
        asked = {"num_ranks": config.num_ranks, "strategy.data_parallel_size": replicas}
        given = {name: size for name, size in asked.items() if size != "auto"}
        check_positive_integers(**given)
        layouts = [
            Layout(num_ranks, size, num_devices // size // num_ranks)
            for size in self._sizes
            for num_ranks in range(1, num_devices // size + 1)
            if num_devices // size % num_ranks == 0
            and config.num_ranks in ("auto", num_ranks)
            and replicas in ("auto", num_devices // size // num_ranks)
        ]
        if layouts:
            return layouts
        if len(self._sizes) == 1:
            given["tensor_parallel_size"] = self._sizes[0]
        words = " x ".join(f"{name} ({size})" for name, size in given.items())
        raise ScheduleError(
            f"{words} makes no layout of {num_devices} devices (devices={config.devices}, "
            f"num_nodes={num_nodes}), which num_ranks x tensor_parallel_size x "
            f"strategy.data_parallel_size has to be; leave out a size to have it searched"
        )

    def _yield_traced_planners(self) -> Iterator[ModelPlanner]:
        """Yield a planner, whose model is traced, for each number of tensor ranks that can be."""
        errors: list[Exception] = []
        for size in self._sizes:
            words = "1 tensor rank" if size == 1 else f"{size} tensor ranks"
            self._show_progress(f"counting what the model needs with {words}")
            try:
                self._traced[size] = self._planner_of(size)
            except NothingDistributedError as error:
                errors.append(error)
                self._left_out["several tensor ranks"] = _first_line(error)
                self._mark_tensor_ranks_decided(2)
                break
            except Exception as error:  # of the user's own code too, which may need another size
                errors.append(error)
                name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                self._left_out[words] = f"{name}{_first_line(error)}"
                self._mark_tensor_ranks_decided(size, size)
            else:
                yield self._traced[size]
        if not self._traced:
            raise errors[0]

    def _planner_of(self, size: int) -> ModelPlanner:
        sizes = {"tensor_parallel_size": size, "strategy.data_parallel_size": 1}
        recompute = {"strategy.recompute": self._recomputes[0]}
        config = with_values(self._config, sizes | recompute)
        planner = ModelPlanner(
            config, self._show_progress, self._any_planner if self._traced else None
        )
        self._trace(planner)
        return planner

    def _trace(self, planner: ModelPlanner) -> None:
        """Trace the model, and leave out recomputation that it cannot have.

        Raises:
            ValueError: The step cannot be traced.
        """
        planner.probe.recomputes = self._recomputes
        count = self._config.num_microbatches
        for recompute in self._recomputes:
            try:
                planner.needs_of(PlanOption("1f1b", 1, count, recompute), 1)
            except ScheduleError:
                if len(self._recomputes) == 1 or recompute == "none":
                    raise
                self._recomputes = tuple(r for r in self._recomputes if r != recompute)

    def _plan_all(self, planners: Iterable[ModelPlanner], times: int) -> list[PlannedLayout]:
        """Return planned layouts: the simplest of the fastest, then the others by their speed.

        They are of so many times the machines or ranks that are asked for.
        """
        self._planned, self._open, self._begun = {}, self._layouts(times), set()
        self._num_layouts = len(self._open)
        if self._only is not None:
            in_full = [
                self._plan(each, inf, _WHOLE) for each in self._layouts_to_plan(planners, times)
            ]
            return [planned for planned in in_full if planned is not None]
        places = self._plan_quickly(planners, times)
        for place in places:
            for scope in self._scopes(place):
                # zb_v is searched in full even if it gains little.
                most = self._best * (1.0 if scope is _ALONE else _WORTH_A_PLAN)
                if (place.work if scope.copies else place.least) > most:
                    self._left_out[str(place.layout)] = _NOT_FASTER
                    continue
                self._prefix_progress(place.layout)
                candidate = self._plan(place, most, scope)
                if candidate is not None:
                    self._planned[place.layout] = candidate
            self._mark_decided(place.layout)
        self._beginning = ""
        return self._select_shown()

    def _scopes(self, place: LayoutToPlan) -> tuple[_SearchScope, ...]:
        if not place.is_large:
            return _SMALL
        return _LARGE if self._schedule == "auto" else _LARGE_BY_NAME

    @property
    def _best(self) -> float:
        return min((each.score for each in self._planned.values()), default=inf)

    def _select_shown(self) -> list[PlannedLayout]:
        best = self._best
        for layout, each in self._planned.items():
            self._left_out.pop(str(layout), None)
            if each.score > SHOWN * best:
                self._left_out[str(layout)] = _SLOW
        shown = [each for each in self._planned.values() if each.score <= SHOWN * best]
        near = [each for each in shown if each.score <= best * ABOUT_EQUAL]
        first = min(near, key=lambda each: each.order, default=None)
        return sorted(shown, key=lambda each: (each is not first, each.score))

    def _mark_decided(self, *decided: Layout) -> None:
        """Take layouts that are decided on out of those that are still to be planned."""
        self._open = [layout for layout in self._open if layout not in decided]

    def _mark_tensor_ranks_decided(self, least: int, most: float = inf) -> None:
        self._mark_decided(*(each for each in self._open if least <= each.num_tensor_ranks <= most))

    def _plan_quickly(self, planners: Iterable[ModelPlanner], times: int) -> list[LayoutToPlan]:
        """Plan the layouts that fit without copies; return all that may become the fastest."""
        places: list[LayoutToPlan] = []
        for place in self._layouts_to_plan(planners, times):
            if place.work > SHOWN * self._best:
                self._leave_out(place.layout, _SLOW)
            else:
                places.append(place)
                self._ensure_quick_plan(place)
        return places

    def _ensure_quick_plan(self, place: LayoutToPlan) -> bool:
        """Plan a layout without copies, if that has not been done; return whether it fits so."""
        # A large one is wanted only if it is the fastest.
        most = (1.0 if place.is_large else SHOWN) * self._best
        if place.layout not in self._planned and place.least <= most and place.least < inf:
            self._prefix_progress(place.layout)
            candidate = self._plan(place, most, _SHORTLY)
            if candidate is not None:
                self._planned[place.layout] = candidate
                self._mark_decided(place.layout)
        return place.layout in self._planned

    def _layouts_to_plan(self, planners: Iterable[ModelPlanner], times: int) -> list[LayoutToPlan]:
        """Return the layouts of all tensor ranks that are worth it, the most promising first."""
        places: list[LayoutToPlan] = []
        for planner in planners:
            first = min(places, key=lambda place: place.least, default=None)
            of_size = self._layouts_that_fit(planner, times)
            best_of_size = min((place.least for place in of_size), default=inf)
            places += of_size
            size, best = planner.settings.tensor_parallel_size, first.least if first else inf
            is_slower = _SLOWER * best < best_of_size < inf and size < self._sizes[-1]
            # A bound does not say that a layout fits.
            if is_slower and first is not None and self._ensure_quick_plan(first):
                self._left_out[f"more than {size} tensor ranks"] = (
                    f"{size} take {best_of_size / best:.2f} times as long as fewer, or longer"
                )
                self._mark_tensor_ranks_decided(size + 1)
                break
        return sorted(places, key=lambda place: (place.least, place.layout.num_ranks))

    def _leave_out(self, layout: Layout, reason: str) -> None:
        self._left_out[str(layout)] = reason
        self._mark_decided(layout)

    def _layouts_that_fit(self, planner: ModelPlanner, times: int) -> list[LayoutToPlan]:
        """Return the layouts of a planner's tensor ranks whose weights and states fit."""
        places = []
        for layout in self._layouts(times):
            num_ranks, size, num_replicas = layout
            if size != planner.settings.tensor_parallel_size:
                continue
            sizes: Any = {"data_parallel_size": num_replicas}
            if self._only is None:
                count = self._config.num_microbatches
                if count % num_replicas:
                    reason = f"the replicas cannot divide num_microbatches ({count})"
                    self._leave_out(layout, reason)
                    continue
                sizes["num_microbatches"] = count // num_replicas
            settings, memory = replace(planner.settings, **sizes), planner.memory
            option = PlanOption("1f1b", 1, int(settings.num_microbatches), self._recomputes[0])
            assert memory is not None
            planners = [
                planner.with_settings(replace(settings, sharding=sharding))
                for sharding in self._shardings(settings)
            ]
            in_layout = planners[-1]
            try:
                least_bytes = in_layout.least_memory_without_activations(option, num_ranks)
                if least_bytes > memory:
                    self._leave_out(layout, self._record_least_memory(layout, least_bytes))
                    continue
                in_layout.needs_of(option, num_ranks)  # refuses more ranks than blocks
                [seconds] = compute_seconds(in_layout.costs_of(option, 1), 1)
                work = seconds * option.num_microbatches / num_ranks
                bounds = [
                    score_bound_without_copies(self._request(each, layout, _SHORTLY))
                    for each in planners
                ]
            except ScheduleError as error:
                self._leave_out(layout, _first_line(error))
                continue
            least = max(work, bounds[-1])
            if bounds[0] > least * ABOUT_EQUAL:  # more memory makes no plan slower
                planners = planners[-1:]
            places.append(LayoutToPlan(layout, planners, least, work))
        return places

    def _plan(
        self, place: LayoutToPlan, omits_above: float, scope: _SearchScope
    ) -> PlannedLayout | None:
        """Return the fastest plan of a layout; None if it does not fit, or is slow."""
        best: PlannedLayout | None = None
        layout, reason = place.layout, ""
        orders = self._rank_orders_to_try(place.planners[0], layout)[
            : None if scope.is_whole else 1
        ]
        for planner in place.planners:
            if best is not None and not best.plan.is_limited_by_memory:
                break
            for order in orders:
                changed = replace(planner.settings, rank_order=order)
                least = omits_above if best is None else best.score
                try:
                    candidate = self._plan_of(planner.with_settings(changed), layout, least, scope)
                except MemoryLimitError as error:
                    reason = reason or self._record_memory_shortage(planner, layout, error)
                except ScheduleError as error:
                    reason = reason or _first_line(error)
                else:
                    if candidate.score * (1 if best is None else ABOUT_EQUAL) <= least:
                        best = candidate
        if best is None:
            self._left_out[str(layout)] = reason if omits_above == inf else _NOT_FASTER
        return best

    def _plan_of(
        self,
        planner: ModelPlanner,
        layout: Layout,
        omits_above: float | None,
        scope: _SearchScope,
    ) -> PlannedLayout:
        plan, needs = planner.plan(self._request(planner, layout, scope, omits_above))
        return PlannedLayout(planner, plan, needs)

    def _request(
        self,
        planner: ModelPlanner,
        layout: Layout,
        scope: _SearchScope,
        omits_above: float | None = inf,
    ) -> PlanRequest:
        """Return the request for a layout's plans.

        ``omits_above`` None: for all options, searches of many seconds among them.
        """
        settings = planner.settings
        counts = [int(settings.num_microbatches) * times for times in self._multiples]
        wanted = planner.options(self._schedule, counts, self._recomputes, self._num_slices)
        if self._schedule == "auto" and omits_above is not None:
            wanted = [option for option in wanted if not FAMILIES[option.schedule].takes_seconds]
        if self._schedule == "auto" and not scope.is_whole:
            head = settings.head_weight_grad_choices[0]
            quick = [option for option in wanted if option.head_weight_grad == head]
            wanted = [option for option in quick if option.schedule in scope.recipes] or quick
        if not scope.copies and settings.offload == "auto":
            planner = planner.with_settings(replace(settings, offload="none"))
        more: Any = {"omits_above": omits_above, "recipes": {**FAMILIES, **scope.recipes}}
        return planner.request(wanted, layout.num_ranks, **more)

    def _record_memory_shortage(
        self, planner: ModelPlanner, layout: Layout, error: MemoryLimitError
    ) -> str:
        _, limit, needed = error.args
        assert planner.memory is not None
        return self._record_least_memory(layout, needed + planner.memory - limit)  # messages

    def _record_least_memory(self, layout: Layout, needed: float) -> str:
        if self._least is None or needed < self._least[0]:
            self._least = needed, layout
        return f"needs {bytes_formatter(self._config.device_memory)(needed)} or more of a device"

    def _shardings(self, settings: PipelineSettings) -> list[str]:
        if self._has_sharding or settings.data_parallel_size == 1:
            return [settings.sharding]
        return ["none", "optimizer"]

    def _rank_orders_to_try(self, planner: ModelPlanner, layout: Layout) -> list[str]:
        """Return the orders of ranks of which another one is not faster over every link.

        First is that in which messages and gradients take less time.
        """
        settings = planner.settings
        if self._has_order or 1 in (layout.num_ranks, layout.num_replicas):
            return [settings.rank_order]
        option = PlanOption("1f1b", 1, int(settings.num_microbatches), self._recomputes[0])
        needs = planner.needs_of(option, layout.num_ranks)
        placement = option.placement(layout.num_ranks)
        seconds, sums = {}, {}
        for order in _RANK_ORDERS:
            links = planner.with_settings(replace(settings, rank_order=order)).links
            messages = links.message_seconds(needs.sent[Kind.SEND_F], placement)
            reduce = links.reduce_seconds(needs.gradient_bytes(), placement)
            seconds[order] = [*messages, *reduce]
            sums[order] = option.num_microbatches * max(messages) + max(reduce)
        first, second = sorted(_RANK_ORDERS, key=sums.__getitem__)
        if _is_never_slower(seconds[first], seconds[second]):
            return [first]
        return [second] if _is_never_slower(seconds[second], seconds[first]) else [first, second]

    def _prefix_progress(self, layout: Layout) -> None:
        """Have all that is shown from now on begin with a layout."""
        self._begun.add(layout)
        number = self._num_layouts - len({*self._open} - self._begun)
        self._beginning = f"layout {number} of {self._num_layouts}, {layout}, "

    def _show_progress(self, text: str) -> None:
        self._show(f"{self._beginning}{text}")


_SLOW = f"takes more than {SHOWN:g} times as long"
_OTHER_CARDS = "use another order or larger cards, strategy.recompute=full, or smaller microbatches"
_NOT_FASTER = "no plan that fits is faster than those shown"


def _no_card_fits(error: MemoryLimitError, write: Callable[[float], str]) -> str:
    sentence, limit, needed = error.args
    room = write(limit) if limit else "none, as weights, gradients and states take all"
    return str(sentence).format(limit=f"the room for activations ({room})", needed=write(needed))


def _is_never_slower(seconds: Iterable[float], others: Iterable[float]) -> bool:
    return all(a <= b for a, b in zip(seconds, others, strict=True))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
