"""The index of refusals on the page of messages, read from the package's source.

``site_hooks`` puts it into the page where the site is built, so that it has what the code has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_pipeoffload"
VALUE = "…"
_LEAST = 30  # characters; shorter texts are parts of messages
_ADVICE = re.compile(
    r"[;:,] (?:or )?(?:add|allow|call|choose|divide|freeze|give|install|keep|leave|let|make|name|"
    r"pass|put|read|return|set|start|take|use|write) "
)
_HEADINGS = {
    "planning": "Arguments and limits",
    "schedule": "Schedules and plans",
    "runtime": "Modules and steps",
    "loop": "Runs",
    "processes": "Processes and clusters",
    "checkpoints": "Checkpoints and weights",
    "optimizers": "Optimizers",
    "texts": "Packed texts",
    "odc": "On-demand communication",
    "cli": "Commands",
}


def refusals() -> Iterator[tuple[str, str]]:
    """Yield the subject and text of every message that is raised, or says what to write."""
    for path in sorted(PACKAGE.rglob("*.py")):
        subject = path.relative_to(PACKAGE).parts[0]
        tree = ast.parse(path.read_text())
        nodes = [*ast.walk(tree)]
        calls = (n.exc for n in nodes if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call))
        raised = {id(argument) for call in calls for argument in call.args}
        seen = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            text = "" if id(node) in seen else " ".join(_text_of(node).split())
            if not text:
                continue
            seen |= {id(part) for part in ast.walk(node)}
            if len(text) >= _LEAST and (id(node) in raised or _ADVICE.search(text)):
                yield _HEADINGS.get(subject, "Other"), text


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (_text_of(part) or VALUE for part in node.values)
        return re.sub(f"{VALUE}+", VALUE, "".join(parts))
    return ""


def index() -> str:
    """Return the index: below each subject a table of messages, and what to do about each."""
    found: dict[str, dict[str, None]] = {heading: {} for heading in (*_HEADINGS.values(), "Other")}
    for heading, text in refusals():
        found[heading][text] = None
    return "\n\n".join(
        f"### {heading}\n\n| message | what to do |\n|---|---|\n"
        + "\n".join(map(_row, sorted(texts)))
        for heading, texts in found.items()
        if texts
    )


def _row(text: str) -> str:
    advice = _ADVICE.search(text)
    cut = text.find("; ") if "; " in text or not advice else advice.start()
    message, todo = (text, "") if cut < 0 else (text[:cut], text[cut + 2 :])
    return f"| {_escaped(message)} | {_escaped(todo)} |"


def _escaped(text: str) -> str:
    for mark in "\\`*_|[]<>{}":
        text = text.replace(mark, f"&#{ord(mark)};")
    return text


if __name__ == "__main__":
    print(index())  # noqa: T201 - what it is for
