"""X-ray of a run that samples texts: one web page in which every sampled token is coloured by its numbers.

    python docs/xray.py runs/my-run          # writes runs/my-run/xray.html, to be opened in any browser
    python docs/xray.py --docs               # runs each script of PAGES as it is, and writes its page in docs/

The run's samples.jsonl has the texts and what the run kept of each token, its metrics.jsonl the curves (the page does
without them if there is no such file). A run that is resumed appends to samples.jsonl: the last line of each update and
row counts; damaged lines are left out, and counted. The page holds its data and loads nothing. Data reach it as JSON, and
are shown as text: whatever a model writes, it is not taken for HTML.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# column of samples.jsonl -> name, whether colours diverge from 0 (else they go from 0 downwards), what it is
QUANTITIES = {
    "advantages": ("advantage", True, "How much better this token turned out than was expected. Orange is blame: "
                   "training makes such tokens less likely. Blue is credit: it makes them likelier. (Where advantages "
                   "are whitened, as in ppo.py by default, 0 is the mean of the whole batch.)"),
    "implicit_rewards": ("implicit reward", True, "What DPO makes of this token: beta times the difference of the two "
                         "log-probabilities. Blue: the policy says it more often than the reference would. The sum over "
                         "a response is the reward for which the policy is the best one."),
    "rewards": ("reward", True, "What the token was paid: its KL times −kl_coef and, for the last one, the score."),
    "kl": ("KL", True, "How far the policy moved from the reference at this token, in nats. The default estimate is "
           "the difference of the two log-probabilities, so it is negative where the token has become less likely."),
    "values": ("value", True, "What the critic, before it saw this token, predicted of the reward still to come."),
    "returns": ("return", True, "What the critic should have predicted: its value plus the advantage, unwhitened."),
    "old_logprobs": ("logprob", False, "The log-probability of this token for the policy that drew it: 0 is certain, "
                     "−2.3 one chance in ten, −4.6 one in a hundred. The more violet, the more surprising."),
    "logprobs": ("logprob", False, "The log-probability of this token for the policy, at temperature 1: 0 is certain, "
                 "−2.3 one chance in ten, −4.6 one in a hundred. The more violet, the more surprising."),
    "ref_logprobs": ("reference logprob", False, "The same for the reference, the policy's frozen first self. Where it "
                     "is far lower than the policy's, the policy has learned to say this."),
}  # fmt: skip
# title of a curve -> name of a line in it -> metric
CURVES = {
    "score": {"score": "objective/scores", "gold score": "objective/gold_scores"},
    "KL to the reference": {"KL per response, nats": "objective/kl", "KL per token, nats": "kl"},
    "length": {"tokens per response": "val/response_length", "tokens per completion": "completions/mean_length"},
    "loss on the test split": {"loss, nats": "eval/loss"},
    "accuracy on the test split": {"pairs": "eval/rewards/accuracies", "tokens": "eval/mean_token_accuracy"},
}
# script -> its page in docs/
PAGES = {"ppo": "xray.html", "rloo": "xray-rloo.html", "grpo": "xray-grpo.html", "dpo": "xray-dpo.html",
         "sft": "xray-sft.html"}  # fmt: skip


class UserError(Exception):
    """A mistake in the input, shown as one sentence."""


def require(condition: object, sentence: str) -> None:
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def read_lines(file: Path, read: Callable[[dict], dict]) -> list[dict | None]:
    """What `read` makes of each line of a jsonl file; None for a line that it cannot use, or that was cut off.

    Tells how many these are. Raises UserError if all are.
    """
    found = []
    trouble = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            require(isinstance(row, dict), "not a JSON object")
            found.append(read(row))
        except Exception as error:  # of JSON, of UTF-8, or because something is missing or has a wrong type
            found.append(None)
            trouble.append(f"line {number}: {error}")
    if trouble:
        sentence = f"{file}: {len(trouble)} of {len(found)} lines cannot be used; {trouble[0]}"
        require(len(trouble) < len(found), sentence)
        print(f"xray.py: warning: {sentence}", file=sys.stderr)
    return found


def is_number(x: object) -> bool:
    """True of what can be drawn: not of None, NaN, the infinities and whole numbers beyond all floats."""
    return isinstance(x, (int, float)) and abs(x) <= sys.float_info.max


def rounded(x: object) -> float | None:
    """To 4 significant digits, which halves the page; None if it is no number."""
    return float(f"{x:.4g}") if is_number(x) else None


def read_sample(row: dict) -> dict:
    """What the page shows of a response: texts, rewards, and every list that has one number for each token."""
    tokens = row.get("tokens")
    is_sample = type(row.get("update")) is int and isinstance(tokens, list)
    require(is_sample, "there is no update, or there are no tokens; is it the samples.jsonl of a run?")
    columns = {
        name: [rounded(x) for x in xs]
        for name, xs in row.items()
        if name != "tokens" and isinstance(xs, list) and len(xs) == len(tokens)
    }
    short = QUANTITIES.keys() & row.keys() - columns.keys()
    require(not short, f"there is not one number for each token in {', '.join(sorted(short))}")
    named = ({"score": row["score"]} if "score" in row else {}) | row.get("rewards_by_name", {})
    return {
        "update": row["update"],
        "row": row.get("row"),
        "prompt": str(row.get("prompt", "")),
        "tokens": [str(token) for token in tokens],
        "scores": {name: rounded(x) for name, x in named.items()},
        "columns": {name: xs for name, xs in columns.items() if any(map(is_number, xs))},
    }


def describe(name: str, samples: list[dict]) -> dict:
    """A column's name, kind and meaning. Unknown ones are shown, too: a rollout may have grown a field."""
    found = [x for sample in samples for x in sample["columns"].get(name, []) if x is not None]
    unknown = (name.replace("_", " "), max(found) > 0, f"The column {name} of samples.jsonl.")
    label, signed, text = QUANTITIES.get(name, unknown)
    return {"name": name, "label": label, "signed": signed, "text": text}


