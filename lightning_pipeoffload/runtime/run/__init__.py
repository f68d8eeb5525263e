"""One rank through a batch: the split module, the actions of the plan in order, their memory."""

from .executor import Executor, WaitForWeights
from .gradient_reduction import GradientReduction
from .pipeline import Pipeline
from .rank_memory import ActivationMemory, Ledger
from .traced_batch import build_microbatches, split_into_microbatches
