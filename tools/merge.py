"""Merges the adapter of a run with --lora-r into its model: a folder that the scripts and other programs load.

    python tools/merge.py runs/mine        # writes runs/mine/merged

Run it where the run was started, if --model was a relative path.
"""

import argparse
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import GenerationConfig, logging


def merge(folder: Path) -> Path:
    """Writes the merged model in the subfolder `merged`, with the config and the stop tokens of the run."""
    adapter = PeftConfig.from_pretrained(folder)
    is_reward_model = adapter.task_type == "SEQ_CLS"
    auto_class = AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    model = auto_class.from_pretrained(adapter.base_model_name_or_path, config=config, dtype=torch.float32)
    if not is_reward_model:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "merged")
    return folder / "merged"


def main() -> None:
    """Merges the adapter of one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a run with --lora-r")
    logging.set_verbosity_error()
    folder = parser.parse_args().folder
    if not (folder / "adapter_config.json").exists():  # the library would look for it on the hub
        parser.error(f"{folder} has no adapter")
    print(f"written: {merge(folder)}")


if __name__ == "__main__":
    main()
