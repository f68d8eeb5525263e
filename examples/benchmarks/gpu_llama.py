"""Four layers of Llama 7B, as Hugging Face has them, on one GPU, for ``gpu_check.py``.

They are what a rank of eight has of the whole model. The vocabulary is small, so that the head is.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from examples.benchmarks.gpu_process import in_one_line, is_accelerated, needing
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.cli.rehearsal import Rehearsal
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.measure import CopySpeed, StageCosts
from lightning_pipeoffload.runtime.run import ActivationMemory, Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.step import Microbatch, sharing_casts
from lightning_pipeoffload.schedule import Costs, Kind, Schedule, build, lower, simulate

_VOCABULARY = 256
_PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, dense


@dataclass(frozen=True)
class Size:
    """How large all is: on a GPU, or on the CPU for the tests."""

    width: int
    inner: int
    heads: int
    sequence: int
    num_microbatches: int
    num_layers: int = 4

    @classmethod
    def on(cls, device: torch.device) -> Size:
        """Return the size for a device."""
        large = cls(4096, 11008, 32, 4096, 8)
        return large if is_accelerated(device) else cls(32, 64, 2, 8, 4)

    @property
    def token_flops(self) -> float:
        """Operations of a token in F and backward: products of weights, and causal attention."""
        weights = 4 * self.width**2 + 3 * self.width * self.inner
        return 6.0 * self.num_layers * (weights + self.width * self.sequence)


class Llama(LightningModule):
    """Hugging Face's class, made where it is to be."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - slow to import

        config = LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=size.width, intermediate_size=size.inner,
            num_hidden_layers=size.num_layers, num_attention_heads=size.heads,
            num_key_value_heads=size.heads, max_position_embeddings=size.sequence,
        )  # fmt: skip
        with device:
            self.model = LlamaForCausalLM(config)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        loss: Tensor = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


