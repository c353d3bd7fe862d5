"""The roles that compute a number for every response token: actor, critic, and the reference for KL
terms."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rolepool.algorithm import rollout_correction
from rolepool.algorithm.losses import (
    Loss,
    LossCounts,
    agg_loss,
    compute_value_loss,
    masked_kl_penalty,
    masked_sum,
)
from rolepool.config import Config
from rolepool.config.model_keys import ActorConfig, CriticConfig, RefConfig
from rolepool.errors import RolepoolError
from rolepool.models import parity
from rolepool.models.loading import load_critic, load_policy
from rolepool.models.packing import TokenRows, response_values
from rolepool.models.training import FrozenModel
from rolepool.models.weights import WeightSource, WeightSpec
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.batches import (
    ActorUpdate,
    ComparableTokens,
    ComparedUpdate,
    CriticUpdate,
    LogProbs,
    ReferenceLogProbs,
    SampledTokens,
    Tokens,
    Values,
)
from rolepool.protocol.columns import Ragged, flat_values, lengths_of, ragged
from rolepool.protocol.part_times import part
from rolepool.protocol.stores import listening_store
from rolepool.roles.model_role import ModelRole
from rolepool.roles.setups import ActorSetup, Setup, TrainingSetup
from rolepool.roles.trained_role import MiniBatch, TrainedRole
from rolepool.weights.digests import Digests
from rolepool.weights.group import MeetingPoint, TransferGroup
from rolepool.weights.messages import as_matrix, dtype_of
from rolepool.weights.process_group import RowsOf, Sender, Sent
from rolepool.weights.receipts import Receipt
from rolepool.weights.routes import Layout, Trainer, Weight, own_region, rows_in_shard
from rolepool.weights.rows import WeightRows


def _columns_of_log_prob(role: type, config: Config, setup: Setup) -> tuple[str, ...]:
    """The engine's log-probs are read only if they are compared with the actor's."""
    if config.actor_rollout_ref.rollout.checks_parity:
        return ComparableTokens.names()
    return SampledTokens.names()


def _columns_of_update(role: type, config: Config, setup: Setup) -> tuple[str, ...]:
    """The version of the weights is read only if the update compares the engine's log-probs with
    its own."""
    return ComparedUpdate.names() if _update_compares(config) else ActorUpdate.names()


def _update_compares(config: Config) -> bool:
    """Whether the update compares the engine's log-probs with its own, because it has no others."""
    return config.bypasses_old_log_prob and config.actor_rollout_ref.rollout.checks_parity


