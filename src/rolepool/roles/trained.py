"""What actor and critic have in common: a model in training, updated in mini-batches, saved and read back."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rolepool.algorithm import LossCounts
from rolepool.config import Config
from rolepool.config.model_keys import Actor, Critic, CriticModel, Fsdp, PolicyModel
from rolepool.models.checkpoint import load_trained, save_trained
from rolepool.models.packing import Batch, rows_on
from rolepool.models.sharding import max_over_ranks, sum_over_ranks
from rolepool.models.training import TrainedModel
from rolepool.models.utilization import model_utilization
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.memory import free_bytes
from rolepool.roles.model_role import ModelRole
from rolepool.roles.passes import USABLE, training_bytes

logger = logging.getLogger(__name__)


class TrainedRole(ModelRole):
    trained: TrainedModel

    def __init__(
        self,
        config: Config,
        role: Role,
        section: str,
        keys: Actor | Critic,
        model_section: str,
        model_keys: PolicyModel | CriticModel,
    ) -> None:
        super().__init__(config, role)
        self.role = role
        self.keys = keys
        self.packed = model_keys.use_remove_padding
        self.checkpointing = model_keys.enable_gradient_checkpointing
        max_tokens = keys.ppo_max_token_len_per_gpu if keys.use_dynamic_bsz else None
        self.tokens = (f"{section}.ppo_max_token_len_per_gpu", max_tokens)
        """The key for tokens of a pass, of updates and of passes that only score."""
        rows = (f"{section}.ppo_micro_batch_size_per_gpu", keys.ppo_micro_batch_size_per_gpu)
        updates = self.add_passes(f"update_{role}", rows, self.tokens, training_bytes)
        if not self.checkpointing:
            updates.further = [f"{model_section}.enable_gradient_checkpointing=true"]

    def train(self, model: nn.Module, fsdp: Fsdp, num_training_steps: int) -> None:
        """Have the model trained as the keys say."""
        self.trained = TrainedModel(
            model,
            device=self.device,
            optim=self.keys.optim,
            fsdp=fsdp,
            grad_clip=self.keys.grad_clip,
            num_training_steps=num_training_steps,
            checkpointing=self.checkpointing,
        )

    def loss_of(self, part: Batch, counts: LossCounts) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the rows of one pass, on the device, and metrics: shares that add up over passes and ranks."""
        raise NotImplementedError

    def update(self, data: DataProto, ends_step: bool) -> dict[str, float]:
        """One pass over the batch in mini-batches, an optimizer step each. Metrics are means over the mini-batches."""
        start_s = time.perf_counter()
        with self.trained.on_device(training=True):
            metrics = self._step_through(data)
        seconds = time.perf_counter() - start_s
        metrics["lr"] = self.trained.learning_rate
        if ends_step:
            self.trained.num_updates += 1
        named = {f"{self.role}/{key}": value for key, value in metrics.items()}
        shape = self.held.shape if self.held is not None else None
        used = model_utilization(shape, data.batch["attention_mask"], seconds, self.device)
        return named if used is None else {**named, f"perf/mfu/{self.role}": used}

    def _step_through(self, data: DataProto) -> dict[str, float]:
        """What ranks must tell each other is told before the first mini-batch, and metrics are read after the last: in
        between the host never waits for the device."""
        num_rows = self.keys.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // self.context.dp_size
        batches = [dict(data.batch[start : start + num_rows].items()) for start in range(0, len(data), num_rows)]
        counts = count_losses([batch["response_mask"] for batch in batches], self.device)
        cuts = [self.passes[f"update_{self.role}"].cut(batch["attention_mask"]) for batch in batches]
        if self.checkpointing:
            masks = [batch["attention_mask"][rows] for batch, cut in zip(batches, cuts, strict=True) for rows in cut]
            self.trained.recompute_activations(self._must_recompute(max(int(mask.sum()) for mask in masks)))
        of_batches = [
            self.trained.step(cut, partial(self._loss_of_rows, batch, count))
            for batch, count, cut in zip(batches, counts, cuts, strict=True)
        ]
        names = list(of_batches[0])
        numbers = torch.stack([torch.stack([metrics[name] for name in names]) for metrics in of_batches]).tolist()
        columns = dict(zip(names, zip(*numbers, strict=True), strict=True))
        for norm in columns["grad_norm"]:
            if self.rank == 0 and not math.isfinite(norm):
                logger.warning(
                    "%s: the norm of the gradients is %s, so this optimizer step is left out", self.role, norm
                )
        means = {name: sum(column) / len(batches) for name, column in columns.items()}
        return {**sum_over_ranks(means, self.device), "grad_norm": means["grad_norm"]}

    def _must_recompute(self, num_tokens: int) -> bool:
        """Whether the activations of a pass cannot be kept. Known for packed passes on a GPU; elsewhere they are not.

        Ranks do the same, as layers that are computed again are gathered again by all.
        """
        if self.device == "cpu" or self.held is None or not self.packed:
            return True
        kept = replace(self.held, checkpointing=False).training(num_tokens, accumulates=True)
        to_come = 0 if self.trained.optimizer.state else kept.optimizer  # with the first step
        wanted = kept.working - kept.idle + to_come
        return bool(max_over_ranks(int(wanted > USABLE * free_bytes(self.device)), self.device))

    def _loss_of_rows(self, batch: Batch, counts: LossCounts, rows: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss_of(rows_on(self.device, batch, rows), counts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: str) -> None:
        """Weights, optimizer, schedule and random states, each rank its own part, into a new folder that all see."""
        save_trained(self.trained, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: str) -> None:
        """What was saved there, by any number of ranks."""
        load_trained(self.trained, Path(folder))


def count_losses(response_masks: Sequence[Tensor], device: str) -> list[LossCounts]:
    """What the losses of each mini-batch are divided by, counted over all ranks."""
    mine = [LossCounts.of(mask) for mask in response_masks]
    tokens = {f"tokens {number}": float(counts.num_tokens) for number, counts in enumerate(mine)}
    sequences = {f"sequences {number}": float(counts.num_sequences) for number, counts in enumerate(mine)}
    total = sum_over_ranks({**tokens, **sequences}, device)
    return [
        replace(counts, num_tokens=int(total[f"tokens {number}"]), num_sequences=int(total[f"sequences {number}"]))
        for number, counts in enumerate(mine)
    ]
