"""The parts of a run that need no process: what it reads, its steps, its stores and its journal.

Owns how many steps a run makes. Raises an error if something cannot be read, or does not fit
together.
"""

import torch

from rolepool.cluster import Cluster
from rolepool.config import Config, LoadedConfig
from rolepool.data.prompts import PromptLoader, PromptSet
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import PlacementError
from rolepool.metrics.run_folder import RunFolder
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems
from rolepool.trainer.advantages import Estimator, RepeatedPrompts
from rolepool.trainer.bad_steps import BadSteps
from rolepool.trainer.build import build_roles
from rolepool.trainer.checkpoint import Checkpoints
from rolepool.trainer.inputs import check_inputs, check_prompts
from rolepool.trainer.interrupt import Interrupt
from rolepool.trainer.journal import Journal
from rolepool.trainer.paper import check_step, step_of
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.step import Roles


class RunParts:
    """Everything that a run has before its processes start."""

    def __init__(
        self,
        loaded: LoadedConfig,
        dtype: torch.dtype,
        reward: UserFunction | None,
    ) -> None:
        self.loaded = loaded
        self._dtype = dtype
        self._reward = reward
        config = loaded.config
        keys = config.trainer
        data = config.data
        self.config = config
        """The config of the start. After a move the deployment has another one."""
        self.plan = build_plan(config)
        PlacementError.raise_if_any(find_problems(config, self.plan))
        check_step(config)
        checked = check_inputs(config, self.plan, reward)
        self.helpers = checked.helpers
        """The pools beside those of the plan, and the number of their processes."""

        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        prompts = PromptSet("train", config, self.tokenizer, reward)
        prompt_sets = [prompts]
        self.val_prompts: PromptSet | None = None
        if data.val_files:
            self.val_prompts = PromptSet("val", config, self.tokenizer, reward)
            self.val_prompts.leave_out(prompts)
            prompt_sets.append(self.val_prompts)
        check_prompts(config, checked.models, prompt_sets)
        seed = keys.seed if data.seed is None else data.seed
        size_key = "data.train_batch_size"
        if config.prompts_of_generation != data.train_batch_size:
            size_key = "data.gen_batch_size"
        self.loader = PromptLoader(
            prompts,
            config.prompts_of_generation,
            seed=seed,
            shuffle=data.shuffle,
            size_key=size_key,
        )
        # How many groups will be filtered is not known, so they do not count here.
        num_steps_per_epoch = max(1, len(prompts) // data.train_batch_size)
        num_steps_of_epochs = keys.total_epochs * num_steps_per_epoch
        self.num_steps = keys.total_training_steps or num_steps_of_epochs

        estimator = Estimator(config)
        num_samples = config.actor_rollout_ref.rollout.n
        self.pipeline = Pipeline(
            step=step_of(config, estimator.needs),
            estimator=estimator,
            prompts=RepeatedPrompts(self.loader, num_samples),
        )

        self.folder = RunFolder(keys.default_local_dir)
        self.checkpoints = Checkpoints(config, self.folder, self.plan.roles)
        self.bad_steps = BadSteps(loaded, self.checkpoints)
        self.journal = Journal(
            config,
            self.folder,
            self.tokenizer,
            self.bad_steps,
        )
        self.interrupt = Interrupt()

    def build_roles(self, cluster: Cluster, config: Config, reads_weights: bool) -> Roles:
        """Build every role that its pool does not have yet, and wait until they are ready."""
        return build_roles(
            cluster,
            config,
            self.num_steps,
            self._dtype,
            self._reward,
            tell=self.journal.notice,
            reads_weights=reads_weights,
            gets_weights=True,  # `Deployment.restore` sends them
        )