@dataclass
class Steps(Callback):
    """What steps take: the first ones warm up, then some are timed, and one is watched.

    Attributes:
        num_batches: Batches of a step.
        num_warm: Steps before the ones that are timed, of which there is one more.
        profiles: Whether the last one is profiled, after which launches take longer.
    """

    num_batches: int
    num_warm: int
    profiles: bool = False
    starts: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    caught: list[Any] = field(default_factory=list)
    reads: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, float] = field(default_factory=dict)
    memory: tuple[int, ...] = (0, 0, 0)
    actions: dict[tuple[Kind, int], float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """How many there are to be."""
        return 2 * self.num_warm + 2

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Note when a step begins, once the device has ended the one before."""
        if batch_idx % self.num_batches:
            return
        on_device, index = is_accelerated(trainer.strategy.root_device), len(self.starts)
        if on_device:
            torch.accelerator.synchronize()
        if index == self.num_warm and on_device:
            torch.accelerator.reset_peak_memory_stats()
            self.memory = (torch.accelerator.memory_allocated(), 0, 0)
        self.around = ExitStack()
        if index == self.num_steps - 1 and self.profiles:
            kind = ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU
            self.profiled = self.around.enter_context(profile(activities=[kind]))
        elif index == self.num_steps - 1 and on_device:
            self.caught = self.around.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self.around.callback(torch.cuda.set_sync_debug_mode, "default")
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Note what the host has taken, and what was watched."""
        if (args[-1] + 1) % self.num_batches:
            return
        self.host.append(time.perf_counter() - self.starts[-1])
        index, on_device = len(self.starts) - 1, is_accelerated(trainer.strategy.root_device)
        if index == 2 * self.num_warm and on_device:
            peaks = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_reserved()
            self.memory = self.memory[0], *peaks
        if index < self.num_steps - 1:
            return
        if self.profiles and on_device:
            torch.accelerator.synchronize()
        self.around.close()
        if self.profiles:
            self._read_profile()
        self.reads.update(
            f"{Path(one.filename).name}:{one.lineno}"
            for one in self.caught
            if "synchronizing" in str(one.message)
        )
        if isinstance(trainer.strategy, PipeOffloadStrategy):
            self.actions = trainer.strategy.split.executor.timer.action_seconds()

    def _read_profile(self) -> None:
        averages = self.profiled.key_averages()
        print(averages.table("self_device_time_total", row_limit=25, max_name_column_width=90))
        seconds: Counter[str] = Counter()
        for event in averages:
            seconds[_kind_of_kernel(event.key)] += event.self_device_time_total / 1e6
        self.kernels = dict(seconds)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        timed = self.starts[self.num_warm : 2 * self.num_warm + 2]
        return median(after - before for before, after in pairwise(timed))

    @property
    def host_seconds(self) -> float:
        """Seconds of the host until all of a step is enqueued."""
        return median(self.host[self.num_warm : 2 * self.num_warm + 1])


_KERNELS = {
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "attention": ("flash", "fmha", "cudnn", "sdpa"),
}


def _kind_of_kernel(name: str) -> str:
    attention, products = _KERNELS["attention"], _KERNELS["products"]
    lower_name = name.lower()
    if any(word in lower_name for word in attention):
        return "attention"
    return "products" if any(word in lower_name for word in products) else "the rest"


def fit(
    device: torch.device,
    strategy: Any,
    compiles: bool = False,
    num_warm: int = 4,
    prepare: Callable[[Llama], None] = lambda module: None,
    **of_steps: Any,
) -> tuple[Steps, Trainer]:
    """Train on random text; return what steps took, and the trainer.

    Args:
        device: The device.
        strategy: A strategy; the name of Lightning's own gets each microbatch as a batch.
        compiles: Whether layers are compiled.
        num_warm: Steps before those that are timed.
        prepare: Changes the module before it is trained.
        **of_steps: More of :class:`Steps`.
    """
    size = Size.on(device)
    _empty(device)
    torch.manual_seed(0)
    module = Llama(size, device)
    prepare(module)
    module.model.config.use_cache = not compiles  # a cache makes each layer a function of its own
    if compiles and isinstance(strategy, str):
        for layer in module.model.model.layers:
            layer.compile(**_compile_with(device))
    is_plain = isinstance(strategy, str)
    count = size.num_microbatches
    num_warm = num_warm if is_accelerated(device) else 1
    steps = Steps(count if is_plain else 1, num_warm, **of_steps)
    generator = torch.Generator().manual_seed(0)
    numel = steps.num_steps * count, size.sequence
    text: Any = [*torch.randint(_VOCABULARY, numel, generator=generator)]
    trainer = Trainer(
        accelerator="auto" if is_accelerated(device) else "cpu", devices=1, strategy=strategy,
        precision="bf16-mixed", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[steps],
        accumulate_grad_batches=count if is_plain else 1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(text, 1 if is_plain else count))
    return steps, trainer


def _compile_with(device: torch.device) -> dict[str, Any]:
    return {} if is_accelerated(device) else {"backend": "aot_eager"}


def _empty(device: torch.device) -> None:
    gc.collect()
    if is_accelerated(device):
        torch.accelerator.empty_cache()


def figures(device: torch.device, steps: Steps, trainer: Trainer) -> str:
    """Return tokens per second, and what a step consists of."""
    size = Size.on(device)
    tokens = size.num_microbatches * size.sequence / steps.seconds
    allocated, peak, reserved = (number / 2**30 for number in steps.memory)
    return (
        f"{tokens:.0f} tokens/s, {tokens * size.token_flops / _PEAK_FLOPS:.1%} MFU; a step "
        f"{steps.seconds * 1e3:.0f} ms, of the host {steps.host_seconds * 1e3:.0f}; "
        f"{sum(steps.reads.values())} reads {dict(steps.reads.most_common(3))}; "
        f"{allocated:.1f} GiB before a step, {peak:.1f} at its peak, {reserved:.1f} reserved"
        f"{_of_pipeline(steps, trainer)}; loss {loss_of(trainer):.4f}"
    )


def _of_pipeline(steps: Steps, trainer: Trainer) -> str:
    if not isinstance(trainer.strategy, PipeOffloadStrategy):
        return ""
    measured = trainer.strategy.report()["measured"]
    (ledger,) = measured["peak_activation_bytes"]
    return (
        f", {ledger / 2**30:.1f} of activations by the ledger; a microbatch in ms: "
        + ", ".join(f"{kind.value} {s * 1e3:.1f}" for kind, s in _by_kind(steps).items())
        + f"; {measured['deferred_flops'][0] / measured['weight_flops'][0]:.0%} left for W"
    )


def _by_kind(steps: Steps) -> dict[Kind, float]:
    """Return the seconds of a microbatch in all stages, by kind of action."""
    found: dict[Kind, float] = {}
    for (kind, _), seconds in steps.actions.items():
        if kind in (Kind.F, Kind.B, Kind.W, Kind.BW):
            found[kind] = found.get(kind, 0.0) + seconds
    return found


def _strategies() -> dict[str, dict[str, Any]]:
    """Return the arguments of strategies by a name for them."""
    return {
        "zb_h1": {"schedule": "zb_h1"},
        "zb_h1, W in two passes": {"schedule": "zb_h1", "gradient_accumulation_fusion": False},
        "1f1b": {"schedule": "1f1b"},
    }


@needing("transformers")
def llama(device: torch.device) -> Iterator[str]:
    """A Trainer over one stage, compared with plain Lightning that accumulates."""
    split: dict[str, float] = {}
    steps, trainer = fit(device, "auto")
    plain, loss = steps.seconds, loss_of(trainer)
    yield f"plain Lightning: {figures(device, steps, trainer)}"
    del trainer
    count = Size.on(device).num_microbatches
    for name, options in _strategies().items():
        steps, trainer = fit(device, PipeOffloadStrategy(num_microbatches=count, **options))
        yield f"{name}: {plain / steps.seconds:.3f} of plain; {figures(device, steps, trainer)}"
        assert abs(loss_of(trainer) - loss) < TOLERANCE
        del trainer
        split[name] = sum(s for kind, s in _by_kind(steps).items() if kind is not Kind.F)
    yield f"B + W take {split['zb_h1'] / split['1f1b']:.3f} of both at once"
    for strategy in ("auto", PipeOffloadStrategy(num_microbatches=count, schedule="zb_h1")):
        steps, _ = fit(device, strategy, num_warm=1, profiles=True)
        kinds = ", ".join(f"{kind} {s * 1e3:.0f}" for kind, s in sorted(steps.kernels.items()))
        kernels = sum(steps.kernels.values()) * 1e3
        name = strategy if isinstance(strategy, str) else "zb_h1"
        yield f"{name}: a step has {kernels:.0f} ms of kernels: {kinds}"


@needing("transformers")
def compiled(device: torch.device) -> Iterator[str]:
    """The same with compiled layers."""
    compile_with = _compile_with(device) or True
    found: dict[str, tuple[float, float]] = {}
    for name in ("zb_h1", "zb_h1, W in two passes"):
        options = _strategies()[name] | {"num_microbatches": Size.on(device).num_microbatches}
        strategy = PipeOffloadStrategy(compile=compile_with, **options)
        started = time.perf_counter()
        steps, trainer = fit(device, strategy, compiles=True, num_warm=3)
        whole = time.perf_counter() - started
        yield f"{name}, whose fit took {whole:.0f} s: {figures(device, steps, trainer)}"
        found[name] = steps.seconds, loss_of(trainer)
        del trainer, strategy
    steps, trainer = fit(device, "auto", compiles=True, num_warm=3)
    yield f"plain Lightning: {figures(device, steps, trainer)}"
    for name, (seconds, loss) in found.items():
        yield f"{name}: {steps.seconds / seconds:.3f} of plain Lightning"
        assert abs(loss_of(trainer) - loss) < TOLERANCE


@needing("transformers", "triton", "liger_kernel")
def liger(device: torch.device) -> Iterator[str]:
    """The same with Liger's kernels in the layers, which are Triton's."""

    def prepare(module: Llama) -> None:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # noqa: PLC0415

        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=module.model)

    count, losses = Size.on(device).num_microbatches, []
    for strategy in ("auto", PipeOffloadStrategy(num_microbatches=count, schedule="zb_h1")):
        name = "plain Lightning" if isinstance(strategy, str) else "zb_h1"
        try:
            steps, trainer = fit(device, strategy, num_warm=2, prepare=prepare)
        except Exception as error:
            yield f"{name}: {in_one_line(error)}"
            raise
        losses.append(loss_of(trainer))
        yield f"{name}: {figures(device, steps, trainer)}"
    assert abs(losses[0] - losses[1]) < TOLERANCE


