"""Running the conversations of a batch at the same time over one engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.config.functions import import_environment
from rolepool.config.model_keys import MultiTurnConfig
from rolepool.data.tokenizer import load_tokenizer
from rolepool.data.tools import TemplateOptions, ToolProcess, template_options
from rolepool.errors import DataError, RolepoolError, logger, one_line
from rolepool.rollout.conversation_queue import ConversationQueue
from rolepool.rollout.engine import Engine, Sampling, Session
from rolepool.rollout.environments import Generate, PromptRow, RolloutFunction, Trajectory
from rolepool.rollout.tool_loop import ToolLoop


@dataclass(frozen=True)
class Conversations:
    """Runs an environment for the rows of a batch."""

    rollout: RolloutFunction
    tokenizer: PreTrainedTokenizerBase
    processes: Sequence[ToolProcess]
    limits: tuple[int, int]
    """The largest numbers of tokens of a prompt and of everything after it."""
    turns: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    template_options: TemplateOptions = field(default_factory=dict)

    def run(
        self,
        engine: Engine,
        sampling: Sampling,
        rows: Sequence[PromptRow],
        seeds: Sequence[int],
    ) -> list[Trajectory]:
        """The trajectory of each row, which has this seed. It does not depend on the order in which
        tools answer."""
        max_prompt, max_response = self.limits
        longest = replace(sampling, max_new_tokens=max_response)
        with engine.session(longest, len(rows), max_prompt + max_response) as session:
            conversations = self._run(
                session,
                rows,
                seeds,
                stop_token_ids=sampling.stop_token_ids,
            )
            return asyncio.run(conversations)

    async def _run(
        self,
        session: Session,
        rows: Sequence[PromptRow],
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> list[Trajectory]:
        queue = ConversationQueue(session, self.processes)
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                for number, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
                    generate = Generate(
                        queue,
                        self.tokenizer,
                        conversation=number,
                        seed=seed,
                        max_response_length=self.limits[1],
                        turns=self.turns,
                        template_options=self.template_options,
                        stop_token_ids=stop_token_ids,
                    )
                    task = group.create_task(self._converse(row, generate))
                    tasks.append(task)
                group.create_task(queue.serve(tasks))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if queue.errors:
            logger.warning(
                "%d calls of tools failed; the first: %s",
                len(queue.errors),
                queue.errors[0],
            )
        return [task.result() for task in tasks]

    async def _converse(self, row: PromptRow, generate: Generate) -> Trajectory:
        """The trajectory of a row, checked."""
        try:
            trajectory = await self.rollout(row, generate)
            num_prompt = len(trajectory.prompt_ids)
            trajectory.turn_scores()  # raises an error if the reward does not fit the turns
        except RolepoolError:
            raise
        except Exception as error:
            problem = f"the environment failed with {type(error).__name__}: {one_line(error)}"
            raise RolepoolError(f"{problem}, for {row['origin']}") from error
        max_prompt, _ = self.limits
        if num_prompt > max_prompt:
            problem = f"the environment's prompt has {num_prompt} tokens, for {row['origin']}"
            raise DataError(f"data.max_prompt_length={max_prompt}: {problem}; raise it")
        return trajectory


def conversations_of(config: Config) -> Conversations | None:
    """What runs the environment that the config names; None if it names none."""
    environment = import_environment(config.environment.path, config.environment.name)
    if environment is None:
        return None
    rollout = environment
    if isinstance(environment, type):
        rollout = ToolLoop(environment, config)
    keys = config.environment
    policy_keys = config.actor_rollout_ref
    return Conversations(
        rollout,
        load_tokenizer(policy_keys.model),
        processes=[ToolProcess(keys) for _ in range(keys.num_processes)],
        limits=(config.data.max_prompt_length, config.data.max_response_length),
        turns=policy_keys.rollout.multi_turn,
        template_options=template_options(config),
    )
