"""rolepool in Python: `import rolepool as rp`, then `rp.plan`, `rp.train` and `rp.Run`.

Owns the arguments of these functions. They do what the commands with these names do, with the same
messages. Slow imports wait until a function needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolepool.config import Config, LoadedConfig, loading, read_config
from rolepool.config.functions import import_extensions, only_reading
from rolepool.config.saved import load_saved
from rolepool.data.given import Data, DataFiles
from rolepool.data.reward_functions import PYTHON_FUNCTION
from rolepool.errors import ConfigError, PlacementError, collected, explained, logger
from rolepool.files import write_atomically
from rolepool.placement import build_plan
from rolepool.placement.checks import find_warnings
from rolepool.placement.hardware import detect_gpu_memory, parse_inventory, parse_memory
from rolepool.placement.render import PlanSummary as PlanSummary
from rolepool.planning import Hardware, checked_for_plan, summarise, summary_of

if TYPE_CHECKING:
    from rolepool.report.run import ReadRun
    from rolepool.trainer.console import OnStep, OnValidation

Source = str | Path | Mapping[str, Any] | LoadedConfig
"""A config file or the name of a recipe, keys with values, or a config that was loaded."""


def load_config(config: Source | Sequence[Source] = (), **keys: Any) -> LoadedConfig:
    """Load and check a config, as all commands do. Raises ConfigError with one line for each
    problem.

    `config` is a YAML file, the name of a recipe, a dict, a config that this function returned, or
    a list of them; the last one wins. `keys` win over `config`. Write them as nested dicts
    (`trainer={"save_freq": 5}`) or as dotted keys (`**{"trainer.save_freq": 5}`).

    The result has the values in `.config`, such as `.config.trainer.save_freq`. `.to_yaml()`
    returns all keys as text, and `.explain("trainer.save_freq")` says what a key means.
    """
    return loading.load_config(_files(config, keys))


def plan(
    config: Source | Sequence[Source] = (),
    *,
    model: str | Path | None = None,
    placement: str | Mapping[str, Any] | None = None,
    inventory: str | Sequence[int] | None = None,
    gpu_memory: str | float | None = None,
    **keys: Any,
) -> PlanSummary:
    """Which roles run on which GPUs, whether they fit in memory, and what runs at the same time.

    `config`, `model`, `placement` and `keys` are those of `train`. `inventory` is the number of
    GPUs on each node, such as `[8, 8]`. `gpu_memory` is the memory of one GPU in GiB; the default
    is that of this machine's GPU. Starts no process and imports neither torch nor Ray. Raises
    PlacementError if the roles cannot be placed.
    """
    if inventory is not None and not isinstance(inventory, str):
        inventory = ",".join(map(str, inventory))
    nodes = None if inventory is None else parse_inventory(inventory)
    if gpu_memory is None:
        memory_bytes = detect_gpu_memory()
    else:
        memory_bytes = parse_memory(str(gpu_memory))
    hardware = Hardware(nodes, memory_bytes)
    sources = [*_files(config, keys), _named(model, placement)]
    draft = read_config(sources)
    loaded = checked_for_plan(draft, hardware)
    summary = summarise(loaded, hardware)
    PlacementError.raise_if_any(summary.problems)
    return summary


def train(
    model: str | Path | None = None,
    data: Data | Mapping[str, Any] | None = None,
    reward: Callable[..., Any] | str | Path | None = None,
    placement: str | Mapping[str, Any] | None = None,
    *,
    val_data: Data | None = None,
    config: Source | Sequence[Source] = (),
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
    **keys: Any,
) -> Run:
    """Train, and return the finished run. Resumes from the newest checkpoint of the run folder if
    there is one.

    - `model`: a Hugging Face model folder or hub id (`actor_rollout_ref.model.path`).
    - `data`, `val_data`: files (`data.train_files`, `data.val_files`), a list of rows (dicts), or a `datasets.Dataset`.
      Rows are written as JSONL files below `data` in the run folder. `data` may also be a dict with keys of the section
      `data`.
    - `reward`: a function with the parameters `data_source`, `solution_str`, `ground_truth` and `extra_info`, which
      returns a number, or a dict with the number as `score` and other numbers to log. It may be async, and a function
      with a parameter `completions` or `solution_strs` gets a whole batch (docs/rewards.md). A function that is defined
      in a notebook or script is copied to the reward workers; a function of a module is imported there. May also be a
      Python file (`custom_reward_function.path`). Default: the built-in rules.
    - `placement`: a strategy, such as `"split"`, or a dict with keys of the section `placement`.
    - `config`, `keys`: see `load_config`. The arguments above win over them.
    - `on_step(step, metrics)` is called after each step. `on_validation(step, metrics, samples)` is called after each
      validation; a sample has the prompt, the response, the ground truth and the score.

    Ctrl-C (in a notebook: interrupt) finishes the step, saves it if the run saves checkpoints, and
    raises KeyboardInterrupt. Errors that you can fix are RolepoolErrors. May be called again in the
    same process.
    """
    from rolepool.trainer.main_ppo import start
    from rolepool.trainer.start_checks import checked

    problems: list[str] = []
    sources = [*_files(config, keys), _named(model, placement)]
    if isinstance(data, Mapping):
        sources.append({"data": data})
        data = None
    function = reward if callable(reward) else None
    if function is not None:
        name = getattr(function, "__name__", type(function).__name__)
        keys_of_reward = {"path": PYTHON_FUNCTION, "name": name}
        sources.append({"custom_reward_function": keys_of_reward})
        with collected(problems):
            _check_can_be_sent(function, name)
    elif reward is not None:
        sources.append({"custom_reward_function.path": reward})
    draft = read_config(sources)
    with DataFiles(draft.loaded.config) as files:
        keys_of_data: dict[str, Any] = {}
        rows_of_splits = {"train": data, "val": val_data}
        for split, rows in rows_of_splits.items():
            if rows is None:
                continue
            key = f"data.{split}_files"
            keys_of_data[key] = []
            with collected(problems):
                keys_of_data[key] = files.of(rows, split)
        draft = read_config([*sources, keys_of_data])
        wrong_keys = [key for key, paths in keys_of_data.items() if not paths]
        loaded = checked(draft.with_problems(problems, wrong_keys), function)
        start(loaded, function, on_step, on_validation)
    return Run(loaded.config.trainer.default_local_dir)


class Run:
    """A run folder, such as `Run("runs/demo")`: what `train` returns. The run may still be
    training."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._read()  # raises ConfigError if it is not a run folder

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _read(self, last_bytes: float = 0) -> ReadRun:
        from rolepool.report.run import read_run

        return read_run(self.folder, last_bytes)

    @property
    def config(self) -> Config:
        """All keys of the run, such as `run.config.trainer.save_freq`."""
        return load_saved(self.folder).config

    @property
    def plan(self) -> PlanSummary:
        """The plan of the run, with the memory estimate for this machine's GPU."""
        recorded = self._read().plans
        if not recorded:
            raise ConfigError(
                f"run {self.folder}: has no readable plan.json; use rp.plan with the config of the run"
            )
        newest = recorded[-1]
        with only_reading():
            config = self.config
            return summary_of(
                config,
                newest.plan,
                detect_gpu_memory(),
                replan=build_plan,
                warnings=list(find_warnings(config, newest.plan, on_cpus=False)),
                schedule=newest.schedule,
            )

    def metrics(self) -> Any:
        """The metrics of all steps: a pandas DataFrame with one row per step, or a list of dicts if
        pandas is not installed. Metrics of a validation or a checkpoint are in the row of its
        step."""
        rows = self._read().metrics
        if find_spec("pandas") is None:
            return [{"step": step, **row} for step, row in rows.items()]
        import pandas

        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("step")

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report page and return its path; default: report.html in the run folder."""
        from rolepool.report.page import render

        page = self.folder / "report.html" if path is None else Path(path)
        with only_reading(), explained(f"report {page}: cannot be written", "give another path"):
            run = self._read(last_bytes=math.inf)
            return write_atomically(page, [render(run)])

    def move(
        self,
        *words: str,
        timeout_s: float = 600.0,
        on_progress: Callable[[str], object] = logger.info,
    ) -> str:
        """Ask the run, which must be training in another process, to change its placement, such as
        `run.move("placement.strategy=split")`. Waits until it has moved, and returns what it did.
        `on_progress` gets a line every few seconds."""
        from rolepool.trainer.moves import ask_run, check_move, check_words, is_known, moved

        check_words(words)
        saved = load_saved(self.folder)
        if is_known(saved, words):  # otherwise only the run itself can check it
            with only_reading(*words):
                plan, loaded = moved(saved.config, words)
                gpu_memory_bytes = None if plan.device == "cpu" else detect_gpu_memory()
                check_move(
                    loaded.config,
                    plan,
                    gpu_memory_bytes,
                    before=self._read().plan,
                )
        return ask_run(self.folder, words, timeout_s, on_progress)

    def export(self, folder: str | Path, step: int | None = None, role: str = "actor") -> Path:
        """Write the model of a checkpoint as a Hugging Face model folder and return this folder;
        default: the actor of the newest checkpoint."""
        from rolepool.trainer.checkpoint import export_run

        with only_reading():
            export_run(self.folder, step, Path(folder), role)
        return Path(folder)


# From arguments to keys


def _files(
    config: Source | Sequence[Source], keys: Mapping[str, Any]
) -> list[loading.ConfigSource]:
    """All that a call names, for the loader, which reads it together: one source may set a key that
    another needs."""
    if isinstance(config, str | Path | Mapping | LoadedConfig):
        return [_as_file(config), keys]
    files = [_as_file(source) for source in config]
    return [*files, keys]


def _as_file(source: Source) -> loading.ConfigSource:
    """A source in a form that the loader of files reads: a name, or keys with values."""
    if isinstance(source, LoadedConfig):
        # They may have been loaded in another process.
        import_extensions(source.config.trainer.extensions)
        # Only the keys that were set, so that others still follow them.
        values = {key: source.value_of(key) for key in sorted(source.set_keys)}
        return loading.PlainValues(values)
    if isinstance(source, Mapping):
        return source
    return str(source)


def _named(
    model: str | Path | None,
    placement: str | Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The keys that the arguments of these names stand for."""
    keys: dict[str, Any] = {}
    if model is not None:
        keys["actor_rollout_ref.model.path"] = model
    if isinstance(placement, Mapping):
        keys["placement"] = placement
    elif placement is not None:
        keys["placement"] = {"strategy": placement}
    return keys


def _check_can_be_sent(function: Callable[..., Any], name: str) -> None:
    """Raise ConfigError if a reward function cannot be sent to other processes."""
    import cloudpickle

    what = f"reward={name}: cannot be sent to the reward workers"
    fix = "create what cannot be copied inside the function"
    with explained(what, fix, Exception):  # an object of the user may raise anything
        cloudpickle.dumps(function)
