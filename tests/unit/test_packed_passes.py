"""Packed passes: each sequence sees itself alone, and everything is as in padded passes and in
plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rolepool.errors import RolepoolError
from rolepool.models.loading import load_critic, load_policy
from rolepool.models.packing import TokenRows, response_log_probs, response_values
from rolepool.protocol import pad_ragged, ragged
from tiny_models import config_of

VOCABULARY = 40
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


LENGTHS = [(6, 5), (1, 2), (3, 0), (0, 0), (4, 4)]
"""Tokens of each prompt and response."""


def rows() -> TokenRows:
    prompts, responses = torch.tensor(LENGTHS).T
    ids = torch.randint(
        VOCABULARY, (int((prompts + responses).sum()),), generator=torch.Generator().manual_seed(1)
    )
    return TokenRows(
        {"input_ids": ragged(ids, prompts + responses), "num_prompt_tokens": prompts}, "cpu"
    )


def load(path: str, packed: bool) -> nn.Module:
    return load_policy(config_of(path), torch.float64, packed=packed)


def scores_and_gradients(path: str, *, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = load(path, packed)
    scores = torch.stack(response_log_probs(model, rows(), temperature=0.9, packed=packed))
    (scores[0].sum() + 0.3 * scores[1].sum()).backward()
    return scores.detach(), {
        name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None
    }


def one_by_one(path: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sequence on its own, through Hugging Face's model as it is and all logits."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="sdpa"
    )
    all_scores = []
    for ids, (_, num) in zip(rows().ids.split([sum(row) for row in LENGTHS]), LENGTHS, strict=True):
        if num:
            logits = model(ids[None]).logits[0, -num - 1 : -1] / 0.9
            tokens = Categorical(logits=logits)
            chosen, entropies = tokens.log_prob(ids[-num:]), tokens.entropy()
            (chosen.sum() + 0.3 * entropies.sum()).backward()
            all_scores.append(torch.stack((chosen, entropies)).detach())
    scores = torch.cat(all_scores, dim=1)
    return scores, {
        name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None
    }


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
            torch.testing.assert_close(
                gradients[name], gradient, rtol=0, atol=1e-9, msg=f"packed={packed}: {name}"
            )


def test_a_window_changes_what_is_computed(tmp_path: Path) -> None:
    windowed = write_model(
        tmp_path / "a", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    )
    whole = write_model(tmp_path / "b")
    one, other = (scores_and_gradients(path, packed=True)[0] for path in (windowed, whole))
    assert not torch.allclose(one, other, atol=1e-6)


def test_packed_inputs_are_all_tokens_in_one_row_and_where_sequences_start() -> None:
    inputs, places = rows().packed_inputs()
    starts = inputs["cu_seq_lens_q"]
    assert isinstance(starts, Tensor)
    assert starts.tolist() == [0, 11, 14, 17, 25] and starts.dtype == torch.int32
    assert inputs["max_length_q"] == 11
    assert torch.equal(
        inputs["position_ids"], torch.cat([torch.arange(n) for n in (11, 3, 3, 8)])[None]
    )  # type: ignore[arg-type]
    assert places.tolist() == [5, 6, 7, 8, 9, 11, 12, 20, 21, 22, 23]


def test_padded_inputs_are_as_wide_as_the_longest_row() -> None:
    inputs, places = rows().padded_inputs(pad_token_id=VOCABULARY)
    ids = inputs["input_ids"]
    assert isinstance(ids, Tensor) and ids.shape == (5, 11)
    assert torch.equal(ids[inputs["attention_mask"].bool()], rows().ids)  # type: ignore[attr-defined]
    assert (ids == VOCABULARY).sum(dim=1).tolist() == [0, 8, 8, 11, 3]
    assert places.tolist() == [5, 6, 7, 8, 9, 11, 12, 47, 48, 49, 50]


def test_values_of_response_tokens_become_padded_and_ragged() -> None:
    tokens, lengths = rows(), [response for _, response in LENGTHS]
    values = torch.arange(1.0, 12.0)
    assert tokens.pad(values).tolist()[1] == [6, 7, 0, 0, 0]
    assert torch.equal(tokens.pad(values), pad_ragged(tokens.ragged(values), 5))
    assert [row.tolist() for row in tokens.ragged(values).unbind()] == [
        row.tolist() for row in values.split(lengths)
    ]


def test_values_of_a_model_in_16_bits_are_in_32(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    for packed, dtype in ((True, torch.float16), (False, torch.float16), (False, torch.float64)):
        model = load_critic(config_of(path), dtype, packed=packed)
        values = response_values(model, rows(), packed=packed)
        assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_model_for_packed_passes_refuses_rows_whose_sequences_it_is_not_told(
    tmp_path: Path,
) -> None:
    model = load(write_model(tmp_path), packed=True)
    with pytest.raises(RolepoolError, match="use_remove_padding=false"):
        model(input_ids=rows().ids[None])
