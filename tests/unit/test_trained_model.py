"""A model in training: what it keeps of a forward pass, and after something went wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rolepool.config import load_config
from rolepool.errors import RolepoolError
from rolepool.models.training import TrainedModel


def in_training(model: nn.Module, *, checkpointing: bool) -> TrainedModel:
    keys = load_config([], []).config.critic
    return TrainedModel(
        model,
        device="cpu",
        optim=keys.optim,
        fsdp=keys.model.fsdp_config,
        grad_clip=1.0,
        num_training_steps=10,
        checkpointing=checkpointing,
    )


@pytest.fixture
def trained() -> TrainedModel:
    return in_training(nn.Linear(2, 1), checkpointing=False)


def test_after_an_update_that_failed_its_weights_are_not_used(trained: TrainedModel) -> None:
    with pytest.raises(ZeroDivisionError), trained.on_device(training=True):
        raise ZeroDivisionError("half of the mini-batches were done")
    words = r"an earlier update failed.*half of the mini-batches"
    with pytest.raises(RolepoolError, match=words), trained.on_device(training=False):
        pass


def test_after_a_forward_pass_that_failed_the_model_goes_on(trained: TrainedModel) -> None:
    with pytest.raises(ZeroDivisionError), trained.on_device(training=False):
        raise ZeroDivisionError
    with trained.on_device(training=True) as model:
        assert model(torch.ones(1, 2)).shape == (1, 1)


def test_activations_are_kept_or_made_again_from_update_to_update() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3))  # type: ignore[no-untyped-call]
    trained = in_training(model, checkpointing=True)
    runs: list[str] = []
    trained.model.get_submodule("model.layers.1").register_forward_pre_hook(lambda *_: runs.append("again"))

    def num_runs() -> int:
        runs.clear()
        tokens = torch.arange(4)[None]
        trained.step([[0]], lambda _: (trained.model(input_ids=tokens, use_cache=False).logits.square().mean(), {}))
        return len(runs)

    assert num_runs() == 2
    trained.recompute_activations(False)
    assert num_runs() == 1
    trained.recompute_activations(True)
    assert num_runs() == 2
