"""The plan as a person reads it, and as data for other programs: all that `rolepool plan` prints.

Owns the text: a grid of nodes and GPUs, the pools below it, what overlaps, what does not fit. Computes nothing: every
figure comes from the plan and the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from string import ascii_uppercase

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolepool.placement.advice import Advice
from rolepool.placement.estimate import MemoryEstimate, MicroBatch
from rolepool.placement.memory import GIB, PROCESS_OVERHEAD_BYTES
from rolepool.placement.plan import Plan

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
MAX_ROWS_ALIKE = 4
"""Nodes that look the same are shown one by one up to here, and beyond as one row."""
MAX_COLUMNS = 16
WIDTH_OFF_TERMINAL = 120

MEMORY_COLUMNS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "kv_cache": "KV cache",
    "activations": "activations",
    "logits": "logits",
    "working": "at work",
    "idle": "at rest",
}
"""Titles of a role's figures."""


Overlaps = Sequence[tuple[str, str]]
"""Pairs of operations that can run at the same time."""


def plan_as_json(
    plan: Plan, overlaps: Overlaps, estimate: MemoryEstimate, problems: Sequence[str], advice: Sequence[Advice]
) -> str:
    """One JSON object: pools, roles, overlaps, memory, problems, advice."""
    document = plan.model_dump(mode="json") | {"overlaps": overlaps}
    pools = {
        name: {
            "roles": {
                role: {f"{field}_bytes": getattr(part, field) for field in MEMORY_COLUMNS}
                for role, part in memory.roles.items()
            },
            "overhead_bytes": PROCESS_OVERHEAD_BYTES,
            "peak_bytes": memory.peak,
            "peak_role": memory.peak_role,
            "least_bytes": memory.least,
            "limit_bytes": memory.limit,
            "fits": memory.fits,
        }
        for name, memory in estimate.pools.items()
    }
    sizes = {
        operation: {"rows": size.rows, "tokens": size.tokens if size.rows is None else None}
        | {"is_chosen": size.is_chosen, "recomputes": size.recomputes}
        for operation, size in estimate.micro_batches.items()
    }
    document["memory"] = {"pools": pools, "micro_batches": sizes, "unknown": estimate.unknown}
    document["problems"] = list(problems)
    document["advice"] = [{"override": item.override, "excess_bytes": item.excess} for item in advice]
    return json.dumps(document, indent=2)


def plan_as_text(plan: Plan, overlaps: Overlaps, estimate: MemoryEstimate, advice: Sequence[Advice]) -> str:
    """What to print, in colour where standard output is a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH_OFF_TERMINAL
    parts: list[RenderableType] = [_headline(plan), "", _grid(plan), "", _legend(plan, estimate), ""]
    if estimate.pools and plan.device != "cpu":
        parts.extend([_memory_table(plan, estimate), ""])
    parts.extend(_notes(plan, overlaps, estimate))
    parts.extend(_memory_verdict(estimate, advice))
    with console.capture() as capture:
        console.print(Group(*parts))
    return capture.get().rstrip("\n")


def _letter(index: int, rank: int | str = "") -> Text:
    """A pool, or one process of it, in the pool's colour."""
    letter = ascii_uppercase[index] if index < 26 else f"P{index}"
    return Text(f"{letter}{rank}", style=_colour(index))


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _headline(plan: Plan) -> Text:
    nodes = ", ".join(f"{len(list(same))} x {num_gpus}" for num_gpus, same in groupby(plan.gpus_per_node))
    used = len({slot for pool in plan.pools.values() for slot in pool.slots})
    kind = "CPU slots" if plan.device == "cpu" else "GPUs"
    pools = "1 pool" if len(plan.pools) == 1 else f"{len(plan.pools)} pools"
    return Text(f"{pools} on {used} of {sum(plan.gpus_per_node)} {kind} (nodes x {kind}: {nodes})", style="bold")


def _grid(plan: Plan) -> Table:
    """One row a node, one column a GPU; a cell holds pool letter and rank."""
    holders: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, pool in enumerate(plan.pools.values()):
        for rank, slot in enumerate(pool.slots):
            holders.setdefault(slot, []).append((index, rank))

    def pools_at(node: int) -> list[list[int]]:
        """The pools on each GPU: nodes with the same look alike."""
        return [[index for index, _ in holders.get((node, gpu), [])] for gpu in range(plan.gpus_per_node[node])]

    width = max(plan.gpus_per_node)
    columns = min(width, MAX_COLUMNS)
    word = "slot" if plan.device == "cpu" else "GPU"
    table = _table("node", *(f"{word} {gpu}" if columns <= 8 else str(gpu) for gpu in range(columns)))
    if width > columns:
        table.add_column(f"... {width - columns} more")
    for _, group in groupby(range(len(plan.gpus_per_node)), key=pools_at):
        nodes = list(group)
        alike = len(nodes) > MAX_ROWS_ALIKE
        for node in nodes[:1] if alike else nodes:
            row = [_cell(holders.get((node, gpu), []), not alike) for gpu in range(plan.gpus_per_node[node])]
            table.add_row(f"{nodes[0]}-{nodes[-1]}" if alike else str(node), *row[:columns])
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _cell(holders: Sequence[tuple[int, int]], with_rank: bool) -> Text:
    names = [_letter(index, rank if with_rank else "") for index, rank in holders]
    return Text(" ").join(names) if names else Text(".", style="dim")


