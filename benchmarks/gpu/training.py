"""Training and scoring on one GPU against the plain way of doing the same: seconds, share of the
matmul rate, memory.

    python benchmarks/gpu/training.py [--shape recipes/shapes/qwen2.5-0.5b] [--max-tokens 20480] [--profile]
    python benchmarks/gpu/training.py --shape recipes/shapes/qwen3-0.6b --row-tokens 16384 --rows 16 --alone
    python benchmarks/gpu/training.py --shape recipes/shapes/qwen2.5-3b --alone --default-keys
    python benchmarks/gpu/training.py --tiny      a small model on the CPU, to try the script out

Rows of many lengths go through the roles as a run would send them: 4 mini-batches, packed, passes
of bounded tokens. The plain way: the same Hugging Face model, optimizer and precision, padded rows,
all logits in fp32, nothing compiled. Both with random weights; gradients of both are compared with
those of an fp32 model. Shares count 6 (updates) or 2 (scoring) x parameters x real tokens, and
causal attention, and are of what an 8192-cubed bf16 product reaches in the same run. Medians of
--repeats after a first that warms up.

With --row-tokens all rows have this length. With --alone only the actor is measured, without the
plain way and without its gradients in fp32, which long rows have no memory for. With --default-keys
the micro-batches are those that the plan chooses for a run of PPO with all roles in one pool. The
share of the peak is that of the GPU's published rate in 16 bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rolepool.algorithm.losses import LossCounts, compute_value_loss
from rolepool.algorithm.policy_losses import compute_policy_loss_vanilla
from rolepool.config import Config, load_config
from rolepool.config.model_files import ModelShape, read_shape
from rolepool.models.loading import load_critic, load_policy
from rolepool.models.micro_batches import by_rows
from rolepool.models.training import TrainedModel, model_utilization
from rolepool.placement import ParallelDims, build_plan
from rolepool.placement.estimate import MicroBatch, estimate_memory
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.protocol import DataProto, ragged, unpad
from rolepool.protocol.columns import lengths_of
from rolepool.protocol.worker import WorkerContext, made_in
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.setups import ActorSetup, TrainingSetup

ROOT = Path(__file__).parent.parent.parent
GOALS = {"update_actor": 0.45, "compute_log_prob": 0.50, "update_critic": 0.45}
"""Least share of the matmul rate."""
MINI_BATCHES = 4
GIB = 2**30


@dataclass
class Setting:
    """What is measured, and with how much."""

    model: Path
    shape: ModelShape
    config: Config
    data: DataProto
    padded: DataProto
    """The same rows, as the plain way takes them."""
    device: str
    rows_per_padded_pass: int
    repeats: int
    profile: bool
    alone: bool
    """Whether only this side's actor is measured."""
    micro_batches: Mapping[str, MicroBatch] | None
    """Those of the plan; None uses the keys of the config."""

    def flops(self, per_param: int) -> float:
        lengths = lengths_of(self.data.batch["input_ids"]).double()
        attention = (
            2
            * self.shape.num_layers
            * self.shape.num_heads
            * self.shape.head_dim
            * lengths.square().sum()
        )
        return float(per_param * self.shape.num_params * lengths.sum() + per_param / 2 * attention)


@dataclass
class Measured:
    first_s: float
    median_s: float
    peak_bytes: int


@dataclass
class Results:
    times: dict[str, dict[str, Measured]] = field(default_factory=dict)
    """By operation and side."""
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Of the first mini-batch, by side, in host memory."""


def make_rows(num_rows: int, shortest: int, longest: int, vocab_size: int) -> DataProto:
    """Lengths between the two, spread evenly; the first quarter of each is its prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(shortest, longest, num_rows).long()[
        torch.randperm(num_rows, generator=generator)
    ]
    num_prompt = lengths // 4
    num_response = lengths - num_prompt
    names = ("advantages", "values", "returns")
    return DataProto.from_dict(
        {
            "input_ids": ragged(
                torch.randint(vocab_size, (int(lengths.sum()),), generator=generator), lengths
            ),
            "num_prompt_tokens": num_prompt,
            **{
                key: ragged(torch.randn(int(num_response.sum()), generator=generator), num_response)
                for key in names
            },
        }
    )


