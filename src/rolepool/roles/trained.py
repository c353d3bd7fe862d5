"""What actor and critic have in common: a model in training, updated in mini-batches, saved and read back."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rolepool.algorithm import LossCounts
from rolepool.config import Config
from rolepool.config.model_keys import ActorConfig, CriticConfig, CriticModelConfig, FsdpConfig, PolicyModelConfig
from rolepool.models.checkpoint.state import load_trained, save_trained
from rolepool.models.packing import Batch, rows_on
from rolepool.models.sharding import sum_over_ranks
from rolepool.models.training import TrainedModel
from rolepool.models.utilization import model_utilization
from rolepool.placement import Role
from rolepool.placement.estimate import shape_of
from rolepool.placement.models import ModelShape, ShapeUnknown
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.roles.model_role import MicroBatches, ModelRole


class TrainedRole(ModelRole):
    trained: TrainedModel

    def __init__(
        self,
        config: Config,
        role: Role,
        micro_batches: MicroBatches | None,
        keys: ActorConfig | CriticConfig,
        model_section: str,
        model_keys: PolicyModelConfig | CriticModelConfig,
    ) -> None:
        super().__init__(config, role, micro_batches, packed=model_keys.use_remove_padding)
        self.role = role
        self.keys = keys
        self.checkpointing = model_keys.enable_gradient_checkpointing
        self.shape: ModelShape | None = None
        """None if the plan cannot tell the model's shape."""
        with suppress(ShapeUnknown):
            self.shape = shape_of(config, role)
        if not self.checkpointing:
            self.passes[f"update_{role}"].further = [f"{model_section}.enable_gradient_checkpointing=true"]

    def train(self, model: nn.Module, fsdp: FsdpConfig, num_training_steps: int) -> None:
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
        # Kept activations save time; on a CPU nobody counts what they take.
        if self.checkpointing and self.device != "cpu":
            self.trained.recompute_activations(bool(self.passes[f"update_{self.role}"].size.recomputes))

    def loss_of(self, part: Batch, counts: LossCounts) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the rows of one pass, on the device, and metrics: shares that add up over passes and ranks."""
        raise NotImplementedError

    def update(self, data: DataProto, ends_step: bool) -> dict[str, float]:
        """One pass over the batch in mini-batches, an optimizer step each. Metrics are means over the mini-batches, and
        how many updates were made and how many were skipped because their gradients were not finite."""
        start_s = time.perf_counter()
        with self.trained.on_device(training=True):
            metrics = self._step_through(data)
        seconds = time.perf_counter() - start_s
        metrics["lr"] = self.trained.learning_rate
        if ends_step:
            self.trained.num_updates += 1
        named = {f"{self.role}/{key}": value for key, value in metrics.items()}
        used = model_utilization(self.shape, data.batch["attention_mask"], seconds, self.device)
        return named if used is None else {**named, f"perf/mfu/{self.role}": used}

    def _step_through(self, data: DataProto) -> dict[str, float]:
        """What ranks must tell each other is told before the first mini-batch, and metrics are read after the last: in
        between the host never waits for the device."""
        num_rows = self.keys.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // self.context.dp_size
        batches = [dict(data.batch[start : start + num_rows].items()) for start in range(0, len(data), num_rows)]
        counts = count_losses([batch["response_mask"] for batch in batches], self.device)
        cuts = [self.passes[f"update_{self.role}"].cut(batch["attention_mask"]) for batch in batches]
        of_batches = [
            self.trained.step(cut, partial(self._loss_of_rows, batch, count))
            for batch, count, cut in zip(batches, counts, cuts, strict=True)
        ]
        names = list(of_batches[0])
        numbers = torch.stack([torch.stack([metrics[name] for name in names]) for metrics in of_batches]).tolist()
        columns = dict(zip(names, zip(*numbers, strict=True), strict=True))
        means = {name: sum(column) / len(batches) for name, column in columns.items()}
        num_made = sum(map(math.isfinite, columns["grad_norm"]))
        return {
            **sum_over_ranks(means, self.device),
            "grad_norm": means["grad_norm"],
            "updates": num_made,
            "skipped_updates": len(batches) - num_made,
        }

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sees(self, path: str) -> bool:
        """Whether a file of the driver's is there for this rank, too."""
        return Path(path).exists()


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
