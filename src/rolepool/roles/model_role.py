"""What roles with a model have in common: micro-batches, and what to change if memory runs out.

A role is a subclass that sets `role`, loads its model and computes. What it is and which keys it
has are in its row of `rolepool.placement.roles`. Owns the order of changes that save memory: what
the role itself can do, what the other roles of its process can move to host memory, another
division of the GPUs.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from rolepool.config import Config
from rolepool.config.model_keys import RefFsdpConfig
from rolepool.models.compile_cache import use_compile_cache
from rolepool.models.packing import TokenRows, TokenScores, response_log_probs
from rolepool.models.ranks import PartSums
from rolepool.models.training import DeviceModel
from rolepool.placement.checks import roomier_divisions
from rolepool.placement.estimate import default_micro_batches
from rolepool.placement.roles import ROLE_SPECS, Role
from rolepool.protocol import DataProto, Worker
from rolepool.protocol.batches import Tokens, TypedBatch
from rolepool.protocol.columns import lengths_of
from rolepool.protocol.part_times import part, work_of
from rolepool.roles.micro_batches import MicroBatches
from rolepool.roles.setups import Setup

Computed = TypeVar("Computed", bound=TypedBatch)


class ModelRole(Worker):
    """A role with a model. `self.keys` is its section of the config."""

    role: ClassVar[Role]
    setup_type: ClassVar[type[Setup]] = Setup
    """What the run tells the role when it builds it."""
    placed: DeviceModel
    """The model that `in_micro_batches` computes with."""

    def __init__(self, config: Config, setup: Setup) -> None:
        self.config = config
        self.spec = ROLE_SPECS[self.role]
        self.keys: Any = config.at(self.spec.section)
        self.packed: bool = self.spec.can_pack and config.at(self.spec.model).use_remove_padding
        self.part_sums = PartSums(self.context.dims, self.device)
        sizes = setup.micro_batches
        if sizes is None:
            sizes = default_micro_batches(config, self.role)
        width = config.tokens_of_longest_row
        self.micro_batches: dict[str, MicroBatches] = {}
        """By the name of the method."""
        for operation, _ in self.spec.batched_in(config):
            self.micro_batches[operation.method] = MicroBatches(
                size=sizes[operation.name],
                part_sums=self.part_sums,
                packed=self.packed,
                width=width,
            )
        if self.device != "cpu":  # nothing is compiled for a CPU
            use_compile_cache(config.trainer.compile_cache_dir)
        self.frozen_dtype = setup.dtype if self.device == "cpu" else torch.bfloat16
        """The dtype of weights that are not trained."""

    def in_micro_batches(
        self,
        method: str,
        tokens: Tokens,
        compute: Callable[[TokenRows], Computed],
    ) -> Computed:
        """What the model computes from micro-batches of tokens, in the order of rows, in host
        memory."""
        lengths = lengths_of(tokens.input_ids).tolist()
        split = self.micro_batches[method].split(lengths)
        batch = tokens.to_proto()
        parts: list[Computed] = []
        with self.placed.on_device():
            for rows in split:
                own_lengths = [lengths[row] for row in rows]
                num_tokens, num_attended = work_of(own_lengths)
                with part("score", num_tokens, num_attended):
                    token_rows = TokenRows(batch[rows].batch, self.device)
                    parts.append(compute(token_rows))
            protos = [computed.to_proto() for computed in parts]
            # Only now: micro-batches do not wait for each other's results.
            joined = DataProto.concat(protos).to("cpu")
        order = list(chain(*split))
        joined.reorder(np.argsort(order))
        return type(parts[0]).of(joined)

    def log_probs(self, rows: TokenRows) -> TokenScores:
        """Log-probs and entropies of response tokens under the policy of this role."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        return response_log_probs(
            self.placed.model,
            rows,
            temperature=temperature,
            packed=self.packed,
        )

    def smaller(self, method: str) -> list[str]:
        """Overrides with which the role itself takes less memory in this method."""
        if method not in self.micro_batches:
            return []
        return self.micro_batches[method].smaller()

    def less_memory(self, method: str) -> list[str]:
        at_rest: list[str] = []
        for other in self.siblings.values():
            if other is not self:
                at_rest += other.less_memory_at_rest()
        return [
            *self.smaller(method),
            *at_rest,
            *roomier_divisions(self.config, self.role),
        ]

    def less_memory_at_rest(self) -> list[str]:
        section = self.spec.fsdp
        if section is None:
            return []
        return offloads(section, self.config.at(section), self.device)


def offloads(section: str, fsdp: RefFsdpConfig, device: str) -> list[str]:
    """What could still be kept in host memory while the role is idle, the larger part first;
    nothing on a CPU."""
    if device == "cpu":
        return []
    values = fsdp.model_dump()
    overrides: list[str] = []
    for key in ("optimizer_offload", "param_offload"):
        if values.get(key) is False:
            overrides.append(f"{section}.{key}=true")
    return overrides