def make_page(run: Path, name: str | None = None, links: dict[str, str] | None = None) -> str:
    """The page of a run's folder, called `name` or like the folder, with links to other pages."""
    require(run.is_dir(), f"{run}: there is no such folder; name the --output-dir of a run")
    file = run / "samples.jsonl"
    require(file.exists(), f"{run} has no samples.jsonl: the scripts that sample texts write it (unless told "
            "--num-sample-generations 0), reward_model.py and ddpo.py do not")  # fmt: skip
    last = {}  # of a run that was resumed, the last line of each update and row
    for number, sample in enumerate(read_lines(file, read_sample), 1):
        if sample:
            row = sample.pop("row")
            last[sample["update"], f"line {number}" if row is None else str(row)] = sample
    samples = list(last.values())
    names = {name for sample in samples for name in sample["columns"]}
    require(names, f"{file} has no response with numbers for its tokens")
    ordered = [name for name in QUANTITIES if name in names] + sorted(names - set(QUANTITIES))
    file = run / "metrics.jsonl"
    metrics = [row or {} for row in read_lines(file, dict)] if file.exists() else []
    curves = []
    for title, lines in CURVES.items():
        points = {label: [rounded(row.get(name)) for row in metrics] for label, name in lines.items()}
        curves.append({"title": title, "lines": {label: xs for label, xs in points.items() if any(xs)}})  # not if all 0
    data = {
        "run": name or run.resolve().name,
        "links": links or {},
        "is_trained_by_reward": not names.isdisjoint(("advantages", "implicit_rewards")),
        "samples": sorted(samples, key=lambda sample: sample["update"]),
        "quantities": [describe(name, samples) for name in ordered],
        "curves": [curve for curve in curves if curve["lines"]],
        "last": max([len(metrics), *(sample["update"] for sample in samples)]),
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no </script> ends the data
    return PAGE.replace("DATA", text)


def make_docs() -> None:
    """The pages in docs/: the script's run without flags, but for fewer tables, which keeps the pages small."""
    docs = Path(__file__).resolve().parent
    links = {f"{script}.py": page for script, page in PAGES.items()}
    for script, page in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--num-sample-generations", "4", "--output-dir", folder]
            subprocess.run([sys.executable, docs.parent / f"{script}.py", *flags], check=True)
            (docs / page).write_text(make_page(Path(folder), f"python {script}.py", links), encoding="utf-8")


def main() -> None:
    """Reads the command line and writes the page; a user's mistake ends in one sentence and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run, with samples.jsonl and metrics.jsonl")
    parser.add_argument("--output", type=Path, help="the page to write; by default xray.html in that folder")
    parser.add_argument("--docs", action="store_true", help="run the scripts, and write the pages in docs/")
    args = parser.parse_args()
    if args.docs:
        return make_docs()
    if args.run is None:
        parser.error("name the folder of a run")
    sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal has not
    output = args.output or args.run / "xray.html"
    try:
        page = make_page(args.run)
        output.write_text(page, encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"xray.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"saved as {output}")


PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Which token got the blame?</title>
<style>
:root { color-scheme: light dark; --paper: #fffdf8; --card: #fff; --ink: #1c1b19; --soft: #605c55; --line: #ddd8cd;
  --low: #f58a5b; --high: #6aaef0; --deep: #b693ec; --gold: #946000; --blue: #1f63b0 }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --card: #1e2126; --ink: #f1efea; --soft: #b0aca4;
  --line: #3b3f46; --low: #bb4419; --high: #286abf; --deep: #8450c9; --gold: #e8b04a; --blue: #7db6f5 } }
* { box-sizing: border-box }
html { font-size: clamp(16px, 0.35vw + 12px, 24px) }
body { margin: 0; background: var(--paper); color: var(--ink); font-family: system-ui, sans-serif; line-height: 1.45;
  display: grid; grid-template-columns: minmax(0, 1fr) 24rem; gap: 0 2.2rem; padding: 1.3rem 2rem; align-items: start }
aside { position: sticky; top: 1.3rem }
h1 { font: 600 2rem/1.15 Georgia, "Liberation Serif", serif; margin: 0 0 .3rem }
h2 { font-size: .8rem; font-weight: 600; margin: 0 0 .2rem; color: var(--soft) }
p { margin: 0 0 .7rem; max-width: 62rem }
.soft { color: var(--soft); font-size: .85rem }
nav a { color: inherit; margin-right: 1rem }
fieldset { border: 0; padding: 0; margin: 0 0 .6rem; display: flex; flex-wrap: wrap; gap: .35rem }
fieldset label { border: 1px solid var(--line); border-radius: 2rem; padding: .15rem .8rem; cursor: pointer }
fieldset label:has(:checked) { background: var(--ink); color: var(--paper); border-color: var(--ink) }
fieldset input { position: absolute; opacity: 0; pointer-events: none }
:focus-visible, label:has(:focus-visible) { outline: 3px solid var(--gold); outline-offset: 1px }
#slide { display: flex; align-items: center; gap: .9rem; margin: .3rem 0 .8rem; font-weight: 600 }
#slide input { flex: 1; max-width: 30rem; accent-color: var(--blue); min-width: 5rem }
#bar { height: 1rem; border-radius: 3px; border: 1px solid var(--line) }
#legend { display: flex; flex-wrap: wrap; gap: .2rem 2rem; align-items: center; margin: 0 0 1rem }
#scale { flex: 1 1 20rem; max-width: 30rem }
#ticks { display: flex; justify-content: space-between; font-size: .9rem }
article { display: grid; grid-template-columns: minmax(0, 1fr) minmax(7rem, auto); gap: .2rem 1.2rem;
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem 1rem; margin: 0 0 .8rem }
.prompt { color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .95rem }
.response { grid-column: 1; font: 1.22rem/1.75 Georgia, "Liberation Serif", serif }
.scores { grid-column: 2; grid-row: 1 / span 2; text-align: right; font-size: .8rem; color: var(--soft);
  overflow-wrap: anywhere }
.scores b { display: block; font-size: 1.5rem; line-height: 1.2; color: var(--ink) }
.scores b::before { content: "score "; font: .8rem system-ui, sans-serif; color: var(--soft) }
.word { display: inline-flex; flex-wrap: wrap; max-width: 100%; vertical-align: top }
.token { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; border-radius: 3px; max-width: 100%;
  margin: 0 1px 2px 0; padding: 0 1px; min-width: .5em; cursor: pointer; scroll-margin-bottom: 15rem;
  -webkit-tap-highlight-color: transparent }
.token[aria-selected=true] { outline: 2px solid var(--ink); outline-offset: 0 }
.numbers .token::after { content: attr(data-number); display: block; direction: ltr; text-align: center;
  font: .62rem/1 system-ui, sans-serif; padding: 0 2px 3px }
#readout { border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: .6rem .9rem;
  margin: 0 0 .9rem }
#readout b { font: 600 1.3rem/1.4 Georgia, "Liberation Serif", serif; white-space: pre-wrap; overflow-wrap: anywhere;
  border-radius: 3px; padding: 0 .25rem }
dl { display: grid; grid-template-columns: 1fr auto; gap: 0 1rem; margin: .3rem 0 0 }
#readout, #extremes, #ticks, .scores, figcaption, .token::after { font-variant-numeric: tabular-nums }
dd { margin: 0; text-align: right }
dl .on { font-weight: 700 }
#extremes { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 1rem; margin: 0 0 .9rem }
#extremes button { display: flex; justify-content: space-between; gap: .5rem; width: 100%; border: 0; cursor: pointer;
  padding: .1rem .4rem; margin: 0 0 2px; border-radius: 3px; color: inherit; font: .9rem/1.4 system-ui, sans-serif }
#extremes span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: pre }
figure { margin: 0 0 .5rem }
figcaption { font-size: .85rem }
figcaption span { margin-right: 1rem }
svg { display: block; width: 100% }
svg text { font-size: 12px; fill: var(--soft) }
path { fill: none; stroke-width: 2.2; stroke-linejoin: round }
.frame { stroke: var(--line) } .marker { stroke: var(--ink); stroke-dasharray: 3 3 }
.line0 { stroke: var(--blue); color: var(--blue) } .line1 { stroke: var(--gold); color: var(--gold) }
figcaption .line0::before, figcaption .line1::before { content: "━ " }
@media (max-width: 900px) { body { display: block; padding: 1rem .9rem 15rem } aside { position: static }
  h1 { font-size: 1.6rem } article { grid-template-columns: 1fr; padding: .6rem .7rem } .response { font-size: 1.15rem }
  .scores { grid-column: 1; grid-row: auto; text-align: left } .scores b { display: inline; font-size: 1.1rem }
  #readout { position: fixed; inset: auto 0 0; margin: 0; border-radius: 10px 10px 0 0; max-height: 14rem;
    overflow: auto; box-shadow: 0 -3px 14px #0005; font-size: .9rem } dl { gap: 0 .6rem } }
</style>
<main>
  <nav id="links" class="soft"></nav>
  <h1 id="title">Which token got the blame?</h1>
  <p><span id="why">A reward is one number for a whole text. Training makes numbers for every token out of it.</span>
    Below are responses that the policy gave in the run <span id="run"></span>; their colours show the number chosen
    here. Point at a token, tap it, or step through a response with the arrow keys, to see all its numbers.</p>
  <div id="slide"><label for="slider">Update</label><input id="slider" type="range" min="0" value="0">
    <output id="update"></output></div>
  <fieldset id="quantities" aria-label="What the colours show"></fieldset>
  <p id="meaning"></p>
  <div id="legend"><div id="scale"><div id="bar"></div><div id="ticks"></div></div><div class="soft">The same scale for
    all updates; 95 % of the tokens lie within it.<br>
    <label><input type="checkbox" id="numbers"> Write the number under each token.</label></div></div>
  <div id="samples"></div>
</main>
<aside>
  <div id="readout" aria-live="polite"></div>
  <div id="extremes"></div>
  <div id="curves"></div>
  <svg id="blank" viewBox="0 0 330 118" role="img" hidden></svg>
</aside>
<script type="application/json" id="data">DATA</script>
<script>
"use strict"
const $ = id => document.getElementById(id)
const data = JSON.parse($("data").textContent)
const updates = [...new Set(data.samples.map(sample => sample.update))]
let quantity = data.quantities[0], shown = [], cells = []  // shown: samples of the update; cells: their drawn tokens

const fixed = (x, digits) => x == null ? "none" : x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−")
const visible = text => text.replace(/[\x00-\x1f\x7f-\x9f]/g, c => ({ "\n": "⏎", "\t": "⇥" })[c] ?? "\ufffd") || "∅"

function make(parent, tag, text, name) {  // a new element of a class; what comes from data is only ever its text
  const e = parent.appendChild(document.createElement(tag))
  if (text !== undefined) e.textContent = text
  if (name) e.className = name
  return e
}

for (const q of data.quantities) {  // one scale for all updates: 95 % of the tokens lie within it
  const of = s => (s.columns[q.name] ?? []).filter(x => x !== null)
  const sizes = data.samples.flatMap(of).map(Math.abs).sort((a, b) => a - b)
  q.limit = sizes[Math.ceil(0.95 * sizes.length) - 1] || sizes.at(-1) || 1
  q.digits = Math.min(20, Math.max(0, 2 - Math.floor(Math.log10(q.limit))))
  q.shared = data.samples.every(s => new Set(of(s)).size < 2) && data.samples.some(s => of(s).length > 1)
}

function colour(x, q = quantity) {
  const share = Math.min(1, Math.abs(x) / q.limit) * 100, end = !q.signed ? "deep" : x < 0 ? "low" : "high"
  return x == null ? "" : `color-mix(in oklab, var(--${end}) ${share.toFixed(1)}%, var(--card))`
}

function drawSample(sample) {
  const box = make($("samples"), "article"), scores = Object.entries(sample.scores)
  make(box, "p", sample.prompt, "prompt")
  const response = make(box, "div", undefined, "response"), side = make(box, "div", undefined, "scores")
  scores.forEach(([name, x], i) => i ? make(side, "div", `${name} ${fixed(x, 2)}`) : make(side, "b", fixed(x, 2)))
  response.dir = "auto"
  if (!sample.tokens.length) return make(response, "span", "(an empty response)", "soft")
  response.setAttribute("role", "listbox")
  response.setAttribute("aria-label", "tokens of a response")
  let word
  sample.tokens.forEach((text, i) => {
    if (!i || /^\s/.test(text) || sample.tokens[i - 1].endsWith("\n")) word = make(response, "span", undefined, "word")
    const e = make(word, "span", visible(text), "token")
    e.setAttribute("role", "option")
    e.tabIndex = i ? -1 : 0
    cells.push({ sample, i, e })
    if (text.endsWith("\n")) make(response, "br")
  })
}

const number = (cell, q = quantity) => cell.sample.columns[q.name]?.[cell.i] ?? null

function paint() {  // colours, legend, extremes
  const q = quantity, ends = q.signed ? [-1, -.5, 0, .5, 1] : [-1, -.75, -.5, -.25, 0]
  for (const cell of cells) {
    const x = number(cell)
    cell.e.style.background = colour(x)
    cell.e.dataset.number = fixed(x, q.digits)
  }
  $("meaning").textContent = q.text + (q.shared ? " Here all tokens of a response share one number." : "")
  $("bar").style.background = "linear-gradient(to right, " + ends.map(x => colour(x * q.limit)).join() + ")"
  $("ticks").replaceChildren()
  for (const x of ends) make($("ticks"), "span", (x === -1 ? "≤ " : x === 1 ? "≥ " : "") + fixed(x * q.limit, q.digits))
  $("extremes").replaceChildren()
  const ranked = cells.filter(cell => number(cell) !== null).sort((a, b) => number(a) - number(b))
  for (const [title, part] of [["lowest here", ranked.slice(0, 4)], ["highest here", ranked.slice(-4).reverse()]]) {
    const list = make($("extremes"), "div")
    if (!q.shared) make(list, "h2", title)
    for (const cell of q.shared ? [] : part) {
      const button = make(list, "button")
      make(button, "span", visible(cell.sample.tokens[cell.i]).trim())
      make(button, "span", fixed(number(cell), q.digits))
      button.style.background = colour(number(cell))
      button.onclick = () => cell.e.focus()
    }
  }
  return ranked[0] ?? cells[0]
}

function select(cell) {
  const readout = $("readout")
  readout.replaceChildren()
  if (!cell) return make(readout, "span", "no tokens in this update", "soft")
  for (const c of cells) c.e.setAttribute("aria-selected", c === cell)
  make(readout, "b", visible(cell.sample.tokens[cell.i])).style.background = colour(number(cell))
  make(readout, "span", ` token ${cell.i + 1} of ${cell.sample.tokens.length}`, "soft")
  const list = make(readout, "dl")
  for (const q of data.quantities) {
    const x = number(cell, q), chance = q.name.endsWith("logprobs") && x !== null
    make(list, "dt", q.label, q === quantity ? "on" : "")
    make(list, "dd", fixed(x, 3) + (chance ? ` (${fixed(100 * Math.exp(x), 1)} %)` : ""), q === quantity ? "on" : "")
  }
}

function show(index) {  // an update
  index = Math.max(0, Math.min(updates.length - 1, index))
  $("slider").value = index
  $("slider").setAttribute("aria-valuetext", `update ${updates[index]}`)
  $("update").textContent = `${updates[index]} of ${data.last}`
  $("samples").replaceChildren()
  cells = []
  data.samples.filter(sample => sample.update === updates[index]).forEach(drawSample)
  select(paint())
  for (const curve of data.curves) curve.mark(updates[index])
}

function drawCurve(curve) {
  const figure = make($("curves"), "figure"), caption = make(figure, "figcaption"), lines = Object.entries(curve.lines)
  const svg = figure.appendChild($("blank").cloneNode()), all = lines.flatMap(([, xs]) => xs.filter(x => x !== null))
  const draw = (tag, attributes, text) => {
    const e = svg.appendChild(document.createElementNS(svg.namespaceURI, tag))
    for (const name in attributes) e.setAttribute(name, attributes[name])
    if (text !== undefined) e.textContent = text
    return e
  }
  svg.removeAttribute("id")
  svg.removeAttribute("hidden")
  svg.setAttribute("aria-label", `${curve.title} against updates`)
  const low = Math.min(0, ...all), high = Math.max(0, ...all)
  const x = update => 36 + 286 * (update - 1) / Math.max(1, data.last - 1), y = v => 98 - 90 * (v - low) / (high - low)
  const power = 10 ** Math.floor(Math.log10(high - low))
  const step = power * [.5, 1, 2].find(s => (high - low) / s / power <= 5)
  const digits = Math.max(0, -Math.floor(Math.log10(step)))
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) {
    draw("line", { class: "frame", x1: 36, x2: 322, y1: y(v), y2: y(v) })
    draw("text", { x: 31, y: y(v) + 4, "text-anchor": "end" }, fixed(v, digits))
  }
  for (const update of updates) draw("line", { class: "line0", x1: x(update), x2: x(update), y1: 98, y2: 102 })
  draw("text", { x: 36, y: 115, "text-anchor": "middle" }, "1")
  draw("text", { x: 322, y: 115, "text-anchor": "end" }, `update ${data.last}`)
  lines.forEach(([, xs], i) => {
    const points = xs.map((v, t) => v === null ? "" : `L${x(t + 1)} ${y(v)}`).join("")  // lines bridge what is missing
    draw("path", { class: `line${i}`, d: points.replace("L", "M") })
  })
  const marker = draw("line", { class: "marker", y1: 4, y2: 98 })
  curve.mark = update => {
    marker.setAttribute("x1", x(update))
    marker.setAttribute("x2", x(update))
    caption.replaceChildren()
    lines.forEach(([name, xs], i) => make(caption, "span", `${name} ${fixed(xs.slice(0, update).findLast(v => v !== null), 2)}`, `line${i}`))
  }
}

$("run").textContent = data.run
if (!data.is_trained_by_reward) {
  $("title").textContent = document.title = "Which token was a surprise?"
  $("why").remove()
}
for (const [name, page] of Object.entries(data.links)) make($("links"), "a", name).href = page
data.curves.forEach(drawCurve)
for (const q of data.quantities) {
  const label = make($("quantities"), "label"), input = make(label, "input")
  Object.assign(input, { type: "radio", name: "quantity", checked: q === quantity })
  input.onchange = () => { quantity = q; select(paint()) }
  label.append(q.label)
}
$("slider").max = updates.length - 1
$("slider").oninput = event => show(+event.target.value)
$("numbers").onchange = event => $("samples").classList.toggle("numbers", event.target.checked)
const cellOf = event => cells.find(cell => cell.e === event.target)
for (const kind of ["pointerover", "focusin"]) $("samples").addEventListener(kind, event => {
  if (cellOf(event)) select(cellOf(event))
})
document.addEventListener("keydown", event => {  // arrows: from token to token, or else from update to update
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], cell = cellOf(event)
  if (!step || event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input")) return
  event.preventDefault()
  if (!cell) return show(+$("slider").value + step)
  const next = cells[cells.indexOf(cell) + step]
  if (next) next.e.focus()
})
show(0)
</script>
"""

if __name__ == "__main__":
    main()
