"""How much of the weight gradients' work each family of models leaves for W.

Run from the repository's root: ``python -m examples.benchmarks.coverage [family ...]``. The
families are those of the tests, tiny and on the CPU: a share of operations, not of time.
"""

from __future__ import annotations

import sys

import torch

from tests.support.comparison import train
from tests.support.families import FAMILIES


def coverage(name: str) -> float:
    """Return the share of a training step's weight-gradient operations that W computes."""
    family = FAMILIES[name]
    options = {"blocks": family.blocks} if family.blocks else {}
    pipeline, _ = train(family.task(), "zb_h1", 2, family.samples(8), **options)
    memories = [stage.memories[0] for rank in pipeline.ranks for stage in rank.stages.values()]
    deferred = sum(memory.deferred_flops or 0 for memory in memories)
    return deferred / sum(rank.weight_flops for rank in pipeline.ranks)


def main() -> None:
    print("| family | left for W, % |")
    print("|---|---|")
    for name in sys.argv[1:] or FAMILIES:
        torch.manual_seed(0)
        print(f"| {name} | {100 * coverage(name):.1f} |", flush=True)


if __name__ == "__main__":
    main()
