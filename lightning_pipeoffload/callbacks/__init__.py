"""Lightning callbacks that show what a pipeline does."""

from .memory_picture import MemoryPicture
from .pipeline_monitor import PipelineMonitor
