"""mkdocs.yml, docs/site_hook.py: the site has all pages as GitHub shows them, and each of its links opens something."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from urllib.parse import unquote

import pytest
from elements import Elements
from markdown_it import MarkdownIt
from sources import ROOT, text_of
from test_docs import PAGES

HAS_MKDOCS = importlib.util.find_spec("mkdocs")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_MKDOCS, reason="pip install -r requirements-more.txt")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built with pictures as PNG. A link or a heading that is missing is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"SVG": "false"}, capture_output=True, text=True)
    assert not built.returncode, built.stdout + built.stderr
    return folder


def place_of(page):
    """Where a page of the repository is on the site."""
    path = page.relative_to(ROOT)
    return path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html")


def test_every_link_of_the_site_opens_a_file_of_it(site):
    for page in site.rglob("*.html"):
        for link in Elements(page.read_text("utf-8")).links:
            file = unquote(link.partition("#")[0])
            assert re.match(r"https?:|mailto:|data:|/", link) or (page.parent / file).exists(), (page, link)


def test_every_page_is_there_with_the_elements_that_github_shows(site):
    """A list that GitHub sees without an empty line before it is none for mkdocs."""
    for page in PAGES:
        assert (site / place_of(page)).exists(), f"{page}: no page of the site has a link to it"
        text = re.sub(r"^```math.*?^```", "", text_of(page), flags=re.M | re.S)  # they become formulas
        ours = Counter(Elements(MarkdownIt("gfm-like", {"linkify": False}).render(text)).tags)
        article = re.search(r"<article.*</article>", (site / place_of(page)).read_text("utf-8"), re.S)[0]
        theirs = Counter(Elements(article).tags)
        for tag in ("li", "ul", "ol", "tr", "pre", "h2", "h3", "img"):
            assert theirs[tag] == ours[tag], f"{page}: {theirs[tag]} <{tag}>, and {ours[tag]} on GitHub"
