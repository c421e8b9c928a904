"""A browser, where there is one: what its own code makes of a page."""

import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no browser here: install chromium to see the page's code run")


def dom_of(url, folder):
    """The elements that a browser makes of a page."""
    quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