@needing("transformers", "torchao")
def float8(device: torch.device) -> Iterator[str]:
    """Float8 layers of torchao: plain and compiled, over one stage compiled, and eager for W."""

    def prepare(module: Llama) -> None:
        from torchao.float8 import (  # noqa: PLC0415
            Float8LinearConfig,
            convert_to_float8_training,
        )

        config = Float8LinearConfig(emulate=not is_accelerated(device))
        convert_to_float8_training(module.model.model, config=config)

    count = Size.on(device).num_microbatches
    options: dict[str, Any] = {"num_microbatches": count, "schedule": "zb_h1"}
    over_stage = PipeOffloadStrategy(compile=_compile_with(device) or True, **options)
    variants: dict[str, tuple[Any, bool, Any]] = {
        "plain bfloat16, compiled": ("auto", True, lambda module: None),
        "plain float8, compiled": ("auto", True, prepare),
        "zb_h1 float8, compiled": (over_stage, True, prepare),
        "zb_h1 float8, W apart": (PipeOffloadStrategy(**options), False, prepare),
    }
    seconds, losses = [], []
    for name, (strategy, compiles, change) in variants.items():
        steps, trainer = fit(device, strategy, compiles, num_warm=3, prepare=change)
        seconds.append(steps.seconds)
        losses.append(loss_of(trainer))
        share = seconds[0] / steps.seconds
        yield f"{name}: {share:.3f} of bfloat16; {figures(device, steps, trainer)}"
        del trainer
    yield f"zb_h1: {seconds[1] / seconds[2]:.3f} of plain float8, both compiled"
    assert all(abs(loss - losses[1]) < TOLERANCE for loss in losses[2:])


