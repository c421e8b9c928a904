"""Applies diffs of docs/fork.md or docs/diffs/ to their script, and writes the result as fork.py beside it.

    python tools/make_fork.py "A loss term"                     # writes lecture/fork.py, to be read and run
    python tools/make_fork.py "A loss term" --script ppo.py     # the same change of ppo.py, as fork.py
    python tools/make_fork.py "Score scaling" "Early stop"      # both changes of ppo.py, one after the other

A diff is named by its heading on the page. A fork.py that exists may hold work of yours, and git ignores it: --force
overwrites it.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/fork.md", "docs/diffs/settings.md", "docs/diffs/questions.md", "docs/agent.md")


def scripts_of(diff: str) -> list[str]:
    """The files that a diff changes: its first line names them, unless that is lecture/ppo.py."""
    named = re.match(r"--- (.+)\n", diff)
    return named[1].split(", ") if named else ["lecture/ppo.py"]


def read_diffs(page: str, script: str = "") -> dict[str, str]:
    """Maps each subsection's heading to its diff: all blocks that name the script, or else the first block."""
    diffs = {}
    for heading, text in re.findall(r"^### ([^\n]+)\n((?:(?!#)[^\n]*\n)*)", page, re.M):
        if blocks := re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S):
            of_script = [block for block in blocks if script in scripts_of(block)]
            diffs[heading] = "".join(of_script) or blocks[0]
    return diffs


def script_of(diff: str) -> str:
    """The file that a diff is for, unless another is named."""
    return scripts_of(diff)[0]


def apply(diff: str, source: str) -> str:
    """The source after the change. The old text of each part must occur in it once, at any indentation."""
    source = "\n" + source
    diff = re.sub(r"^--- .*\n", "", diff, flags=re.M)
    for part in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        places = []
        for indent in ("", " " * 4, " " * 8):
            here = "\n" + textwrap.indent(old, indent)
            places += [(indent, here)] * len(re.findall(f"(?={re.escape(here)})", source))
        if len(places) != 1:
            raise ValueError(f"this occurs {len(places)} times in the file, not once:\n{old}")
        [(indent, here)] = places
        source = source.replace(here, "\n" + textwrap.indent(new, indent))
    return source[1:]


def fork(names: list[str], script: str) -> str:
    """The script with some diffs, one after the other."""
    diffs = {}
    for page in PAGES:
        diffs |= read_diffs((ROOT / page).read_text("utf-8"), script)
    text = (ROOT / script).read_text("utf-8")
    for name in names:
        try:
            text = apply(diffs[name], text)
        except ValueError as error:
            raise ValueError(f"the diff {name!r} does not fit {script}: {error}") from None
    return text


def main() -> None:
    """Writes fork.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="+", help="the heading of a diff on its page")
    parser.add_argument("--script", help="the script to change, if it is not the first that the diff names")
    parser.add_argument("--force", action="store_true", help="overwrite fork.py if it exists")
    args = parser.parse_args()
    diffs = {}
    for page in PAGES:
        diffs |= read_diffs((ROOT / page).read_text("utf-8"))
    for name in args.name:
        if name not in diffs:
            sys.exit(f"error: there is no diff {name!r}, only {', '.join(diffs)}")
    script = args.script or script_of(diffs[args.name[0]])
    output = (ROOT / script).with_name("fork.py")
    if output.exists() and not args.force:
        sys.exit(f"error: {output.relative_to(ROOT)} exists: rename it, or overwrite it with --force")
    try:
        text = fork(args.name, script)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    output.write_text(text, "utf-8")
    print(f"written: {output.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
