"""A plan with what is known about it, as text for people and as JSON for programs: what `rolepool
plan` prints.

Owns the text: a grid of nodes and GPUs, a table of pools, what overlaps, and what does not fit.
Computes nothing: every figure comes from the plan and the estimate.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from string import ascii_uppercase

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rolepool.placement.checks import Advice
from rolepool.placement.estimate import GIB, PROCESS_OVERHEAD_BYTES, SHARED_MEMORY, MemoryEstimate
from rolepool.placement.plan import Plan
from rolepool.terminal import Terminal
from rolepool.units import show_bytes

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
NO_WRAP = ("node", "ranks", "memory", "memory per GPU")
"""Titles of columns of text whose cells are not cut into several lines."""
MAX_ROWS_ALIKE = 4
"""More nodes than this that look the same are shown as one row."""
MAX_COLUMNS, FEW_COLUMNS = 16, 8
"""Most GPUs of a node that are shown, and most that have wide columns."""
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
        plan, memory, console = self.plan, self.memory, Terminal(force_jupyter=False)
        console.width = max(console.width, MIN_WIDTH) if console.is_terminal else MIN_WIDTH
        nodes = ", ".join(
            f"{len(list(same))} x {num_gpus}" for num_gpus, same in groupby(plan.gpus_per_node)
        )
        kind = "CPU slots" if plan.device == "cpu" else "GPUs"
        gpus = f"{len(plan.slots)} of {sum(plan.gpus_per_node)} {kind} (nodes x {kind}: {nodes})"
        title = f"{len(plan.pools)} pool{'s' if len(plan.pools) > 1 else ''} on {gpus}"
        parts: list[RenderableType] = [Text(title, style="bold"), ""]
        parts += [*_grid(plan), _pool_table(plan, memory), ""]
        if memory.pools and plan.device != "cpu":
            parts.extend([_memory_table(plan, memory), ""])
        lines = [Text.assemble((f"{title}: ", "bold"), text) for title, text in _notes(self)]
        lines += [Text(line, style="yellow") for line in _warnings(memory, self.advice)]
        for line in lines:
            is_long = len(line) > console.width
            parts.append(
                Text("\n    ").join(line.wrap(console, console.width - 4)) if is_long else line
            )
        with console.capture() as capture:
            console.print(Group(*parts))
        return capture.get().rstrip("\n")

    def to_json(self) -> str:
        """What `rolepool plan --json` prints."""
        pools = {
            name: {
                "roles": {
                    role: {f"{column}_bytes": getattr(part, column) for column in MEMORY_COLUMNS}
                    for role, part in memory.roles.items()
                },
                "overhead_bytes": PROCESS_OVERHEAD_BYTES,
                "peak_bytes": memory.peak,
                "peak_role": memory.peak_role,
                "least_bytes": memory.least,
                "limit_bytes": memory.limit,
                "fits": None if memory.limit is None else not memory.excess,
            }
            for name, memory in self.memory.pools.items()
        }
        sizes = {
            operation: {"rows": size.rows, "tokens": size.tokens if size.rows is None else None}
            | {"is_chosen": size.is_chosen, "recomputes": size.recomputes}
            for operation, size in self.memory.micro_batches.items()
        }
        document = self.plan.model_dump(mode="json") | {
            "overlaps": self.overlaps,
            "memory": {"pools": pools, "micro_batches": sizes, "unknown": self.memory.unknown}
            | {"snapshot_bytes": self.snapshot_bytes},
            "engines": dict(self.engines),
            "settings": dict(self.settings),
            "problems": list(self.problems),
            "advice": [
                {"override": item.override, "excess_bytes": item.excess} for item in self.advice
            ],
        }
        return json.dumps(document, indent=2)


def _letter(index: int, rank: int | str = "") -> Text:
    """A pool, or one process of it, in the pool's colour."""
    letter = ascii_uppercase[index] if index < 26 else f"P{index}"
    return Text(f"{letter}{rank}", style=COLOURS[index % len(COLOURS)])


def _table(*titles: str, numbers: Sequence[str] = (), gap: int = 2) -> Table:
    """A table without lines: columns of text, and then columns of numbers."""
    columns = [Column(title, overflow="fold", no_wrap=title in NO_WRAP) for title in titles]
    columns += [
        Column(title, justify="right", vertical="bottom", no_wrap=True) for title in numbers
    ]
    return Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")


def _grid(plan: Plan) -> list[RenderableType]:
    """One row per node and one column per GPU; a cell holds the letter of the pool and the rank."""
    grid: list[list[list[tuple[int, int]]]] = [
        [[] for _ in range(num_gpus)] for num_gpus in plan.gpus_per_node
    ]
    for index, pool in enumerate(plan.pools.values()):
        for rank, slot in enumerate(pool.slots):
            grid[slot.node][slot.gpu].append((index, rank))

    def pools_on(node: int) -> list[list[int]]:
        """The pools on each GPU of a node. Nodes with equal lists look the same."""
        return [[index for index, _ in processes] for processes in grid[node]]

    width = max(plan.gpus_per_node)
    word = "" if width > FEW_COLUMNS else "slot " if plan.device == "cpu" else "GPU "
    titles = [f"{word}{gpu}" for gpu in range(min(width, MAX_COLUMNS))]
    table = _table("node", *titles, gap=3 if width <= FEW_COLUMNS else 1)
    for _, group in groupby(range(len(grid)), key=pools_on):
        nodes = list(group)
        alike = len(nodes) > MAX_ROWS_ALIKE
        for node in nodes[:1] if alike else nodes:
            row = []
            for processes in grid[node][:MAX_COLUMNS]:
                letters = [_letter(index, "" if alike else rank) for index, rank in processes]
                row.append(Text(" ").join(letters) or Text(".", style="dim"))
            table.add_row(f"{nodes[0]}-{nodes[-1]}" if alike else str(node), *row)
    return (
        [table, "", f"... {width - MAX_COLUMNS} more", ""] if width > MAX_COLUMNS else [table, ""]
    )


