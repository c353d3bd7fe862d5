"""What roles with a model have in common: micro-batches, training, checkpoints, and what to change
if memory runs out.

A role is a subclass that sets `role`, loads its model and computes. What it is and which keys it
has are in its row of `rolepool.placement.roles`. Owns the order of changes that save memory: what
the role itself can do, what the other roles of its process can move to host memory, another
division of the GPUs.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from rolepool.algorithm.losses import Loss, LossCounts
from rolepool.algorithm.policy_losses import compute_policy_loss_vanilla
from rolepool.config import Config
from rolepool.config.model_files import ModelShape, ShapeUnknown
from rolepool.config.model_keys import RefFsdpConfig
from rolepool.config.schema import divisor_near
from rolepool.models.checkpoint import load_trained, save_trained
from rolepool.models.micro_batches import balanced, by_rows, num_passes
from rolepool.models.packing import TokenRows, TokenScores, kept_mask, on_device, response_log_probs
from rolepool.models.ranks import PartSums
from rolepool.models.snapshot import SnapshotWriter
from rolepool.models.training import DeviceModel, TrainedModel, model_utilization
from rolepool.placement.checks import roomier_divisions
from rolepool.placement.estimate import MicroBatch, default_micro_batches, shape_of
from rolepool.placement.roles import ROLE_SPECS, Role
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.protocol.columns import (
    INPUT_IDS,
    MASKED_TOKENS,
    RESPONSE_MASK,
    flat_values,
    is_ragged,
    lengths_of,
)
from rolepool.protocol.part_times import part, work_of

Compute = Callable[[TokenRows], Mapping[str, Tensor]]
"""Computes columns from the tokens of a micro-batch."""


@dataclass(frozen=True)
class Setup:
    """What a role is told when it is built, in addition to the config."""

    num_training_steps: int = 0
    dtype: torch.dtype = torch.float32
    micro_batches: Mapping[str, MicroBatch] | None = None
    """The plan's micro-batches, by the name of the operation; None uses those that the keys set."""
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    policy_loss: Callable[..., Loss] = compute_policy_loss_vanilla
    reward: Callable[..., Any] | None = None
    """The reward function that a Python program has given; None uses the one that the config
    names."""


