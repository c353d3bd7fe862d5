"""The rollout: responses to prompts, from the actor's weights.

Owns turning completions into rows, and taking new weights: from the actor in the same process, or
from its export. The engine that generates is the one that `actor_rollout_ref.rollout.name` names:
one of rolepool's own, or a class of the user's.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

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
from rolepool.rollout.engine import ABILITIES, Engine, Request, Sampling
from rolepool.rollout.sampling import sample_seed
from rolepool.weights.channels import unpacked
from rolepool.weights.digests import Digests
from rolepool.weights.receipts import Delivery, Receipt

Purpose = Literal["train", "validate", "baseline"]
"""What responses are for: training samples, validation (`val_kwargs`), or the greedy baseline of
ReMax."""
ENGINE_KEY = "actor_rollout_ref.rollout.name"


def _columns_of_prompts(role: type, config: Config, setup: RolloutSetup) -> tuple[str, ...]:
    """Only an environment reads more of a prompt than its tokens."""
    has_environment = config.environment.name is not None
    return EnvironmentPrompts.names() if has_environment else Prompts.names()


class Rollout(ModelRole):
    role = Role.Rollout
    setup_type = RolloutSetup
    keys: RolloutConfig

    def __init__(self, config: Config, setup: RolloutSetup) -> None:
        super().__init__(config, setup)
        self.stop_token_ids = setup.stop_token_ids
        actor = self.siblings.get(Role.Actor)
        shared_model = None
        if isinstance(actor, Actor) and actor.world_size == 1 and self.device == "cpu":
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
        if self._lacks_weights:
            raise RolepoolError(
                "the rollout has no weights yet: send those of the actor before it generates"
            )
        sampling = self._sampling(purpose)
        asked = Prompts.of(prompts)
        run_seed = self.context.run_seed
        seeds: list[int] = []
        for uid, index in zip(asked.uid, asked.sample_index, strict=True):
            seeds.append(sample_seed(run_seed, uid, int(index)))
        checks_parity = self.keys.checks_parity
        kept = Kept(
            log_probs=checks_parity or self.keys.calculate_log_probs, versions=checks_parity
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
        self, asked: Prompts, seeds: Sequence[int], sampling: Sampling, kept: Kept
    ) -> Rollouts:
        """Responses of one turn."""
        requests: list[Request] = []
        for token_ids, seed in zip(asked.raw_prompt_ids, seeds, strict=True):
            requests.append(Request(token_ids, seed))
        completions = self.engine.generate(requests, sampling)
        return rollouts_of([request.token_ids for request in requests], completions, kept)

    def smaller(self, method: str) -> list[str]:
        section = self.spec.section
        overrides = []
        num_sequences = self.config.rows_of_step // self.context.dims.dp
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
        """Take the weights of the actor in this process. Nothing is moved if both use one model."""
        actor = self.siblings[Role.Actor]
        assert isinstance(actor, Actor)
        names = () if self.engine.shared_weights else None
        # All ranks gather the same weights, so one of them says what these are.
        sent = Digests() if self.rank == 0 else None
        with actor.weights.open(names) as tensors, part("gather"):
            got = self.engine.update_weights(_noted(tensors, sent), version)
        self._lacks_weights = False
        self._warn_without(got)
        return Delivery(None if sent is None else Receipt(version, sent.read()), got)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def take_weights(self, weights: DataProto, version: int | None) -> Receipt | None:
        """Take some of the weights, as the actor's `export_weights` returns them. The last call
        gives the version; then the engine drops what it computed with the old weights. It returns
        the engine's receipt, if there is one."""
        got = self.engine.update_weights(unpacked(weights), version)
        if version is not None:
            self._lacks_weights = False
            self._warn_without(got)
        return got

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
    tensors: Iterable[tuple[str, Tensor]], digests: Digests | None
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors. Their digests are computed before they are handed on."""
    for name, tensor in tensors:
        if digests is not None:
            digests.add(name, tensor)
        yield name, tensor
