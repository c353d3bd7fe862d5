"""A model in training: after something went wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rolepool.config import load_config
from rolepool.errors import RolepoolError
from rolepool.models.training import TrainedModel
from rolepool.placement import ParallelDims


@pytest.fixture
def trained() -> TrainedModel:
    keys = load_config([], []).config.critic
    fsdp = keys.model.fsdp_config
    return TrainedModel(
        nn.Linear(2, 1),
        device="cpu",
        dims=ParallelDims(),
        optim=keys.optim,
        fsdp=fsdp,
        grad_clip=1.0,
        num_steps=10,
    )


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
