"""What roles have in common whose model is trained: updates in mini-batches, checkpoints and
snapshots."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from rolepool.algorithm.losses import Loss, LossCounts
from rolepool.config.model_files import ModelShape, ShapeUnknown
from rolepool.models.checkpoint import load_trained, save_trained
from rolepool.models.packing import TokenRows, kept_mask, on_device, sampled_tokens
from rolepool.models.ranks import PartSums
from rolepool.models.snapshot import SnapshotWriter
from rolepool.models.training import TrainedModel, model_utilization
from rolepool.placement.estimate import shape_of
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.columns import (
    INPUT_IDS,
    LOSS_MASK,
    RESPONSE_MASK,
    flat_values,
    is_ragged,
    lengths_of,
)
from rolepool.roles.model_role import ModelRole
from rolepool.roles.setups import TrainingSetup


class MiniBatch(NamedTuple):
    """The rows of one optimizer step."""

    data: DataProto
    counts: LossCounts
    lengths: list[int]
    """The tokens of each row."""
    micro_batches: list[list[int]]
    """The numbers of the rows of each micro-batch."""


class TrainedRole(ModelRole):
    """A role whose model is trained: updated in mini-batches, saved and loaded."""

    setup_type: ClassVar[type[TrainingSetup]] = TrainingSetup
    trained: TrainedModel
    metrics_of_first: frozenset[str] = frozenset()
    """Metrics of the weights before a step: they are those of its first mini-batch alone. Others
    are means over all mini-batches."""
    is_first_mini_batch = False
    """Whether the loss is that of the first mini-batch of a step, whose weights generated the
    responses."""
    _begins_step = True
    """Whether the next epoch is the first one of a step."""

    def train(self, model: nn.Module, num_training_steps: int) -> None:
        """Prepare the model for training. The learning rate follows the steps in which the role is
        updated."""
        self.loss_scale_factor = float(self.config.data.max_response_length)
        """The divisor of the aggregation seq-mean-token-sum-norm."""
        self.shape: ModelShape | None = None
        """None if the plan cannot tell the model's shape."""
        with suppress(ShapeUnknown):
            self.shape = shape_of(self.config, self.role)
        update = next(operation for operation in self.spec.operations if operation.trains)
        self.update_micro_batches = self.micro_batches[update.method]
        section = self.spec.model
        if not self.config.at(section).enable_gradient_checkpointing:
            override = f"{section}.enable_gradient_checkpointing=true"
            self.update_micro_batches.further = [override]
        # Kept activations save time; their memory is not planned on a CPU.
        elif self.device == "cpu" or self.update_micro_batches.size.recomputes:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )  # type: ignore[operator]
        self.trained = TrainedModel(
            model,
            device=self.device,
            dims=self.context.dims,
            num_steps=num_training_steps,
            optim=self.keys.optim,
            grad_clip=self.keys.grad_clip,
            fsdp=self.config.at(str(self.spec.fsdp)),
        )
        self.placed = self.trained
        self.snapshots = SnapshotWriter(self.trained)

    def loss_of(
        self,
        rows: TokenRows,
        columns: Mapping[str, Tensor],
        counts: LossCounts,
    ) -> Loss:
        """The loss of one micro-batch and metrics: shares that add up over micro-batches and ranks.

        Columns are on the device, padded on the right: [rows, longest response], with their
        `response_mask`.
        """
        raise NotImplementedError

    def update(self, data: DataProto, ends_step: bool) -> dict[str, float]:
        """One epoch over the batch in mini-batches, with one optimizer step each. Returns the mean
        of each metric over the mini-batches, the number of updates, how many were skipped because
        their gradients were not finite, and how many because no response of the mini-batch has a
        token.

        Ranks exchange their counts before the first mini-batch, and metrics are read after the last
        one, so that the host does not wait for the device in between."""
        start_s = time.perf_counter()
        batches = data.split(self._rows_of_mini_batch())
        with self.trained.on_device(training=True):
            taken = self._step_through(batches)
            columns = _in_host_memory(taken)
            if self._begins_step and taken:
                # Inside of this block, because after an error the weights must not be used.
                self.check_first(data)
            means = self._means(columns)
            sums, memory_gb = self._sum_over_ranks(means)
        seconds = time.perf_counter() - start_s
        num_updates = 0
        if taken:
            is_finite = columns["grad_norm"].isfinite()
            num_updates = int(is_finite.sum())
        learning_rate = self.trained.learning_rate  # that of these updates, not of the next ones
        self._begins_step = ends_step
        if ends_step:
            self.trained.num_updates += 1
        if taken:
            sums["grad_norm"] = means["grad_norm"]  # each rank has the norm of the whole pool
        metrics = {
            **sums,
            "updates": num_updates,
            "skipped_updates": len(taken) - num_updates,
            "empty_updates": len(batches) - len(taken),
            "lr": learning_rate,
        }
        named = {f"{self.role}/{key}": value for key, value in metrics.items()}
        named["perf/cpu_memory_used_gb"] = memory_gb
        if taken:
            named |= self._utilization(data, seconds)
        return named

    def check_first(self, data: DataProto) -> None:
        """Look at what the first mini-batch of a step has computed, and raise an error if the run
        must stop. It is called after the last mini-batch, so that the host does not wait for the
        device in between."""

    def before_step(self, mini_batch: MiniBatch) -> None:
        """Compute what the loss needs of the whole mini-batch. All ranks call it together, before
        the forward pass of the first micro-batch."""

    def _means(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean of each metric over the mini-batches. What only the first one tells is left out
        in later epochs."""
        means: dict[str, float] = {}
        for name, column in columns.items():
            if name not in self.metrics_of_first:
                means[name] = float(column.mean())
            elif self._begins_step:
                means[name] = float(column[0])
        return means

    def _rows_of_mini_batch(self) -> int:
        """The rows of this rank in a mini-batch."""
        return int(self.config.rows_of_mini_batch(self.keys) // self.context.dims.dp)

    def _step_through(self, batches: Sequence[DataProto]) -> list[Mapping[str, Tensor]]:
        """Take an optimizer step with each mini-batch that has tokens. Returns the metrics of these
        steps, on the device."""
        taken: list[Mapping[str, Tensor]] = []
        for mini_batch in self._prepare(batches):
            # There is nothing to learn from, but weight decay and momentum would change the
            # weights. All ranks skip it together, because the counts are those of the whole
            # mini-batch.
            if mini_batch.counts.num_tokens == 0:
                continue
            self.is_first_mini_batch = self._begins_step and not taken
            self.before_step(mini_batch)
            loss_of = partial(
                self._loss_of_rows,
                mini_batch.data,
                mini_batch.counts,
            )
            metrics = self.trained.step(
                mini_batch.micro_batches,
                loss_of,
                mini_batch.lengths,
            )
            taken.append(metrics)
        return taken

    def _prepare(self, batches: Sequence[DataProto]) -> list[MiniBatch]:
        """Count and split all mini-batches before the first step, because ranks exchange their
        counts."""
        masks = ((kept_mask(batch.batch), sampled_tokens(batch.batch)) for batch in batches)
        all_counts = count_losses(masks, self.loss_scale_factor, self.part_sums)
        prepared = []
        for data, counts in zip(batches, all_counts, strict=True):
            lengths = lengths_of(data.batch[INPUT_IDS]).tolist()
            mini_batch = MiniBatch(
                data=data,
                counts=counts,
                lengths=lengths,
                micro_batches=self.update_micro_batches.split(lengths),
            )
            prepared.append(mini_batch)
        return prepared

    def _sum_over_ranks(self, means: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """The sum of each metric over all parts of the batch, and the memory in GiB that is used on
        a node."""
        # Each rank knows its own node. Divided by the number of parts, the sum is a mean over them.
        used_gb = psutil.virtual_memory().used / 2**30
        share_gb = used_gb / self.context.dims.dp
        *totals, memory_gb = self.part_sums.sum([*means.values(), share_gb])
        return dict(zip(means, totals, strict=True)), memory_gb

    def _utilization(self, data: DataProto, seconds: float) -> dict[str, float]:
        """The share of the GPU's speed that the update used; empty if it is not known."""
        gpu_name = ""
        if self.device != "cpu":
            gpu_name = torch.cuda.get_device_name()
        lengths = lengths_of(data.batch[INPUT_IDS])
        used = model_utilization(self.shape, lengths, seconds, gpu_name)
        if used is None:
            return {}
        return {f"perf/mfu/{self.role}": used}

    def _loss_of_rows(
        self,
        mini_batch: DataProto,
        counts: LossCounts,
        rows: Sequence[int],
    ) -> Loss:
        """The loss of one micro-batch, which has these rows of a mini-batch."""
        tokens, columns = self.columns_of(mini_batch, rows)
        return self.loss_of(tokens, columns, counts)

    def columns_of(
        self, mini_batch: DataProto, rows: Sequence[int]
    ) -> tuple[TokenRows, dict[str, Tensor]]:
        """The tokens of one micro-batch, and its columns as `loss_of` gets them."""
        batch = mini_batch[rows].batch
        tokens = TokenRows(batch, self.device)
        mask = on_device(kept_mask(batch), self.device)
        columns = {RESPONSE_MASK: mask}
        for name, column in batch.items():
            # The rows of `tokens` have the ids already, and the mask leaves out padding rows, which
            # the column does not.
            is_needed = name not in (INPUT_IDS, RESPONSE_MASK, LOSS_MASK)
            if is_needed and is_ragged(column):
                of_responses = on_device(flat_values(column), self.device)
                columns[name] = tokens.pad(of_responses)
        return tokens, columns

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: str) -> None:
        """Save weights, optimizer, schedule and random states in a new folder that all ranks
        share."""
        save_trained(self.trained, Path(folder))

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def take_snapshot(self, folder: str, number: int, next_folder: str | None = None) -> bool:
        """Copy the same to a folder in shared memory of this node, which the next snapshot but one
        writes again. If `next_folder` is given, the memory of the next one is allocated there in
        the background.

        Returns False if it cannot be written.
        """
        following = None if next_folder is None else Path(next_folder)
        return self.snapshots.write(Path(folder), number, following)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: str) -> None:
        """Load what any number of ranks saved there."""
        self.trained.wait_for_copies()
        load_trained(self.trained, Path(folder))
        self._begins_step = True


