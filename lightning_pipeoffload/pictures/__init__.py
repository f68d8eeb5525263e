"""Pictures of timelines and of memory, as SVG, PNG or a trace."""

from .figures import MISSING, SMALL, has_matplotlib, new_figure, picture_path_error, save_figure
from .measured_step import MeasuredStep, RankStep, join_rank_steps
from .picture_file import ENDINGS, PictureFile, TitledTimeline, to_measured_trace
from .timelines import draw_measured
