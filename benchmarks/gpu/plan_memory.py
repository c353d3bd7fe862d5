"""What `rolepool plan` says about each role's memory, compared with what the role takes on one GPU.

    python benchmarks/gpu/plan_memory.py [--cases 0.5b 1.5b-checkpointing] [--roles actor rollout] [--snapshot]
    python benchmarks/gpu/plan_memory.py --tiny      a small model on the CPU, to try the script out; no verdict

Whole runs with default keys are in plan_memory_runs.py, which this script calls at the end unless
--cases is given. Each role does what it does in a PPO step, twice, in a process of its own:
recipes/qwen0.5b_h200.yaml, micro-batches filled by tokens, rows of full length, random weights.
Compared are

- at work: the most that torch had allocated, and what the pools of CUDA graphs hold unused;
- at rest: the same after the last operation, while another role of the pool would work.

Not what the allocator has reserved: it gives back what is unused before it fails, so it is no need of the role. What
else the process takes of the GPU (context, libraries, what is reserved and unused) is to be within the plan's overhead.
--snapshot records the last operation once more and prints what was alive at its peak, by the line that allocated it.
The exit code is 1 where a figure is more than 15% off.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import plan_memory_runs
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rolepool.config import Config, load_config
from rolepool.placement import Role, build_plan
from rolepool.placement.estimate import (
    GIB,
    PROCESS_OVERHEAD_BYTES,
    MicroBatch,
    RoleMemory,
    estimate_memory,
)
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.worker import WorkerContext, made_in
from rolepool.roles.actor_critic import Actor, Critic, Reference
from rolepool.roles.reward_model import RewardModel
from rolepool.roles.rollout import Rollout
from rolepool.roles.setups import (
    ActorSetup,
    RewardModelSetup,
    RolloutSetup,
    Setup,
    TrainingSetup,
)

ROOT = Path(__file__).parent.parent.parent
ALLOWED = 0.15
TIMEOUT_S = 240
MOST_LINES = 25
TRAINED = (Role.Actor, Role.Critic)
ROLES = (*TRAINED, Role.RefPolicy, Role.Rollout, Role.RewardModel)


@dataclass(frozen=True)
class Case:
    shape: str
    max_tokens: int
    """Of a pass."""
    checkpointing: bool
    roles: tuple[Role, ...] = ROLES
    gpu_memory_gib: float = 140
    """What the plan is told. With too little of it activations are recomputed."""


CASES = {
    "0.5b": Case("qwen2.5-0.5b", 12_288, False),  # two passes a mini-batch
    "0.5b-one-pass": Case("qwen2.5-0.5b", 24_576, False, TRAINED),
    "1.5b": Case("qwen2.5-1.5b", 12_288, False),
    "1.5b-checkpointing": Case("qwen2.5-1.5b", 24_576, True, TRAINED, gpu_memory_gib=45),
}
TINY = {"tiny": Case("qwen2-tiny", 32, False)}


@dataclass
class Operation:
    name: str
    peak_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    graph_bytes: int
    """Unused in the pools of CUDA graphs, where nobody else can use it."""
    process_bytes: int
    """That the GPU has less of, all processes counted, than before this one took any."""


@dataclass
class Measured:
    operations: list[Operation] = field(default_factory=list)
    statistics: dict[str, int] = field(default_factory=dict)
    at_peak: list[str] = field(default_factory=list)

    @property
    def at_work(self) -> int:
        return max(operation.peak_bytes + operation.graph_bytes for operation in self.operations)

    @property
    def at_rest(self) -> int:
        return self.operations[-1].allocated_bytes + self.operations[-1].graph_bytes


def make_config(model: Path, case: Case, tiny: bool) -> Config:
    sizes = [
        "data.train_batch_size=8",
        "data.max_prompt_length=4",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.device=cpu",
    ]
    return load_config(
        [ROOT / "recipes" / "qwen0.5b_h200.yaml"],
        [
            f"actor_rollout_ref.model.path={model}",
            f"critic.model.path={model}",
            "reward_model.enable=true",
            f"reward_model.model.path={model / 'reward'}",
            f"actor_rollout_ref.model.enable_gradient_checkpointing={str(case.checkpointing).lower()}",
            f"critic.model.enable_gradient_checkpointing={str(case.checkpointing).lower()}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={case.max_tokens}",
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
            f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={case.max_tokens}",
            "critic.use_dynamic_bsz=true",
            f"critic.ppo_max_token_len_per_gpu={case.max_tokens}",
            "reward_model.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null",
            "critic.ppo_micro_batch_size_per_gpu=null",
            *(sizes if tiny else []),
        ],
    ).config


def make_models(content: dict[str, Any], device: str, folder: Path) -> None:
    """A policy, and a reward model in `folder`/reward: random weights, of which nothing stays on
    the device."""
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(**content, num_labels=1)
    for auto, where in (
        (AutoModelForCausalLM, folder),
        (AutoModelForSequenceClassification, folder / "reward"),
    ):
        with torch.device(device):
            model: Any = auto.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(where)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()


def make_rows(config: Config, vocab_size: int) -> DataProto:
    """All of full length."""
    num_rows, prompt, response = (
        config.data.train_batch_size,
        config.data.max_prompt_length,
        config.data.max_response_length,
    )
    lengths = torch.full((num_rows,), prompt + response)
    ids = torch.randint(
        1, vocab_size, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1)
    )
    names = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    return DataProto.from_dict(
        {
            "input_ids": ragged(ids, lengths),
            "num_prompt_tokens": lengths - response,
            **{name: ragged(torch.randn(num_rows * response), lengths - prompt) for name in names},
        }
    )


def make_prompts(rows: DataProto) -> DataProto:
    ids = rows.to_padded().batch["prompts"].tolist()
    columns = {"raw_prompt_ids": ids, "uid": list(range(len(ids))), "sample_index": [0] * len(ids)}
    return DataProto.from_dict(non_tensors=columns)


def operations_of(
    role: Role, config: Config, sizes: dict[str, MicroBatch], vocab_size: int
) -> list[tuple[str, Callable[[], object]]]:
    """The role is made, and what it does in a step is to be called, twice."""
    data = make_rows(config, vocab_size)
    if role == Role.Actor:
        actor = Actor(config, ActorSetup(num_training_steps=10, micro_batches=sizes))
        once: list[tuple[str, Callable[[], object]]] = [
            ("compute_log_prob", lambda: actor.compute_log_prob(data)),
            ("update_actor", lambda: actor.update_actor(data)),
        ]
    elif role == Role.Critic:
        critic = Critic(config, TrainingSetup(num_training_steps=10, micro_batches=sizes))
        once = [
            ("compute_values", lambda: critic.compute_values(data)),
            ("update_critic", lambda: critic.update_critic(data)),
        ]
    elif role == Role.RefPolicy:
        reference = Reference(config, Setup(micro_batches=sizes))
        once = [("compute_ref_log_prob", lambda: reference.compute_ref_log_prob(data))]
    elif role == Role.Rollout:
        rollout = Rollout(config, RolloutSetup(micro_batches=sizes))
        prompts = make_prompts(data)
        once = [("generate_sequences", lambda: rollout.generate_sequences(prompts))]
    else:
        reward_model = RewardModel(config, RewardModelSetup(micro_batches=sizes))
        once = [("compute_scores", lambda: reward_model.compute_scores(data))]
    return 2 * once


# In the role's own process


def measure_role(
    role: Role,
    config: Config,
    sizes: dict[str, MicroBatch],
    vocab_size: int,
    device: str,
    snapshot: bool,
    answer: Connection,
) -> None:
    try:
        answer.send(_measure_role(role, config, sizes, vocab_size, device, snapshot))
    except BaseException:
        answer.send(traceback.format_exc())


def _measure_role(
    role: Role,
    config: Config,
    sizes: dict[str, MicroBatch],
    vocab_size: int,
    device: str,
    snapshot: bool,
) -> Measured:
    on_gpu = device == "cuda"
    before = used_on_gpu() if on_gpu else 0
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        with made_in(WorkerContext(role=role, device=device)):
            operations = operations_of(role, config, sizes, vocab_size)
        measured = Measured()
        for name, call in operations:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            call()
            measured.operations.append(
                look(name, before) if on_gpu else Operation(name, 0, 0, 0, 0, 0)
            )
        if on_gpu:
            names = ("num_alloc_retries", "inactive_split_bytes.all.peak", "allocation.all.peak")
            measured.statistics = {name: torch.cuda.memory_stats().get(name, 0) for name in names}
            if snapshot:
                measured.at_peak = alive_at_peak(operations[-1][1])
            with_workspaces = torch.cuda.memory_allocated()
            torch._C._cuda_clearCublasWorkspaces()
            measured.statistics["workspaces of matrix products"] = (
                with_workspaces - torch.cuda.memory_allocated()
            )
        dist.destroy_process_group()
    return measured


def used_on_gpu() -> int:
    """By all processes; asked of the driver, which makes no context for it."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def look(name: str, before: int) -> Operation:
    torch.cuda.synchronize()
    of_graphs = [
        part
        for part in torch.cuda.memory_snapshot()
        if tuple(part.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    return Operation(
        name=name,
        peak_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        allocated_bytes=torch.cuda.memory_allocated(),
        graph_bytes=sum(part["total_size"] - part["allocated_size"] for part in of_graphs),
        process_bytes=used_on_gpu() - before,
    )


def alive_at_peak(call: Callable[[], object]) -> list[str]:
    """What an operation had allocated when most was: bytes by the line of code that asked for
    them."""
    standing = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=1_000_000
    )
    call()
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    alive: dict[int, tuple[int, str]] = {}
    total = peak = 0
    at_peak: dict[int, tuple[int, str]] = {}
    grows = False
    for event in history:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], place_of(event.get("frames", [])))
            total += event["size"]
            grows = grows or total > peak
            peak = max(peak, total)
        elif event["action"] == "free_requested":
            if grows:  # copied at each local maximum only
                at_peak, grows = dict(alive), False
            size, _ = alive.pop(event["addr"], (event["size"], ""))  # else it was there before
            total -= size
    if grows:
        at_peak = dict(alive)
    by_place: dict[str, list[int]] = defaultdict(list)
    for size, place in at_peak.values():
        by_place[place].append(size)
    lines = [
        f"{standing / GIB:7.3f} GiB  before the operation; {peak / GIB:.3f} GiB more at its peak"
    ]
    largest = sorted(by_place.items(), key=lambda item: -sum(item[1]))[: MOST_LINES - 1]
    lines += [f"{sum(sizes) / GIB:7.3f} GiB  {len(sizes):5} x  {place}" for place, sizes in largest]
    return lines


