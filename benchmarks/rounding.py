"""Why log-probs in bf16 differ from those in float32, and why those under autocast differ less.

    python benchmarks/rounding.py MODEL_FOLDER [--device cpu]

A pretrained model continues some questions, greedily and in float32. Then plain transformers code
computes the log-probs of these tokens in float32, and three times with bf16:

- autocast: matrix products round to bf16; what layers add to each other (the residual stream) stays
  in float32;
- bf16: weights and all that layers pass on are bf16, as in a rollout engine, and as under FSDP's
  mixed precision, with which rolepool trains;
- residuals: the same, but the residual stream is in float32.

How far the last one is from the first two says how much of their difference is due to the residual
stream. Prints the root mean square and the largest difference from float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = [f"What is {first} + {first * 3}? Explain your answer." for first in range(2, 10)]
NEW_TOKENS = 32


class RoundsItsInput(nn.Module):
    """A layer in bf16 that gets float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Any:
        return self.layer(hidden.to(torch.bfloat16))


def load(folder: str, dtype: torch.dtype, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)


def with_float32_residuals(model: Any, exact: Any) -> Any:
    """Change a bf16 model so that embeddings, norms and the residual stream are float32."""
    decoder = model.model
    decoder.embed_tokens = nn.Embedding.from_pretrained(exact.model.embed_tokens.weight.detach())
    decoder.norm.float()
    for layer in decoder.layers:
        layer.input_layernorm.float()
        layer.post_attention_layernorm.float()
        for block in (layer.self_attn, layer.mlp):
            for name, part in list(block.named_children()):
                if isinstance(part, nn.Linear):
                    setattr(block, name, RoundsItsInput(part))
    model.lm_head = RoundsItsInput(model.lm_head)
    return model


def log_probs(model: Any, token_ids: Tensor) -> Tensor:
    """The log-prob of each token after the first."""
    logits = model(token_ids).logits.float()
    return torch.log_softmax(logits[0, :-1], -1).gather(1, token_ids[0, 1:, None])[:, 0]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    exact = load(options.model, torch.float32, options.device)
    rows = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, return_tensors="pt").to(options.device)
        rows.append(exact.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False))

    half = load(options.model, torch.bfloat16, options.device)
    other_half = load(options.model, torch.bfloat16, options.device)
    wide = with_float32_residuals(other_half, exact)

    def autocast(token_ids: Tensor) -> Tensor:
        with torch.autocast(options.device, torch.bfloat16):
            return log_probs(exact, token_ids)

    sides: dict[str, Callable[[Tensor], Tensor]] = {
        "autocast": autocast,
        "bf16": lambda token_ids: log_probs(half, token_ids),
        "residuals": lambda token_ids: log_probs(wide, token_ids),
    }
    expected = torch.cat([log_probs(exact, token_ids) for token_ids in rows])
    print(f"{len(expected)} tokens; difference of log-probs from float32:")
    for name, compute in sides.items():
        errors = torch.cat([compute(token_ids) for token_ids in rows]) - expected
        root_mean_square = errors.square().mean().sqrt().item()
        print(f"  {name:10} {root_mean_square:.4f}, at most {errors.abs().max().item():.2f}")


if __name__ == "__main__":
    main()
