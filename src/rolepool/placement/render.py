"""A plan with what is known about it, as text for people and as JSON for programs: what `rolepool
plan` prints.

Owns the text: a grid of nodes and GPUs, a table of pools, what overlaps, and what does not fit.
Computes nothing: every figure comes from the plan and the estimate.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from string import ascii_uppercase

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rolepool.placement.checks import Advice
from rolepool.placement.estimate import (
    GIB,
    PROCESS_OVERHEAD_BYTES,
    SHARED_MEMORY,
    MemoryEstimate,
    MicroBatch,
    PoolMemory,
)
from rolepool.placement.plan import Plan
from rolepool.terminal import Terminal
from rolepool.units import show_bytes

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
NO_WRAP = ("node", "ranks", "memory", "memory per GPU")
"""Titles of columns of text whose cells are not cut into several lines."""
MAX_ROWS_ALIKE = 4
"""More nodes than this that look the same are shown as one row."""
MAX_COLUMNS = 16
"""Most GPUs of a node that are shown."""
FEW_COLUMNS = 8
"""Most GPUs of a node that have wide columns."""
MIN_WIDTH = 80
"""No line is longer in a terminal of this width, or if the output is not a terminal."""
MAX_NAME = 24
"""Longer names of pools may be cut into several lines."""
MEMORY_COLUMNS = (
    "weights",
    "gradients",
    "optimizer",
    "kv_cache",
    "activations",
    "logits",
    "working",
    "idle",
)
"""The figures of a role that are shown, as `RoleMemory` names them."""


@dataclass(frozen=True, repr=False)
class PlanSummary:
    """A plan and what is known about it. `str()` of it is the text that `rolepool plan` prints."""

    plan: Plan
    """The pool of each role, and the GPUs of each pool."""
    overlaps: Sequence[tuple[str, str]]
    """Pairs of operations that can run at the same time."""
    memory: MemoryEstimate
    """The estimated memory of each pool and role."""
    problems: Sequence[str]
    """Why training cannot start; `plan` raises them."""
    warnings: Sequence[str]
    """What is allowed, and probably not wanted."""
    advice: Sequence[Advice]
    """Overrides that make the plan fit in memory, or come closer to it; empty if it fits."""
    engines: Mapping[str, str | None]
    """For each rollout engine, why it cannot run the policy, or None if it can; empty if the model
    is not on disk."""
    snapshot_bytes: int
    """The most shared memory that a node needs for snapshots; 0 if none are taken or their size is
    not known."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What training does, in words and by subject, if several keys or files decide it."""

    def __str__(self) -> str:
        return Text.from_ansi(self.to_terminal()).plain

    __repr__ = __str__

    def to_terminal(self) -> str:
        """The text, with colours if standard output is a terminal."""
        plan = self.plan
        memory = self.memory
        console = Terminal(force_jupyter=False)
        if console.is_terminal:
            console.width = max(console.width, MIN_WIDTH)
        else:
            console.width = MIN_WIDTH
        parts: list[RenderableType] = [
            Text(_headline(plan), style="bold"),
            "",
            *_grid(plan),
            _pool_table(plan, memory),
            "",
        ]
        if memory.pools and plan.device != "cpu":
            parts.append(_memory_table(plan, memory))
            parts.append("")
        lines: list[Text] = []
        for title, text in _notes(self):
            lines.append(Text.assemble((f"{title}: ", "bold"), text))
        for warning in _warnings(memory, self.advice):
            lines.append(Text(warning, style="yellow"))
        for line in lines:
            if len(line) > console.width:
                pieces = line.wrap(console, console.width - 4)
                line = Text("\n    ").join(pieces)
            parts.append(line)
        with console.capture() as capture:
            console.print(Group(*parts))
        return capture.get().rstrip("\n")

    def to_json(self) -> str:
        """What `rolepool plan --json` prints."""
        memory = self.memory
        pools: dict[str, object] = {}
        for name, pool in memory.pools.items():
            pools[name] = _pool_json(pool)
        micro_batches: dict[str, object] = {}
        for operation, size in memory.micro_batches.items():
            micro_batches[operation] = _size_json(size)
        advice: list[dict[str, str | int]] = []
        for item in self.advice:
            advice.append({"override": item.override, "excess_bytes": item.excess})

        document = self.plan.model_dump(mode="json")
        document["overlaps"] = self.overlaps
        document["memory"] = {
            "pools": pools,
            "micro_batches": micro_batches,
            "unknown": memory.unknown,
            "snapshot_bytes": self.snapshot_bytes,
        }
        document["engines"] = dict(self.engines)
        document["settings"] = dict(self.settings)
        document["problems"] = list(self.problems)
        document["advice"] = advice
        return json.dumps(document, indent=2)


