"""What other placements would cost: profiles from run folders and console logs, and predictions as
tables and plots.

Owns reading profiles, and how predictions are shown. `rolepool.planner` predicts.
"""

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from rolepool.config import Config, import_own_extensions, load_config
from rolepool.config.fitting import num_cores
from rolepool.config.loading import PlainValues
from rolepool.config.saved import saved_config
from rolepool.errors import ConfigError, RolepoolError, collected, explained, first_few
from rolepool.files import atomic_path
from rolepool.metrics.sharding_times import SHARDING_FILE, ShardingTimes
from rolepool.metrics.spans import DRIVER, RULE_POOL, Recorded, Span
from rolepool.placement import build_plan
from rolepool.placement.hardware import detect_gpu_memory, parse_inventory, parse_memory
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS
from rolepool.planner.layouts import places
from rolepool.planner.predict import Prediction, Predictor, ScheduleOf
from rolepool.planner.profile import SYNC, Profile, Recording
from rolepool.planner.search import search
from rolepool.report.console_logs import read_logs
from rolepool.report.metrics_by_step import TIMING
from rolepool.report.operations import timed_operations
from rolepool.report.placement_runs import overrides_of
from rolepool.report.plots import new_figure, style
from rolepool.report.run import Run, parts_of, read_run
from rolepool.report.tables import TABLES

Answer = tuple[dict[str, Prediction], list[str]]
TABLE_WIDTH = 180
MAX_PATH = 4
"""Operations of a critical path that are shown."""


def read_recordings(paths: Sequence[str | Path], num_gpus: int | None) -> list[Recording]:
    """What runs recorded, one entry for each placement of each run. A console log counts as a run
    on `num_gpus` GPUs of one node, in one pool."""
    found: list[Recording] = []
    for path in map(Path, paths):
        found += (
            recordings_of(read_run(path)) if path.is_dir() else _recordings_of_log(path, num_gpus)
        )
    if len({identity_of(one.config) for one in found}) > 1:
        problem = "the runs have different models or devices, so they are not one profile"
        raise ConfigError(f"predict: {problem}; give runs of the same models on the same device")
    return found


def recordings_of(run: Run) -> list[Recording]:
    """What a run recorded with each of its placements."""
    parts = [part for part in parts_of(run) if part.plans and part.spans]
    if not run.config or not parts:
        raise ConfigError(
            f"run {run.folder}: has no config, plan or spans, so nothing can be predicted from it"
        )
    loaded = saved_config(run.config, run.folder)
    if loaded.unknown_names:
        names = first_few(loaded.unknown_names, 3)
        fix = "if you trust its extensions, name them: --set trainer.extensions=[...]"
        raise ConfigError(
            f"run {run.folder}: {names}: not known, and what a run names is not imported; {fix}"
        )
    config = loaded.config
    measured = run.read_whole(SHARDING_FILE, ShardingTimes.model_validate_json)
    times = measured.times if measured is not None else []
    return [Recording(config, part.plans[0].plan, part.spans, times) for part in parts]


def identity_of(config: Config) -> tuple[Any, ...]:
    """What runs of one profile have in common."""
    paths = [config.at(spec.model).path for spec in ROLE_SPECS.values()]
    return config.trainer.device, *paths


def _recordings_of_log(path: Path, num_gpus: int | None) -> Iterator[Recording]:
    """A console log as a recording: one call of each operation in each step, one after another."""
    logs = read_logs([path])
    if num_gpus is None:
        raise ConfigError(
            f"predict {path}: a console log does not tell the number of GPUs; give it with --gpus"
        )
    for metrics in logs.values():
        names = timed_operations(metrics)
        words = [f"trainer.n_gpus_per_node={num_gpus}", "trainer.device=cuda"]
        words += (
            ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
            if "values" not in names
            else []
        )
        words.append(
            f"actor_rollout_ref.actor.use_kl_loss={any(f'{TIMING}ref' in row for row in metrics.values())}"
        )
        config = load_config([], words).config
        plan = build_plan(config)
        roles = {one.name: role for role, spec in ROLE_SPECS.items() for one in spec.operations}
        num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n // num_gpus
        spans: list[Recorded] = []
        now = 0.0
        for step, row in metrics.items():
            if not all(
                math.isfinite(value)
                for name, value in row.items()
                if name.startswith((TIMING, "perf/"))
            ):
                continue
            tokens = int(row.get("perf/total_num_tokens", 1.0)) // num_gpus
            for name in (name for name in OPERATIONS if name in names or name == SYNC):
                seconds, role, call = row.get(f"{TIMING}{name}", 0.0), roles.get(name), len(spans)
                pool = DRIVER if role is None else plan.roles.get(role, RULE_POOL)
                span = Span(
                    pool,
                    role or "trainer",
                    0,
                    name,
                    now,
                    now,
                    now + seconds,
                    call=call,
                    after=(call - 1,),
                )
                spans.append(
                    Recorded(step, name, span._replace(num_rows=num_rows, num_tokens=tokens))
                )
                now += seconds
        yield Recording(config, plan, spans)


