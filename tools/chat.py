"""Talk to a policy in the terminal. /quit or Ctrl-D ends it.

  python tools/chat.py runs/my-run

With a chat template this is a conversation; once it is too long, its first turns are removed. Without one, the policy
continues each text separately.
"""

import argparse
import json
import sys
from contextlib import suppress

import torch
from evaluate import find, ppo, reading, stop_tokens
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer, logging

with suppress(ImportError):
    import readline  # noqa: F401, for the arrow keys, where the library exists


def encode(messages, tokenizer, options):
    """Token ids of the conversation, up to where the answer begins; without a chat template, of its only text."""
    if not tokenizer.chat_template:
        return ppo.encode([messages[0]["content"]], tokenizer)[0].tolist()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return ppo.encode([text], tokenizer, is_chat=True)[0].tolist()


def answer(policy, prompt, length, streamer, args):
    """Samples an answer to a prompt, and prints it token by token. Settings stored with the policy are not used."""
    options = {"do_sample": args.temperature > 0, "temperature": args.temperature or 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"eos_token_id": policy.stop_token_ids, "pad_token_id": policy.tokenizer.pad_token_id}
    inputs = torch.tensor([prompt], device=policy.device)
    config = GenerationConfig(max_new_tokens=length, **options)
    ids = policy.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config, streamer=streamer)
    decode = policy.tokenizer.decode
    return decode(ids[0], skip_special_tokens=True).removeprefix(decode(prompt, skip_special_tokens=True)).strip()


def main():
    """Reads texts and prints the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the policy: a folder, or a name on the hub")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="divides the logits; 0 takes the most likely token"
    )
    parser.add_argument("--response-length", type=int, default=256, help="maximum tokens in an answer")
    parser.add_argument("--system", help="a system message, such as that of the training data")
    parser.add_argument("--tools", type=json.loads, help="JSON: a list of tools, as in the column `tools` of the data")
    kwargs_help = 'JSON for the chat template, such as {"enable_thinking": false}'
    parser.add_argument("--chat-template-kwargs", type=json.loads, default={}, help=kwargs_help)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with reading(args.model):
        policy = ppo.load_model(AutoModelForCausalLM, find(args.model))
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    policy.stop_token_ids = stop_tokens(policy, is_chat=bool(policy.tokenizer.chat_template))
    policy.generation_config = GenerationConfig()  # otherwise stored options would be added to those of `answer`
    tokenizer = policy.tokenizer
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    template = {"tools": args.tools} | args.chat_template_kwargs
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ppo.require(tokenizer.chat_template or not args.system, f"--system: {args.model} has no chat template")
    system = [{"role": "system", "content": args.system}] if args.system else []
    if not tokenizer.chat_template:
        print("This model has no chat template: it continues the text that you type.")
    print("/quit or Ctrl-D ends the conversation.")
    messages = []
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            text = input("> ")
            if text.strip() == "/quit":
                break
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            if not tokenizer.chat_template:
                messages = messages[-1:]
            try:
                prompt = encode(system + messages, tokenizer, template)
            except SystemExit as error:  # such as a word that the tokenizer lacks
                print(error)
                messages.pop()
                continue
            while len(messages) > 1 and len(prompt) + args.response_length > limit:
                messages = messages[2:]  # removes the oldest question and its answer
                prompt = encode(system + messages, tokenizer, template)
            length = min(args.response_length, limit - len(prompt))
            if length < 1:
                print(f"that is too long: {len(prompt)} tokens, but the model reads at most {limit}")
                messages = []
                continue
            messages.append({"role": "assistant", "content": answer(policy, prompt, length, streamer, args)})


if __name__ == "__main__":
    main()
