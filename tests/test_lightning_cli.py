"""LightningCLI, which is jsonargparse, takes every argument of the strategy as text."""

from datetime import timedelta
from inspect import signature

import pytest
import torch

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import build
from tests.support.fits import Net
from tests.test_readme import GIVEN_BY_THE_TRAINER

pytest.importorskip("jsonargparse", reason="the extra test is not installed")


def own(num_ranks, num_microbatches):
    return build("1f1b", num_ranks, num_microbatches)


# Text on the command line, and the value that it means; a Schedule has no text.
GIVEN = {
    "pipeline_parallel_size": [("auto", "auto"), ("1", 1)],
    "data_parallel_size": [("auto", "auto"), ("1", 1)],
    "tensor_parallel_size": [("1", 1)],
    "rank_order": [("data_inner", "data_inner")],
    "sharding": [("optimizer", "optimizer")],
    "num_microbatches": [("auto", "auto"), ("8", 8)],
    "num_chunks": [("auto", "auto"), ("2", 2)],
    "schedule": [("zb_v", "zb_v"), ("tests.test_lightning_cli.own", own)],
    "offload": [("half", "half"), ("0.5", 0.5)],
    "recompute": [("cheap", "cheap")],
    "memory_limit": [("20GiB", "20GiB"), ("4096", 4096), ("null", None)],
    "host_memory_limit": [("20GiB", "20GiB"), ("4096", 4096)],
    "blocks": [("layers", "layers"), ("[a.*,b.*]", ["a.*", "b.*"])],
    "split": [("even", "even"), ("[2,4]", [2, 4])],
    "make_microbatches": [("torch.chunk", torch.chunk)],
    "microbatch_weight": [("tokens", "tokens"), ("torch.numel", torch.numel)],
    "optimizer_sync": [("post_validation", "post_validation")],
    "per_parameter_optimizer": [("true", True)],
    "optimizer_offload": [("true", True)],
    "master_weights": [("null", None)],
    "compile": [("true", True), ("{mode: max-autotune-no-cudagraphs}", ...)],
    "gradient_accumulation_fusion": [("true", True), ("auto", "auto")],
    "head_weight_grad": [("B", "B")],
    "num_sequence_slices": [("1", 1)],
    "derive_lengths": [("false", False)],
    "solver_seconds": [("5", 5.0)],
    "plan_cache": [("folder", "folder")],
    "save_distributed_checkpoint": [("true", True)],
    "start_method": [("fork", "fork")],
    "process_group_backend": [("gloo", "gloo")],
    "timeout": [("0:10:00", timedelta(minutes=10))],
}


def test_every_argument_is_given():
    arguments = signature(PipeOffloadStrategy.__init__).parameters.keys()
    assert GIVEN.keys() == arguments - GIVEN_BY_THE_TRAINER


@pytest.mark.parametrize("number", range(3))
def test_every_argument_is_taken(number, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    of_each = {name: texts[min(number, len(texts) - 1)] for name, texts in GIVEN.items()}
    strategy = "--trainer.strategy"
    words = [f"{strategy}.init_args.{name}={text}" for name, (text, _) in of_each.items()]
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = LightningCLI(
        Net,
        run=False,
        save_config_callback=None,
        args=[*trainer, f"{strategy}=lightning_pipeoffload.PipeOffloadStrategy", *words],
    )
    settings = cli.trainer.strategy.settings
    found = {name: value for name, value in vars(settings).items() if of_each[name][1] is not ...}
    assert found == {name: of_each[name][1] for name in found}
    assert isinstance(settings, PipelineSettings)
