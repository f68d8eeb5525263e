"""The processes of a pipeline: started, connected, watched, and stopped together."""

from .failure import print_error_line
from .joint_strategy import JointStrategy
from .pipeline_processes import PipelineProcesses
from .processes import Processes
from .rank_differences import (
    StepOptions,
    describe_module,
    describe_optimizers,
    describe_trainer,
    refuse_differences,
)
from .replica import data_parallel_rank, data_parallel_size, forget_replica, reads_data, set_replica
from .run_store import StoreBarrier, free_port
from .tensor_gather import gather_tensor