def _legend(plan: Plan, estimate: MemoryEstimate) -> Table:
    table = _table("", "pool", "processes", "roles", "memory" if plan.device == "cpu" else "memory per GPU")
    for index, (name, pool) in enumerate(plan.pools.items()):
        share = "" if pool.share == 1 else f" x {pool.share:g} GPU"
        table.add_row(
            _letter(index),
            Text(name, style=_colour(index)),
            f"{pool.world_size}{share}",
            Text(", ".join(pool.roles), style=_colour(index)),
            _memory_text(plan, estimate, name),
        )
    return table


def _memory_table(plan: Plan, estimate: MemoryEstimate) -> Table:
    """GiB per role on one GPU. A pool's peak is one role at work, the others at rest, and the process itself."""
    table = _table("GiB per GPU")
    for title in MEMORY_COLUMNS.values():
        table.add_column(title, justify="right")
    for index, name in enumerate(plan.pools):
        for role, memory in estimate.pools[name].roles.items() if name in estimate.pools else ():
            figures = [getattr(memory, field) / GIB for field in MEMORY_COLUMNS]
            table.add_row(Text(role, style=_colour(index)), *(f"{figure:.1f}" if figure else "." for figure in figures))
    return table


def _memory_text(plan: Plan, estimate: MemoryEstimate, name: str) -> Text:
    if plan.device == "cpu":
        return Text("host memory", style="dim")
    if name not in estimate.pools:
        return Text("memory unknown", style="dim")
    memory = estimate.pools[name]
    least = f" (least {memory.least / GIB:.1f})" if memory.least < memory.peak else ""
    if memory.limit is None:
        return Text(f"{memory.peak / GIB:.1f} GiB{least}")
    verdict, style = ("fits", "green") if memory.fits else ("does not fit", "bold red")
    return Text.assemble(f"{memory.peak / GIB:.1f} of {memory.limit / GIB:.1f} GiB, ", (verdict, style), least)


def _notes(plan: Plan, overlaps: Overlaps, estimate: MemoryEstimate) -> list[Text]:
    notes = [
        ("overlap", f"{one} with {', '.join(other for _, other in pairs)}")
        for one, pairs in groupby(overlaps, key=lambda pair: pair[0])
    ] or [("overlap", "none, all operations run one after another")]
    notes += [("not used", f"{role}, because {reason}") for role, reason in plan.left_out.items()]
    if plan.device != "cpu":
        texts = {operation: _size_text(size) for operation, size in estimate.micro_batches.items()}
        for text in dict.fromkeys(texts.values()):
            names = ", ".join(operation for operation in texts if texts[operation] == text)
            notes.append(("micro-batches", f"{names}: {text}"))
        if estimate.pools and all(memory.limit is None for memory in estimate.pools.values()):
            unbounded = "the GPU's memory is not known, so sizes are those of a GPU with enough room; give --gpu-memory"
            notes.append(("memory", unbounded))
        if plan.mps and plan.sharing_pools:
            where = f"started on the nodes of {', '.join(plan.sharing_pools)}, and stopped with the run"
            notes.append(("CUDA MPS", where))
        for reason in dict.fromkeys(estimate.unknown.values()):
            roles = [role for role, why in estimate.unknown.items() if why == reason]
            notes.append(("memory unknown", f"{', '.join(roles)}: {reason}"))
    return [Text.assemble((f"{title}: ", "bold"), text) for title, text in notes]


def _size_text(size: MicroBatch) -> str:
    amount = f"up to {size.tokens:,} tokens" if size.rows is None else f"{size.rows} sequences"
    chosen = " (chosen)" if size.is_chosen else ""
    activations = {None: "", True: ", activations recomputed", False: ", activations kept"}[size.recomputes]
    return f"{amount}{chosen}{activations}"


def _memory_verdict(estimate: MemoryEstimate, advice: Sequence[Advice]) -> list[Text]:
    lines = [
        f"warning: {name} does not fit by {(memory.peak - memory.limit) / GIB:.1f} GiB, while {memory.peak_role} works "
        "(an estimate; the run is not stopped by it)"
        for name, memory in estimate.pools.items()
        if memory.limit is not None and not memory.fits
    ]
    if lines and not advice:
        lines.append("  nothing tried here brings it down; use more GPUs or a smaller model")
    return [Text(line, style="yellow") for line in [*lines, *(f"  try {item}" for item in advice)]]
