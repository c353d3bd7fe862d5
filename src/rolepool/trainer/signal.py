"""`rolepool signal`: whether a policy can learn from its prompts, before it is trained.

A policy learns from differences between responses: where all responses to a prompt get the same
score, there is nothing to learn. Owns what is measured for this, and what is said about it. The
processes start as those of a training run do, in a temporary run folder, and no weights change.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.table import Table
from torch import Tensor

from rolepool.config import LoadedConfig
from rolepool.protocol import DataProto
from rolepool.protocol.columns import TOKENS, rows_of_responses
from rolepool.trainer.advantages import repeated
from rolepool.trainer.build import stop_tokens_of
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer
from rolepool.trainer.samples import question_of

DEFAULT_SAMPLES = 8
"""Responses to each prompt if rollout.n is 1, because one response has nothing to differ from."""
FEW_MIXED = 0.2
MANY_TRUNCATED = 0.1
TOO_EASY = 0.9
MANY_NEARLY_EQUAL = 0.1
"""Shares from which something is said about them."""
SMALL_DIFFERENCE = 0.05
"""Scores that differ by no more than this are called nearly equal, as 0 and the 0.01 that some
verifiers give for any answer."""
MAX_CHARACTERS = 120


@dataclass
class Source:
    """The responses to the prompts of one data source."""

    groups: list[Sequence[float]] = field(default_factory=list)
    """The scores of the responses to each prompt."""
    lengths: list[int] = field(default_factory=list)
    """The tokens of each response."""
    num_truncated: int = 0
    example: tuple[str, str, str] = ("", "", "")
    """The question of the first prompt, its first response and its ground truth."""

    @property
    def mean(self) -> float:
        """The mean score, which is pass@1 if scores are 0 or 1."""
        return float(np.mean(self.groups))

    @property
    def best(self) -> float:
        """The mean of the best score of each prompt, which is pass@n if scores are 0 or 1."""
        best_scores = np.max(self.groups, axis=1)
        return float(np.mean(best_scores))

    @property
    def mixed(self) -> float:
        """The share of prompts whose responses have different scores."""
        return self._share_of_differences(SMALL_DIFFERENCE, np.inf)

    @property
    def nearly_equal(self) -> float:
        """The share of prompts whose responses have scores that differ, but hardly."""
        return self._share_of_differences(0.0, SMALL_DIFFERENCE)

    def _share_of_differences(self, more_than: float, at_most: float) -> float:
        differences = np.ptp(self.groups, axis=1)
        is_between = (differences > more_than) & (differences <= at_most)
        return float(np.mean(is_between))

    @property
    def truncated(self) -> float:
        return self.num_truncated / len(self.lengths)


@dataclass
class Signal:
    """What was measured."""

    sources: dict[str, Source]
    num_samples: int
    max_response_length: int
    tokens_per_s: float
    divides_by_std: bool = False
    """Whether the algorithm divides the advantages of a prompt by their standard deviation."""

    def as_table(self) -> Table:
        names = ("prompts", "score", f"best of {self.num_samples}", "mixed", "truncated", "tokens")
        table = Table("data source", box=None, pad_edge=False)
        for name in names:
            table.add_column(name, justify="right")
        for name, source in self.sources.items():
            table.add_row(
                name,
                str(len(source.groups)),
                f"{source.mean:.3f}",
                f"{source.best:.3f}",
                f"{source.mixed:.0%}",
                f"{source.truncated:.0%}",
                f"{np.mean(source.lengths):.0f}",
            )
        return table

    def advice(self) -> list[str]:
        """What to change, one line for each thing."""
        lines: list[str] = []
        for name, source in self.sources.items():
            lines += [f"{name}: {line}" for line in self._advice_for(source)]
        return lines

    def _advice_for(self, source: Source) -> Iterator[str]:
        if source.truncated > MANY_TRUNCATED:
            limit = f"data.max_response_length={self.max_response_length}"
            share = f"{source.truncated:.0%} of the responses reach {limit}"
            fix = "raise it, and look at the stop tokens that `rolepool plan` shows"
            yield f"{share}; if answers are cut off, {fix}"
        if not source.mixed and source.best <= SMALL_DIFFERENCE:
            question, response, truth = source.example
            example = f"{question!r}, answered {response!r}, with the ground truth {truth!r}"
            fix = "use easier prompts, another model, or a reward that finds the answer in the response"
            yield f"no signal: no response has a score, such as {example}; {fix}"
        elif not source.mixed:
            yield "no signal: all responses to a prompt have the same score; use harder prompts, or a finer reward"
        elif source.mean >= TOO_EASY:
            yield "the policy can do this already; use harder prompts"
        elif source.mixed < FEW_MIXED:
            share = f"only {source.mixed:.0%} of the prompts have responses with different scores"
            fix = "use prompts that are neither too easy nor too hard, or a larger actor_rollout_ref.rollout.n"
            yield f"{share}, and only those teach; {fix}"
        if self.divides_by_std and source.nearly_equal > MANY_NEARLY_EQUAL:
            share = f"in {source.nearly_equal:.0%} of the prompts"
            what = f"{share} scores differ by {SMALL_DIFFERENCE} or less"
            effect = "dividing by their standard deviation makes that as strong as a right answer"
            fix = "set algorithm.norm_adv_by_std_in_grpo=false, or use a reward without such differences"
            yield f"{what}, and {effect}; {fix}"


class _Measurement(Trainer):
    """A run that generates and scores responses to some training prompts, and trains nothing."""

    def __init__(self, loaded: LoadedConfig, num_prompts: int) -> None:
        super().__init__(loaded)
        self._num_prompts = num_prompts
        self._stops = stop_tokens_of(self.parts.config, self.parts.tokenizer)
        self.signal: Signal | None = None

    def train(self) -> None:
        self.observer.on_phase(f"generating responses to {self._num_prompts} prompts")
        num_samples = self.parts.config.actor_rollout_ref.rollout.n
        if num_samples <= 1:
            num_samples = DEFAULT_SAMPLES
        limit = self.parts.config.data.max_response_length
        roles = self.deployment.roles
        sources: dict[str, Source] = defaultdict(Source)
        num_tokens = 0
        seconds = 0.0
        num_left = self._num_prompts
        while num_left > 0:
            prompts = self.parts.loader.next_batch()[:num_left]
            num_left -= len(prompts)
            start_s = time.monotonic()
            rows = repeated(prompts, num_samples)
            rollouts = roles.rollout.generate_sequences(rows)
            tokens = rollouts.get(keys=TOKENS).batch
            responses = list(rows_of_responses(tokens))
            seconds += time.monotonic() - start_s
            num_tokens += sum(map(len, responses))
            scored = roles.reward.compute_scores(rollouts.union(rows)).get()
            scores: list[float] = scored.batch["scores"].tolist()
            self._add(sources, rows, responses, scores, num_samples)
        algorithm = self.parts.config.algorithm
        is_grpo = algorithm.adv_estimator == "grpo"
        self.signal = Signal(
            dict(sorted(sources.items())),
            num_samples=num_samples,
            max_response_length=limit,
            tokens_per_s=num_tokens / seconds,
            divides_by_std=is_grpo and algorithm.norm_adv_by_std_in_grpo,
        )

    def _add(
        self,
        sources: dict[str, Source],
        rows: DataProto,
        responses: Sequence[Tensor],
        scores: Sequence[float],
        num_samples: int,
    ) -> None:
        """Add the responses to some prompts. Those to one prompt are next to each other."""
        columns = rows.non_tensor_batch
        for first in range(0, len(responses), num_samples):
            source = sources[str(columns["data_source"][first])]
            group = slice(first, first + num_samples)
            source.groups.append(scores[group])
            for response in responses[group]:
                source.lengths.append(len(response))
                source.num_truncated += self._is_truncated(response)
            if len(source.groups) == 1:
                reward_model = columns["reward_model"][first] or {}
                question = question_of(columns["raw_prompt"][first])
                text = self.parts.tokenizer.decode(responses[first], skip_special_tokens=True)
                source.example = (
                    _short(question),
                    _short(text),
                    _short(reward_model.get("ground_truth")),
                )

    def _is_truncated(self, response: Tensor) -> bool:
        """Whether a response was cut at the limit, and did not just end there."""
        limit = self.parts.config.data.max_response_length
        return len(response) >= limit and int(response[-1]) not in self._stops


class _Passing(Observer):
    """Passes on what the run does, and what it waits for."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def on_phase(self, what: str) -> None:
        self._say(what)

    def on_notice(self, line: str) -> None:
        self._say(line)


def measure_signal(
    loaded: LoadedConfig, num_prompts: int, say: Callable[[str], object] = lambda line: None
) -> Signal:
    """Generate and score responses to some training prompts with the config's model, engine and
    reward. `say` gets a line for each part of it, and for each thing that it waits for."""
    with tempfile.TemporaryDirectory(prefix="rolepool-signal-") as folder:
        config = loaded.config
        changes = {
            "trainer.default_local_dir": str(Path(folder) / "run"),
            "trainer.logger": (),
            "trainer.resume_mode": "disable",
            "trainer.save_freq": -1,
            "trainer.val_only": True,
            "trainer.snapshot_freq": -1,
            "data.val_files": (),
        }
        for key, value in changes.items():
            config = config.with_value(key, value)
        run = _Measurement(replace(loaded, config=config), num_prompts)
        run.observer = _Passing(say)
        run.run()
    assert run.signal is not None
    return run.signal


def _short(value: object) -> str:
    """A value as one line, which is cut if it is long."""
    text = " ".join(str(value).split())
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}..."
