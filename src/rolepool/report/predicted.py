"""What other placements would cost, as tables, words and plots.

Owns how predictions are asked for and shown. `rolepool.planner` predicts.
"""

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from rolepool.config import Config, import_own_extensions, load_config
from rolepool.config.fitting import num_cores
from rolepool.config.loading import PlainValues
from rolepool.errors import RolepoolError, collected, explained
from rolepool.files import atomic_path
from rolepool.placement import build_plan
from rolepool.placement.hardware import detect_gpu_memory, parse_inventory, parse_memory
from rolepool.planner.layouts import places
from rolepool.planner.predict import Prediction, Predictor, ScheduleOf
from rolepool.planner.profile import Profile, Recording
from rolepool.planner.search import search
from rolepool.report.placement_runs import overrides_of
from rolepool.report.plots import new_figure, style
from rolepool.report.recordings import read_recordings, recordings_of
from rolepool.report.run import ReadRun
from rolepool.report.tables import TABLES

SIZE_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")
TABLE_WIDTH = 180
MAX_PATH = 4
"""Operations of a critical path that are shown."""


def other_placements(run: ReadRun) -> list[Prediction]:
    """The placement of a run, and the best other ones on the same GPUs, predicted from the run
    itself. Empty if that is not possible: an older version recorded no schedule, and pools that
    share GPUs slow each other down."""
    schedule = run.plans[-1].schedule if run.plans else None
    if schedule is None or run.plans[-1].plan.sharing_pools:
        return []
    # A run with extensions has roles and operations that are not known here, and a damaged one has
    # other surprises.
    with suppress(RolepoolError, LookupError, ValueError, ArithmeticError):
        recording = recordings_of(run)[-1]
        predictor = Predictor(
            profile=Profile([recording]),
            schedule_of=lambda _: schedule,
            gpu_memory_bytes=_gpu_memory_bytes(run),
        )
        plan = recording.plan
        own = predictor.predict("", recording.config, plan)
        predictions = [own]
        for prediction in search(predictor, recording.config, plan.gpus_per_node):
            if places(prediction.plan) != places(plan):
                predictions.append(prediction)
        return predictions
    return []


def _gpu_memory_bytes(run: ReadRun) -> int | None:
    """The memory of the smallest GPU that the run has measured; None if it has measured none."""
    sizes: list[int] = []
    for sample in run.monitor:
        for gpu in sample["gpus"]:
            num_bytes = gpu.get("memory_total_bytes")
            if num_bytes:
                sizes.append(num_bytes)
    return min(sizes, default=None)


class Answer(NamedTuple):
    """Predictions with a label, and why others are not possible."""

    predictions: dict[str, Prediction]
    problems: list[str]


class PredictRequest:
    """What `rolepool predict` is asked."""

    def __init__(self, options: Namespace, schedule_of: ScheduleOf) -> None:
        import_own_extensions(options.set)
        recordings = read_recordings(options.runs, options.gpus)
        newest = recordings[-1]
        self.config = newest.config
        self.inventory = newest.plan.gpus_per_node
        self.objective = options.objective
        if options.gpus is not None or options.inventory is not None:
            self.inventory = parse_inventory(options.inventory or str(options.gpus))
        if options.set:
            values = PlainValues(self.config.model_dump(mode="json"))
            self.config = load_config([values], options.set).config
        speeds = _parse_speeds(options.speed)
        gpu_memory_bytes: int | None
        if options.gpu_memory is not None:
            gpu_memory_bytes = parse_memory(options.gpu_memory)
        else:
            gpu_memory_bytes = detect_gpu_memory()
        cores = None
        if self.inventory == newest.plan.gpus_per_node and len(self.inventory) == 1:
            # The prediction is about this machine.
            cores = num_cores()
        self.predictor = Predictor(
            Profile(recordings),
            schedule_of,
            gpu_memory_bytes=gpu_memory_bytes,
            num_cores=cores,
            speeds=speeds,
        )
        work = _work_of(self.config)
        self.measured: list[Recording] = []
        """Other runs that do the same work."""
        for recording in read_recordings(options.measured, options.gpus):
            if _work_of(recording.config) == work:
                self.measured.append(recording)

    def placements(self, words: Sequence[str]) -> Answer:
        """The placements that these words name."""
        predictions: dict[str, Prediction] = {}
        problems: list[str] = []
        sizes = [
            f"trainer.nnodes={len(self.inventory)}",
            f"trainer.n_gpus_per_node={max(self.inventory)}",
        ]
        for placement in words:
            overrides: list[str] = []
            for word in placement.split():
                overrides += overrides_of(word)
            with collected(problems, f"{placement}: "):
                base = without_placement(self.config, overrides)
                config = load_config([base], [*sizes, *overrides]).config
                inventory: list[int] | None = list(self.inventory)
                # A placement that sets the number of GPUs itself gets that number.
                if any(override.startswith(SIZE_KEYS) for override in overrides):
                    inventory = None
                plan = build_plan(config, inventory, take_all=True)
                predictions[placement] = self.predictor.predict(placement, config, plan)
        return Answer(predictions, problems)

    def search(self) -> Answer:
        """The best placements."""
        best = search(self.predictor, self.config, self.inventory, self.objective)
        predictions: dict[str, Prediction] = {}
        for number, prediction in enumerate(best, 1):
            predictions[str(number)] = prediction
        return Answer(predictions, problems=[])

    def scaling(self, text: str) -> Answer:
        """The best placement for each number of GPUs, on nodes of the profile's size."""
        predictions: dict[str, Prediction] = {}
        problems: list[str] = []
        per_node = max(self.inventory)
        all_num_gpus = set()
        for word in text.split(","):
            all_num_gpus.add(sum(parse_inventory(word)))
        for num_gpus in sorted(all_num_gpus):
            num_whole_nodes, rest = divmod(num_gpus, per_node)
            inventory = [per_node] * num_whole_nodes
            if rest:
                inventory.append(rest)
            with collected(problems, f"{num_gpus} GPUs: "):
                best = search(self.predictor, self.config, inventory, self.objective)
                predictions[str(num_gpus)] = best[0]
        return Answer(predictions, problems)

    def as_table(self, first: str, predictions: Mapping[str, Prediction]) -> Table:
        """The predictions, with the measured times of the same placements. `first` is the title of
        the labels."""
        measured = []
        for recording in self.measured:
            if not math.isnan(recording.step_s):
                measured.append(recording)
        memory_is_known = any(prediction.memory_gib for prediction in predictions.values())
        rows: dict[str, dict[str, str]] = {}
        for label, prediction in predictions.items():
            row = _columns(prediction)
            if memory_is_known:
                most_gib = max(prediction.memory_gib.values(), default=0)
                row["GiB"] = f"{most_gib:.0f}"
            if measured:
                row.update(_measured_columns(prediction, measured))
            rows[label] = row

        return _table_of(first, rows)


