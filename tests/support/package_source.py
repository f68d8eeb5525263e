"""The package's source text, for tests that read it."""

import ast
from pathlib import Path

import lightning_pipeoffload

PACKAGE = Path(lightning_pipeoffload.__file__).parent


def imported_in(file):
    """Names by which the nodes of a file use other packages; a loop over several is one of them."""
    names, groups = set(), set()
    for node in file:
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif (
            isinstance(node, ast.ImportFrom) and f"{node.module}.".partition(".")[0] != PACKAGE.name
        ):
            names |= set() if node.level else {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if node.value.elts and {*map(root_of, node.value.elts)} <= names:
                groups |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For) and root_of(node.iter) in groups:
            names.add(ast.unparse(node.target))
    return names


def root_of(node):
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return getattr(node, "id", "")
