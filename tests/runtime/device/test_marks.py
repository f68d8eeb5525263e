"""What a profiler shows of a step, and what a step calls where none runs."""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.profiler import emit_itt
from torch.profiler import profile

from lightning_pipeoffload.runtime.device import marks
from lightning_pipeoffload.schedule import COMPUTE, build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import DemoGPT, call_step, tokens


def step_of(schedule):
    """Return a function that runs a step of two ranks in this process."""
    pipeline = InProcessPipeline(DemoGPT(depth=4).double(), schedule, call_step)
    return lambda: pipeline.run(tokens(3), 1)


def test_the_trace_names_what_the_plan_names():
    schedule = build("zb_h1", 2, 3)
    run = step_of(schedule)
    run()
    with profile(acc_events=True) as profiled:
        run()
    names = {event.name for event in profiled.events()}
    assert names >= {str(a) for rank in schedule for a in rank if a.kind in COMPUTE}
    assert names >= {"0SEND_F0", "1RECV_F0", "wait 1RECV_F0"}


def test_without_a_profiler_a_step_calls_nothing_for_it():
    run, called = step_of(build("zb_h1", 2, 3)), []
    with profile():
        run()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == marks.__file__:
            called.append(frame.f_code.co_name)

    run()  # so that what the profiler has changed is changed back
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert called == []


@pytest.mark.parametrize("context", [nullcontext, emit_itt, profile], ids=lambda c: c.__name__)
def test_what_emits_ranges_is_a_profiler_too(context):
    """As CUDA's emit_nvtx does, which needs a GPU."""
    with context():
        assert marks.is_profiled() is (context is not nullcontext)


def test_what_is_not_to_be_recorded_is_not():
    x = torch.ones(1)
    with profile(acc_events=True) as profiled:
        with marks.unprofiled():
            x.add(1)
        x.mul(2)
    names = {event.name for event in profiled.events()}
    assert "aten::mul" in names
    assert "aten::add" not in names