def _table_of(first: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
    """A table of rows that have the same columns. `first` is the title of their labels."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    titles = next(iter(rows.values()), {})
    for title in titles:
        if title in TEXT_COLUMNS:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(
                title,
                justify="right",
                no_wrap=True,
                overflow="fold",
            )
    for label, row in rows.items():
        table.add_row(label, *row.values())
    return table


TEXT_COLUMNS = ("pools, and how busy they are", "a step waits for")


def _columns(prediction: Prediction) -> dict[str, str]:
    """What the table shows of each prediction, by the titles of the columns."""
    pools = []
    for name, pool in prediction.plan.pools.items():
        busy = prediction.busy.get(name, 0)
        pools.append(f"{name} [{pool.world_size}] {busy:.0%}")
    num_gpus = len(prediction.plan.slots)
    tokens_per_s = prediction.num_tokens / prediction.step_s / num_gpus
    return {
        "step": f"{prediction.step_s:.3g} s",
        "from": f"{prediction.low_s:.3g} s",
        "to": f"{prediction.high_s:.3g} s",
        "tokens/s per GPU": f"{tokens_per_s:,.0f}",
        "pools, and how busy they are": ", ".join(pools),
        "a step waits for": path_in_words(prediction),
    }


def _measured_columns(prediction: Prediction, measured: Iterable[Recording]) -> dict[str, str]:
    """The measured time of the same placement, and the error of the prediction; empty if it was
    not measured."""
    for recording in measured:
        if places(recording.plan) == places(prediction.plan):
            measured_s = recording.step_s
            error = prediction.step_s / measured_s - 1
            return {"measured": f"{measured_s:.3g} s", "error": f"{error:+.0%}"}
    return {"measured": "", "error": ""}


def _work_of(config: Config) -> list[object]:
    """The values of the keys that change what a step has to compute."""
    return [config.at(key) for key in TABLES.work_keys]


def _parse_speeds(words: Sequence[str]) -> dict[str, float]:
    """The factors of --speed, by operation or role."""
    fix = "write factors, such as --speed rollout=2"
    speeds = {}
    with explained(f"--speed {' '.join(words)}", fix, ValueError):
        for word in words:
            name, _, factor = word.partition("=")
            speeds[name] = float(factor)
        if not all(0 < factor < math.inf for factor in speeds.values()):
            raise ValueError("a factor must be over 0")
    return speeds


def without_placement(config: Config, words: Iterable[str]) -> PlainValues:
    """The values of a config. If the words name a strategy, the keys of the old strategy are
    removed, because they do not suit another one."""
    content = config.model_dump(mode="json")
    if any(word.startswith("placement.strategy=") for word in words):
        for key in ("split", "pools", "roles"):
            del content["placement"][key]
    return PlainValues(content)


def path_in_words(prediction: Prediction) -> str:
    """The operations that a step waits for longest, without those under 1%."""
    shares = []
    for operation, seconds in prediction.path:
        share = seconds / prediction.step_s
        if share >= 0.01:
            shares.append((share, operation))
    longest = sorted(shares, reverse=True)[:MAX_PATH]
    return ", ".join(f"{operation} {share:.0%}" for share, operation in longest)


def why_best(best: Prediction, *others: Prediction) -> str:
    """Why the first of several predictions is the best one, in words."""
    waits = path_in_words(best)
    text = f"The best placement takes {best.step_s:.3g} s per step; {waits} of it is what a step waits for."
    if others:
        second = others[0]
        factor = second.step_s / best.step_s
        text += f" The next one takes {factor:.2f} times as long (it waits for {path_in_words(second)})."
        if second.step_s < best.high_s:
            text += " The intervals of the two overlap, so only a run can tell which one is faster."
    return text


def plot_scaling(best: Mapping[str, Prediction], path: Path) -> None:
    """Write a plot of the step time against the number of GPUs."""
    counts = []
    step_s = []
    low_s = []
    high_s = []
    for num_gpus, prediction in best.items():
        counts.append(int(num_gpus))
        step_s.append(prediction.step_s)
        low_s.append(prediction.low_s)
        high_s.append(prediction.high_s)
    with style():
        figure = new_figure(4.0)
        axes = figure.subplots()
        axes.plot(counts, step_s, marker="o")
        axes.fill_between(counts, low_s, high_s, alpha=0.2)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GPUs",
            ylabel="predicted step time (s)",
        )
        with atomic_path(path) as temporary:
            figure.savefig(temporary)
