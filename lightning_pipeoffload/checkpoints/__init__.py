"""Checkpoints of all ranks' state: brought together, written completely or not at all, read safely.

The life of a value that is saved::

    1  SplitState             split_state.py   its owner has it, others a shape: ShapeOnly
    2  on_save_checkpoint                      the user's hooks read and change each rank's dict
    3  CheckpointGatherer     saved_values.py  owner and number of each value that rank 0 lacks
    4  torch.save on rank 0                    writes the structure: DeferredTensor
    5  DeferredTensor                          its bytes are due: the owner sends the value
    6  replacing              file.py          flushed, and moved to the checkpoint's name

In a folder each rank writes its own values at 3 (write_checkpoint_folder, folder.py), then 6.

The life of a value that is loaded, by every rank::

    1  load_lazily, StoredFolder               its place in the file: StoredTensor
    2  on_load_checkpoint                      the user's hooks may read it, which reads the file
    3  load_model_state_dict                   is read into the module; once it is split, its own
    4  load_optimizer_state_dict               is put into the optimizer's state unread
    5  MasterWeights.make_loaded_masters       first batch: a master is read, where there is one
    6  SplitState.read_stored_optimizer_states then: the states of its own parameters are read and
                                               moved to the device; the others have gone

The stand-ins are these: ShapeOnly (saved, from 1 on), DeferredTensor (in torch.save on rank 0) and
StoredTensor (loaded, up to 3 and 6). None of them is trained.
"""

from .checkpoint import ResumeState, read_checkpoint, write_checkpoint
from .file import path_or_backup
from .folder import AtomicCheckpoints, PartWriter, refuse_remote_folder, write_checkpoint_folder
from .load_weights import load_weights
from .save_pretrained import save_pretrained
from .saved_values import CheckpointGatherer
from .shards import BEFORE_FIRST_BATCH, shard_state_dict
from .split_state import SplitState, broadcast_split_values, load_unsplit, unsplit_state_dict
