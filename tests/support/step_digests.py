"""Digests of losses, gradients and weights of many steps and fits, one JSON line each.

python -m tests.support.step_digests

``tests.support.compare_with`` runs it in two trees and compares the lines: each tree trains through
its own interface, and a name stands for the same training in both.
"""

import json
import shutil
import sys
import tempfile
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from lightning_pipeoffload.schedule import Costs, build, offload_activations
from tests.models.test_forms import FORMS, loss
from tests.models.test_forms import tokens as form_tokens
from tests.support import fits
from tests.support.caches import begin_session
from tests.support.comparison import NUM_MICROBATCHES, train
from tests.support.families import FAMILIES, Task
from tests.support.offloaded import memory_of_all
from tests.support.rank_pool import RankPool
from tests.support.small_modules import MODELS, run_pipeline

STEPS = [("1f1b", 2), ("zb_h1", 4), ("interleaved_1f1b", 2), ("zb_v", 2)]
FITS = [
    (2, {"schedule": "1f1b"}),
    (2, {"schedule": "zb_v", "module": {"tie": True}}),
    (4, {"schedule": "zb_h2", "data": {"kind": "shuffled"}}),
    (2, {"schedule": "po_h"}),
    (2, {"offload": "full", "recompute": "full"}),
]


def digest(value):
    """Return a digest of all bits of nested tensors and numbers."""
    found = sha256()
    for part in parts(value):
        found.update(part)
    return found.hexdigest()[:16]


def parts(value):
    """Yield what a value consists of, in an order that depends on names only."""
    if isinstance(value, dict):
        for name in sorted(value):
            yield name.encode()
            yield from parts(value[name])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from parts(each)
    elif torch.is_tensor(value):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        flat = value.detach().resolve_conj().contiguous().flatten()
        yield flat.view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value).encode()


def steps():
    """Yield a name and a step of each family and form, with each of a few schedules."""
    for place, (name, family) in enumerate(FAMILIES.items()):
        options = {"blocks": family.blocks} if family.blocks else {}
        schedules = [STEPS[place % 3], STEPS[3]]
        yield from of_schedules(name, partial(of_family, family), schedules, options)
    for name, form in FORMS.items():
        yield from of_schedules(name, partial(of_form, form), STEPS, {})
    for name, case in MODELS.items():
        yield f"{name} zb_h1 2 offload", lambda c=case: offloaded_step(c)


def of_family(family):
    return family.task(), family.samples(8)


def of_form(form):
    return Task(form(), loss).double(), form_tokens()


def of_schedules(name, make, schedules, options):
    """Yield a name and a step for each schedule."""
    for schedule, num_ranks in schedules:

        def step(schedule=schedule, num_ranks=num_ranks):
            module, batch = make()
            found = train(module, schedule, num_ranks, batch, **options)[1]
            return found.losses, found.gradients, found.buffers

        yield f"{name} {schedule} {num_ranks}", step


def offloaded_step(case):
    """Train one step with all activations on the host."""
    module, batch = case.make().double(), case.batch(2 * NUM_MICROBATCHES)
    schedule = build("zb_h1", 2, NUM_MICROBATCHES)
    plan, _ = offload_activations(schedule, Costs(1, 1, 1, offload=0.5, reload=0.5), "full")
    found = run_pipeline(module, plan, batch, 2, memory=memory_of_all)
    return found.losses, found.gradients, found.buffers


def fit(num_ranks, options):
    """Return losses, metrics and the last checkpoint's weights of a fit over processes."""
    pool = RankPool(num_ranks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = pool.run(partial(fits.fit, num_ranks, folder, **options))[0]
            weights = torch.load(Path(folder) / "last.ckpt")["state_dict"]
            return found["losses"], found["metrics"], dict(weights)
    finally:
        pool.close()


def main():
    torch.set_num_threads(1)
    caches = begin_session()
    try:
        digest_all()
    finally:
        shutil.rmtree(caches, ignore_errors=True)


def digest_all():
    named = [*steps(), *((f"fit {n} {o}", lambda n=n, o=o: fit(n, o)) for n, o in FITS)]
    for name, call in named:
        torch.manual_seed(0)
        try:
            found = digest(call())
        except Exception as error:  # a refusal is a result, which both trees should give
            found = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        sys.stdout.write(json.dumps([name, found]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