def place_of(frames: list[dict[str, Any]]) -> str:
    """The innermost line, and the innermost of ours where that is another."""
    shown = [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames]
    ours = [
        text for text, frame in zip(shown, frames, strict=True) if "rolepool" in frame["filename"]
    ]
    return " < ".join(dict.fromkeys([*shown[:1], *ours[:1]])) or "(no frames)"


# In the parent


def run_apart(
    config: Config,
    sizes: dict[str, MicroBatch],
    vocab_size: int,
    device: str,
    snapshot: bool,
    role: Role,
) -> Measured | str:
    """A role's figures, or why there are none."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(
        target=measure_role, args=(role, config, sizes, vocab_size, device, snapshot, its)
    )
    process.start()
    its.close()
    try:
        return mine.recv() if mine.poll(TIMEOUT_S) else f"no answer within {TIMEOUT_S} s"
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}"
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


def is_close(planned: int, measured: int) -> bool:
    return abs(planned - measured) <= ALLOWED * measured


def show(role: Role, planned: RoleMemory, measured: Measured, has_gpu: bool) -> bool:
    """Whether both figures are within what is allowed."""
    parts = ("weights", "gradients", "optimizer", "kv_cache", "activations", "logits")
    print(
        f"\n  {role}: planned "
        + ", ".join(f"{part} {getattr(planned, part) / GIB:.3f}" for part in parts)
    )
    for operation in measured.operations:
        print(
            f"    {operation.name:20} peak {operation.peak_bytes / GIB:7.3f}  reserved "
            f"{operation.peak_reserved_bytes / GIB:7.3f}  after {operation.allocated_bytes / GIB:7.3f}  graphs "
            f"{operation.graph_bytes / GIB:6.3f}  process {operation.process_bytes / GIB:7.3f}  beyond reserved "
            f"{(operation.process_bytes - operation.peak_reserved_bytes) / GIB:6.3f}"
        )
    verdicts = []
    for name, plan, found in (
        ("at work", planned.working, measured.at_work),
        ("at rest", planned.idle, measured.at_rest),
    ):
        text = f"    {name:20} planned {plan / GIB:7.3f}  measured {found / GIB:7.3f}"
        if has_gpu:
            verdicts.append(is_close(plan, found))
            text += f"  ratio {plan / found:5.3f}  {'within' if verdicts[-1] else 'MORE THAN'} {ALLOWED:.0%}"
        print(text)
    if measured.statistics:
        print(f"    {measured.statistics}")
    for line in measured.at_peak:
        print(f"      {line}")
    sys.stdout.flush()
    return all(verdicts)


def measure_case(name: str, case: Case, options: argparse.Namespace, folder: Path) -> bool:
    content = json.loads(
        (ROOT / "recipes" / "shapes" / case.shape / "config.json").read_text(encoding="utf-8")
    )
    device = "cpu" if options.tiny else "cuda"
    make_models(content, device, folder)
    config = make_config(folder, case, options.tiny)
    estimate = estimate_memory(config, build_plan(config), int(case.gpu_memory_gib * GIB))
    (pool,) = estimate.pools.values()
    print(
        f"\n{name}: passes of {case.max_tokens} tokens, checkpointing {case.checkpointing}; figures in GiB; "
        f"the plan's overhead of a process {PROCESS_OVERHEAD_BYTES / GIB:.2f}"
    )
    roles = [role for role in case.roles if role in options.roles]
    good = True
    with ThreadPoolExecutor(options.at_once) as threads:
        run = partial(
            run_apart,
            config,
            estimate.micro_batches,
            content["vocab_size"],
            device,
            options.snapshot,
        )
        for role, measured in zip(roles, threads.map(run, roles), strict=True):
            if isinstance(measured, str):
                print(f"\n  {role}: failed\n{measured}", flush=True)
                good = False
            else:
                good = show(role, pool.roles[role], measured, not options.tiny) and good
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="*", choices=list(CASES), help="default: all, and whole runs"
    )
    parser.add_argument("--roles", nargs="*", default=list(ROLES), help="such as actor, rollout")
    parser.add_argument(
        "--snapshot", action="store_true", help="print what was alive at the peak of an operation"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="roles; the column `process` counts all of them"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    options = parser.parse_args()
    good = True
    for name, case in (
        TINY.items() if options.tiny else ((name, CASES[name]) for name in options.cases or CASES)
    ):
        try:
            with tempfile.TemporaryDirectory() as folder:
                good = measure_case(name, case, options, Path(folder)) and good
        except Exception:
            traceback.print_exc()
            good = False
    if options.cases is None:
        cases = plan_memory_runs.TINY if options.tiny else plan_memory_runs.CASES
        good = plan_memory_runs.run_cases(cases) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
