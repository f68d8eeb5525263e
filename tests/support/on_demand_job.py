"""A task of a Slurm job over several nodes, each of which shards the parameters.

srun -N2 --ntasks-per-node=2 python -m tests.support.on_demand_job FOLDER
"""

import sys
from pathlib import Path

import torch

from tests.support import on_demand_fits as fits

COUNTS = (2, 1, 0, 1)


def main(folder):
    trainer = fits.ending_trainer(2, {}, num_nodes=2)
    module = fits.made()
    batches = [minibatch[trainer.global_rank] for minibatch in fits.minibatches(COUNTS)]
    trainer.fit(module, fits.Loader(batches))
    found = fits.outcome(module, trainer)  # which gathers
    torch.save(found, Path(folder) / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