def _in_host_memory(taken: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The values of each metric in all optimizer steps, in host memory. This waits for the device
    once."""
    if not taken:
        return {}
    rows = []
    for metrics in taken:
        values = list(metrics.values())
        rows.append(torch.stack(values))
    numbers = torch.stack(rows).cpu()
    names = taken[0]
    return dict(zip(names, numbers.unbind(dim=1), strict=True))


def count_losses(
    masks: Iterable[tuple[Tensor, Tensor]], scale: float, part_sums: PartSums
) -> list[LossCounts]:
    """What the losses of each mini-batch are divided by, counted over all parts of the batch.
    `masks` are the tokens that count, and those that were sampled.

    A sequence whose tokens are all rejected still counts as a sequence, as in verl.
    """
    counts: list[float] = []
    for kept, sampled in masks:
        num_tokens = kept.sum()
        num_rows = sampled.any(dim=1).sum()
        counts += [float(num_tokens), float(num_rows)]
    # One exchange for all of them: the counts of tokens and of rows take turns.
    totals = part_sums.sum(counts)
    totals_of_tokens = totals[::2]
    totals_of_rows = totals[1::2]
    summed = []
    for total_tokens, total_rows in zip(totals_of_tokens, totals_of_rows, strict=True):
        of_mini_batch = LossCounts(int(total_tokens), int(total_rows), scale)
        summed.append(of_mini_batch)
    return summed