class Actor(TrainedRole):
    """The policy in training: computes log-probs of rollouts, is updated, and exports its
    weights."""

    role = Role.Actor
    setup_type = ActorSetup
    keys: ActorConfig

    def __init__(self, config: Config, setup: ActorSetup) -> None:
        super().__init__(config, setup)
        self.policy_loss = setup.policy_loss
        model = load_policy(
            config,
            setup.dtype,
            packed=self.packed,
            reads_weights=setup.reads_weights,
        )
        # While the critic warms up, the actor is not updated.
        num_steps = setup.num_training_steps - config.trainer.critic_warmup
        self.train(model, max(0, num_steps))
        if self.keys.loss_scale_factor is not None:
            self.loss_scale_factor = self.keys.loss_scale_factor
        # Rollouts compute in 16 bits on GPUs.
        rollout_dtype = None if self.device == "cpu" else torch.bfloat16
        self.weights = WeightSource(self.trained, rollout_dtype)
        self._sent = Digests()
        self.weights_version = 0
        """The version of the weights that were sent to the rollout last. Those of this process are
        the same until the next update."""
        self._sender: Sender | None = None
        """This rank's end of the process group with the rollout, if it has joined one."""
        self._from_engine = parity.Apart()
        """How far the first log-probs of a step are from the engine's, if those are the old
        log-probs."""
        self.correction = config.algorithm.rollout_correction
        self._divisor_of_weights = 1.0
        """The mean of the weights of the mini-batch, if they are divided by it."""
        if config.bypasses_old_log_prob:
            # Nobody has computed it before the update.
            self.metrics_of_first = frozenset({"entropy"})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=_columns_of_log_prob)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the response tokens under the current weights, and the sum of the entropies
        of those tokens that were sampled. With `rollout.parity_check`, log-probs are compared
        with the engine's, except those of rows that were generated with older weights."""

        def score(rows: TokenRows) -> LogProbs:
            log_probs, entropies = self.log_probs(rows)
            padded_entropies = rows.pad(entropies.double())
            sums = masked_sum(padded_entropies, rows.is_sampled, axis=1)
            return LogProbs(
                old_log_probs=rows.ragged(log_probs),
                entropy_sums=sums,
            )

        tokens = SampledTokens.of(data)
        computed = self.in_micro_batches("compute_log_prob", tokens, score)
        if self.config.actor_rollout_ref.rollout.checks_parity:
            self._compare(ComparableTokens.of(data), computed.old_log_probs)
        return computed.to_proto()

    def _compare(self, rollouts: ComparableTokens, ours: Ragged) -> None:
        """Compare the engine's log-probs of these rows with the actor's, if they have any."""
        theirs = rollouts.rollout_log_probs
        if rollouts.weights_version is None or theirs is None:
            return
        self._raise_if_apart(
            int(rollouts.weights_version.max()),
            theirs=flat_values(theirs),
            ours=flat_values(ours),
            mask=self._compared_tokens(rollouts, theirs),
        )

    def _compared_tokens(self, rows: ComparableTokens, log_probs: Ragged) -> Tensor | None:
        """Which response tokens are compared with the engine's, one row after another; None means
        all of them."""
        mask: Tensor | None = None
        if rows.response_mask is not None:
            # What an environment wrote was not sampled, so the engine has no log-probs of it.
            mask = flat_values(rows.response_mask)
        if self.config.algorithm.max_staleness > 0 and rows.weights_version is not None:
            is_fresh = rows.weights_version == self.weights_version
            of_tokens = torch.repeat_interleave(is_fresh, lengths_of(log_probs))
            mask = of_tokens if mask is None else mask & of_tokens
        return mask

    def _raise_if_apart(
        self,
        version: int,
        theirs: Tensor,
        ours: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Raise an error if the engine, whose log-probs are `theirs`, did not generate with the
        current weights, or computes other log-probs. None as `mask` compares all tokens."""
        if mask is not None:
            theirs = theirs[mask]
            ours = ours[mask]
        theirs = theirs[: parity.NUM_TOKENS]
        ours = ours[: parity.NUM_TOKENS]
        apart = parity.Apart()
        apart.add(theirs, ours, torch.ones_like(ours, dtype=torch.bool))
        self._raise_if_different(version, apart.read())

    def _raise_if_different(self, version: int, difference: parity.Difference) -> None:
        """Raise an error if the difference between engine and actor is above the limit."""
        keys = self.config.actor_rollout_ref.rollout
        limit = keys.parity_limit or parity.LIMITS["cpu" if self.device == "cpu" else "cuda"]
        error = difference.logit_error(keys.temperature)
        if not error <= limit:  # also if it is NaN
            raise RolepoolError(
                f"actor_rollout_ref.rollout.name={keys.engine}: the engine's log-probs, with version {version} of the "
                f"weights, are {difference.distance:.2g} from the actor's (mean of {difference.num_tokens} tokens), so "
                f"its logits are wrong by about {error:.2g}, and actor_rollout_ref.rollout.parity_limit is {limit:g}: "
                "it computes other numbers, or did not take the last weights; fix the engine, or raise the limit"
            )

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=_columns_of_update,
    )
    def update_actor(self, data: DataProto, ends_step: bool = True) -> dict[str, float]:
        """One epoch of updates."""
        if _update_compares(self.config):
            self._mark_compared(data)
        metrics = self.update(data, ends_step)
        if self.keys.use_kl_loss:
            metrics["actor/kl_coef"] = self.keys.kl_loss_coef
        if self.correction.corrects_in_update:
            return rollout_correction.named_metrics(metrics, f"{self.role}/")
        return metrics

    def before_step(self, mini_batch: MiniBatch) -> None:
        """With `bypass_mode`, the weights of tokens are computed in the update, and their mean over
        the mini-batch is not known before the loss of its last micro-batch. So this computes all of
        them once more, without gradient."""
        keys = self.correction
        if not (keys.corrects_in_update and keys.weighs and keys.rollout_is_batch_normalize):
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for rows in mini_batch.micro_batches:
                tokens, columns = self.columns_of(mini_batch.data, rows)
                new_log_probs, _ = self.log_probs(tokens)
                sums += rollout_correction.sums_of_weights(
                    tokens.pad(new_log_probs),
                    columns["old_log_probs"],
                    columns["response_mask"],
                    keys,
                )
        total, number = self.part_sums.sum(sums.tolist())
        self._divisor_of_weights = rollout_correction.divisor_of_weights(total, number)

    def _mark_compared(self, data: DataProto) -> None:
        """Add the column `is_compared` if the rows of a batch may have been generated with older
        weights: whether each response token is compared with the engine's."""
        rows = ComparedUpdate.of(data)
        if self.config.algorithm.max_staleness == 0 or rows.weights_version is None:
            return
        is_fresh = rows.weights_version == self.weights_version
        lengths = lengths_of(rows.old_log_probs)
        data.batch["is_compared"] = ragged(torch.repeat_interleave(is_fresh, lengths), lengths)

    def check_first(self, data: DataProto) -> None:
        """Compare the engine's log-probs with those that the first mini-batch has computed. If the
        rows have no `weights_version`, nobody compares them here."""
        rows = ComparedUpdate.of(data)
        if rows.weights_version is not None:
            version = int(rows.weights_version.max())
            self._raise_if_different(version, self._from_engine.read())

    def loss_of(
        self,
        rows: TokenRows,
        columns: Mapping[str, Tensor],
        counts: LossCounts,
    ) -> Loss:
        keys = self.keys
        mask = columns["response_mask"]
        mode = keys.loss_agg_mode
        new_log_probs, entropies = self.log_probs(rows)
        log_probs = rows.pad(new_log_probs)
        if self.is_first_mini_batch and _update_compares(self.config):
            compared = columns.get("is_compared", mask)
            self._from_engine.add(columns["old_log_probs"], log_probs, mask & compared)
        loss, metrics = self._policy_loss_of(log_probs, columns, counts)
        metrics = {**metrics, "pg_loss": loss.detach()}
        if keys.entropy_coeff != 0 or self.config.bypasses_old_log_prob:
            entropy = agg_loss(rows.pad(entropies), mask, mode, counts=counts)
            metrics["entropy"] = entropy.detach()
            if keys.entropy_coeff != 0:
                loss = loss - keys.entropy_coeff * entropy
        if keys.use_kl_loss:
            kl = masked_kl_penalty(
                log_probs,
                columns["ref_log_prob"],
                mask,
                keys.kl_loss_type,
            )
            kl_loss = agg_loss(kl, mask, mode, counts=counts)
            loss = loss + keys.kl_loss_coef * kl_loss
            metrics["kl_loss"] = kl_loss.detach()
        return loss, metrics

    def _policy_loss_of(
        self,
        log_probs: Tensor,
        columns: Mapping[str, Tensor],
        counts: LossCounts,
    ) -> Loss:
        """The policy loss, and metrics. With `bypass_mode`, tokens are weighed and rejected here;
        without it, the columns say how."""
        keys = self.keys
        mask = columns["response_mask"]
        weights = columns.get("rollout_is_weights")
        metrics_of_correction: dict[str, Tensor] = {}
        if self.correction.corrects_in_update:
            corrected, metrics_of_correction = rollout_correction.correct_rows(
                log_probs,
                columns["old_log_probs"],
                mask,
                self.correction,
                divisor=self._divisor_of_weights,
                counts=counts,
            )
            weights = corrected.weights
            if corrected.kept is not None:
                # Only here: entropy and KL are those of all tokens, and so are the counts, as in
                # verl.
                mask = corrected.kept
        optional = {} if weights is None else {"rollout_is_weights": weights}
        loss, metrics = self.policy_loss(
            old_log_prob=columns["old_log_probs"],
            log_prob=log_probs,
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=keys.loss_agg_mode,
            config=keys,
            counts=counts,
            clip_ratio_low=keys.clip_ratio_low,
            clip_ratio_high=keys.clip_ratio_high,
            clip_ratio_c=keys.clip_ratio_c,
            **optional,
        )
        return loss, {**metrics, **metrics_of_correction}

    # Weights for a rollout in another pool (`rolepool.weights.channels`)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def weights_to_send(self) -> list[Weight]:
        """All weights without their numbers; tied weights are listed once."""
        return [_as_weight(spec) for spec in self.weights.specs()]

    # Through shared memory

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def export_rows(self, weights: Sequence[Weight]) -> dict[str, WeightRows]:
        """This rank's own rows of some weights, in host memory."""
        exported: dict[str, WeightRows] = {}
        with self._open_own_rows() as rows_of:
            for weight in weights:
                region = own_region(weight, self._trainer, self.rank)
                if region.num_elements:
                    rows = rows_of(weight)
                    # Before they leave the device.
                    self._sent.add_part(weight.name, rows, region, weight.shape)
                    first_row, _ = region.rows
                    exported[weight.name] = WeightRows(weight.shape, first_row, rows.cpu())
        return exported

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sent_receipt(self, version: int) -> Receipt:
        """The digests of what this rank has exported since the last receipt."""
        receipt = Receipt(version, self._sent.read())
        self._sent = Digests()
        self.weights_version = version
        return receipt

    @property
    def _trainer(self) -> Trainer:
        dims = self.context.dims
        return Trainer(dims.world_size, dims.shard)

    @contextmanager
    def _open_own_rows(self) -> Iterator[RowsOf]:
        """This rank's own rows of weights, in the dtype in which they are sent."""
        with self.weights.open_shards() as shard_of:

            def rows_of(weight: Weight) -> Tensor:
                first, end = rows_in_shard(weight, self._trainer, self.rank)
                shard = as_matrix(shard_of(weight.name))
                return shard[first:end].to(dtype_of(weight))

            yield rows_of

    # Through a process group

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def open_meeting(self, num_ranks: int, secret: str) -> MeetingPoint:
        """Open the store in which the ranks of both pools find each other."""
        address = self.context.address
        self._meeting_store = listening_store(address, num_ranks)
        return MeetingPoint(address, self._meeting_store.port, secret)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_transfers(self, point: MeetingPoint, layout: Layout) -> None:
        """Meet the ranks of the rollout. All of them do this at the same time."""
        if self._sender is not None:
            self._sender.close()
        group = TransferGroup(point, self.rank, layout.num_ranks, self.device)
        self._sender = Sender(group, layout, self.rank, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def await_turn(self) -> None:
        """Ends when the calls before it have ended."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, turn: object, version: int) -> Sent:
        """Send this rank's rows of all weights, at the same time as the rollout receives them.
        `turn` is the result of the rollout's `await_turn`."""
        assert self._sender is not None, "this rank has not joined the transfers"
        self.weights_version = version
        with self._open_own_rows() as rows_of, part("send"):
            return self._sender.send(rows_of)


def _as_weight(spec: WeightSpec) -> Weight:
    dtype = str(spec.dtype).removeprefix("torch.")
    return Weight(spec.name, spec.shape, dtype, spec.dtype.itemsize, spec.is_sharded)


class Critic(TrainedRole):
    """Computes a value for every response token, and is updated towards the returns."""

    role = Role.Critic
    keys: CriticConfig

    def __init__(self, config: Config, setup: TrainingSetup) -> None:
        super().__init__(config, setup)
        model = load_critic(
            config,
            setup.dtype,
            packed=self.packed,
            reads_weights=setup.reads_weights,
        )
        self.train(model, setup.num_training_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=Tokens.names())
    def compute_values(self, data: DataProto) -> DataProto:
        """The value of the state before each response token."""

        def score(rows: TokenRows) -> Values:
            values = self._values(rows)
            return Values(values=rows.ragged(values))

        computed = self.in_micro_batches("compute_values", Tokens.of(data), score)
        return computed.to_proto()

    def _values(self, rows: TokenRows) -> Tensor:
        return response_values(self.trained.model, rows, packed=self.packed)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=CriticUpdate.names(),
    )
    def update_critic(self, data: DataProto, ends_step: bool = True) -> dict[str, float]:
        """One epoch of updates."""
        return self.update(data, ends_step)

    def loss_of(
        self,
        rows: TokenRows,
        columns: Mapping[str, Tensor],
        counts: LossCounts,
    ) -> Loss:
        mask = columns["response_mask"]
        predicted = rows.pad(self._values(rows))
        loss, clip_fraction = compute_value_loss(
            predicted,
            columns["returns"],
            columns["values"],
            mask,
            self.keys.cliprange_value,
            self.keys.loss_agg_mode,
            counts=counts,
        )
        total = masked_sum(predicted.detach(), mask)
        metrics = {
            "vf_loss": loss.detach(),
            "vf_clipfrac": clip_fraction,
            "vpred_mean": total / max(counts.num_tokens, 1),
        }
        return loss, metrics


class Reference(ModelRole):
    """The policy before training: computes log-probs for KL terms."""

    role = Role.RefPolicy
    keys: RefConfig

    def __init__(self, config: Config, setup: Setup) -> None:
        super().__init__(config, setup)
        model = load_policy(config, self.frozen_dtype, packed=self.packed)
        self.placed = FrozenModel(
            model,
            device=self.device,
            dims=self.context.dims,
            offload=self.keys.fsdp_config.param_offload,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=Tokens.names())
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the response tokens under the weights before training."""

        def score(rows: TokenRows) -> ReferenceLogProbs:
            log_probs, _ = self.log_probs(rows)
            return ReferenceLogProbs(ref_log_prob=rows.ragged(log_probs))

        computed = self.in_micro_batches("compute_ref_log_prob", Tokens.of(data), score)
        return computed.to_proto()
