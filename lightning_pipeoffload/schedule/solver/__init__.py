"""A solver that decides order and copies together."""

from .optpipe import best_of_families, check_solver_seconds, solve_plan
from .plan_model import check_solver
from .plan_problem import PlanProblem, span_lower_bound
from .plan_solver import PlanSolver
