"""The values that steps log: captured by microbatch, and published to the other ranks."""

from .log_capture import LogCapture, MicrobatchCapture, combine_logged, ignore_log
from .metric_calls import MetricCalls, batch_value
from .metric_values import ReplicaMetricSync
from .publisher import PendingNumbers, RankFigures
from .shared_metrics import SharedMetricsConnector
