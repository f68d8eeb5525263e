"""Pictures of timelines and of memory, as SVG, PNG or a trace."""

from .figures import MISSING, SMALL, has_matplotlib, new_figure, obstacle_of, save_figure
from .measured_step import MeasuredStep, RankStep, join_ranks
from .picture_file import ENDINGS, Drawn, PictureFile, to_measured_trace
from .timelines import draw_measured
