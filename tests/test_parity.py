"""One whole update of ppo.py and rloo.py against one of TRL 0.16.1's PPOTrainer and RLOOTrainer, in float32.

benchmarks/trl_parity.py ran TRL's own trainers on tiny models with fixed responses and wrote down what they computed.
Here the same update is built from our functions, in the order of train(): log-probabilities, values, scores, rewards,
advantages, then the loss and the gradient of the steps and the weights they leave. In the cases `full` all responses
run to full length, in `eos` they end anywhere; `steps` are 2 epochs of 2 mini-batches, the others a single step.

Where TRL 0.16.1 has a fault, or made another choice, a switch below does as TRL does, and then nothing else differs:

  max_grad_norm is accepted and never applied               NO_CLIPPING: max_grad_norm=1e9
  no bias in the value head (a choice; ours is trained)     NO_BIAS: critic.head has none
  PPO: the score stands one position after EOS where there  ONE_FURTHER: the mask of rewards, GAE and value loss is
  is room, so that the value there is trained too           true for one position more; whitening and policy loss
                                                            keep theirs
  RLOO: a group's rows are B/K apart (a choice)             TRL's rows are put in our order, a group together

Not compared, because TRL's numbers mean something else:

  in `eos`: policy/entropy_avg, approxkl_avg, val/ratio     padding is counted (objective/entropy too, as +1.0 a token,
                                                            which the test subtracts); of several mini-batches each
                                                            counts the same, whatever its tokens
  in `eos`: val/num_eos_tokens                              for RLOO also of what was drawn after EOS
  objective/scores with normalize_reward                    always about 0: scores after they were normalised
  val/ratio_var; val/ratio of RLOO                          variance of the mini-batches' means, NaN for a single one;
                                                            mean over tokens, though what is clipped is the response's

Kept out by the data: padding is a token of its own (TRL makes its masks from token identity), all dropouts of the
config are 0, no accumulation (TRL divides by the tokens of a micro-batch), EOS is the stop token (TRL's penalty looks
for EOS only), token_level_kl is off (it changes nothing in TRL), no mini-batch's mean ratio is near our limit of 10
(TRL 0.7's; 0.16 has none). TRL's temperature + 1e-7 is lost in rounding.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import ppo
import rloo

FOLDER = Path(__file__).parent / "golden"
NO_CLIPPING, NO_BIAS, ONE_FURTHER = "no clipping", "no bias", "one further"
TOKENIZER = SimpleNamespace(get_vocab=dict, eos_token_id=2, decode=lambda *_, **__: "")  # all that a scorer asks for

# --- what TRL did


def read(case):
    """Settings, numbers and tensors of a case; RLOO's rows in our order, where a group are neighbours."""
    data = json.loads((FOLDER / f"trl016_update_{case}.json").read_text())
    tensors = load_file(FOLDER / f"trl016_update_{case}.safetensors")
    i, o, orders = data["inputs"], data["outputs"], torch.tensor(data["inputs"]["orders"])
    k = i["settings"].get("rloo_k", 1)
    rows = torch.arange(orders.shape[1]).view(k, -1).T.flatten()  # of TRL, in our order
    new = {name.removeprefix("new."): tensors.pop(name) for name in list(tensors) if name.startswith("new.")}
    gradient = {n.removeprefix("gradient."): tensors.pop(n) for n in list(tensors) if n.startswith("gradient.")}
    tensors = {name: x.flatten()[rows] if name == "rlhf_reward" else x[rows] for name, x in tensors.items()}
    tensors["prompt_mask"] = tensors["queries"] != i["config"]["pad_token_id"]
    return SimpleNamespace(
        **tensors, config=i["config"], settings=i["settings"], orders=list(rows.argsort()[orders]), new=new,
        gradient=gradient, losses=o["losses"], metrics=o["metrics"],
    )  # fmt: skip


