"""What actor and critic have in common: a model in training, updated in mini-batches, saved and read back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rolepool.algorithm.losses import LossCounts
from rolepool.config import Config
from rolepool.config.model_keys import ActorConfig, CriticConfig, CriticModelConfig, FsdpConfig, PolicyModelConfig
from rolepool.models.checkpoint import load_trained, save_trained
from rolepool.models.packing import TokenRows, on_device
from rolepool.models.sharding import sum_over_ranks
from rolepool.models.training import TrainedModel, model_utilization
from rolepool.placement import Role
from rolepool.placement.estimate import shape_of
from rolepool.placement.models import ModelShape, ShapeUnknown
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.batching import IS_PADDING_KEY
from rolepool.protocol.ragged import INPUT_IDS, NUM_PROMPT_TOKENS, flat_values, is_ragged, lengths_of
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

    def loss_of(
        self, rows: TokenRows, columns: Mapping[str, Tensor], counts: LossCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch and metrics: shares that add up over micro-batches and ranks.

        Columns are on the device, padded on the right: [rows, longest response], with their `response_mask`.
        """
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
        used = model_utilization(self.shape, lengths_of(data.batch[INPUT_IDS]), seconds, self.device)
        return named if used is None else {**named, f"perf/mfu/{self.role}": used}

    def _step_through(self, data: DataProto) -> dict[str, float]:
        """What ranks must tell each other is told before the first mini-batch, and metrics are read after the last: in
        between the host never waits for the device."""
        num_rows = self.keys.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // self.context.dp_size
        batches = data.split(num_rows)
        counts = count_losses(map(kept_lengths, batches), self.config.data.max_response_length, self.device)
        passes = self.passes[f"update_{self.role}"]
        cuts = [passes.cut(lengths_of(batch.batch[INPUT_IDS]).tolist()) for batch in batches]
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

    def _loss_of_rows(
        self, batch: DataProto, counts: LossCounts, rows: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        part: DataProto = batch[rows]
        tokens, kept = TokenRows(part.batch, self.device), kept_lengths(part)
        of_responses = {key: one for key, one in part.batch.items() if is_ragged(one) and key != INPUT_IDS}
        columns = {key: tokens.pad(on_device(flat_values(one), self.device)) for key, one in of_responses.items()}
        columns["response_mask"] = on_device(torch.arange(int(tokens.num_response.max())) < kept[:, None], self.device)
        return self.loss_of(tokens, columns, counts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: str) -> None:
        """Weights, optimizer, schedule and random states, each rank its own part, into a new folder that all see."""
        save_trained(self.trained, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: str) -> None:
        """What was saved there, by any number of ranks."""
        load_trained(self.trained, Path(folder))


def kept_lengths(data: DataProto) -> Tensor:
    """The response tokens of each row that count in losses: none of a row that pads the batch."""
    lengths: Tensor = lengths_of(data.batch[INPUT_IDS]) - data.batch[NUM_PROMPT_TOKENS]
    return lengths if IS_PADDING_KEY not in data.batch else lengths * ~data.batch[IS_PADDING_KEY]


def count_losses(lengths_of_batches: Iterable[Tensor], longest: int, device: str) -> list[LossCounts]:
    """What the losses of each mini-batch are divided by, counted over all ranks."""
    counts = {
        f"{kind} {number}": float(count)
        for number, lengths in enumerate(lengths_of_batches)
        for kind, count in (("tokens", lengths.sum()), ("sequences", (lengths > 0).sum()))
    }
    totals = list(map(int, sum_over_ranks(counts, device).values()))
    return [LossCounts(*counted, float(longest)) for counted in zip(totals[::2], totals[1::2], strict=True)]
