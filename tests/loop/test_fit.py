"""What a fit is made of."""

import ast
import inspect

from lightning_pipeoffload.loop import fit, lightning_patches


def test_a_fit_is_complete_once_it_is_made():
    (made,) = ast.parse(inspect.getsource(fit.Fit)).body
    methods = [node for node in made.body if isinstance(node, ast.FunctionDef)]
    set_in = {
        (method.name, node.attr)
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {name for name, _ in set_in} == {"__init__"}


def test_what_stands_in_place_of_lightnings_own_holds_its_owners():
    assert ".strategy" not in inspect.getsource(lightning_patches)