def _pool_json(pool: PoolMemory) -> dict[str, object]:
    roles: dict[str, dict[str, int]] = {}
    for role, memory in pool.roles.items():
        figures: dict[str, int] = {}
        for column in MEMORY_COLUMNS:
            figures[f"{column}_bytes"] = getattr(memory, column)
        roles[role] = figures
    return {
        "roles": roles,
        "overhead_bytes": PROCESS_OVERHEAD_BYTES,
        "peak_bytes": pool.peak,
        "peak_role": pool.peak_role,
        "least_bytes": pool.least,
        "limit_bytes": pool.limit,
        "fits": None if pool.limit is None else not pool.excess,
    }


def _size_json(size: MicroBatch) -> dict[str, int | None]:
    return {
        "rows": size.rows,
        "tokens": size.tokens if size.rows is None else None,
        "is_chosen": size.is_chosen,
        "recomputes": size.recomputes,
    }


def _headline(plan: Plan) -> str:
    """How many pools are on how many GPUs."""
    sizes: list[str] = []
    for num_gpus, equal_nodes in groupby(plan.gpus_per_node):
        num_nodes = len(list(equal_nodes))
        sizes.append(f"{num_nodes} x {num_gpus}")
    kind = "CPU slots" if plan.device == "cpu" else "GPUs"
    used = f"{len(plan.slots)} of {sum(plan.gpus_per_node)} {kind}"
    gpus = f"{used} (nodes x {kind}: {', '.join(sizes)})"
    plural = "s" if len(plan.pools) > 1 else ""
    return f"{len(plan.pools)} pool{plural} on {gpus}"


def _letter(index: int, rank: int | str = "") -> Text:
    """A pool, or one process of it, in the pool's colour."""
    letter = ascii_uppercase[index] if index < 26 else f"P{index}"
    return Text(f"{letter}{rank}", style=COLOURS[index % len(COLOURS)])


def _table(*titles: str, numbers: Sequence[str] = (), gap: int = 2) -> Table:
    """A table without lines: columns of text, and then columns of numbers."""
    columns: list[Column] = []
    for title in titles:
        columns.append(Column(title, overflow="fold", no_wrap=title in NO_WRAP))
    for title in numbers:
        columns.append(Column(title, justify="right", vertical="bottom", no_wrap=True))
    return Table(
        *columns,
        box=None,
        pad_edge=False,
        padding=(0, gap, 0, 0),
        header_style="dim",
    )


def _grid(plan: Plan) -> list[RenderableType]:
    """One row per node and one column per GPU; a cell holds the letter of the pool and the rank."""
    # For each GPU of each node its processes: the index of the pool, and the rank.
    grid: list[list[list[tuple[int, int]]]] = []
    for num_gpus in plan.gpus_per_node:
        grid.append([[] for _ in range(num_gpus)])
    for index, pool in enumerate(plan.pools.values()):
        for rank, slot in enumerate(pool.slots):
            processes_of_gpu = grid[slot.node][slot.gpu]
            processes_of_gpu.append((index, rank))

    def pools_on(node: int) -> list[list[int]]:
        """The pools on each GPU of a node. Nodes with equal lists look the same."""
        pools_of_gpus: list[list[int]] = []
        for processes in grid[node]:
            pools_of_gpus.append([index for index, _ in processes])
        return pools_of_gpus

    width = max(plan.gpus_per_node)
    if width > FEW_COLUMNS:
        word = ""
    elif plan.device == "cpu":
        word = "slot "
    else:
        word = "GPU "
    titles = [f"{word}{gpu}" for gpu in range(min(width, MAX_COLUMNS))]
    gap = 3 if width <= FEW_COLUMNS else 1
    table = _table("node", *titles, gap=gap)

    def add_row(title: str, node: int, *, with_rank: bool) -> None:
        shown = grid[node][:MAX_COLUMNS]
        cells = [_cell(processes, with_rank=with_rank) for processes in shown]
        table.add_row(title, *cells)

    for _, group in groupby(range(len(grid)), key=pools_on):
        nodes = list(group)
        if len(nodes) > MAX_ROWS_ALIKE:
            first = nodes[0]
            last = nodes[-1]
            add_row(f"{first}-{last}", first, with_rank=False)
            continue
        for node in nodes:
            add_row(str(node), node, with_rank=True)
    num_hidden = width - MAX_COLUMNS
    if num_hidden > 0:
        return [table, "", f"... {num_hidden} more", ""]
    return [table, ""]


def _cell(processes: Sequence[tuple[int, int]], *, with_rank: bool) -> Text:
    """What the grid shows for a GPU with these processes."""
    if not processes:
        return Text(".", style="dim")
    letters: list[Text] = []
    for index, rank in processes:
        letters.append(_letter(index, rank if with_rank else ""))
    return Text(" ").join(letters)


def _pool_table(plan: Plan, estimate: MemoryEstimate) -> Table:
    title = "memory" if plan.device == "cpu" else "memory per GPU"
    table = _table("", "pool", "ranks", "roles", title)
    table.columns[1].no_wrap = max(map(len, plan.pools)) <= MAX_NAME
    for index, (name, pool) in enumerate(plan.pools.items()):
        letter = _letter(index)
        share = "" if pool.share == 1 else f" x {pool.share:g} GPU"
        memory = estimate.pools.get(name)
        if plan.device == "cpu":
            text = Text("host memory", style="dim")
        elif memory is None:
            text = Text("memory unknown", style="dim")
        else:
            text = _memory_in_words(memory)
        table.add_row(
            letter,
            Text(name, style=letter.style),
            f"{pool.world_size}{share}",
            Text(", ".join(pool.roles), style=letter.style),
            text,
        )
    return table


