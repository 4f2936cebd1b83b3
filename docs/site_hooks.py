"""Hooks of MkDocs for the site of the documentation (`make site`).

The navigation is what docs/index.md lists. Pages of the repository's root, and source files that a page links to, become part of the
site, so that every link leads somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside docs/ that are pages of the site."""
LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def read_navigation(index: str) -> list[dict[str, Any]]:
    """The sections of docs/index.md: title and page of each item; files that are no Markdown are not in the navigation."""
    navigation: list[dict[str, Any]] = [{"Overview": "index.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        items = re.findall(r"^- \[([^\]]+)\]\(([^)#]+\.md)\)", body, re.MULTILINE)
        if items:
            navigation.append({title.strip(): [{name: page.removeprefix("../")} for name, page in items]})
    return navigation


def on_config(config: Any) -> Any:
    """Take the navigation from docs/index.md."""
    config.nav = read_navigation(Path(config.docs_dir, "index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files outside docs/ that its pages link to."""
    from mkdocs.structure.files import File

    pages = [*Path(config.docs_dir).rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)]
    linked = {name for page in pages for name in outside_links(page)}
    for name in sorted({*linked, *ROOT_PAGES}):
        if (ROOT / name).is_file():
            target = name if name in ROOT_PAGES else f"source/{name}"
            files.append(File.generated(config, target, abs_src_path=str(ROOT / name)))
    return files


def outside_links(page: Path) -> set[str]:
    """Paths, from the repository's root, of the files outside docs/ that a page links to."""
    found = set()
    for path, _ in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve()
        if target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "docs"):
            found.add(target.relative_to(ROOT).as_posix())
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links of pages to where their targets are in the site."""
    name = page.file.src_uri
    folder = ROOT if name in ROOT_PAGES else (ROOT / "docs" / name).parent
    depth = "../" * (len(PurePosixPath(name).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        path, anchor = match.group(1), match.group(2) or ""
        target = (folder / path).resolve()
        if not target.is_relative_to(ROOT):
            return match.group()
        inside = target.relative_to(ROOT).as_posix()
        if inside.startswith("docs/"):
            return f"]({depth}{inside.removeprefix('docs/')}{anchor})"
        return f"]({depth}{inside if inside in ROOT_PAGES else f'source/{inside}'}{anchor})"

    return LINK.sub(moved, markdown)
