"""The documentation builds as a site without a warning: every link and anchor leads somewhere, also in the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docs import site_hooks

ROOT = Path(__file__).parent.parent


def test_the_site_builds_and_its_links_lead_to_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in (page for page in pages if page.name not in ("404.html", "paper.html")):
        content = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|<link rel="stylesheet" href)="https?://', content), (
            "the site loads files from other machines"
        )
        for target in re.findall(r'(?:href|src)="([^"#]+)', content):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).resolve().exists(), f"{page.relative_to(tmp_path)} links to {target}"


def test_navigation_follows_the_sections_of_the_index() -> None:
    index = (
        "# x\n\n- [Not one](no.md)\n\n## A\n\n- [One](one.md): first\n- [Two](../TWO.md)\n- [Page](page.html)\n\n## B\n\ntext\n"
    )
    assert site_hooks.read_navigation(index) == [{"Overview": "index.md"}, {"A": [{"One": "one.md"}, {"Two": "TWO.md"}]}]


def test_every_page_is_in_the_index_or_in_the_list_of_decisions() -> None:
    docs = ROOT / "docs"
    first, *sections = site_hooks.read_navigation((docs / "index.md").read_text(encoding="utf-8"))
    items = [item for section in sections for items in section.values() for item in items]
    listed = {"index.md"} | {page for item in items for page in item.values()}
    assert first == {"Overview": "index.md"}
    decisions = (docs / "decisions" / "README.md").read_text(encoding="utf-8")
    missing = {page.name for page in docs.glob("*.md")} - listed
    missing |= {page.name for page in (docs / "decisions").glob("0*.md") if f"({page.name})" not in decisions}
    assert missing == set(), "list each in docs/index.md under what a reader wants, or in docs/decisions/README.md"
