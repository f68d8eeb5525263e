"""A call of the user's step says what it is for."""

import pytest
import torch

from lightning_pipeoffload.runtime.cut.partition import CutSettings
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.step.batch_slice import make_microbatches
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.runtime.transport import InProcessTransport
from lightning_pipeoffload.runtime.users_code.step_call import TRACE, StepCall
from lightning_pipeoffload.schedule import build, lower
from tests.support.small_modules import Regression, linear_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_each_stage_and_the_probe_say_what_their_calls_are_for(num_microbatches):
    module, calls = Regression(linear_blocks(4)), []
    plan = lower(build("zb_v", 1, num_microbatches))

    def step(part, call):
        calls.append(call)
        return module.step(part)

    pipeline = Pipeline(module, 0, CutSettings((0, 0)), CPU)
    slices = pipeline.cut_batch(torch.ones(num_microbatches, 4), 1, step, "train", 0)
    assert {*calls} == {TRACE}
    calls.clear()
    executor = Executor(
        0, pipeline.stages, InProcessTransport(), ActionTimer(CPU), ActivationMemory.on(CPU)
    )
    executor.run(plan, make_microbatches(slices))
    pipeline.detach()
    first, last = StepCall(), StepCall(is_last=True, is_last_local=True)
    assert (calls[0], calls[-1], {*calls}) == (first, last, {first, last})
