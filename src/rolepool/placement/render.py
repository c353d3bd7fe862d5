"""The plan as a person reads it: a grid of nodes and GPUs, the pools below it, what overlaps, what does not fit.

Owns the text. Computes nothing: every figure comes from the plan and the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from string import ascii_uppercase

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolepool.placement.advice import Advice
from rolepool.placement.memory import GIB, MemoryEstimate
from rolepool.placement.plan import Plan
from rolepool.placement.roles import Role

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
MAX_ROWS_ALIKE = 4
"""Nodes that look the same are shown one by one up to here, and beyond as one row."""
MAX_COLUMNS = 16
WIDTH_OFF_TERMINAL = 120


def render_plan(plan: Plan, estimate: MemoryEstimate, advice: Sequence[Advice]) -> RenderableType:
    """All that `rolepool plan` prints."""
    letters = {name: _letter(index) for index, name in enumerate(plan.pools)}
    parts: list[RenderableType] = [_headline(plan), "", _grid(plan, letters), "", _legend(plan, estimate, letters), ""]
    if estimate.pools and plan.device != "cpu":
        parts.extend([_memory_table(plan, estimate), ""])
    parts.extend(_notes(plan, estimate))
    parts.extend(_memory_verdict(estimate, advice))
    return Group(*parts)


def plan_as_text(plan: Plan, estimate: MemoryEstimate, advice: Sequence[Advice]) -> str:
    """What to print, in colour where standard output is a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OFF_TERMINAL
    with console.capture() as capture:
        console.print(render_plan(plan, estimate, advice))
    return capture.get().rstrip("\n")


def _letter(index: int) -> str:
    return ascii_uppercase[index] if index < 26 else f"P{index}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _slot_word(plan: Plan) -> str:
    return "slot" if plan.device == "cpu" else "GPU"


def _headline(plan: Plan) -> Text:
    nodes = ", ".join(f"{len(list(same))} x {num_gpus}" for num_gpus, same in groupby(plan.gpus_per_node))
    used = len({slot for pool in plan.pools.values() for slot in pool.slots})
    kind = "CPU slots" if plan.device == "cpu" else "GPUs"
    pools = "1 pool" if len(plan.pools) == 1 else f"{len(plan.pools)} pools"
    return Text(f"{pools} on {used} of {sum(plan.gpus_per_node)} {kind} (nodes x {kind}: {nodes})", style="bold")


def _grid(plan: Plan, letters: dict[str, str]) -> Table:
    """One row a node, one column a GPU; a cell holds pool letter and rank."""
    width = max(plan.gpus_per_node)
    cells: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, pool in enumerate(plan.pools.values()):
        for rank, slot in enumerate(pool.slots):
            cells.setdefault(slot, []).append((index, rank))
    names = list(letters.values())

    def look(node: int) -> tuple[object, ...]:
        return tuple(
            tuple(index for index, _ in cells.get((node, gpu), [])) if gpu < plan.gpus_per_node[node] else None
            for gpu in range(width)
        )

    columns = min(width, MAX_COLUMNS)
    table = _table("node")
    for gpu in range(columns):
        table.add_column(f"{_slot_word(plan)} {gpu}" if columns <= 8 else str(gpu))
    if width > columns:
        table.add_column(f"... {width - columns} more")
    for _, group in groupby(range(len(plan.gpus_per_node)), key=look):
        nodes = list(group)
        alike = len(nodes) > MAX_ROWS_ALIKE
        for node in nodes[:1] if alike else nodes:
            title = f"{nodes[0]}-{nodes[-1]}" if alike else str(node)
            row = [
                _cell(cells.get((node, gpu), []), names, with_rank=not alike)
                if gpu < plan.gpus_per_node[node]
                else Text("")
                for gpu in range(columns)
            ]
            table.add_row(title, *row)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _cell(holders: list[tuple[int, int]], names: list[str], *, with_rank: bool) -> Text:
    if not holders:
        return Text(".", style="dim")
    text = Text()
    for position, (index, rank) in enumerate(holders):
        text.append(" " if position else "")
        text.append(f"{names[index]}{rank}" if with_rank else names[index], style=_colour(index))
    return text