def other_placements(run: Run) -> list[Prediction]:
    """The placement of a run, and the best other ones on the same GPUs, predicted from the run
    itself. Empty if that is not possible: an older version recorded no schedule, and pools that
    share GPUs slow each other down."""
    schedule = run.plans[-1].schedule if run.plans else None
    if schedule is None or run.plans[-1].plan.sharing_pools:
        return []
    gpus = [gpu for sample in run.monitor for gpu in sample["gpus"]]
    memory = min(
        (gpu["memory_total_bytes"] for gpu in gpus if gpu.get("memory_total_bytes")), default=None
    )
    # A run with extensions has roles and operations that are not known here, and a damaged one has
    # other surprises.
    with suppress(RolepoolError, LookupError, ValueError, ArithmeticError):
        recording = recordings_of(run)[-1]
        config, plan = recording.config, recording.plan
        predictor = Predictor(Profile([recording]), lambda _: schedule, gpu_memory_bytes=memory)
        own, best = (
            predictor.predict("", config, plan),
            search(predictor, config, plan.gpus_per_node),
        )
        return [own, *(one for one in best if places(one.plan) != places(plan))]
    return []


class Request:
    """What `rolepool predict` is asked. Each answer has predictions with a label, and why others
    are not possible."""

    def __init__(self, options: Namespace, schedule_of: ScheduleOf) -> None:
        import_own_extensions(options.set)
        recordings = read_recordings(options.runs, options.gpus)
        config, inventory = recordings[-1].config, recordings[-1].plan.gpus_per_node
        if options.gpus is not None or options.inventory is not None:
            inventory = parse_inventory(options.inventory or str(options.gpus))
        if options.set:
            config = load_config([PlainValues(config.model_dump(mode="json"))], options.set).config
        with explained(
            f"--speed {' '.join(options.speed)}",
            "write factors, such as --speed rollout=2",
            ValueError,
        ):
            speeds = {
                name: float(factor)
                for name, _, factor in (word.partition("=") for word in options.speed)
            }
            if not all(0 < factor < math.inf for factor in speeds.values()):
                raise ValueError("a factor must be over 0")
        memory = (
            parse_memory(options.gpu_memory)
            if options.gpu_memory is not None
            else detect_gpu_memory()
        )
        is_here = inventory == recordings[-1].plan.gpus_per_node and len(inventory) == 1
        cores, profile = num_cores() if is_here else None, Profile(recordings)
        self.predictor = Predictor(profile, schedule_of, memory, cores, speeds)
        self.config, self.inventory, self.objective = config, inventory, options.objective
        measured = read_recordings(options.measured, options.gpus)
        work = [config.at(key) for key in TABLES.work_keys]
        self.measured = [
            one for one in measured if [one.config.at(key) for key in TABLES.work_keys] == work
        ]

    def placements(self, words: Sequence[str]) -> Answer:
        """The placements that these words name."""
        found: dict[str, Prediction] = {}
        problems: list[str] = []
        sizes = [
            f"trainer.nnodes={len(self.inventory)}",
            f"trainer.n_gpus_per_node={max(self.inventory)}",
        ]
        for placement in words:
            overrides = [word for part in placement.split() for word in overrides_of(part)]
            with collected(problems, f"{placement}: "):
                config = load_config(
                    [without_placement(self.config, overrides)], [*sizes, *overrides]
                ).config
                is_sized = any(
                    word.startswith(("trainer.nnodes", "trainer.n_gpus_per_node"))
                    for word in overrides
                )
                plan = build_plan(config, None if is_sized else self.inventory, take_all=True)
                found[placement] = self.predictor.predict(placement, config, plan)
        return found, problems

    def search(self) -> Answer:
        """The best placements."""
        found = search(self.predictor, self.config, self.inventory, self.objective)
        return {str(number): one for number, one in enumerate(found, 1)}, []

    def scaling(self, text: str) -> Answer:
        """The best placement for each number of GPUs, on nodes of the profile's size."""
        found: dict[str, Prediction] = {}
        problems: list[str] = []
        per_node = max(self.inventory)
        for number in sorted({sum(parse_inventory(word)) for word in text.split(",")}):
            inventory = [per_node] * (number // per_node) + (
                [number % per_node] if number % per_node else []
            )
            with collected(problems, f"{number} GPUs: "):
                found[str(number)] = search(self.predictor, self.config, inventory, self.objective)[
                    0
                ]
        return found, problems

    def as_table(self, first: str, predictions: Mapping[str, Prediction]) -> Table:
        """The predictions, with the measured times of the same placements. `first` is the title of
        the labels."""
        by_place = [
            (places(one.plan), one.step_s) for one in self.measured if not math.isnan(one.step_s)
        ]
        has_memory = any(one.memory_gib for one in predictions.values())
        table = Table(box=None, pad_edge=False, header_style="bold")
        columns = [
            first,
            "step",
            "from",
            "to",
            "tokens/s per GPU",
            "pools, and how busy they are",
            "a step waits for",
        ]
        columns += ["GiB"] * has_memory + ["measured", "error"] * bool(by_place)
        for name in columns:
            is_text = name in (first, *columns[5:7])
            table.add_column(
                name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
            )
        for label, one in predictions.items():
            pools = [
                f"{name} [{pool.world_size}] {one.busy.get(name, 0):.0%}"
                for name, pool in one.plan.pools.items()
            ]
            cells = [
                label,
                *(f"{seconds:.3g} s" for seconds in (one.step_s, one.low_s, one.high_s)),
            ]
            cells += [
                f"{one.num_tokens / one.step_s / len(one.plan.slots):,.0f}",
                ", ".join(pools),
                path_in_words(one),
            ]
            cells += [f"{max(one.memory_gib.values(), default=0):.0f}"] * has_memory
            for measured_s in [seconds for slots, seconds in by_place if slots == places(one.plan)][
                :1
            ]:
                cells += [f"{measured_s:.3g} s", f"{one.step_s / measured_s - 1:+.0%}"]
            table.add_row(*cells)
        return table