def load_models(trl):
    """Policy, reference, value and reward model with the weights that TRL began with."""
    weights = load_file(FOLDER / "trl016_update_weights.safetensors")

    def load(make, name, **kwargs):
        model = make(GPT2Config(**trl.config, **kwargs))
        part = {k.removeprefix(f"{name}."): x for k, x in weights.items() if k.startswith(f"{name}.")}
        missing, unexpected = model.load_state_dict(part, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # which is the embedding
        return model.eval()

    policy, reference = (load(GPT2LMHeadModel, name) for name in ("policy", trl.settings["reference"]))
    value, reward = (load(GPT2ForSequenceClassification, name, num_labels=1) for name in ("value", "reward"))
    return policy, reference, value, reward.requires_grad_(False)


# --- the same with our functions


def make_args(script, trl, switches):
    """TRL's settings as our arguments."""
    settings = {name: x for name, x in trl.settings.items() if name != "reference"} | {"micro_batch_size": 8}
    return script.Args(**settings, max_grad_norm=1e9 if NO_CLIPPING in switches else 1.0)


@torch.no_grad()
def make_rollout(script, policy, trl, args):
    """The rollout that sample_batch would have returned, had it drawn TRL's responses."""
    mask, ended = script.response_mask(trl.responses, trl.config["eos_token_id"])
    text = (trl.queries, trl.prompt_mask, trl.responses.masked_fill(~mask, trl.config["pad_token_id"]), mask)
    logprobs = script.token_logprobs(script.response_logits(policy, *text, args.temperature), text[2])
    return script.Rollout(*text, logprobs=logprobs, ended=ended)


def put_score_one_further(monkeypatch, rollout):
    """TRL's second mask, true for one position more: of rewards, values and value loss, but not of the policy loss."""
    mask, original = rollout.mask, ppo.policy_loss
    rollout.mask = F.pad(mask, (1, 0), value=True)[:, :-1]
    rollout.kl = rollout.kl.masked_fill(~mask, 0.0)

    def policy_loss(logprobs, old_logprobs, advantages, longer, *rest):
        """The longer mask's mean of this is the mean over real tokens: only they have an advantage that is not 0."""
        losses, *others = original(logprobs, old_logprobs, advantages, longer, *rest)
        return losses * longer.sum() / (advantages != 0).sum(), *others

    monkeypatch.setattr(ppo, "policy_loss", policy_loss)


class Watch:
    """Gives our update TRL's random orders, and notes the loss and the gradient of each step."""

    def __init__(self, monkeypatch, trl, optimizer, parameters):
        self.losses, self.gradients, self.parameters = [0.0], [], parameters
        self.orders, self.backward = list(trl.orders), torch.Tensor.backward
        monkeypatch.setattr(torch, "randperm", lambda *_, **__: self.orders.pop(0))
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss, **kwargs: self.note_loss(loss, **kwargs))
        optimizer.register_step_pre_hook(self.note_step)

    def note_loss(self, loss, **kwargs):
        """Adds up the losses of a step, one for each of its micro-batches."""
        self.losses[-1] += loss.item()
        self.backward(loss, **kwargs)

    def note_step(self, *_):
        """Called by the optimiser before it takes the step."""
        self.losses.append(0.0)
        self.gradients.append({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})


def named(policy, critic=None):
    """The parameters in training by TRL's names."""
    found = {f"policy.{name}": p for name, p in policy.named_parameters()}
    theirs = {"body": "value.transformer", "head": "value.score"}
    for name, p in critic.named_parameters() if critic else ():
        part, dot, rest = name.partition(".")
        found[theirs[part] + dot + rest] = p
    return found


def run(monkeypatch, trl, args, optimize, policy, critic=None):
    """The optimiser's steps: what was noted of them, the stats, and the weights before and after."""
    parameters = named(policy, critic)
    # The optimiser of train(), and of TRL: in the first update of a run the learning rate is still the full one.
    groups = [{"params": list(model.parameters())} for model in (policy, critic) if model]
    optimizer = torch.optim.AdamW(groups, args.learning_rate, eps=args.adam_epsilon, weight_decay=0.0, fused=True)
    watch = Watch(monkeypatch, trl, optimizer, parameters)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    stats = optimize(optimizer)
    after = {name: p.detach() for name, p in parameters.items()}
    return SimpleNamespace(losses=watch.losses[:-1], gradients=watch.gradients, stats=stats, before=before, after=after)


