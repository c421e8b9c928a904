"""Talk to a policy in the terminal. Ctrl-D ends it.

  python tools/chat.py runs/my-run

With a chat template this is a conversation; once it is too long, its first turns are removed. Without one, the policy
continues each text separately.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer, logging

sys.path.append(str(Path(__file__).resolve().parent.parent))
from evaluate import stop_tokens
from grpo import blank_before_answer, encode_prompt, template_options, decode_after

with suppress(ImportError):
    import readline  # noqa: F401, for the arrow keys, where the library exists


def encode(messages: list[dict], tokenizer: AutoTokenizer, options: dict) -> list[int]:
    """Token ids of the conversation, up to where the answer begins; without a chat template, of its only text."""
    return encode_prompt(messages if tokenizer.chat_template else messages[0]["content"], tokenizer, options)


def main() -> None:
    """Reads texts and prints the answers, token by token as they are sampled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the policy: a folder, or a name on the hub")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="divides the logits; 0 takes the most likely token"
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
    with suppress(OSError):  # with an adapter, use its own file and not that of its base model
        stored = GenerationConfig.from_pretrained(args.model)
    policy.name_or_path, policy.tokenizer, policy.generation_config = args.model, tokenizer, stored
    stops = stop_tokens(policy)
    policy.generation_config = GenerationConfig()  # otherwise stored options would be added to these
    options = {"do_sample": args.temperature > 0, "temperature": args.temperature or 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"eos_token_id": stops, "pad_token_id": tokenizer.eos_token_id}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if not tokenizer.chat_template:
        print("This model has no chat template: it continues the text that you type.")
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
                messages = messages[2:]  # removes the oldest question and its answer
                prompt = encode(messages, tokenizer, template)
            length = min(args.response_length, limit - len(prompt))
            if length < 1:
                print(f"that is too long: {len(prompt)} tokens, but the model reads at most {limit}")
                messages = []
                continue
            if tokenizer.unk_token_id not in (None, tokenizer.eos_token_id) and tokenizer.unk_token_id in prompt:
                print(f"some words are not in the tokenizer: the policy reads {tokenizer.unk_token} instead")
            inputs = torch.tensor([prompt], device=policy.device)
            options["attention_mask"] = torch.ones_like(inputs)
            ids = policy.generate(inputs, max_new_tokens=length, streamer=streamer, **options)[0, len(prompt) :]
            answer = decode_after(prompt, ids.tolist(), tokenizer)
            if tokenizer.chat_template:
                answer = answer.removeprefix(blank_before_answer(tokenizer))
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