@dataclass
class MicroBatches:
    """The micro-batches of one operation, and how rows were last split."""

    size: MicroBatch
    part_sums: PartSums
    packed: bool
    width: int
    """The tokens of the longest row that the config allows."""
    further: Sequence[str] = ()
    """Other overrides with which micro-batches take less memory."""
    _num_rows: int = 0
    _most_rows: int = 0

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each micro-batch, for rows of these lengths. Every rank has the same number
        of micro-batches."""
        if self.size.rows is not None:  # all ranks have as many rows, padding included
            rows = by_rows(len(lengths), self.size.rows)
        else:
            counted = lengths if self.packed else [max(lengths)] * len(lengths)
            num_here = num_passes(counted, self.size.tokens)
            rows = balanced(counted, self.part_sums.max(num_here))
        self._num_rows, self._most_rows = len(lengths), max(map(len, rows), default=0)
        return rows

    def smaller(self) -> list[str]:
        """The override with which micro-batches are half as large, if they can be smaller, and
        others."""
        keys, most_rows = self.size.keys, self._most_rows or self.size.rows or 1
        if self.size.rows is None and not self.size.is_chosen:
            tokens = max(self.size.tokens // 2, self.width)
            half = [f"{keys.tokens}={tokens}"] if tokens < self.size.tokens else []
        else:
            half = (
                [f"{keys.rows}={divisor_near(self._num_rows, most_rows // 2)}"]
                if most_rows > 1
                else []
            )
        return [*half, *self.further]


class ModelRole(Worker):
    """A role with a model. `self.keys` is its section of the config."""

    role: ClassVar[Role]
    placed: DeviceModel
    """The model that `in_micro_batches` computes with."""

    def __init__(self, config: Config, setup: Setup) -> None:
        self.config, self.spec = config, ROLE_SPECS[self.role]
        self.keys: Any = config.at(self.spec.section)
        self.packed: bool = self.spec.can_pack and config.at(self.spec.model).use_remove_padding
        sizes = (
            default_micro_batches(config, self.role)
            if setup.micro_batches is None
            else setup.micro_batches
        )
        width = config.data.max_prompt_length + config.data.max_response_length
        self.part_sums = PartSums(self.context.dims, self.device)
        self.micro_batches = {
            operation.method: MicroBatches(
                sizes[operation.name], self.part_sums, self.packed, width
            )
            for operation, _ in self.spec.batched
        }
        self.frozen_dtype = setup.dtype if self.device == "cpu" else torch.bfloat16
        """The dtype of weights that are not trained."""

    def in_micro_batches(self, method: str, data: DataProto, compute: Compute) -> DataProto:
        """The columns that the model computes from micro-batches of tokens, in the order of rows,
        in host memory."""
        tokens = data.select([key for key in MASKED_TOKENS if key in data.batch], [], [])
        lengths, parts = lengths_of(data.batch[INPUT_IDS]).tolist(), []
        split = self.micro_batches[method].split(lengths)
        with self.placed.on_device():
            for rows in split:
                with part("score", *work_of(lengths[row] for row in rows)):
                    parts.append(
                        DataProto.from_dict(compute(TokenRows(tokens[rows].batch, self.device)))
                    )
            computed = DataProto.concat(parts).to(
                "cpu"
            )  # only now: micro-batches do not wait for each other's results
        computed.reorder(np.argsort([row for rows in split for row in rows]))
        return computed

    def log_probs(self, rows: TokenRows) -> TokenScores:
        """Log-probs and entropies of response tokens under the policy of this role."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        return response_log_probs(
            self.placed.model, rows, temperature=temperature, packed=self.packed
        )

    def smaller(self, method: str) -> list[str]:
        """Overrides with which the role itself takes less memory in this method."""
        return self.micro_batches[method].smaller() if method in self.micro_batches else []

    def less_memory(self, method: str) -> list[str]:
        others = [other for other in self.siblings.values() if other is not self]
        at_rest = [override for other in others for override in other.less_memory_at_rest()]
        return [*self.smaller(method), *at_rest, *roomier_divisions(self.config, self.role)]

    def less_memory_at_rest(self) -> list[str]:
        section = self.spec.fsdp
        return [] if section is None else offloads(section, self.config.at(section), self.device)


def offloads(section: str, fsdp: RefFsdpConfig, device: str) -> list[str]:
    """What could still be kept in host memory while the role is idle, the larger part first;
    nothing on a CPU."""
    values = {} if device == "cpu" else fsdp.model_dump()
    return [
        f"{section}.{key}=true"
        for key in ("optimizer_offload", "param_offload")
        if values.get(key) is False
    ]


