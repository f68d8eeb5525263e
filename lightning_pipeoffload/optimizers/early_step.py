"""Steps that begin on the host as soon as gradients are final, while the last W's run.

A rank's last W's run parameter by parameter. Where nothing has to see all gradients before the
optimizer does, each bucket goes to the host and steps there while the next ones are computed::

    device   W of bucket 0 | W of bucket 1 | W of bucket 2
    host                   | STEP 0        | STEP 1       | STEP 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor


class EarlyStep:
    """Gives final gradients to the host's step; in place of a sum over replicas.

    Args:
        stages: For each parameter that one stage of the pipeline uses alone, that stage.
        take: Called with parameters whose gradients are final.
    """

    def __init__(self, stages: Mapping[Tensor, int], take: Callable[[Tensor], None]) -> None:
        self._stages, self._take = stages, take

    def expect(self, stage: int, coming: Iterable[Tensor] = ()) -> None:
        """Note that a stage's last B has run: its gradients are final but for ``coming``."""
        later = {*coming}
        for parameter, own in self._stages.items():
            if own == stage and parameter not in later:
                self._take(parameter)

    def finish(self, parameter: Tensor) -> None:
        """Note that the last W of a parameter has run."""
        if parameter in self._stages:
            self._take(parameter)
