"""A prompt in the terminal: what does a policy say? Ctrl-D ends it.

  python tools/chat.py runs/my-run

With a chat template the talk goes on from turn to turn, and forgets its beginning once it is too long; without one, the
policy continues each text that it is given.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer, logging

sys.path.append(str(Path(__file__).resolve().parent.parent))
from grpo import blank_before_answer, encode_prompt, template_options, text_behind

with suppress(ImportError):
    import readline  # noqa: F401, arrow keys, where there is such a library


def encode(messages: list[dict], tokenizer: AutoTokenizer, options: dict) -> list[int]:
    """Token ids of the talk so far, up to where the policy is to speak; without a chat template, of its one text."""
    return encode_prompt(messages if tokenizer.chat_template else messages[0]["content"], tokenizer, options)


def main() -> None:
    """Reads texts, and prints what the policy makes of each as it is drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the policy: a folder, or a name on the hub")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="divides the logits; 0 takes the likeliest token"
    )
    parser.add_argument("--response-length", type=int, default=256, help="maximum tokens in an answer")
    parser.add_argument("--tools", help="JSON: a list of the tools' schemas, as in the column `tools` of the data")
    parser.add_argument("--chat-template-kwargs", help='JSON for the chat template, such as {"enable_thinking": false}')
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    args = parser.parse_args()
    template = template_options(vars(args))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    policy = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    stored = policy.generation_config
    with suppress(OSError):  # of an adapter, beside it, not beside the model that it belongs to
        stored = GenerationConfig.from_pretrained(args.model)
    policy.generation_config = GenerationConfig()  # else what is stored there fills the gaps below
    stops = tokenizer.eos_token_id if stored.eos_token_id is None else stored.eos_token_id
    options = {"do_sample": args.temperature > 0, "temperature": args.temperature or 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"eos_token_id": stops, "pad_token_id": tokenizer.eos_token_id}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            text = input("> ")
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            if not tokenizer.chat_template:
                messages = messages[-1:]
            prompt = encode(messages, tokenizer, template)
            while len(messages) > 1 and len(prompt) + args.response_length > limit:
                messages = messages[2:]  # it forgets the oldest question and its answer
                prompt = encode(messages, tokenizer, template)
            length = min(args.response_length, limit - len(prompt))
            if length < 1:
                print(f"that is too long: {len(prompt)} tokens, of which the model reads {limit}")
                messages = []
                continue
            if tokenizer.unk_token_id not in (None, tokenizer.eos_token_id) and tokenizer.unk_token_id in prompt:
                print(f"some words are not in the tokenizer, and the policy reads {tokenizer.unk_token} in their place")
            inputs = torch.tensor([prompt], device=policy.device)
            ids = policy.generate(inputs, max_new_tokens=length, streamer=streamer, **options)[0, len(prompt) :]
            said = text_behind(prompt, ids.tolist(), tokenizer)
            if tokenizer.chat_template:
                said = said.removeprefix(blank_before_answer(tokenizer))
            messages.append({"role": "assistant", "content": said})


if __name__ == "__main__":
    main()
