"""Pages: their elements as a parser sees them, and where there is a browser, what their own code makes of them."""

import shutil
import subprocess
from html.parser import HTMLParser

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no browser here: install chromium to see the page's code run")


def dom_of(url, folder):
    quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


class Elements(HTMLParser):
    """The tags of a page, and the names of their attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
