"""A prompt in the terminal: what does a policy say? Ctrl-D ends it.

  python tools/chat.py runs/my-run

With a chat template the talk goes on from turn to turn, and forgets its beginning once it is too long; without one, the
policy continues each text that it is given.
"""

import argparse
import sys
from contextlib import suppress

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, GenerationConfig
from transformers import TextStreamer, logging

with suppress(ImportError):
    import readline  # noqa: F401, arrow keys, where there is such a library


def encode(messages: list[dict], tokenizer: AutoTokenizer) -> BatchEncoding:
    """The talk so far, up to where the policy is to speak; without a chat template, its one text."""
    if not tokenizer.chat_template:
        return tokenizer(messages[0]["content"], return_tensors="pt")
    ready = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(messages, **ready)


def main() -> None:
    """Reads texts, and prints what the policy makes of each as it is drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the policy: a folder, or a name on the hub")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="divides the logits; 0 takes the likeliest token"
    )
    parser.add_argument("--response-length", type=int, default=256, help="maximum tokens in an answer")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    args = parser.parse_args()
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
            inputs = encode(messages, tokenizer)
            while len(messages) > 1 and inputs["input_ids"].shape[1] + args.response_length > limit:
                messages = messages[2:]  # it forgets the oldest question and its answer
                inputs = encode(messages, tokenizer)
            start = inputs["input_ids"].shape[1]
            length = min(args.response_length, limit - start)
            if length < 1:
                print(f"that is too long: {start} tokens, of which the model reads {limit}")
                messages = []
                continue
            if (
                tokenizer.unk_token_id not in (None, tokenizer.eos_token_id)
                and tokenizer.unk_token_id in inputs["input_ids"]
            ):
                print(f"some words are not in the tokenizer, and the policy reads {tokenizer.unk_token} in their place")
            inputs = inputs.to(policy.device)
            ids = policy.generate(**inputs, max_new_tokens=length, streamer=streamer, **options)[0, start:]
            messages.append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})


if __name__ == "__main__":
    main()
