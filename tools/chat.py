"""A prompt in the terminal: what does a policy say? Ctrl-D ends it.

  python tools/chat.py runs/my-run

With a chat template the talk goes on from turn to turn; without one, the policy continues each text that it is given.
"""

import argparse
from contextlib import suppress

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer, logging

with suppress(ImportError):
    import readline  # noqa: F401, arrow keys, where there is such a library


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
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    policy.generation_config = GenerationConfig()  # else what is stored there fills the gaps below
    options = {"do_sample": args.temperature > 0, "temperature": args.temperature or 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            text = input("> ")
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            inputs = tokenizer(text, return_tensors="pt")
            if tokenizer.chat_template:
                ready = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
                inputs = tokenizer.apply_chat_template(messages, **ready)
            start = inputs["input_ids"].shape[1]
            length = min(args.response_length, limit - start) if limit else args.response_length
            inputs = inputs.to(policy.device)
            ids = policy.generate(**inputs, max_new_tokens=length, streamer=streamer, **options)[0, start:]
            messages.append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})


if __name__ == "__main__":
    main()