def _memory_in_words(memory: PoolMemory) -> Text:
    """The peak of a pool, and whether it fits."""
    if memory.limit is None:
        limit = [Text(" GiB")]
    elif memory.excess:
        limit = [Text(f" of {memory.limit / GIB:.1f} GiB, ")]
        limit.append(Text("does not fit", style="bold red"))
    else:
        limit = [Text(f" of {memory.limit / GIB:.1f} GiB, ")]
        limit.append(Text("fits", style="green"))
    least = ""
    if memory.least < memory.peak:
        least = f"\n(least {memory.least / GIB:.1f})"
    return Text.assemble(f"{memory.peak / GIB:.1f}", *limit, least)


def _memory_table(plan: Plan, estimate: MemoryEstimate) -> Table:
    """GiB of each role on one GPU. A pool's peak is one role that computes, the others idle, and
    the process itself."""
    titles = [column.replace("_", "\n") for column in MEMORY_COLUMNS]
    table = _table("GiB per GPU", numbers=titles, gap=1)
    for index, name in enumerate(plan.pools):
        if name not in estimate.pools:
            continue
        style = _letter(index).style
        pool = estimate.pools[name]
        for role, memory in pool.roles.items():
            cells: list[str] = []
            for column in MEMORY_COLUMNS:
                figure = getattr(memory, column) / GIB
                cells.append(f"{figure:.1f}" if figure else ".")
            title = Text(role, style=style)
            table.add_row(title, *cells)
    return table


def _notes(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    """The title and the text of each note."""
    plan = summary.plan
    estimate = summary.memory
    partners: dict[str, list[str]] = {}
    for first, second in summary.overlaps:
        partners.setdefault(first, []).append(second)
    for operation, others in partners.items():
        yield "overlap", f"{operation} with {', '.join(others)}"
    if not summary.overlaps:
        yield "overlap", "none, all operations run one after another"
    for role, reason in plan.unused_roles.items():
        yield "not used", f"{role}, because {reason}"
    if plan.device != "cpu":
        yield from _memory_notes(estimate)
        if plan.mps and plan.sharing_pools:
            pools = ", ".join(plan.sharing_pools)
            yield "CUDA MPS", f"started on the nodes of {pools}, and stopped with the run"
    if summary.snapshot_bytes > GIB // 10:
        needed = f"{show_bytes(summary.snapshot_bytes)} of {SHARED_MEMORY}"
        yield "snapshots", f"{needed} on each node, to resume if a process dies"
    yield from summary.settings.items()
    able: list[str] = []
    reasons: list[str] = []
    for engine, reason_against in summary.engines.items():
        if reason_against is None:
            able.append(engine)
        else:
            reasons.append(reason_against)
    if reasons:
        names = ", ".join(able) or "none"
        yield "rollout engines for this model", "; ".join([names, *reasons])


def _memory_notes(estimate: MemoryEstimate) -> Iterator[tuple[str, str]]:
    """How large micro-batches are, and what is not known about memory."""
    sizes: list[tuple[str, str]] = []
    for operation, size in estimate.micro_batches.items():
        sizes.append((operation, _size_in_words(size)))
    for line in _grouped(sizes):
        yield "micro-batches", line
    for line in _grouped(estimate.unknown.items()):
        yield "memory unknown", line
    # The pools have a limit each, or none has one.
    limits = [pool.limit for pool in estimate.pools.values()]
    if limits and all(limit is None for limit in limits):
        reason = "the GPU's memory is not known, so sizes are for a GPU with enough memory"
        yield "memory", f"{reason}; set --gpu-memory"


def _grouped(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line for each text, with the names of all operations or roles that have it."""
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    for text, names_with_it in names.items():
        yield f"{', '.join(names_with_it)}: {text}"


def _size_in_words(size: MicroBatch) -> str:
    if size.rows is None:
        words = f"up to {size.tokens:,} tokens"
    else:
        words = f"{size.rows} sequences"
    if size.is_chosen:
        words += " (chosen)"
    if size.recomputes is None:
        return words
    fate = "recomputed" if size.recomputes else "kept"
    return f"{words}, activations {fate}"


def _warnings(estimate: MemoryEstimate, advice: Sequence[Advice]) -> Iterator[str]:
    for name, memory in estimate.pools.items():
        if memory.excess:
            amount = f"by {show_bytes(memory.excess)} while {memory.peak_role} computes"
            yield f"warning: {name} does not fit {amount} (an estimate; it does not stop the run)"
    if estimate.excess and not advice:
        yield "  no change that was tried helps; use more GPUs or a smaller model"
    for item in advice:
        if item.excess:
            effect = f"still {show_bytes(item.excess)} too much"
        else:
            effect = "fits"
        yield f"  try {item.override}  {effect}"
