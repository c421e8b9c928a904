"""What mkdocs.yml cannot say: which files the site has, and where its links lead.

The site has README.md and all files that can be reached from it by links, at their paths in the repository. Three kinds
change: a source file becomes a page (ppo.py is at ppo.py.html), a folder without a README.md becomes a list of its
files, and pictures that our programs draw become SVG.
"""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
SVG = ROOT / "runs/site"
DRAW = {"experiments/draw.py": (SVG, "docs"), "exercises/bugs/gallery.py": (SVG / "bugs", "docs/findings/bugs")}
AS_THEY_ARE = (".md", ".png", ".svg", ".html", ".json", ".jsonl")  # other files are source code
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")  # a file of the repository; a place in it may follow
WIDE = ".md-grid { max-width: 75rem }\n"  # so that most lines of code fit
FORMULA = re.compile(r'<(span|div) class="[a-z]+">\\[(\[](.+?)\\[)\]]</\1>', re.S)  # as pymdownx.arithmatex writes it
HEAD = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"  # of a page that shows a source file


def target(link: str, page: Path) -> Path | None:
    """The file behind a link, if there is one. Behind a folder it is README.md, even if the folder has none."""
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir():
        return path / "README.md"
    return path if path.exists() else None


def text_of(path: Path) -> str:
    """The text of a file as Markdown."""
    if not path.exists():  # a folder's
        files = sorted(file.name for file in path.parent.iterdir() if file.is_file())
        return f"# {path.parent.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in files)
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return re.sub(r"^   (?=- )", "    ", text, flags=re.M)  # the indent of an inner list that mkdocs sees
    language = {".py": "python", ".toml": "toml", ".cff": "yaml"}.get(path.suffix, "text")
    return f"{HEAD}# {path.relative_to(ROOT).as_posix()}\n\n~~~~~~ {{.{language} linenums=1}}\n{text}~~~~~~\n"


def links_of(path: Path) -> set[Path]:
    """The files that a page links to."""
    links = LINK.findall(text_of(path)) if path.suffix == ".md" else []
    return {target(link, path) for link in links} - {None}


def reached() -> list[Path]:
    """README.md, and all files that can be reached from it."""
    found, queue = set(), {ROOT / "README.md"}
    while queue:
        found |= queue
        queue = set().union(*map(links_of, queue)) - found
    return sorted(found)


def drawn(path: Path) -> Path | None:
    """The SVG of a picture, if there is one."""
    file = SVG / ("bugs" if path.parent.name == "bugs" else "") / f"{path.stem}.svg"
    return file if path.suffix == ".png" and file.exists() else None


def place_of(path: Path) -> str:
    """Where a file is on the site."""
    path = path.with_suffix(".svg") if drawn(path) else path
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix in AS_THEY_ARE else f"{name}.md"


def page_of(path: Path) -> str:
    """The text of a file, with the links of the site."""

    def replace(link: re.Match) -> str:
        there = target(link[0], path)
        return os.path.relpath(ROOT / place_of(there), path.parent).replace("\\", "/") if there else link[0]

    return LINK.sub(replace, text_of(path)) if path.suffix == ".md" else text_of(path)


def draw_pictures() -> None:
    """Draws the SVG of the programs that have drawn a PNG since."""
    for program, (folder, pictures) in DRAW.items():
        oldest = min((file.stat().st_mtime for file in folder.glob("*.svg")), default=0)
        if oldest < max(file.stat().st_mtime for file in (ROOT / pictures).rglob("*.png")):
            subprocess.run([sys.executable, ROOT / program, "--svg", folder], check=True)


def on_files(files: Files, config) -> Files:
    """Replaces the files of docs/ by those of the site."""
    if os.environ.get("SVG") != "false":
        draw_pictures()
    ours = [File.generated(config, "wide.css", content=WIDE)]
    for path in reached():
        place = place_of(path)
        if place.endswith(".md"):
            file = File.generated(config, place, content=page_of(path))
        else:
            file = File.generated(config, place, abs_src_path=str(drawn(path) or path))
        if path.suffix != ".md" or not path.exists():
            file.inclusion = InclusionLevel.NOT_IN_NAV
        ours.append(file)
    return Files([file for file in files if file.src_dir != config.docs_dir] + ours)  # theirs are of the theme


def on_page_content(content: str, **_) -> str:
    """Formulas as MathML, which browsers draw."""

    def draw(formula: re.Match) -> str:
        text = html.unescape(formula[2]).replace("{aligned}", "{align*}")  # the name that latex2mathml knows
        display = {"span": "inline", "div": "block"}[formula[1]]
        return f"<{formula[1]} style='overflow-x: auto'>{convert(text, display=display)}</{formula[1]}>"

    return FORMULA.sub(draw, content)
