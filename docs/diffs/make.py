"""Writes the pages beside it: what changes from one of the short forms in lecture/ to the next.

    python docs/diffs/make.py     # after a change to lecture/; a test fails as long as the pages are old

A page names the functions, and cells, that fall away, come in and stay the same text, and shows the others, but for settings, as a diff.
Docstrings are left out.
"""

import ast
import difflib
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = {
    ("ppo", "rloo"): """The critic is gone, and with it the values, GAE, the value loss and half of the networks in
training. A number that does not depend on the response may be subtracted from its reward without changing the
expected gradient, and the mean reward of the *other* responses to the same prompt is such a number. The price: each
prompt needs K responses, and all tokens of a response share one advantage. The whole response is now the action, so
ratio and clipping are those of its probability.""",
    ("rloo", "grpo"): """The baseline becomes the mean of the whole group, and the advantage is divided by the group's
standard deviation. The first only multiplies the advantages by (K − 1)/K, which the learning rate absorbs. The second
is a choice: prompts that are nearly always, or nearly never, answered right get more weight than those in between;
`--scale-rewards none` undoes it. The ratio is again one per token. The KL, if there is one, has moved from the reward
into the loss, where it is no longer part of what the group compares.""",
    ("grpo", "agent"): """A response becomes a stream of turns: an environment answers the policy, and takes the place
of the reward function. The environment's tokens are read like those of a prompt, so they are in the attention mask;
they are not actions, so they are not in `written`, which selects the tokens of the loss. EOS ends a turn, not the
text, and the environment decides when the episode is over. If it answers nothing and ends after one turn, this is GRPO
with `--scale-rewards batch`. The KL term, and all ways to add up tokens but one, are left out to make room.""",
    (
        "sft",
        "reward_model",
    ): """The label is no longer a text's next token, but which of two texts was preferred. So only one number of the
network's output is left, at the last position. The loss is still a cross-entropy: −log σ of the difference of two
rewards is that of a choice between two. It depends on differences alone and leaves the zero of the rewards open,
which is set at the end.""",
    ("reward_model", "dpo"): """The reward head is gone, because a policy *is* a reward model: β log(π/π_ref) is the
reward for which it is the best policy that stays near the reference. In the same loss, the difference of two outputs
becomes a difference of two log-ratios. The price: a reference must read every pair, and nothing ever judges what the
policy itself would write.""",
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
        f"Made by [`make.py`](make.py) from [one file](../../lecture/{before}.py) and [the other](../../lecture/{after}.py), which has what comes in, and the settings.",
        "",
    ]
    out += ["| | functions and cells |", "|---|---|"]
    out += [f"| fall away | {named([name for name in a if name not in partners.values()])} |"]
    out += [f"| come in | {named(new)} |", f"| change | {named([titles[name] for name in changed])} |"]
    out += [f"| stay, word for word | {named([name for name in b if name in partners and name not in changed])} |", ""]
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