def without_placement(config: Config, words: Iterable[str]) -> PlainValues:
    """The values of a config. If the words name a strategy, the keys of the old strategy are
    removed, because they do not suit another one."""
    content = config.model_dump(mode="json")
    if any(word.startswith("placement.strategy=") for word in words):
        for key in ("split", "pools", "roles"):
            del content["placement"][key]
    return PlainValues(content)


def path_in_words(one: Prediction) -> str:
    """The operations that a step waits for longest, without those under 1%."""
    longest = sorted(
        ((seconds / one.step_s, operation) for operation, seconds in one.path), reverse=True
    )[:MAX_PATH]
    return ", ".join(f"{operation} {share:.0%}" for share, operation in longest if share >= 0.01)


def why_best(best: Prediction, *others: Prediction) -> str:
    """Why the first of several predictions is the best one, in words."""
    waits = path_in_words(best)
    text = f"The best placement takes {best.step_s:.3g} s per step; {waits} of it is what a step waits for."
    if others:
        second = others[0]
        factor, waits = second.step_s / best.step_s, path_in_words(second)
        text += f" The next one takes {factor:.2f} times as long (it waits for {waits})."
        if second.step_s < best.high_s:
            text += " The intervals of the two overlap, so only a run can tell which one is faster."
    return text


def plot_scaling(best: Mapping[str, Prediction], path: Path) -> None:
    """Write a plot of the step time against the number of GPUs."""
    with style():
        figure = new_figure(4.0)
        axes = figure.subplots()
        counts, times = list(map(int, best)), list(best.values())
        axes.plot(counts, [one.step_s for one in times], marker="o")
        axes.fill_between(
            counts, [one.low_s for one in times], [one.high_s for one in times], alpha=0.2
        )
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="predicted step time (s)")
        with atomic_path(path) as temporary:
            figure.savefig(temporary)