def measure(setting: Setting, action: Callable[[], object]) -> Measured:
    def run() -> float:
        start_s = time.perf_counter()
        action()
        if setting.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    first_s = run()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    median_s = statistics.median(run() for _ in range(setting.repeats))
    peak = torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0
    return Measured(first_s, median_s, peak)


def matmul_rate(device: str) -> float:
    """FLOP/s of a large product in bf16; of a small one in fp32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def seconds() -> float:
        start_s = time.perf_counter()
        for _ in range(10):
            one @ other
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / 10

    seconds()
    return 2 * size**3 / statistics.median(seconds() for _ in range(5))


def keep_first_gradients(trained: TrainedModel, kept: dict[str, Tensor]) -> None:
    def look(*_: object) -> None:
        if not kept:
            for name, parameter in trained.model.named_parameters():
                assert parameter.grad is not None
                kept[name] = getattr(
                    parameter.grad, "full_tensor", lambda g=parameter.grad: g
                )().cpu()

    trained.optimizer.register_step_pre_hook(look)


def show_profile(setting: Setting, name: str, action: Callable[[], object]) -> None:
    if setting.profile and setting.device == "cuda":
        with torch.profiler.profile() as profile:
            action()
        print(
            f"{name}:\n{profile.key_averages().table(sort_by='self_cuda_time_total', row_limit=25)}",
            flush=True,
        )


# This side


def measure_actor(setting: Setting, results: Results) -> None:
    with made_in(WorkerContext(role="actor", device=setting.device)):
        setup = ActorSetup(num_training_steps=10, micro_batches=setting.micro_batches)
        actor = Actor(setting.config, setup)
    data = setting.data

    results.times.setdefault("compute_log_prob", {})["rolepool"] = measure(
        setting, lambda: actor.compute_log_prob(data)
    )
    if "old_log_probs" not in data.batch:
        scored = actor.compute_log_prob(data)
        data.batch["old_log_probs"] = scored.batch["old_log_probs"]
    keep_first_gradients(actor.trained, results.gradients.setdefault("rolepool", {}))
    results.times.setdefault("update_actor", {})["rolepool"] = measure(
        setting, lambda: actor.update_actor(data)
    )
    show_profile(setting, "compute_log_prob", lambda: actor.compute_log_prob(data))
    show_profile(setting, "update_actor", lambda: actor.update_actor(data))


def measure_critic(setting: Setting, results: Results) -> None:
    with made_in(WorkerContext(role="critic", device=setting.device)):
        of_critic = TrainingSetup(num_training_steps=10, micro_batches=setting.micro_batches)
        critic = Critic(setting.config, of_critic)
    results.times.setdefault("compute_values", {})["rolepool"] = measure(
        setting, lambda: critic.compute_values(setting.data)
    )
    results.times.setdefault("update_critic", {})["rolepool"] = measure(
        setting, lambda: critic.update_critic(setting.data)
    )


# The plain way


def plain_model(setting: Setting, *, is_critic: bool) -> TrainedModel:
    load = load_critic if is_critic else load_policy
    model = load(setting.config, torch.float32, packed=False)
    keys = setting.config.critic if is_critic else setting.config.actor_rollout_ref.actor
    fsdp = setting.config.actor_rollout_ref.actor.fsdp_config
    return TrainedModel(
        model,
        device=setting.device,
        dims=ParallelDims(),
        optim=keys.optim,
        fsdp=fsdp,
        grad_clip=keys.grad_clip,
        num_steps=10,
    )


def plain_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    names = ("input_ids", "attention_mask", "position_ids")
    logits: Tensor = model(**{name: batch[name] for name in names}, use_cache=False).logits.float()
    return logits[:, -batch["responses"].shape[1] - 1 : -1]


def plain_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    log_p = torch.log_softmax(plain_output(model, batch), dim=-1)
    return log_p.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)


def plain_policy_loss(
    setting: Setting, model: nn.Module, batch: dict[str, Tensor], counts: LossCounts
) -> Tensor:
    keys = setting.config.actor_rollout_ref.actor
    return compute_policy_loss_vanilla(
        batch["old_log_probs"],
        plain_log_probs(model, batch),
        batch["advantages"],
        batch["response_mask"],
        keys.loss_agg_mode,
        clip_ratio_low=keys.clip_ratio_low,
        clip_ratio_high=keys.clip_ratio_high,
        clip_ratio_c=keys.clip_ratio_c,
        counts=counts,
    )[0]


def plain_update(
    setting: Setting, trained: TrainedModel, loss: Callable[[dict[str, Tensor], LossCounts], Tensor]
) -> None:
    size = len(setting.data) // MINI_BATCHES
    for start in range(0, len(setting.data), size):
        rows = setting.padded.batch[start : start + size]
        batch = {key: value.to(setting.device) for key, value in rows.items()}
        counts = LossCounts.of(batch["response_mask"])

        def loss_of(
            taken: Sequence[int], batch: dict[str, Tensor] = batch, counts: LossCounts = counts
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return loss({key: value[taken] for key, value in batch.items()}, counts), {}

        trained.step(by_rows(size, setting.rows_per_padded_pass), loss_of)


def plain_score(
    setting: Setting,
    model: nn.Module,
    score: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    rows_per_pass: int,
) -> Tensor:
    scores = []
    with torch.no_grad():
        for rows in by_rows(len(setting.data), rows_per_pass):
            batch = {
                key: value[rows].to(setting.device) for key, value in setting.padded.batch.items()
            }
            scores.append(score(model, batch).cpu())
    return torch.cat(scores)


def measure_exact(setting: Setting, results: Results) -> None:
    """Nothing is timed: log-probs that all start from, and gradients, as they are without the noise
    of 16 bits."""
    model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32).eval()
    model.to(setting.device)
    rows_per_pass = max(1, setting.rows_per_padded_pass // 4)
    log_probs = plain_score(setting, model, plain_log_probs, rows_per_pass)
    setting.padded.batch["old_log_probs"] = log_probs
    setting.data.batch["old_log_probs"] = unpad(
        log_probs, setting.padded.batch["response_mask"].sum(dim=1)
    )
    size = len(setting.data) // MINI_BATCHES
    counts = LossCounts.of(setting.padded.batch["response_mask"][:size])
    for rows in by_rows(size, rows_per_pass):
        batch = {key: value[rows].to(setting.device) for key, value in setting.padded.batch.items()}
        plain_policy_loss(setting, model, batch, counts).backward()
    torch.nn.utils.clip_grad_norm_(
        model.parameters(), setting.config.actor_rollout_ref.actor.grad_clip
    )
    results.gradients["exact"] = {
        name: weight.grad.cpu() for name, weight in model.named_parameters()
    }


def measure_plain_actor(setting: Setting, results: Results) -> None:
    trained = plain_model(setting, is_critic=False)
    keep_first_gradients(trained, results.gradients.setdefault("plain", {}))
    loss = partial(plain_policy_loss, setting, trained.model)

    results.times.setdefault("update_actor", {})["plain"] = measure(
        setting, lambda: plain_update(setting, trained, loss)
    )
    trained.model.eval()
    results.times.setdefault("compute_log_prob", {})["plain"] = measure(
        setting,
        lambda: plain_score(setting, trained.model, plain_log_probs, setting.rows_per_padded_pass),
    )


def measure_plain_critic(setting: Setting, results: Results) -> None:
    trained, keys = plain_model(setting, is_critic=True), setting.config.critic

    def loss(batch: dict[str, Tensor], counts: LossCounts) -> Tensor:
        values, mask = plain_output(trained.model, batch)[..., 0], batch["response_mask"]
        of_batch = (batch["returns"], batch["values"], mask)
        return compute_value_loss(
            values, *of_batch, keys.cliprange_value, keys.loss_agg_mode, counts=counts
        )[0]

    results.times.setdefault("update_critic", {})["plain"] = measure(
        setting, lambda: plain_update(setting, trained, loss)
    )
    trained.model.eval()
    results.times.setdefault("compute_values", {})["plain"] = measure(
        setting,
        lambda: plain_score(setting, trained.model, plain_output, setting.rows_per_padded_pass),
    )


# What comes out


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    difference = sum(
        float((found[name] - expected[name]).double().square().sum()) for name in expected
    )
    return float(
        (difference / sum(float(tensor.double().square().sum()) for tensor in expected.values()))
        ** 0.5
    )


def show(setting: Setting, results: Results, rate: float) -> None:
    tokens = int(lengths_of(setting.data.batch["input_ids"]).sum())
    print(
        f"{len(setting.data)} rows, {tokens} tokens, {setting.shape.num_params / 1e6:.0f}M parameters"
    )
    print(f"matmul rate {rate / 1e12:.1f} TFLOP/s")
    columns = (
        "first s",
        "median s",
        "plain s",
        "ratio",
        "TFLOP/s",
        "share",
        "goal",
        "peak GiB",
        "plain GiB",
        "ratio",
    )
    print(f"{'':17}" + "".join(f"{column:>10}" for column in columns))
    for name, sides in results.times.items():
        ours, plain = sides.get("rolepool"), sides.get("plain")
        if ours is None or (plain is None and not setting.alone):
            print(f"{name:17} failed on one side; the other: {sides}")
            continue
        achieved = setting.flops(6 if name.startswith("update") else 2) / ours.median_s
        cells = (
            f"{ours.first_s:.2f}",
            f"{ours.median_s:.3f}",
            f"{plain.median_s:.3f}" if plain else "-",
            f"{plain.median_s / ours.median_s:.2f}" if plain else "-",
            f"{achieved / 1e12:.1f}",
            f"{achieved / rate:.1%}",
            f"{GOALS[name]:.0%}" if name in GOALS else "-",
            f"{ours.peak_bytes / GIB:.1f}",
            f"{plain.peak_bytes / GIB:.1f}" if plain else "-",
            f"{plain.peak_bytes / ours.peak_bytes:.2f}" if plain and ours.peak_bytes else "-",
        )
        print(f"{name:17}" + "".join(f"{cell:>10}" for cell in cells))
    exact = results.gradients.pop("exact", {})
    for side, found in results.gradients.items():
        if found and exact:
            print(
                f"gradients of the first mini-batch, {side} against fp32: {relative_difference(found, exact):.2%} off"
            )


def figures_of(setting: Setting, results: Results, rate: float) -> dict[str, dict[str, Any]]:
    """What this side reached, by operation."""
    lengths = lengths_of(setting.data.batch["input_ids"])
    gpu = torch.cuda.get_device_name() if setting.device == "cuda" else ""
    figures: dict[str, dict[str, Any]] = {}
    for name, sides in results.times.items():
        if "rolepool" not in sides:
            continue
        ours = sides["rolepool"]
        share_of_peak = None
        if name.startswith("update"):
            share_of_peak = model_utilization(setting.shape, lengths, ours.median_s, gpu)
        achieved = setting.flops(6 if name.startswith("update") else 2) / ours.median_s
        figures[name] = {
            "first_s": ours.first_s,
            "median_s": ours.median_s,
            "tokens_per_s": int(lengths.sum()) / ours.median_s,
            "share_of_matmul_rate": achieved / rate,
            "share_of_peak": share_of_peak,
            "peak_gib": ours.peak_bytes / GIB,
        }
    return figures


def size_keys(options: argparse.Namespace) -> list[str]:
    """The keys of the sizes of micro-batches."""
    if options.default_keys:
        return []
    return [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={options.max_tokens}",
        "critic.use_dynamic_bsz=true",
        f"critic.ppo_max_token_len_per_gpu={options.max_tokens}",
    ]


def make_setting(options: argparse.Namespace, folder: Path) -> Setting:
    content = json.loads((options.shape / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    device = "cpu" if options.tiny else "cuda"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**content), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    longest = options.row_tokens or (32 if options.tiny else 512)
    shortest = options.row_tokens or longest // 8
    rows = 16 if options.tiny else options.rows
    # With the default, true, the plan recomputes activations only if they do not fit.
    recompute = str(options.recompute or options.default_keys).lower()
    config = load_config(
        [],
        [
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.model.enable_gradient_checkpointing={recompute}",
            f"critic.model.enable_gradient_checkpointing={recompute}",
            f"data.train_batch_size={rows}",
            f"data.max_prompt_length={longest // 4}",
            f"data.max_response_length={longest - longest // 4}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={rows // MINI_BATCHES}",
            f"trainer.device={device}",
            "trainer.n_gpus_per_node=1",
            *size_keys(options),
        ],
    ).config
    micro_batches = None
    if options.default_keys:
        memory = estimate_memory(config, build_plan(config), detect_gpu_memory())
        micro_batches = memory.micro_batches
        for operation, size in micro_batches.items():
            how = {None: "", True: ", recomputed", False: ", activations kept"}[size.recomputes]
            print(f"{operation}: up to {size.tokens} tokens{how}")
    data = make_rows(rows, shortest, longest, content["vocab_size"])
    return Setting(
        model=folder,
        shape=read_shape(str(folder)),
        config=config,
        data=data,
        padded=data.to_padded(longest // 4, longest - longest // 4),
        device=device,
        rows_per_padded_pass=options.padded_rows,
        repeats=options.repeats,
        profile=options.profile,
        alone=options.alone,
        micro_batches=micro_batches,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", type=Path, help="default: recipes/shapes/qwen2.5-0.5b, or qwen2-tiny"
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=20_480, help="of a packed pass")
    parser.add_argument("--padded-rows", type=int, default=32, help="of a pass of the plain way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="also print which kernels take how long"
    )
    parser.add_argument("--row-tokens", type=int, help="of all rows; default: 64 to 512")
    parser.add_argument("--recompute", action="store_true", help="activations are not kept")
    parser.add_argument(
        "--default-keys", action="store_true", help="micro-batches that the plan chooses"
    )
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--alone", action="store_true", help="only the actor, and no plain way")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    options = parser.parse_args()
    options.shape = options.shape or ROOT / "recipes" / "shapes" / (
        "qwen2-tiny" if options.tiny else "qwen2.5-0.5b"
    )
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if options.tiny else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        setting = make_setting(options, Path(folder) / "model")
        rate, results = matmul_rate(setting.device), Results()
        steps: list[Callable[[Setting, Results], Any]] = [
            measure_exact,
            measure_actor,
            measure_plain_actor,
            measure_critic,
            measure_plain_critic,
        ]
        if setting.alone:
            steps = [measure_actor]
        for step in steps:
            start_s = time.perf_counter()
            try:
                step(setting, results)
            except Exception:
                failed += 1
                traceback.print_exc()
            gc.collect()
            if setting.device == "cuda":
                torch.cuda.empty_cache()
            print(f"{step.__name__}: {time.perf_counter() - start_s:.1f} s", flush=True)
        figures = figures_of(setting, results, rate)
        show(setting, results, rate)
        for name, one in figures.items():
            peak = one["share_of_peak"]
            of_peak = "" if peak is None else f", {peak:.1%} of the GPU's peak"
            print(f"{name}: {one['tokens_per_s']:,.0f} tokens/s{of_peak}")
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        dist.destroy_process_group()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
