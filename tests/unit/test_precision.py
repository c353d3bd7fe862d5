"""Weights in one precision, computing in another: here float32 and float64, which every CPU can
do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rolepool.models.packing import add_token_scores
from rolepool.models.sharding import compute_in, decoder_layers

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
INPUTS = {"input_ids": torch.arange(12).view(2, 6), "use_cache": False}
PLACES, LABELS = torch.tensor([1, 2, 7]), torch.tensor([3, 4, 5])


def make_model(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return add_token_scores(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)))  # type: ignore[no-untyped-call]


def scores_and_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    log_probs, entropies = model.token_scores(INPUTS, PLACES, LABELS, 0.7)  # type: ignore[operator]
    (log_probs.sum() + entropies.sum()).backward()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    return {"log_probs": log_probs.detach(), "entropies": entropies.detach(), **gradients}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_model_computes_as_its_copy_in_the_other_precision_does(
    tied: bool, checkpointing: bool
) -> None:
    model = make_model(tied=tied).train()
    expected = scores_and_gradients(copy.deepcopy(model).double())
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    compute_in(torch.float64, model, decoder_layers(model), ["token_scores"])
    found = scores_and_gradients(model)
    assert found["log_probs"].dtype == torch.float64 and found.keys() == expected.keys()
    for name, tensor in found.items():
        assert name in ("log_probs", "entropies") or tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=1e-6, atol=1e-9)


def test_the_weights_stay_what_they_are_and_later_changes_count() -> None:
    model = make_model(tied=True)
    names, before = list(model.state_dict()), model.state_dict()["model.norm.weight"].clone()
    compute_in(torch.float64, model, decoder_layers(model), ["forward"])
    first = model(**INPUTS).logits
    assert first.dtype == torch.float64 and list(model.state_dict()) == names
    assert model.state_dict()["model.norm.weight"].dtype == torch.float32
    assert torch.equal(model.state_dict()["model.norm.weight"], before)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(2)
    torch.testing.assert_close(model(**INPUTS).logits, 2 * first)


def test_a_model_that_is_in_that_precision_is_left_alone() -> None:
    model = make_model(tied=True).double()
    compute_in(torch.float64, model, decoder_layers(model), ["forward"])
    assert "forward" not in vars(model)
