"""A solver that decides order and copies together."""

from .optpipe import best_of_families, check_solver_seconds, solved
from .plan_model import check_solver
from .plan_problem import PlanProblem, least_span
from .plan_solver import PlanSolver
