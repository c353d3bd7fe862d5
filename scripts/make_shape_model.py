"""Make a model of a given shape with random weights, a tokenizer for it, and prompts: enough to
time a recipe offline.

    python scripts/make_shape_model.py recipes/shapes/qwen2.5-0.5b runs/qwen0.5b_data --num-prompts 2048

Writes FOLDER/model (bf16 safetensors, and a tokenizer that takes every letter for a token and can
show every token of the model) and FOLDER/train.jsonl, whose prompts are random letters, exactly
--prompt-tokens each. The reward asks for one letter, which random weights do not find; responses
hardly ever end before their limit.

With --device cuda the weights are drawn on the GPU, which takes seconds for models of billions of
parameters. They are other ones than those of --device cpu. A FOLDER in /dev/shm saves the time of
writing them to a disk.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
SEED = 1


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Bytes without merges: byte-level, for some kinds of model are always given a byte-level
    tokenizer.

    The other tokens come out of the model only.
    """
    tokens = [PAD, EOS, *sorted(ByteLevel.alphabet())]
    tokens += [f"w{number}" for number in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Every byte is known; without an unknown token of our own some tokenizer classes add one that
    # the model has not.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=EOS, padding_side="left"
    )


def write_model(
    shape: dict[str, object], tokenizer: PreTrainedTokenizerFast, folder: Path, device: str
) -> int:
    """Returns the number of parameters."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        **shape,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def make_prompts(num_prompts: int, num_tokens: int) -> list[str]:
    numbers = random.Random(SEED)
    return [
        "".join(numbers.choices(string.ascii_lowercase, k=num_tokens)) for _ in range(num_prompts)
    ]


def row_of(index: int, prompt: str) -> str:
    row = {
        "data_source": "exact_match/one_letter",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": prompt[0]},
        "extra_info": {"index": index},
    }
    return json.dumps(row) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=Path, help="folder with a config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-prompts", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    shape = json.loads((options.shape / "config.json").read_text(encoding="utf-8"))
    folder = options.folder / "model"
    num_params = write_model(shape, make_tokenizer(shape["vocab_size"]), folder, options.device)
    prompts = make_prompts(options.num_prompts, options.prompt_tokens)
    lengths = {len(ids) for ids in AutoTokenizer.from_pretrained(folder)(prompts)["input_ids"]}
    assert lengths == {options.prompt_tokens}, (
        f"as it is loaded the tokenizer makes {lengths} tokens of a prompt"
    )
    lines = "".join(row_of(index, prompt) for index, prompt in enumerate(prompts))
    (options.folder / "train.jsonl").write_text(lines, encoding="utf-8")
    print(f"{options.folder}: {num_params / 1e6:.1f}M parameters, {options.num_prompts} prompts")


if __name__ == "__main__":
    main()