class TrainedRole(ModelRole):
    """A role whose model is trained: updated in mini-batches, saved and loaded."""

    trained: TrainedModel

    def train(self, model: nn.Module, num_training_steps: int) -> None:
        """Prepare the model for training. The learning rate follows the steps in which the role is
        updated."""
        self.loss_scale_factor = float(self.config.data.max_response_length)
        """The divisor of the aggregation seq-mean-token-sum-norm."""
        self.shape: ModelShape | None = None
        """None if the plan cannot tell the model's shape."""
        with suppress(ShapeUnknown):
            self.shape = shape_of(self.config, self.role)
        self.update_micro_batches = next(
            self.micro_batches[one.method] for one in self.spec.operations if one.trains
        )
        keys = {
            "optim": self.keys.optim,
            "grad_clip": self.keys.grad_clip,
            "fsdp": self.config.at(str(self.spec.fsdp)),
        }
        if not self.config.at(self.spec.model).enable_gradient_checkpointing:
            self.update_micro_batches.further = [
                f"{self.spec.model}.enable_gradient_checkpointing=true"
            ]
        # Kept activations save time; their memory is not planned on a CPU.
        elif self.device == "cpu" or self.update_micro_batches.size.recomputes:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )  # type: ignore[operator]
        self.placed = self.trained = TrainedModel(
            model,
            device=self.device,
            dims=self.context.dims,
            num_steps=num_training_steps,
            **keys,
        )
        self.snapshots = SnapshotWriter(self.trained)

    def loss_of(self, rows: TokenRows, columns: Mapping[str, Tensor], counts: LossCounts) -> Loss:
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
        num_rows = (
            self.keys.ppo_mini_batch_size
            * self.config.actor_rollout_ref.rollout.n
            // self.context.dims.dp
        )
        batches = data.split(num_rows)
        with self.trained.on_device(training=True):
            counts = count_losses(
                (kept_mask(batch.batch) for batch in batches),
                self.loss_scale_factor,
                self.part_sums,
            )
            lengths = [lengths_of(batch.batch[INPUT_IDS]).tolist() for batch in batches]
            splits = [self.update_micro_batches.split(of_batch) for of_batch in lengths]
            of_batches = []
            for batch, count, split, of_batch in zip(batches, counts, splits, lengths, strict=True):
                # There is nothing to learn from, but weight decay and momentum would change the
                # weights. All ranks skip it together, because the counts are those of the whole
                # mini-batch.
                if count.num_tokens == 0:
                    continue
                loss_of = partial(self._loss_of_rows, batch, count)
                of_batches.append(self.trained.step(split, loss_of, of_batch))
            columns = _columns_of(of_batches)
            means = {name: float(column.mean()) for name, column in columns.items()}
            # The memory used on a rank's node. Divided by the number of parts, the sum is a mean
            # over them.
            node_memory_gb = psutil.virtual_memory().used / 2**30 / self.context.dims.dp
            *totals, memory_gb = self.part_sums.sum([*means.values(), node_memory_gb])
            sums = dict(zip(means, totals, strict=True))
        seconds = time.perf_counter() - start_s
        num_made = int(columns["grad_norm"].isfinite().sum()) if of_batches else 0
        counted = {
            "updates": num_made,
            "skipped_updates": len(of_batches) - num_made,
            "empty_updates": len(batches) - len(of_batches),
            "lr": self.trained.learning_rate,
        }
        if ends_step:
            self.trained.num_updates += 1
        if of_batches:
            sums["grad_norm"] = means["grad_norm"]  # each rank has the norm of the whole pool
        metrics = {**sums, **counted}
        named = {f"{self.role}/{key}": value for key, value in metrics.items()}
        named["perf/cpu_memory_used_gb"] = memory_gb
        if not of_batches:
            return named
        gpu_name = "" if self.device == "cpu" else torch.cuda.get_device_name()
        used = model_utilization(self.shape, lengths_of(data.batch[INPUT_IDS]), seconds, gpu_name)
        return named if used is None else {**named, f"perf/mfu/{self.role}": used}

    def _loss_of_rows(self, batch: DataProto, counts: LossCounts, rows: Sequence[int]) -> Loss:
        given: DataProto = batch[rows]
        tokens = TokenRows(given.batch, self.device)
        of_responses = {
            key: one for key, one in given.batch.items() if is_ragged(one) and key != INPUT_IDS
        }
        columns = {
            key: tokens.pad(on_device(flat_values(one), self.device))
            for key, one in of_responses.items()
        }
        columns[RESPONSE_MASK] = on_device(kept_mask(given.batch), self.device)
        return self.loss_of(tokens, columns, counts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: str) -> None:
        """Save weights, optimizer, schedule and random states in a new folder that all ranks
        share."""
        save_trained(self.trained, Path(folder))

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def take_snapshot(self, folder: str, number: int) -> bool:
        """Copy the same to a folder in shared memory of this node, which the next snapshot but one
        writes again.

        Returns whether there was room for it.
        """
        return self.snapshots.write(Path(folder), number)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: str) -> None:
        """Load what any number of ranks saved there."""
        self.trained.wait_for_copies()
        load_trained(self.trained, Path(folder))


def _columns_of(of_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The values of each metric in all mini-batches, in host memory. This waits for the device
    once."""
    if not of_batches:
        return {}
    numbers = torch.stack([torch.stack([*metrics.values()]) for metrics in of_batches]).cpu()
    return dict(zip(of_batches[0], numbers.unbind(dim=1), strict=True))


def count_losses(masks: Iterable[Tensor], scale: float, part_sums: PartSums) -> list[LossCounts]:
    """What the losses of each mini-batch are divided by, counted over all parts of the batch."""
    counts = [float(count) for mask in masks for count in (mask.sum(), mask.any(dim=1).sum())]
    totals = list(map(int, part_sums.sum(counts)))
    return [LossCounts(*counted, scale) for counted in zip(totals[::2], totals[1::2], strict=True)]