def update_ppo(monkeypatch, case, switches):
    """One update of ppo.py, step by step as in train()."""
    trl = read(case)
    args, (policy, reference, value, reward) = make_args(ppo, trl, switches), load_models(trl)
    critic = ppo.Critic(value.base_model, value.score)  # as make_critic puts a reward model together
    if NO_BIAS not in switches:
        critic.head.bias = torch.nn.Parameter(torch.zeros(1))
    rollout = make_rollout(ppo, policy, trl, args)
    ppo.score_reference(rollout, policy, reference, args)
    rollout.values = ppo.by_chunks(lambda r: critic(*r.text), rollout, args)
    score = ppo.make_scorer(None, TOKENIZER, args, reward, TOKENIZER)
    scores = ppo.penalize_missing_eos(score(rollout), rollout.ended, args.missing_eos_penalty)
    mask, stats = rollout.mask, ppo.rollout_stats(rollout, scores, -args.kl_coef * rollout.kl)
    if ONE_FURTHER in switches:
        put_score_one_further(monkeypatch, rollout)
    rewards, _ = ppo.shape_rewards(scores, rollout.kl, rollout.mask, args.kl_coef)
    raw_advantages, rollout.returns = ppo.gae(rewards, rollout.values, rollout.mask, args.gamma, args.lam)
    rollout.advantages = ppo.masked_whiten(raw_advantages, mask)
    ours = run(monkeypatch, trl, args, lambda optimizer: ppo.optimize(policy, critic, optimizer, rollout, args),
               policy, critic)  # fmt: skip
    ours.stats |= stats
    ours.rollout, ours.mask, ours.scores, ours.rewards = rollout, mask, scores, rewards
    return trl, ours


def update_rloo(monkeypatch, case, switches):
    """One update of rloo.py, step by step as in train()."""
    trl = read(case)
    args, (policy, reference, _, reward) = make_args(rloo, trl, switches), load_models(trl)
    rollout = make_rollout(rloo, policy, trl, args)
    rloo.score_reference(rollout, policy, reference, args)
    score = rloo.make_scorer(None, TOKENIZER, args, reward, TOKENIZER)
    scores = rloo.penalize_missing_eos(score(rollout), rollout.ended, args.missing_eos_penalty)
    non_score_reward = -args.kl_coef * rollout.kl.masked_fill(~rollout.mask, 0.0)
    stats = rloo.rollout_stats(rollout, scores, non_score_reward)
    if args.normalize_reward:
        scores = rloo.normalize_scores(scores, args.reward_clip_range)
    rewards = scores + non_score_reward.sum(1)
    rollout.advantages = rloo.rloo_advantages(scores, non_score_reward, args.rloo_k, args.token_level_kl)
    if args.normalize_advantage:
        rollout.advantages = rloo.masked_whiten(rollout.advantages, torch.ones_like(rollout.advantages).bool())
    ours = run(monkeypatch, trl, args, lambda optimizer: rloo.optimize_policy(policy, optimizer, rollout, args), policy)
    ours.stats |= stats
    ours.rollout, ours.mask, ours.scores, ours.rewards = rollout, rollout.mask, scores, rewards
    return trl, ours


# --- comparisons


def error(ours, theirs, scale=None):
    """Length of the difference, as a share of the length of theirs (or of the scale)."""
    scale = theirs if scale is None else scale
    return ((ours.double() - theirs.double()).norm() / scale.double().norm().clamp(min=1e-12)).item()


def near(what, ours, theirs, bound=1e-5, mask=None, scale=None):
    """The error is within the bound, where the mask is true."""
    if mask is not None:
        ours, theirs = ours[mask], theirs[mask]
    assert ours.shape == theirs.shape
    found = error(ours, theirs, scale)
    assert found < bound, f"{what}: {found:.2g} is over {bound:g}"


def vector(tensors, part, pick=lambda name, x: x):
    """All tensors of the policy, or of the value model, as one."""
    return torch.cat([pick(name, x).flatten() for name, x in sorted(tensors.items()) if name.startswith(part)])


