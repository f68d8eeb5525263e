"""Hooks of mkdocs: pages from elsewhere in the repository, and links to its files."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/benchmarks/RESULTS.md": "benchmarks.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for path, name in PAGES.items():
        text = _relinked((ROOT / path).read_text(), Path(path).parent.as_posix())
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that leave docs/ into links to added pages; add the index of messages."""
    if page.file.src_uri == "messages.md":
        markdown = markdown.replace("<!-- refusals -->", _index())
    return markdown if page.file.src_uri in PAGES.values() else _relinked(markdown, "docs")


def on_page_content(html: str, **_: Any) -> str:
    """Write the roles of docstrings, such as ``:class:`~a.B```, as plain code."""
    return re.sub(
        r":(?:class|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html
    )


def _index() -> str:
    """Return the index of ``refusals.py``, which lies next to this file and in no package."""
    return str(runpy.run_path(str(Path(__file__).with_name("refusals.py")))["index"]())


def _relinked(markdown: str, folder: str) -> str:
    def replace(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        path = normpath(f"{folder}/{target}")
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor or ''})"
        if path in PAGES:
            return f"[{text}]({PAGES[path]}{anchor or ''})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", replace, markdown)
