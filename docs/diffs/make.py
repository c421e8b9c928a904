"""Writes the pages in this folder: what changes from one of the short files in lecture/ to the next.

    python docs/diffs/make.py     # after a change to lecture/; a test fails while the pages are old

A page lists the functions and cells that are removed, added and unchanged, and shows the others as diffs, without their
docstrings. Settings are left out.
"""

import ast
import difflib
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = {
    ("ppo", "rloo"): """RLOO has no critic, and so no values, no GAE and no value loss: half of the networks that PPO
trains are gone. Instead, the baseline of a response is the mean reward of the *other* responses to the same prompt.
Such a number may be subtracted from the reward, because a baseline that does not depend on the response leaves the
expected gradient as it is. The price: each prompt needs K responses, and all tokens of a response share one advantage.
A whole response is one action now, so that ratio and clip are those of its probability.""",
    ("rloo", "grpo"): """The baseline is the mean of the whole group, and the advantage is divided by the group's
standard deviation. The first change multiplies the advantages by (K − 1)/K, which a learning rate can undo. The second
is a choice: prompts that are nearly always or nearly never answered well count more than those in between.
`--scale-rewards none` leaves the division out. Each token has its own ratio again. KL, if there is any, is a term of the
loss and no longer part of the rewards that a group compares.""",
    ("grpo", "agent"): """A response becomes a stream of several turns: an environment answers the policy, and takes the
place of the reward function. Its tokens are read like those of a prompt, so they are in the attention mask. They are no
actions, so they are not in `mask`, and everything about the loss stays as it was. EOS ends a turn, and the environment
ends the episode. With an environment that ends after one turn without an answer, all numbers are those of GRPO, which a
test checks. The KL term and most of the ways to add up tokens are left out, to keep the file short.""",
    (
        "sft",
        "reward_model",
    ): """The label is no longer the next token of a text. It is which of two texts was preferred, and of the network's
output at all positions one number is left, at the last token. The loss is still cross-entropy: −log σ of the difference
of two rewards is the cross-entropy of a choice between two texts. It depends on differences alone, so it does not fix the
zero of the rewards, which is set after training.""",
    ("reward_model", "dpo"): """The reward head is gone, because a policy *is* a reward model: it is the best policy for
the reward β log(π/π_ref), if it must stay near the reference. In the same loss, the difference of two outputs becomes a
difference of two log-ratios. The price: a reference must read every pair, and nothing in training judges what the policy
itself would write.""",
}
SAME_ROLE = {  # new -> old name
    "Preference": "Pair",
    "encode_preference": "encode_pair",
    "dpo_loss": "preference_loss",
    "play": "sample",
}


def parts(script: str) -> dict[str, list[str]]:
    """Name -> lines of each function of a short form, without its docstring, and of what else stands in each cell."""
    text = (HERE.parent.parent / "lecture" / f"{script}.py").read_text("utf-8")
    lines = text.splitlines()
    found, inside = {}, {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            doc = node.body[0]
            own = lines[first - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
            found[node.name] = own
            inside |= dict.fromkeys(range(first, node.end_lineno + 1))
    cell = None  # the module's docstring stands before the first
    for number, line in enumerate(lines, 1):
        if line.startswith("# %% "):
            cell = line.removeprefix("# %% ").split(",")[0].split(":")[0]
        elif cell and number not in inside and (line or found.get(cell, [""])[-1]):
            found.setdefault(cell, []).append(line)
    return {name: own for name, own in found.items() if any(own)}


def named(names: list[str]) -> str:
    """`a`, `b` and so on, or a dash."""
    return ", ".join(f"`{name}`" for name in names) or "–"


def page(before: str, after: str) -> str:
    """The Markdown page of a step."""
    a, b = parts(before), parts(after)
    partners = {name: name for name in b if name in a}
    partners |= {new: old for new, old in SAME_ROLE.items() if new in b and old in a}
    changed = [name for name in b if name in partners and a[partners[name]] != b[name]]
    titles = {name: name if name == old else f"{old} → {name}" for name, old in partners.items()}
    new = [name for name in b if name not in partners]
    out = [f"# From `lecture/{before}.py` to `lecture/{after}.py`", "", STEPS[before, after], ""]
    out += [
        f"[`make.py`](make.py) writes this page from [`lecture/{before}.py`](../../lecture/{before}.py) and "
        f"[`lecture/{after}.py`](../../lecture/{after}.py). For added functions and settings, see the latter.",
        "",
    ]
    out += ["| | functions and cells |", "|---|---|"]
    out += [f"| removed | {named([name for name in a if name not in partners.values()])} |"]
    out += [f"| added | {named(new)} |", f"| changed | {named([titles[name] for name in changed])} |"]
    out += [f"| unchanged | {named([name for name in b if name in partners and name not in changed])} |", ""]
    for name in changed:
        if name in ("Settings", "Models and data", "The trained policy"):  # which say nothing about the algorithm
            continue
        diff = list(difflib.unified_diff(a[partners[name]], b[name], lineterm="", n=1))[2:]
        lines = [" ⋯" if line.startswith("@@") else line for line in diff]
        out += [f"## `{titles[name]}`", "", "```diff", *lines, "```", ""]
    return "\n".join(out).rstrip() + "\n"


if __name__ == "__main__":
    for before, after in STEPS:
        (HERE / f"{before}-{after}.md").write_text(page(before, after), "utf-8")