def _legend(plan: Plan, estimate: MemoryEstimate, letters: dict[str, str]) -> Table:
    table = _table("", "pool", "processes", "roles", "memory" if plan.device == "cpu" else "memory per GPU")
    for index, (name, pool) in enumerate(plan.pools.items()):
        share = "" if pool.share == 1 else f" x {pool.share:g} GPU"
        style = _colour(index)
        table.add_row(
            Text(letters[name], style=style),
            Text(name, style=style),
            f"{pool.world_size}{share}",
            Text(", ".join(pool.roles), style=style),
            _memory_text(plan, estimate, name),
        )
    return table


MEMORY_COLUMNS = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("KV cache", "kv_cache"),
    ("activations", "activations"),
    ("logits", "logits"),
    ("at work", "working"),
    ("at rest", "idle"),
)


def _memory_table(plan: Plan, estimate: MemoryEstimate) -> Table:
    """GiB per role on one GPU. A pool's peak is one role at work, the others at rest, and the process itself."""
    table = _table("GiB per GPU")
    for title, _ in MEMORY_COLUMNS:
        table.add_column(title, justify="right")
    for index, name in enumerate(plan.pools):
        for role, memory in estimate.pools[name].roles.items() if name in estimate.pools else ():
            figures = [getattr(memory, field) / GIB for _, field in MEMORY_COLUMNS]
            table.add_row(Text(role, style=_colour(index)), *(f"{figure:.1f}" if figure else "." for figure in figures))
    return table


def _memory_text(plan: Plan, estimate: MemoryEstimate, name: str) -> Text:
    if plan.device == "cpu":
        return Text("host memory", style="dim")
    if name not in estimate.pools:
        return Text("memory unknown", style="dim")
    memory = estimate.pools[name]
    if memory.limit is None:
        return Text(f"{memory.peak / GIB:.1f} GiB")
    verdict, style = ("fits", "green") if memory.fits else ("does not fit", "bold red")
    return Text.assemble(f"{memory.peak / GIB:.1f} of {memory.limit / GIB:.1f} GiB, ", (verdict, style))


def _notes(plan: Plan, estimate: MemoryEstimate) -> list[Text]:
    lines = [
        Text.assemble(("overlap: ", "bold"), f"{one} with {', '.join(others)}")
        for one, others in _by_first(plan.overlaps)
    ]
    if not lines:
        lines = [Text.assemble(("overlap: ", "bold"), "none, all operations run one after another")]
    lines.extend(
        Text.assemble(("left out: ", "bold"), f"{role}, for {reason}") for role, reason in plan.left_out.items()
    )
    if estimate.pools and all(memory.limit is None for memory in estimate.pools.values()) and plan.device != "cpu":
        bound = "give --gpu-memory for a verdict; the KV cache is then held within gpu_memory_utilization"
        lines.append(Text.assemble(("memory: ", "bold"), bound))
    if plan.mps and plan.sharing_pools and plan.device != "cpu":
        where = f"started on the nodes of {', '.join(plan.sharing_pools)}, and stopped with the run"
        lines.append(Text.assemble(("CUDA MPS: ", "bold"), where))
    reasons: dict[str, list[Role]] = {}
    for role, reason in estimate.unknown.items():
        reasons.setdefault(reason, []).append(role)
    if plan.device != "cpu":
        lines.extend(
            Text.assemble(("memory unknown: ", "bold"), f"{', '.join(roles)}: {reason}")
            for reason, roles in reasons.items()
        )
    return lines


def _by_first(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    return [(one, [other for _, other in group]) for one, group in groupby(pairs, key=lambda pair: pair[0])]


def _memory_verdict(estimate: MemoryEstimate, advice: Sequence[Advice]) -> list[Text]:
    lines = []
    for name, memory in estimate.pools.items():
        if memory.fits is False and memory.limit is not None:
            over = (memory.peak - memory.limit) / GIB
            lines.append(
                Text(
                    f"warning: {name} does not fit by {over:.1f} GiB, while {memory.peak_role} works (an estimate; "
                    "the run is not stopped by it)",
                    style="yellow",
                )
            )
    if lines:
        lines.extend(Text(f"  try {item}", style="yellow") for item in advice)
        if not advice:
            lines.append(Text("  nothing tried here brings it down; use more GPUs or a smaller model", style="yellow"))
    return lines
