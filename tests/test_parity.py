"""One whole update of ppo.py and rloo.py against one of TRL 0.16.1's PPOTrainer and RLOOTrainer, in float32.

tests/golden/make_trl016.py ran TRL's own trainers on tiny models with fixed responses and wrote down what they made.
Here `train` itself runs on TRL's policy, reward model, prompts and chance: torch.randperm gives its orders, torch.rand
numbers at which its responses are drawn. In the cases `full` all responses run to full length, in `eos` they
end anywhere; `steps` are 2 epochs of 2 mini-batches.

Where TRL 0.16.1 has a fault, or made another choice, the test does as TRL does, and then nothing else differs:

  max_grad_norm is accepted and never applied               max_grad_norm=1e9
  no bias in the value head; ours is trained                the critic is TRL's value model
  policy and reference may start apart                      the policy becomes TRL's once the reference is made
  PPO: the score stands one position after EOS where there  in `eos`, put_score_one_further: the mask of rewards, GAE
  is room, so that the value there is trained too           and value loss is true for one position more
  RLOO: a group's rows are B/K apart                        TRL's rows are put in our order, a group together

Not compared: in `eos`, means over tokens and the number of EOS, in which TRL counts padding; with normalize_reward,
objective/scores, which are the normalised ones.
"""

import json
import sys
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from runs import NAMES, run, script, watch, without_key_bias
from safetensors.torch import load_file
from sources import ROOT, load, text_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

import ppo

sys.path.insert(0, str(ROOT / "tools"))
from make_fork import apply, read_diffs  # noqa: E402

FOLDER = Path(__file__).parent / "golden"
TRL = json.loads((FOLDER / "trl016_update.json").read_text())
ARRAYS = load_file(FOLDER / "trl016_update.safetensors")

# --- what TRL did


def arrays_of(case):
    """Name -> tensor."""
    return {name.removeprefix(f"{case}/"): x for name, x in ARRAYS.items() if name.startswith(f"{case}/")}


def read(case):
    """Settings, numbers and tensors of a case; RLOO's rows in our order, where a group are neighbours."""
    config, theirs = TRL["config"], TRL["cases"][case]
    tensors = arrays_of(case)
    orders = torch.tensor(theirs["orders"])
    k = theirs["settings"].get("rloo_k", 1)
    rows = torch.arange(orders.shape[1]).view(k, -1).T.flatten()  # of TRL, in our order
    new = {name.removeprefix("new."): tensors.pop(name) for name in list(tensors) if name.startswith("new.")}
    gradient = {n.removeprefix("gradient."): tensors.pop(n) for n in list(tensors) if n.startswith("gradient.")}
    tensors = {name: x.flatten()[rows] if name == "rlhf_reward" else x[rows] for name, x in tensors.items()}
    tensors["prompt_mask"] = tensors["queries"] != config["pad_token_id"]
    numbers = {name: theirs[name] for name in ("settings", "losses", "metrics")}
    orders = list(rows.argsort()[orders])
    return SimpleNamespace(**tensors, **numbers, config=config, orders=orders, new=new, gradient=gradient)


def load_models(trl):
    """Policy, reference, value and reward model with the weights that TRL began with."""
    weights = arrays_of("weights")

    def load(make, name, **kwargs):
        model = make(GPT2Config(**trl.config, **kwargs))
        part = {k.removeprefix(f"{name}."): x for k, x in weights.items() if k.startswith(f"{name}.")}
        missing, unexpected = model.load_state_dict(part, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # which is the embedding
        return model.eval()

    policy, reference = (load(GPT2LMHeadModel, name) for name in ("policy", trl.settings["reference"]))
    value, reward = (load(GPT2ForSequenceClassification, name, num_labels=1) for name in ("value", "reward"))
    return policy, reference, value, reward


# --- the same by train()


def write_world(folder, trl, reference, reward):
    """The folders that train() is given: a policy that is TRL's reference, TRL's reward model, and prompts as words."""
    words = {f"<{i}>": i for i in range(trl.config["vocab_size"])}
    model = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<1>", eos_token="<2>")
    for name, network in (("policy", reference), ("reward", reward)):
        network.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    k = trl.settings.get("rloo_k", 1)
    prompts = [" ".join(f"<{i}>" for i in row[real]) for row, real in zip(trl.queries[::k], trl.prompt_mask[::k])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in prompts))
    names = {"model": "policy", "reward_model": "reward", "dataset": "prompts.jsonl"}
    return {flag: str(folder / name) for flag, name in names.items()}


