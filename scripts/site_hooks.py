"""Hooks of mkdocs: pages outside docs/, links to them, and the sections of the navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "overview.md",  # the site's index is that of docs/
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "LICENSE": "LICENSE",
}
"""What pages link to, beside docs/, and its name on the site, in the folder of docs/."""

_SOURCES = r"(?:src|tests|scripts|backends|kernels)/[^)#]+"
_FROM_DOCS = re.compile(
    r"\]\(((?:\.\./)*)\.\./(" + "|".join([*map(re.escape, OUTSIDE), _SOURCES]) + r")([#)])"
)
_TO_DOCS = re.compile(r"\]\(docs/")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill sections that name a folder with its pages."""
    config.nav = [_section(*next(iter(item.items()))) for item in config.nav or []]
    return config


def _section(title: str, target: str | list[dict[str, str]]) -> dict[str, Any]:
    folder = ROOT / "docs" / (target if isinstance(target, str) else "")
    if isinstance(target, list) or not folder.is_dir():
        return {title: target}
    return {title: [f"{target}/{page.name}" for page in sorted(folder.glob("*.md"))]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and the sources that pages link to."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")]
    linked = {link[2] for text in pages for link in _FROM_DOCS.finditer(text)}
    for name, page in ({name: name for name in sorted(linked)} | OUTSIDE).items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    if page.file.src_uri in OUTSIDE.values():
        return _TO_DOCS.sub("](", markdown)
    return _FROM_DOCS.sub(lambda link: f"]({link[1]}{OUTSIDE.get(link[2], link[2])}{link[3]}", markdown)