TOLERANCE = 2e-3  # of losses in bfloat16, between orders of additions


def loss_of(trainer: Trainer) -> float:
    """Return the mean loss of a fit."""
    return float(trainer.callback_metrics["loss"])


def products(device: torch.device) -> Iterator[str]:
    """W's product of a weight: in bfloat16 and added in a second pass, or added in float32."""
    size = Size.on(device)
    shapes = (size.sequence, size.inner), (size.sequence, size.width)
    left, right = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    grad = torch.zeros(size.inner, size.width, device=device)
    flops = 2 * size.sequence * size.inner * size.width
    forms: dict[str, Callable[[], Any]] = {
        "mm alone": lambda: left.t() @ right,
        "mm, and add_": lambda: grad.add_(left.t() @ right),
        "addmm with out_dtype": lambda: torch.addmm(
            grad, left.t(), right, out_dtype=torch.float32, out=grad
        ),
    }
    for name, form in forms.items():
        try:
            seconds = _seconds_of(form, device)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            yield f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
        else:
            yield f"{name}: {seconds * 1e3:.3f} ms, {flops / seconds / 1e12:.0f} TFLOP/s"


def _seconds_of(run: Callable[[], Any], device: torch.device, repetitions: int = 30) -> float:
    for _ in range(3):
        run()
    if is_accelerated(device):
        torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(repetitions):
        run()
    if is_accelerated(device):
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) / repetitions


_NUM_RANKS = 8
_NO_COPIES = CopySpeed(1e12, 1e12, 1.0)  # nothing is copied
_LINK = 150e9  # bytes a second from GPU to GPU over NVLink, as NCCL has it