@torch.no_grad()
def uniforms_for(policy, trl):
    """(B, T) numbers in [0, 1) at which inverting the policy's distribution function gives TRL's responses."""
    ids = torch.cat([trl.queries, trl.responses], 1)
    attention_mask = F.pad(trl.prompt_mask, (0, trl.responses.shape[1]), value=True).long()
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = policy(input_ids=ids, attention_mask=attention_mask, position_ids=positions).logits
    P = trl.queries.shape[1]
    probabilities = (logits[:, P - 1 : -1].double() / trl.settings["temperature"]).softmax(-1)
    middle = probabilities.cumsum(-1) - probabilities / 2
    return middle.gather(-1, trl.responses[..., None]).squeeze(-1).float()


def put_score_one_further(monkeypatch):
    """TRL's second mask, true for one position more: of rewards, values and value loss, but not of the policy loss."""
    shape_rewards, gae, value_loss = ppo.shape_rewards, ppo.gae, ppo.value_loss
    lengthen = lambda mask: F.pad(mask, (1, 0), value=True)[:, :-1]  # noqa: E731

    def longer_value_loss(values, old_values, returns, mask, cliprange_value):
        """What is beyond the mask is added to the last real token; and the mean is to be over the longer mask."""
        longer = lengthen(mask)
        is_last = mask & ~F.pad(mask, (0, 1))[:, 1:]
        losses, clipped = value_loss(values, old_values, returns, longer, cliprange_value)
        beyond = (losses * (longer & ~mask)).sum(1, keepdim=True)
        return (losses * mask + beyond * is_last) * mask.sum() / longer.sum(), clipped

    def longer_rewards(scores, kl, mask, kl_coef):
        """The score stands one further, where there is no KL."""
        return shape_rewards(scores, kl.masked_fill(~mask, 0.0), lengthen(mask), kl_coef)

    def wide_select(rollout, index):
        """With all columns, as in TRL: the last one may be one position further."""
        part = copy(rollout)
        vars(part).update({name: x[index] for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)})
        part.examples = [rollout.examples[i] for i in index]
        return part

    monkeypatch.setattr(ppo.Rollout, "select", wide_select)
    monkeypatch.setattr(ppo, "value_loss", longer_value_loss)
    monkeypatch.setattr(ppo, "gae", lambda rewards, values, mask, *rest: gae(rewards, values, lengthen(mask), *rest))
    monkeypatch.setattr(ppo, "shape_rewards", longer_rewards)


