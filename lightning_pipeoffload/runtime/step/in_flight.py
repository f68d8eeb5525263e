"""A microbatch in flight, and the life of a microbatch in the pipeline.

Three objects hold its state, each with its own lifetime: :class:`.Microbatch`, a part of the batch
on a rank; :class:`InFlight`, one microbatch on one stage from its F to its W; and
:class:`.StagePass`, one call of the user's step, which is that F. Messages are in the rank's
:class:`.Mailbox`, saved tensors in autograd's graph or in an :class:`.ActivationStore`. A stage in
the middle, with the numbers of the events below::

    plan            RECV_F  F           SEND_F         RECV_B  B           SEND_B  W
    Microbatch    1 ================================================================
    Mailbox              2 ===4        7 ===8                9 ==10      12 ==13
    InFlight                3 ================================================15=16
    StagePass               3=4=5=6=7
    saved tensors               5 ===== OFFLOAD FREE RELOAD ======11
    queue of W                                                    11 ========15

 1. The batch is cut: ``build_microbatches`` makes each Microbatch, with the record of its shapes.
 2. At RECV_F, or as soon as the message may come, the Mailbox posts a receive.
 3. F: ``ActivationMemory.open_store`` returns a store if the plan copies the tensors that this F
    saves, or to measure them. ``StageRunner.forward`` makes the InFlight, and a StagePass that
    calls the step.
 4. At the stage's first block the pass takes the message. ``payload.start_stage_graph`` makes its
    tensors the beginning of the stage's graph, which ends B there: their gradients are put into
    ``received``.
 5. The stage's blocks run, and autograd saves tensors.
 6. CarriedValues of the pass record values made outside of the blocks that other stages use.
 7. After the last block the pass leaves the step. The tensors for the next stage are put into
    the Mailbox; the InFlight keeps their edges in the graph only, on the last stage the loss.
 8. SEND_F sends them; or a next stage of this rank takes them.
 9. At RECV_B the Mailbox posts a receive of their gradients,
10. which B takes.
11. ``StageRunner.backward`` runs autograd from the edges or the loss. The graph is freed, and with
    it its saved tensors; weights' products are put into the queue, with their operands.
12. The gradients in ``received`` are put into the Mailbox,
13. and sent to the previous stage.
14. Until W the queue remains, and values of tensors that later F's write and W reads (``seen``).
15. W: ``StageRunner.backward_weight`` empties the queue. BW adds all gradients at once and ends
    here too.
16. ``StageRunner.drop_microbatch`` drops the InFlight. After an error ``abandon`` drops all of a
    stage, and ``discard_forwards`` those whose forwards run again.

Where blocks run on slices of sequences, each slice is a Microbatch with its own InFlight; tensors
kept for later slices of a microbatch on a stage are in the EarlierSlices that they share.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipeoffload.runtime import ReceivedGradients
from lightning_pipeoffload.runtime.cut import StageRecord
from lightning_pipeoffload.runtime.memory import ActivationStore
from lightning_pipeoffload.runtime.sequence import EarlierSlices, SequenceSlice
from lightning_pipeoffload.runtime.step.microbatch import Microbatch
from lightning_pipeoffload.runtime.step.step_writes import WrittenByForward
from lightning_pipeoffload.runtime.users_code import TensorSnapshot
from lightning_pipeoffload.runtime.weight_grad import WeightGradQueue


@dataclass(eq=False)
class InFlight:
    """One microbatch on one stage, from its F to its W.

    Attributes:
        microbatch: The microbatch.
        record: The part of its shapes' record that concerns the stage.
        queue: The weight gradients that wait for W.
        received: Holds the gradients of the received tensors; None: no backward follows.
        store: The tensors that autograd saves; None: autograd keeps them.
        place: The index of the slice of the sequence; 0 if sequences are not sliced.
        loss: The loss, on the last stage and until B; else None.
        sent: The graph edges of the sent tensors that get a gradient, until B.
        written: The attributes that the user's steps write, with their values at the end of F.
        seen: The values during F of tensors that later F's write in place and B or W may read.
        earlier: The tensors that slices of a sequence keep for later slices; None: not sliced.
        awaits_weight: Whether B has run.
    """

    microbatch: Microbatch
    record: StageRecord
    queue: WeightGradQueue
    received: ReceivedGradients | None
    store: ActivationStore | None = None
    place: int = 0
    loss: Tensor | None = None
    sent: tuple[GradientEdge, ...] = ()
    written: WrittenByForward | None = None
    seen: TensorSnapshot | None = None
    earlier: EarlierSlices | None = None
    awaits_weight: bool = False

    @property
    def slice(self) -> SequenceSlice:
        """The slice of the sequence; only for microbatches that are sliced."""
        part = self.microbatch.record.sequence_slice
        assert part is not None
        return part
