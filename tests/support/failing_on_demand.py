"""A run with on-demand communication that fails as it is told to.

python tests/support/failing_on_demand.py push kill 1
python tests/support/failing_on_demand.py push kill 1 gpu
"""

import os
import signal
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


from lightning_pipeoffload.odc import OnDemandRun, OnDemandTransport
from lightning_pipeoffload.runtime.comm import shared_bytes
from tests.support import on_demand_fits


def fail():
    raise RuntimeError("on purpose")


ACTS = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "raise": fail}
_CALLS = 30  # gathers and pushes before it happens, in the midst of training


class Failing:
    """Does something once, when it is asked for the so many-th time on one rank."""

    def __init__(self, act, rank, after=_CALLS):
        self.left = after if int(os.environ.get("LOCAL_RANK", "0")) == rank else -1
        self.act = act

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            ACTS[self.act]()


def in_push(act, rank):
    """Fail while a lock is held, and part of the gradients added."""
    failing = Failing(act, rank)
    held = shared_bytes.OwnerLocks.hold_lock

    @contextmanager
    def failing_held(self, *args):
        with held(self, *args):
            failing()
            yield

    shared_bytes.OwnerLocks.hold_lock = failing_held  # type: ignore[method-assign]


def in_gather(act, rank):
    failing, gather = Failing(act, rank), OnDemandTransport.gather

    def failing_gather(self, *args):
        gather(self, *args)
        failing()

    OnDemandTransport.gather = failing_gather  # type: ignore[method-assign]


def at_barrier(act, rank):
    failing, close = Failing(act, rank, after=2), OnDemandRun.close

    def failing_close(self, *args):
        failing()
        return close(self, *args)

    OnDemandRun.close = failing_close  # type: ignore[method-assign]


PLACES = {"push": in_push, "gather": in_gather, "barrier": at_barrier}


def main(*arguments):
    place, act, rank, *accelerator = arguments or sys.argv[1:]
    PLACES[place](act, int(rank))
    options = {"timeout": timedelta(seconds=30)}
    kind = accelerator[0] if accelerator else "cpu"
    trainer = on_demand_fits.ending_trainer(2, options, max_epochs=20, accelerator=kind)
    own = int(os.environ.get("LOCAL_RANK", "0"))
    batches = [minibatch[own] for minibatch in on_demand_fits.minibatches((3, 1))]
    trainer.fit(on_demand_fits.made(), on_demand_fits.Loader(batches))


if __name__ == "__main__":
    main()