class Watch:
    """Gives train() TRL's weights and chance; notes what it computes, and the loss and the gradient of each step."""

    def __init__(self, monkeypatch, module, trl, policy, value):
        self.is_ppo = module is ppo
        self.start, self.value = policy, value
        self.losses, self.gradients = [0.0], []
        self.orders = list(trl.orders)
        self.uniforms = [uniforms_for(policy, trl)]
        self.sample = module.sample
        monkeypatch.setattr(module, "shuffled", lambda n, *_: list(range(n)))  # the order of the prompts
        monkeypatch.setattr(torch, "randperm", lambda *_, **__: self.orders.pop(0))
        monkeypatch.setattr(torch, "rand", lambda *_, **__: self.uniforms.pop(0))
        monkeypatch.setattr(module, "sample", self.begin_as_trl)
        self.used_scores = None
        watch(monkeypatch, torch.Tensor, "backward", self.note_loss)
        watch(monkeypatch, module, "rollout_stats", self.note_rollout)
        watch(monkeypatch, module, "shape_rewards" if self.is_ppo else "leave_one_out", self.note_rewards)
        if hasattr(module, "normalize_scores"):
            watch(monkeypatch, module, "normalize_scores", lambda scores, *_: setattr(self, "used_scores", scores))

    def begin_as_trl(self, policy, *rest, **kwargs):
        """Called first when all models are made: the reference is TRL's, now the policy becomes so too."""
        self.policy = policy
        policy.load_state_dict(self.start.state_dict())
        self.before = {name: p.detach().clone() for name, p in self.parameters()}
        return self.sample(policy, *rest, **kwargs)

    def parameters(self):
        """Those in training by TRL's names."""
        parts = {"policy": self.policy, "value.transformer": self.value.base_model, "value.score": self.value.score}
        for prefix, model in list(parts.items())[: 3 if self.is_ppo else 1]:
            yield from ((f"{prefix}.{name}", p) for name, p in model.named_parameters())

    def note_rewards(self, result, given, *_, **__):
        """PPO's by token, and RLOO's by response."""
        self.rewards = result if self.is_ppo else given

    def note_rollout(self, stats, rollout, *_):
        """The scores are those of the rollout, unless they were normalised."""
        self.rollout = rollout
        if self.used_scores is None:
            self.used_scores = rollout.scores

    def note_loss(self, _, loss, **__):
        """Adds up the losses of a step, one for each of its micro-batches."""
        self.losses[-1] += loss.item()

    def note_step(self, *_):
        """Called by the optimiser before it takes the step."""
        self.losses.append(0.0)
        self.gradients.append({name: p.grad.clone() for name, p in self.parameters() if p.grad is not None})


def update(monkeypatch, folder, case):
    """One update by train(), of whichever script the case names: what TRL did, and what was noted and left behind."""
    trl = read(case)
    module = script(case.split("_")[0])
    if trl.settings.get("normalize_reward"):
        diff = read_diffs(text_of("docs/diffs/settings.md"), "rloo.py")["REINFORCE++'s normalisation"]
        (folder / "fork.py").write_text(apply(diff, text_of("rloo.py")))
        module = load(folder / "fork.py", "forked")
    policy, reference, value, reward = load_models(trl)
    world = write_world(folder, trl, reference, reward)
    watch = Watch(monkeypatch, module, trl, policy, value)
    if module is ppo:
        monkeypatch.setattr(ppo, "load_critic", lambda *args: value)
    if module is ppo and "eos" in case:
        put_score_one_further(monkeypatch)
    settings = {name: x for name, x in trl.settings.items() if hasattr(module.Args, name)}
    settings |= world
    if module is not ppo:
        settings["reward_fn"] = (f"{ROOT}/rewards/model.py:score",)
    settings["missing_eos_penalty"] = settings["missing_eos_penalty"] or 0.0
    settings["max_grad_norm"] = 1e9
    settings["batch_size"] = settings["total_episodes"] = len(trl.queries)
    handle = register_optimizer_step_pre_hook(watch.note_step)
    try:
        (watch.stats,) = run(module, folder / "run", micro_batch_size=8, **settings)
    finally:
        handle.remove()
    assert not watch.orders and not watch.uniforms  # all of TRL's chance was used
    watch.after = {name: p.detach() for name, p in watch.parameters()}
    saved = GPT2LMHeadModel.from_pretrained(folder / "run").state_dict()
    watch.after |= {name: saved[name.removeprefix("policy.")] for name in watch.after if name.startswith("policy.")}
    watch.losses.pop()  # since the last step
    watch.mask = watch.rollout.mask
    return trl, watch


# --- comparisons


