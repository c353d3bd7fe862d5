"""The rollout: responses to prompts, from the actor's weights.

Owns turning completions into rows, and taking new weights: from the actor in the same process, or
from its export. The engine that generates is the one that `actor_rollout_ref.rollout.name` names:
one of rolepool's own, or a class of the user's.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.config.functions import ENGINES, import_object
from rolepool.config.model_keys import RolloutConfig
from rolepool.errors import RolepoolError, logger
from rolepool.models.loading import load_policy
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.batches import EnvironmentPrompts, Prompts, Rollouts
from rolepool.protocol.part_times import part
from rolepool.roles.actor_critic import Actor
from rolepool.roles.model_role import ModelRole
from rolepool.roles.rollout_columns import Kept, rollouts_of, rollouts_of_turns, rows_of
from rolepool.roles.setups import RolloutSetup
from rolepool.rollout.conversations import conversations_of
from rolepool.rollout.engine import ABILITIES, Engine, Request, Sampling, StreamedEngine
from rolepool.rollout.sampling import sample_seed
from rolepool.weights.digests import Digests
from rolepool.weights.group import MeetingPoint, TransferGroup
from rolepool.weights.process_group import Receiver
from rolepool.weights.receipts import (
    NOTHING_TO_COMPARE,
    Delivery,
    Receipt,
    WeightsDifferError,
    check_receipt,
)
from rolepool.weights.regions import Region
from rolepool.weights.routes import Layout, Weight
from rolepool.weights.rows import Exported, assembled

Purpose = Literal["train", "validate", "baseline"]
"""What responses are for: training samples, validation (`val_kwargs`), or the greedy baseline of
ReMax."""
ENGINE_KEY = "actor_rollout_ref.rollout.name"


def _columns_of_prompts(role: type, config: Config, setup: RolloutSetup) -> tuple[str, ...]:
    """Only an environment reads more of a prompt than its tokens."""
    if config.environment.name is not None:
        return EnvironmentPrompts.names()
    return Prompts.names()


class Rollout(ModelRole):
    role = Role.Rollout
    setup_type = RolloutSetup
    keys: RolloutConfig

    def __init__(self, config: Config, setup: RolloutSetup) -> None:
        super().__init__(config, setup)
        self.stop_token_ids = setup.stop_token_ids
        actor = self.siblings.get(Role.Actor)
        shared_model = None
        if isinstance(actor, Actor):
            has_whole_model = actor.world_size == 1
            if has_whole_model and self.device == "cpu":
                shared_model = actor.trained.model
        name = self.keys.engine
        make = import_object(ENGINE_KEY, ENGINES.get(name, name))
        # A user's engine may need the weights of the files.
        reads_weights = name not in ENGINES or not setup.gets_weights
        self._lacks_weights = shared_model is None and not reads_weights
        """Whether the engine's weights are undefined, because none have arrived yet."""
        self.engine: Engine = make(
            config=config,
            context=self.context,
            load_model=partial(
                load_policy, config, self.frozen_dtype, packed=False, reads_weights=reads_weights
            ),
            shared_model=shared_model,
        )
        if self.rank == 0:
            abilities = getattr(self.engine, "abilities", ())  # a user's class may not have it
            for ability, loss in ABILITIES.items():
                if ability not in abilities:
                    logger.warning("%s=%s has no %s: %s", ENGINE_KEY, name, ability, loss)
        self._has_warned = False
        self._wrong_weights: WeightsDifferError | None = None
        """Why the engine must not generate with the weights that it has."""
        self._receiver: Receiver | None = None
        """This rank's end of the process group with the actor, if it has joined one."""
        self.conversations = conversations_of(config)
        """What runs the environment; None if a response has one turn."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def await_engine(self, wait_s: float) -> str | None:
        """Wait at most so long for an engine that starts beside other roles. Returns what it still
        waits for; None if it can be used."""
        await_start = getattr(self.engine, "await_start", None)  # a user's class may not have it
        if await_start is None:
            return None
        waits_for: str | None = await_start(wait_s)
        return waits_for

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=_columns_of_prompts)
    def generate_sequences(self, prompts: DataProto, purpose: Purpose = "train") -> DataProto:
        """A response to each prompt, or a conversation. It depends on weights, prompt and seed, not
        on the rank."""
        if self._wrong_weights is not None:
            raise self._wrong_weights
        if self._lacks_weights:
            raise RolepoolError(
                "the rollout has no weights yet: send those of the actor before it generates"
            )
        sampling = self._sampling(purpose)
        asked = Prompts.of(prompts)
        run_seed = self.context.run_seed
        seeds: list[int] = []
        for uid, index in zip(asked.uid, asked.sample_index, strict=True):
            seed = sample_seed(run_seed, uid, int(index))
            seeds.append(seed)
        kept = Kept(
            log_probs=self.config.returns_log_probs,
            old_log_probs=self.config.bypasses_old_log_prob,
            dtype=torch.promote_types(self.frozen_dtype, torch.float32),
        )
        self.engine.wake()
        if self.conversations is None:
            rollouts = self._generate(asked, seeds, sampling, kept)
        else:
            rows = rows_of(EnvironmentPrompts.of(prompts))
            trajectories = self.conversations.run(self.engine, sampling, rows, seeds)
            rollouts = rollouts_of_turns(trajectories, kept)
        if self.keys.free_cache_engine:
            self.engine.sleep()
        return rollouts.to_proto()

    def _sampling(self, purpose: Purpose) -> Sampling:
        keys = self.keys.val_kwargs if purpose == "validate" else self.keys
        return Sampling(
            temperature=keys.temperature,
            top_p=keys.top_p,
            top_k=keys.top_k,
            do_sample=keys.do_sample and purpose != "baseline",
            max_new_tokens=self.config.data.max_response_length,
            ignore_eos=self.keys.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )

    def _generate(
        self,
        asked: Prompts,
        seeds: Sequence[int],
        sampling: Sampling,
        kept: Kept,
    ) -> Rollouts:
        """Responses of one turn."""
        requests: list[Request] = []
        for token_ids, seed in zip(asked.raw_prompt_ids, seeds, strict=True):
            requests.append(Request(token_ids, seed))
        completions = self.engine.generate(requests, sampling)
        prompts = [request.token_ids for request in requests]
        return rollouts_of(prompts, completions, kept)

    def smaller(self, method: str) -> list[str]:
        section = self.spec.section
        overrides = []
        num_sequences = self.config.rows_of_generation // self.context.dims.dp
        num_at_once = min(self.keys.max_num_seqs, num_sequences)
        if method == "generate_sequences" and num_at_once > 1:
            overrides.append(f"{section}.max_num_seqs={num_at_once // 2}")
        num_parallel = 2 * self.context.dims.tp
        if self.context.local_world_size % num_parallel == 0:
            overrides.append(f"{section}.tensor_model_parallel_size={num_parallel}")
        return overrides

    def less_memory_at_rest(self) -> list[str]:
        if self.keys.free_cache_engine:
            return []
        return [f"{self.spec.section}.free_cache_engine=true"]

    # Weights

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def take_weights_here(self, version: int) -> Delivery:
        """Take the weights of the actor in this process. Nothing is moved if both use one model.

        A process that is alone compares both receipts itself, so that the driver does not have to
        wait for them before the next generation. If they differ, it refuses to generate.
        """
        actor = self.siblings[Role.Actor]
        assert isinstance(actor, Actor)
        names = () if self.engine.shared_weights else None
        # All ranks gather the same weights, so one of them says what these are.
        sent = Digests() if self.rank == 0 else None
        with actor.weights.open(names) as tensors, part("gather"):
            noted = _noted(tensors, sent)
            got = self.engine.update_weights(noted, version)
        self._lacks_weights = False
        actor.weights_version = version
        self._warn_without(got)
        sent_receipt = None
        if sent is not None:
            sent_receipt = Receipt(version, sent.read())
        if self.world_size == 1 and sent_receipt is not None:
            self._check(sent_receipt, got)
            return NOTHING_TO_COMPARE
        return Delivery(sent_receipt, got)

    def _check(self, sent: Receipt, got: Receipt | None) -> None:
        """Compare the receipts of both sides. Raises WeightsDifferError, now and before every later
        generation."""
        self._wrong_weights = None
        try:
            check_receipt(sent, got, f"{self.context.pool} rank {self.rank}")
        except WeightsDifferError as error:
            self._wrong_weights = error
            raise

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def held_regions(self, weights: list[Weight]) -> dict[str, Region] | None:
        """The part of each of the actor's weights that this rank holds; None if the engine takes
        whole tensors."""
        engine = self._engine_for_parts
        if engine is None:
            return None
        return engine.held_regions({weight.name: weight.shape for weight in weights})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def take_weights(self, exports: list[Exported], version: int | None) -> Receipt | None:
        """Take some of the weights, as the ranks of the actor return them from `export_rows`. The
        last call gives the version; then the engine drops what it computed with the old weights. It
        returns the engine's receipt, if there is one."""
        engine = self._engine_for_parts
        if engine is None:
            got = self.engine.update_weights(assembled(exports), version)
        else:
            got = engine.take_rows(exports, version)
        if version is not None:
            self._lacks_weights = False
            self._warn_without(got)
        return got

    @property
    def _engine_for_parts(self) -> StreamedEngine | None:
        """The engine if it is one of rolepool's own, which can take a part of a weight. The
        interface of others is a stream of whole tensors."""
        if self.keys.engine not in ENGINES:
            return None
        assert isinstance(self.engine, StreamedEngine)
        return self.engine

    # The same through a process group

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_transfers(self, point: MeetingPoint, layout: Layout) -> None:
        """Meet the ranks of the actor. All of them do this at the same time."""
        if self._receiver is not None:
            self._receiver.close()
        rank_in_group = layout.peer_of(self.rank)
        group = TransferGroup(point, rank_in_group, layout.num_ranks, self.device)
        self._receiver = Receiver(group, layout, self.rank, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def await_turn(self) -> None:
        """Ends when the calls before it have ended."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, turn: object, version: int) -> Receipt:
        """Receive what this rank holds of all weights, at the same time as the actor sends them.
        `turn` is the result of the actor's `await_turn`."""
        assert self._receiver is not None, "this rank has not joined the transfers"
        engine = self._engine_for_parts
        assert engine is not None, "the channel of this engine is another one"
        with part("receive"):
            receipt = engine.receive_weights(self._receiver.receive, version)
        self._lacks_weights = False
        return receipt

    def _warn_without(self, receipt: Receipt | None) -> None:
        """Say once in a run that nobody compares the weights of this engine."""
        if receipt is None and self.rank == 0 and not self._has_warned:
            logger.warning(
                "actor_rollout_ref.rollout.name=%s returns no receipts: the run does not compare "
                "the weights that it has got with those that were sent",
                self.keys.engine,
            )
            self._has_warned = True


def _noted(
    tensors: Iterable[tuple[str, Tensor]],
    digests: Digests | None,
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors. They are noted before they are handed on, and must not be changed."""
    for name, tensor in tensors:
        if digests is not None:
            digests.add(name, tensor)
        yield name, tensor
