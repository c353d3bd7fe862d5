"""An extension for `determinism.py`: roles get methods that compute a part of an update several
times from the same state, and fingerprints of what comes out.

A fingerprint is an integer sum over the bits of a tensor, so it does not depend on the order of
adding, and equal fingerprints mean equal bits.

With the variable DETERMINISM_NOISE, losses get noise in their last bits if torch is not told to be
deterministic. So `determinism.py --self-check` shows that differences are found.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rolepool.models.packing import kept_mask
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.columns import INPUT_IDS, lengths_of
from rolepool.roles.model_role import ModelRole
from rolepool.roles.trained_role import TrainedRole, count_losses

AT_ONCE = 2**24
"""Numbers of a tensor that are added at once, because their indices take memory, too."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR = 0x9E3779B97F4A7C15 - 2**64
WORDS = ("deterministic", "Deterministic")
"""In warnings that are about this."""


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """A number of 64 bits that depends on all bits of a tensor and on their places."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.detach().contiguous().flatten().view(INTEGERS[local.element_size()])
    total = 0
    for start in range(0, bits.numel(), AT_ONCE):
        piece = bits[start : start + AT_ONCE].long()
        places = torch.arange(start + 1, start + 1 + len(piece), device=piece.device)
        # Integers overflow, which loses nothing: sums are modulo 2**64.
        mixed = (piece ^ (places * FACTOR)) * (2 * places + 1)
        total = (total + int(mixed.sum())) % 2**64
    return total


def state_of(role: TrainedRole) -> dict[str, int]:
    """The fingerprints of all weights and optimizer states of this rank."""
    found: dict[str, int] = {}
    for name, weight in role.trained.model.named_parameters():
        found[name] = fingerprint(weight)
        for key, value in role.trained.optimizer.state.get(weight, {}).items():
            found[f"{name}/{key}"] = fingerprint(value)
    return found


def hash_state(self: TrainedRole) -> dict[str, int]:
    return state_of(self)


class _Copy:
    """A copy of all weights and optimizer states, to go back to them."""

    def __init__(self, role: TrainedRole) -> None:
        self._optimizer = role.trained.optimizer
        weights = list(role.trained.model.parameters())
        self._weights = [(weight, weight.detach().clone()) for weight in weights]
        self._states = {
            weight: {key: value.clone() for key, value in self._optimizer.state[weight].items()}
            for weight in weights
            if weight in self._optimizer.state
        }

    @torch.no_grad()
    def restore(self) -> None:
        for weight, copy in self._weights:
            weight.copy_(copy)
            if weight not in self._states:
                self._optimizer.state.pop(weight, None)
                continue
            for key, value in self._states[weight].items():
                self._optimizer.state[weight][key].copy_(value)


def probe_gradients(self: TrainedRole, data: DataProto, num_tries: int) -> dict[str, Any]:
    """Losses and gradients of the first mini-batch, several times from the same weights.

    Returns the fingerprints of each try.
    """
    rows = self.keys.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
    batch = data.split(rows // self.context.dims.dp)[0]
    tries: list[dict[str, int]] = []
    losses: list[int] = []
    with self.trained.on_device(training=True) as model:
        count = count_losses([kept_mask(batch.batch)], self.loss_scale_factor, self.part_sums)[0]
        lengths = lengths_of(batch.batch[INPUT_IDS]).tolist()
        split = self.update_micro_batches.split(lengths)
        loss_of = partial(self._loss_of_rows, batch, count)
        for _ in range(num_tries):
            model.train()
            total = 0
            for micro_batch in split:
                loss, _ = loss_of(micro_batch)
                total = (total * 3 + fingerprint(loss)) % 2**64
                loss.backward()
            losses.append(total)
            tries.append(
                {
                    name: fingerprint(weight.grad)
                    for name, weight in model.named_parameters()
                    if weight.grad is not None
                }
            )
            _clear(model)
    return {"losses": losses, "gradients": tries}


def _clear(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = None


def probe_update(self: TrainedRole, data: DataProto, num_tries: int) -> list[dict[str, int]]:
    """All updates of a batch, several times from the same state; the state after each try."""
    copy = _Copy(self)
    states = []
    for _ in range(num_tries):
        self.update(data, False)
        self.trained.wait_for_copies()
        states.append(state_of(self))
        copy.restore()
    return states


def probe_warnings(self: ModelRole, data: DataProto, method: str) -> list[str]:
    """What torch warns of in a method if it is told to warn of operations that are not
    deterministic."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call: Callable[..., Any] = getattr(self, method)
            call(data)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(was_on)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    texts = [str(warning.message).splitlines()[0] for warning in caught]
    return sorted({text for text in texts if any(word in text for word in WORDS)})


def _with_noise(self: TrainedRole, *args: Any) -> Any:
    loss, metrics = _loss_of_rows(self, *args)
    if not torch.are_deterministic_algorithms_enabled():
        loss = loss * (1 + (time.perf_counter_ns() % 1000) * 1e-6)
    return loss, metrics


if "DETERMINISM_NOISE" in os.environ:
    _loss_of_rows = TrainedRole._loss_of_rows
    TrainedRole._loss_of_rows = _with_noise  # type: ignore[method-assign]
TrainedRole.hash_state = register(Dispatch.ONE_TO_ALL, blocking=False)(hash_state)  # type: ignore[attr-defined]
TrainedRole.probe_gradients = register(Dispatch.DP_COMPUTE_METRIC, blocking=False)(probe_gradients)  # type: ignore[attr-defined]
TrainedRole.probe_update = register(Dispatch.DP_COMPUTE_METRIC, blocking=False)(probe_update)  # type: ignore[attr-defined]
ModelRole.probe_warnings = register(Dispatch.DP_COMPUTE_METRIC, blocking=False)(probe_warnings)  # type: ignore[attr-defined]