def near(what, ours, theirs, bound=1e-5, mask=..., scale=None):
    """Where the mask is true, the difference is within the bound, as a share of the length of theirs (or the scale)."""
    ours, theirs = ours[mask].double(), theirs[mask].double()
    assert ours.shape == theirs.shape
    scale = theirs if scale is None else scale.double()
    found = (ours - theirs).norm() / scale.norm().clamp(min=1e-12)
    assert found < bound, f"{what}: {found:.2g} is over {bound:g}"


def compare_steps(trl, ours):
    """Loss and gradient of each step, and the weights they leave."""
    assert len(ours.losses) == len(trl.losses)
    # At a ratio of 1 the loss is a sum that cancels; ours is off by the rounding of a rollout with its cache.
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(trl.losses), rtol=1e-4, atol=1e-5)
    assert set(trl.new) <= set(ours.after)
    moved = {name: x - ours.before[name] for name, x in trl.new.items()}
    after = {name: ours.after[name] for name in trl.new}
    assert not trl.gradient or len(ours.gradients) == 1  # recorded where there is one step
    if trl.gradient:
        of_policy = [gradient for name, gradient in ours.gradients[0].items() if name.startswith("policy")]
        assert ours.stats["policy/grad_norm"] == pytest.approx(nn.utils.get_total_norm(of_policy).item(), rel=1e-4)
    for name, theirs in trl.gradient.items():
        near(f"gradient of {name}", ours.gradients[0][name], theirs, 1e-4)
    for name in trl.new:
        new, theirs, scale = (without_key_bias(name, x[name]) for x in (after, trl.new, moved))
        near(f"weights {name}", new, theirs, 1e-3, scale=scale)


def compare_metrics(trl, ours, names):
    theirs, ours = ({name: x[name] for name in names.split()} for x in (trl.metrics, ours.stats))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


ROLLOUT_METRICS = "objective/kl objective/non_score_reward objective/rlhf_reward objective/scores"
STEP_METRICS = "policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg"
STEP_METRICS += " val/num_eos_tokens val/clipfrac_avg"  # of a critic: 0 in RLOO


def compare_rollout(trl, ours):
    assert torch.equal(ours.mask, ~trl.padding_mask)
    near("logprobs", ours.rollout.old_logprobs, trl.logprobs, mask=ours.mask)
    near("ref_logprobs", ours.rollout.ref_logprobs, trl.ref_logprobs, mask=ours.mask)
    near("scores", ours.used_scores, trl.scores)
    padding = (~ours.mask).sum(1).float().mean().item()
    assert ours.stats["objective/entropy"] - padding == pytest.approx(trl.metrics["objective/entropy"], rel=1e-5)
    if not trl.settings.get("normalize_reward"):
        compare_metrics(trl, ours, ROLLOUT_METRICS)


@pytest.mark.parametrize("case", [case for case in TRL["cases"] if case.split("_")[0] in NAMES])
def test_an_update_is_trls(monkeypatch, tmp_path, case):
    """Everything before the steps, each step, and the weights after it. RLOO has no values."""
    trl, ours = update(monkeypatch, tmp_path, case)
    compare_rollout(trl, ours)
    metrics = STEP_METRICS
    if case.startswith("ppo"):
        r, longer = ours.rollout, ~trl.padding_mask_p1
        near("values", r.values, trl.values, mask=longer)
        near("rewards", ours.rewards, trl.rewards)
        near("returns", r.returns, trl.returns, mask=longer)
        near("advantages", r.advantages, trl.advantages)
        metrics += " loss/value_avg val/ratio"
    else:
        near("rewards of responses", ours.rewards, trl.rlhf_reward)
        near("advantages", ours.rollout.advantages.squeeze(1), trl.advantages)
    compare_steps(trl, ours)
    compare_metrics(trl, ours, "lr episode")
    if "full" in case:
        compare_metrics(trl, ours, metrics)