def _pool_table(plan: Plan, estimate: MemoryEstimate) -> Table:
    table = _table(
        "", "pool", "ranks", "roles", "memory" if plan.device == "cpu" else "memory per GPU"
    )
    table.columns[1].no_wrap = max(map(len, plan.pools)) <= MAX_NAME
    for index, (name, pool) in enumerate(plan.pools.items()):
        letter, memory = _letter(index), estimate.pools.get(name)
        share = "" if pool.share == 1 else f" x {pool.share:g} GPU"
        roles = Text(", ".join(pool.roles), style=letter.style)
        text = Text("host memory" if plan.device == "cpu" else "memory unknown", style="dim")
        if plan.device != "cpu" and memory is not None:
            least = f"\n(least {memory.least / GIB:.1f})" if memory.least < memory.peak else ""
            verdict = (
                Text("does not fit", style="bold red")
                if memory.excess
                else Text("fits", style="green")
            )
            limit = (
                [Text(" GiB")]
                if memory.limit is None
                else [Text(f" of {memory.limit / GIB:.1f} GiB, "), verdict]
            )
            text = Text.assemble(f"{memory.peak / GIB:.1f}", *limit, least)
        table.add_row(
            letter, Text(name, style=letter.style), f"{pool.world_size}{share}", roles, text
        )
    return table


def _memory_table(plan: Plan, estimate: MemoryEstimate) -> Table:
    """GiB of each role on one GPU. A pool's peak is one role that computes, the others idle, and
    the process itself."""
    table = _table(
        "GiB per GPU", numbers=[column.replace("_", "\n") for column in MEMORY_COLUMNS], gap=1
    )
    for index, name in enumerate(plan.pools):
        for role, memory in estimate.pools[name].roles.items() if name in estimate.pools else ():
            figures = [getattr(memory, column) / GIB for column in MEMORY_COLUMNS]
            cells = [f"{figure:.1f}" if figure else "." for figure in figures]
            table.add_row(Text(role, style=_letter(index).style), *cells)
    return table


def _notes(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    """The title and the text of each note."""
    plan, estimate = summary.plan, summary.memory
    for one, pairs in groupby(summary.overlaps, key=lambda pair: pair[0]):
        yield "overlap", f"{one} with {', '.join(other for _, other in pairs)}"
    if not summary.overlaps:
        yield "overlap", "none, all operations run one after another"
    yield from (
        ("not used", f"{role}, because {reason}") for role, reason in plan.unused_roles.items()
    )
    if plan.device != "cpu":
        names: dict[tuple[str, str], list[str]] = {}
        for operation, size in estimate.micro_batches.items():
            amount = (
                f"up to {size.tokens:,} tokens" if size.rows is None else f"{size.rows} sequences"
            )
            chosen = " (chosen)" if size.is_chosen else ""
            activations = {None: "", True: ", activations recomputed", False: ", activations kept"}[
                size.recomputes
            ]
            names.setdefault(("micro-batches", f"{amount}{chosen}{activations}"), []).append(
                operation
            )
        for role, reason in estimate.unknown.items():
            names.setdefault(("memory unknown", reason), []).append(role)
        yield from ((title, f"{', '.join(names[title, text])}: {text}") for title, text in names)
        if estimate.pools and all(memory.limit is None for memory in estimate.pools.values()):
            yield (
                "memory",
                "the GPU's memory is not known, so sizes are for a GPU with enough memory; set --gpu-memory",
            )
        if plan.mps and plan.sharing_pools:
            yield (
                "CUDA MPS",
                f"started on the nodes of {', '.join(plan.sharing_pools)}, and stopped with the run",
            )
    if summary.snapshot_bytes > GIB // 10:
        needed = f"{show_bytes(summary.snapshot_bytes)} of {SHARED_MEMORY}"
        yield "snapshots", f"{needed} on each node, to resume if a process dies"
    yield from summary.settings.items()
    if reasons := [reason for reason in summary.engines.values() if reason is not None]:
        able = (
            ", ".join(name for name, reason in summary.engines.items() if reason is None) or "none"
        )
        yield "rollout engines for this model", "; ".join([able, *reasons])


def _warnings(estimate: MemoryEstimate, advice: Sequence[Advice]) -> Iterator[str]:
    for name, memory in estimate.pools.items():
        if memory.excess:
            amount = f"by {show_bytes(memory.excess)} while {memory.peak_role} computes"
            yield f"warning: {name} does not fit {amount} (an estimate; it does not stop the run)"
    if estimate.excess and not advice:
        yield "  no change that was tried helps; use more GPUs or a smaller model"
    for item in advice:
        effect = f"still {show_bytes(item.excess)} too much" if item.excess else "fits"
        yield f"  try {item.override}  {effect}"
