"""Seconds from the start of a fit to the end of its first batch, compared with ddp.

    python -m examples.benchmarks.first_batch
    python -m examples.benchmarks.first_batch --layers 48 --ways zb_h1 limit --profile

A Hugging Face Llama of tiny layers and AdamW train one batch on two ranks of one thread each, with
an empty folder of plans; "second" is another start of the run with a memory limit, with what the
first has left in it. "Seconds" are the slowest rank's, from the hook ``setup`` on, before which all
processes have met; "CPU" those of the busiest rank's process, which another program on the machine
does not lengthen. "Traces" are the runs of the step without values and "stages" the measured ones
of all cuts, on rank 0. ``--profile`` prints where rank 0's CPU seconds go.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from examples.benchmarks.harness import quiet_trainer, run_ranks, write_results
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.cut import StepTrace
from lightning_pipeoffload.runtime.measure import block_costs

NUM_RANKS, BATCH, TOKENS = 2, 16, 32
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "zb_h1": lambda: PipeOffloadStrategy(schedule="zb_h1"),
    "default": PipeOffloadStrategy,
    "limit": lambda: PipeOffloadStrategy(memory_limit="4GiB"),
    "second": lambda: PipeOffloadStrategy(memory_limit="4GiB"),
}


class TinyLlama(LightningModule):
    """A Llama of many tiny layers, as a user of Lightning would write it."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the next tokens."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class FirstBatch(Callback):
    """Measures this rank from the hook ``setup`` to the end of the first batch."""

    def __init__(self, is_profiled: bool) -> None:
        self._profile = cProfile.Profile(time.process_time) if is_profiled else None
        self.seconds = self.busy = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin."""
        if self._profile is not None and not trainer.global_rank:
            self._profile.enable()
        self._began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """End."""
        began, was_busy = self._began
        self.seconds, self.busy = time.perf_counter() - began, time.process_time() - was_busy
        if self._profile is not None and not dist.get_rank():
            self._profile.disable()
            pstats.Stats(self._profile, stream=sys.stderr).sort_stats("cumtime").print_stats(120)


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count runs of the step without values, and measured stages."""
    running, measure = StepTrace.tracing, block_costs.median_costs

    def trace(self: StepTrace) -> Any:
        counts["traces"] += 1
        return running(self)

    def measured(executor: Any, *args: Any) -> Any:
        counts["stages"] += len(executor.stages)
        return measure(executor, *args)

    with ExitStack() as stack:  # nothing public counts them
        stack.enter_context(patch.object(StepTrace, "tracing", trace))
        stack.enter_context(patch.object(block_costs, "median_costs", measured))
        yield


def measure(num_layers: int, how: str, is_profiled: bool) -> dict[str, float]:
    """Train one batch."""
    torch.manual_seed(0)
    model, counts, first = TinyLlama(num_layers), Counter[str](), FirstBatch(is_profiled)
    tokens = torch.randint(0, 256, (BATCH * NUM_RANKS, TOKENS))
    trainer = quiet_trainer(
        devices=NUM_RANKS, strategy=STRATEGIES[how](), callbacks=[first], max_steps=1
    )
    with counted(counts):
        trainer.fit(model, DataLoader(tokens, batch_size=BATCH))  # type: ignore[arg-type]
    ranks: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(ranks, (first.seconds, first.busy))
    seconds, busy = map(max, zip(*ranks, strict=True))
    return {"seconds": seconds, "CPU": busy, "traces": counts["traces"], "stages": counts["stages"]}


def main(line: Sequence[str] | None = None) -> None:
    """Print a table; with ``--results`` measure one line of it, in every rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 48])
    parser.add_argument("--ways", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    parser.add_argument("--profile", action="store_true", help="print rank 0's CPU seconds")
    parser.add_argument("--results", help="set where a row's ranks are started")
    given = parser.parse_args(line)
    if given.results:
        write_results(
            partial(measure, given.layers[0], given.ways[0], given.profile), given.results
        )
        dist.destroy_process_group()  # its threads may abort the interpreter's end
        return
    print("| layers | way | seconds | of ddp's | CPU | of ddp's | traces | stages |", flush=True)
    print("|---|---|---|---|---|---|---|---|")
    for num_layers in given.layers:
        with tempfile.TemporaryDirectory() as caches:
            ddp: dict[str, float] | None = None
            for way in given.ways:
                flags = ["--profile"] if given.profile else []
                arguments = "--layers", str(num_layers), "--ways", way, *flags
                threads = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": caches}
                row = run_ranks("first_batch", *arguments, environment=threads)
                ddp = ddp or row
                cells = [
                    *(
                        f"{row[name]:.2f} | {row[name] / ddp[name]:.1f}"
                        for name in ("seconds", "CPU")
                    ),
                    *(f"{row[name]:.0f}" for name in ("traces", "stages")),
                ]
                print(f"| {num_layers} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