def without_key_bias(name, x):
    """Attention does not change with the bias of the keys, so its gradient is rounding, which Adam makes into steps."""
    return x if not name.endswith("c_attn.bias") else torch.cat([x[: len(x) // 3], x[2 * len(x) // 3 :]])


def compare_steps(trl, ours, parts):
    """Loss and gradient of each step, and the weights they leave."""
    assert len(ours.losses) == len(trl.losses)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(trl.losses), rtol=1e-4, atol=1e-6)
    assert set(trl.new) <= set(ours.after)
    moved = {name: x - ours.before[name] for name, x in trl.new.items()}
    after = {name: ours.after[name] for name in trl.new}
    for part in parts:
        if trl.gradient:  # recorded where there is one step
            assert len(ours.gradients) == 1
            gradient = {name: ours.gradients[0][name] for name in trl.gradient}
            near(f"gradient of {part}", vector(gradient, part), vector(trl.gradient, part), 1e-4)
        new, theirs, scale = (vector(x, part, without_key_bias) for x in (after, trl.new, moved))
        near(f"weights of {part}", new, theirs, 1e-3, scale=scale)
    for name, theirs in trl.gradient.items():
        near(f"gradient of {name}", ours.gradients[0][name], theirs, 1e-4)
    for name in trl.new:
        new, theirs, scale = (without_key_bias(name, x[name]) for x in (after, trl.new, moved))
        near(f"weights {name}", new, theirs, 1e-3, scale=scale)


def compare_metrics(trl, ours, names):
    """The metrics of these names."""
    theirs, ours = ({name: x[name] for name in names.split()} for x in (trl.metrics, ours.stats))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


ROLLOUT_METRICS = "objective/kl objective/non_score_reward objective/rlhf_reward objective/scores"
STEP_METRICS = "policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg"


def compare_rollout(trl, ours):
    """What both scripts know before the first step."""
    assert torch.equal(ours.mask, ~trl.padding_mask)
    near("logprobs", ours.rollout.logprobs, trl.logprobs, mask=ours.mask)
    near("ref_logprobs", ours.rollout.ref_logprobs, trl.ref_logprobs, mask=ours.mask)
    near("scores", ours.scores, trl.scores)
    padding = (~ours.mask).sum(1).float().mean().item()
    assert ours.stats["objective/entropy"] - padding == pytest.approx(trl.metrics["objective/entropy"], rel=1e-5)
    if not trl.settings.get("normalize_reward"):
        compare_metrics(trl, ours, ROLLOUT_METRICS)


PPO_SWITCHES = {
    "ppo_full": {NO_CLIPPING, NO_BIAS},
    "ppo_full_steps": {NO_CLIPPING, NO_BIAS},
    "ppo_eos": {NO_CLIPPING, NO_BIAS, ONE_FURTHER},
    "ppo_eos_steps": {NO_CLIPPING, NO_BIAS, ONE_FURTHER},
}


@pytest.mark.parametrize("case", PPO_SWITCHES)
def test_ppo_update_against_trl(monkeypatch, case):
    """One update: everything before the steps, each step, and the weights after it."""
    trl, ours = update_ppo(monkeypatch, case, PPO_SWITCHES[case])
    r, longer = ours.rollout, ~trl.padding_mask_p1
    compare_rollout(trl, ours)
    near("values", r.values, trl.values, mask=longer)
    near("rewards", ours.rewards, trl.rewards)
    near("returns", r.returns, trl.returns, mask=longer)
    near("advantages", r.advantages, trl.advantages)
    compare_steps(trl, ours, ["policy", "value"])
    if "full" in case:
        compare_metrics(trl, ours, f"{STEP_METRICS} loss/value_avg val/clipfrac_avg val/ratio val/num_eos_tokens")


@pytest.mark.parametrize("case", ["rloo_full", "rloo_full_steps", "rloo_eos", "rloo_eos_steps"])
def test_rloo_update_against_trl(monkeypatch, case):
    """The same for RLOO, which has neither values nor a place for the score."""
    trl, ours = update_rloo(monkeypatch, case, {NO_CLIPPING})
    compare_rollout(trl, ours)
    near("rewards of responses", ours.rewards, trl.rlhf_reward)
    near("advantages", ours.rollout.advantages.squeeze(1), trl.advantages)
    compare_steps(trl, ours, ["policy"])
    if "full" in case:
        compare_metrics(trl, ours, f"{STEP_METRICS} val/num_eos_tokens")


@pytest.mark.parametrize(
    "switch, case", [(NO_CLIPPING, "ppo_full_steps"), (NO_BIAS, "ppo_full_steps"), (ONE_FURTHER, "ppo_eos")]
)
def test_each_switch_is_needed(monkeypatch, switch, case):
    """Without any one of them the weights become others than TRL's, by far more than rounding."""
    trl, ours = update_ppo(monkeypatch, case, PPO_SWITCHES[case] - {switch})
    moved = {name: x - ours.before[name] for name, x in trl.new.items()}
    assert max(error(ours.after[name], trl.new[name], moved[name]) for name in trl.new) > 0.1