@needing("transformers")
def rehearsed(device: torch.device) -> Iterator[str]:
    """The first, a middle and the last rank of eight; by their costs, what all of them reach."""
    size = Size.on(device)
    size = Size(size.width, size.inner, size.heads, size.sequence, 32, 4 * _NUM_RANKS)
    schedule = build("zb_v", _NUM_RANKS, size.num_microbatches)
    found: dict[int, StageCosts] = {}
    for rank in (0, _NUM_RANKS // 2 - 1, _NUM_RANKS - 1):
        _empty(device)
        if is_accelerated(device):
            torch.accelerator.reset_peak_memory_stats()
        started = time.perf_counter()
        own, row = _rehearse(size, schedule, rank, device)
        found |= own
        yield f"rank {rank}: {row}; took {time.perf_counter() - started:.0f} s"
    yield _reached(size, schedule, found)


def _rehearse(
    size: Size, schedule: Schedule, rank: int, device: torch.device
) -> tuple[dict[int, StageCosts], str]:
    """Measure the costs of a rank's stages, and run two steps of its plan."""
    module = _part_of(size, schedule, rank, device)
    cut = CutSettings(schedule.placement, "model.model.layers", "even")
    pipeline = Pipeline(module, rank, cut, device)
    mixed = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def cut_batch(count: int) -> list[Microbatch]:
        text = torch.randint(_VOCABULARY, (count, size.sequence), device=device)
        step = module.model
        return split_into_microbatches(
            pipeline, text, 1, lambda part, _: step(input_ids=part, labels=part).loss, "train", 0
        )

    rehearsal = Rehearsal(pipeline, ActivationMemory.for_device(device), cut_batch)
    try:
        with mixed, sharing_casts(device):
            own = rehearsal.measure_stages(build("zb_v", _NUM_RANKS, _NUM_RANKS), _NO_COPIES)
            costs = _costs(size, schedule, own)
            plan = lower(schedule)
            rehearsal.memory.reset_peaks()
            seconds = rehearsal.run(plan, costs, 1)
    finally:
        pipeline.detach()
    span, peak = simulate(plan, costs).span[rank], rehearsal.memory.ledger.peak_device_bytes
    allocated = torch.accelerator.max_memory_allocated() if is_accelerated(device) else 0
    stages = ", ".join(
        f"stage {index} F {cost.forward * 1e3:.1f} B {cost.backward_input * 1e3:.1f} "
        f"W {cost.backward_weight * 1e3:.1f} ms"
        for index, cost in own.items()
    )
    return own, (
        f"{stages}; a step {seconds * 1e3:.0f} ms, {seconds / span:.3f} of its plan; "
        f"{peak / 2**30:.1f} GiB of activations, {allocated / 2**30:.1f} allocated"
    )


def _part_of(size: Size, schedule: Schedule, rank: int, device: torch.device) -> Llama:
    """Return a model in which only a rank's layers, and what is around all layers, are real."""
    module = Llama(size, torch.device("meta"))
    inner: Any = module.model.model
    per_stage = size.num_layers // schedule.num_stages
    layers = [inner.layers[i] for i in range(size.num_layers)
              if schedule.rank_of(i // per_stage) == rank]  # fmt: skip
    around = [inner.embed_tokens, inner.norm, module.model.lm_head]
    with device:
        inner.rotary_emb = type(inner.rotary_emb)(module.model.config)
    for part in (*around, *layers):
        part.to_empty(device=device)
        for parameter in part.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.ones_(parameter)
    return module


def _costs(size: Size, schedule: Schedule, found: dict[int, StageCosts]) -> Costs:
    """Return costs of all stages: one that was not measured has those of one in the middle."""
    inner = [cost for stage, cost in found.items() if 0 < stage < schedule.num_stages - 1]
    usual = StageCosts._make(map(fmean, zip(*(inner or found.values()), strict=True)))
    stages = [found.get(stage, usual)._asdict() for stage in range(schedule.num_stages)]
    per_stage: dict[str, Any] = {name: [stage[name] for stage in stages] for name in stages[0]}
    hop = 4 * size.sequence * size.width / _LINK  # the residual stream is in float32
    return Costs(**per_stage, communication=hop)


def _reached(size: Size, schedule: Schedule, found: dict[int, StageCosts]) -> str:
    timeline = simulate(lower(schedule), _costs(size, schedule, found))
    busy = sum(timeline.busy) / _NUM_RANKS
    tokens = size.num_microbatches * size.sequence / timeline.makespan / _NUM_RANKS
    return (
        f"{_NUM_RANKS} ranks, zb_v, {size.num_microbatches} microbatches, by these costs and no "
        f"optimizer: a step of {timeline.makespan:.3f} s, a bubble of "
        f"{1 - busy / timeline.makespan:.1%}, {tokens:.0f} tokens/s on each GPU, "
        f"{tokens * size.token_flops / _PEAK_FLOPS:.1%} MFU"
    )


logging.getLogger("transformers").setLevel(logging.ERROR)
