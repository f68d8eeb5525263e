"""Processes that start at once: forked from one which has imported all that a fit needs.

Those imports take six seconds, longer than nearly every test.
"""

import os
from multiprocessing import get_context, set_start_method

import torch

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "tests.support.fits", "pytest", "omegaconf"])


def fork(target, *args):
    """Start a process that runs ``target``."""
    # No daemon: those must not have workers that load data.
    process = FORKS.Process(target=_run, args=(target, args), daemon=False)
    process.start()
    return process


def _run(target, args):
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning shares the cores out, and sums differ
    set_start_method(None, force=True)  # workers that load data: as the platform's users have them
    target(*args)
