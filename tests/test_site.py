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
