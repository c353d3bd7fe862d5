"""Packed passes: each sequence sees itself alone, and everything is as in padded passes and in plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rolepool.algorithm import entropy_from_logits, logprobs_from_logits
from rolepool.errors import ConfigError, RolepoolError
from rolepool.models.forward import response_log_probs, response_values
from rolepool.models.loading import load_critic, load_policy
from rolepool.models.packing import Packing

PROMPT, RESPONSE, VOCABULARY = 6, 5, 40
WINDOW = 3


def write_model(folder: Path, **changes: object) -> str:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **changes,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return str(folder)


def ragged() -> dict[str, Tensor]:
    lengths = [(6, 5), (1, 2), (3, 0), (0, 0), (4, 4)]
    mask = torch.zeros(len(lengths), PROMPT + RESPONSE, dtype=torch.int64)
    for row, (prompt, response) in enumerate(lengths):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
    ids = torch.randint(VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
    }


def load(path: str, packed: bool) -> nn.Module:
    return load_policy(path, dtype=torch.float64, trust_remote_code=False, overrides={}, packed=packed)


def scores_and_gradients(path: str, *, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = load(path, packed)
    scores = torch.stack(response_log_probs(model, ragged(), temperature=0.9, packed=packed))
    (scores[0].sum() + 0.3 * scores[1].sum()).backward()
    return scores.detach(), {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}


def one_by_one(path: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sequence on its own, through Hugging Face's model as it is and all logits."""
    batch = ragged()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    scores = torch.zeros(2, *batch["responses"].shape, dtype=torch.float64)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        num = int(mask[PROMPT:].sum())
        if num:
            ids = batch["input_ids"][row, mask]
            logits = model(ids[None]).logits[0, -num - 1 : -1] / 0.9
            chosen, entropies = logprobs_from_logits(logits, ids[-num:]), entropy_from_logits(logits)
            (chosen.sum() + 0.3 * entropies.sum()).backward()
            scores[:, row, :num] = torch.stack((chosen, entropies)).detach()
    return scores, {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}],
    ids=["full attention", "a window from the second layer on"],
)
def test_packed_and_padded_passes_score_and_differentiate_as_sequences_one_by_one(
    changes: dict[str, object], tmp_path: Path
) -> None:
    path = write_model(tmp_path, **changes)
    expected, expected_gradients = one_by_one(path)
    for packed in (True, False):
        scores, gradients = scores_and_gradients(path, packed=packed)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-10)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-9, msg=f"packed={packed}: {name}")


def test_a_window_changes_what_is_computed(tmp_path: Path) -> None:
    windowed = write_model(tmp_path / "a", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    whole = write_model(tmp_path / "b")
    one, other = (scores_and_gradients(path, packed=True)[0] for path in (windowed, whole))
    assert not torch.allclose(one, other, atol=1e-6)


def test_what_is_packed_comes_from_the_mask() -> None:
    packing = Packing.of(ragged()["attention_mask"], RESPONSE, torch.device("cpu"))
    assert packing.starts.tolist() == [0, 11, 14, 17, 25] and packing.starts.dtype == torch.int32
    assert packing.longest == 11
    assert packing.before_responses.tolist() == [5, 6, 7, 8, 9, 11, 12, 20, 21, 22, 23]
    assert packing.responses.tolist() == [0, 1, 2, 3, 4, 5, 6, 20, 21, 22, 23]
    assert len(packing.tokens) == 25


def test_values_of_a_model_in_16_bits_are_in_32(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    for packed, dtype in ((True, torch.float16), (False, torch.float16), (False, torch.float64)):
        model = load_critic(path, dtype=dtype, trust_remote_code=False, packed=packed)
        values = response_values(model, ragged(), packed=packed)
        assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_model_for_packed_passes_refuses_rows_whose_sequences_it_is_not_told(tmp_path: Path) -> None:
    model = load(write_model(tmp_path), packed=True)
    with pytest.raises(RolepoolError, match="use_remove_padding=false"):
        model(input_ids=ragged()["input_ids"])


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, final_logit_softcapping=30.0)
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        load(path, packed=True)
