"""How long weights take from the actor's pool to a rollout in another pool, by each way.

    python benchmarks/weight_transfer.py                             about 100 million parameters
    python benchmarks/weight_transfer.py --shape recipes/shapes/qwen2-tiny
    python benchmarks/weight_transfer.py --device cuda --shape recipes/shapes/deepseek-llm-7b-chat \\
        --limit 400 --json transfer.json

Real processes on a Ray of their own, with the roles' own ends of the channels, and without the rest
of training. The actor has fp32 weights, sharded with FSDP2 over `--trainers` processes; the engine
has bf16 weights on `--engines` processes, of which `--tp` share one copy. Weights are random and are
made on the device, so no file is read.

    full            all weights, through a process group (gloo, or NCCL)
    delta           only what changed: after a step of AdamW on random gradients with each learning
                    rate of --rates, and after other values for each share of --shares
    shared memory   each rank exports its rows of 16 tensors at a time to Ray's object store, and
                    each engine process reads what it holds from there
    copy            the engine's bytes, copied once in one process: in host memory, and on a GPU from
                    it to pinned host memory

A time is that of the driver: from queuing the calls until the receipts are compared. Medians of
`--rounds` rounds after one that warms up. "without receipts" is the same with digests that compute
nothing. On a machine with too few GPUs all processes share the first one, which needs NCCL 2.30 or
later (`lanes.py`). After --limit seconds the benchmark stops and keeps what it has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lanes
import ray
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rolepool.cluster import Cluster, RoleProxy
from rolepool.config import Config, load_config
from rolepool.models.sharding import decoder_layers, shard_over
from rolepool.models.training import FrozenModel
from rolepool.models.weights import WeightSource
from rolepool.placement import ParallelDims, build_plan
from rolepool.protocol import Dispatch, register
from rolepool.roles.actor_critic import Actor
from rolepool.roles.rollout import Rollout
from rolepool.rollout.engine import StreamedEngine
from rolepool.rollout.tensor_parallel import Shard
from rolepool.weights.channels import Channel, ProcessGroup, SharedMemory
from rolepool.weights.digests import Digest, Digests

ROOT = Path(__file__).parent.parent
MB = 10**6
MIDDLE = {
    "model_type": "qwen2",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
"""The shape without `--shape`: 124 million parameters."""


class NoDigests(Digests):
    """Digests that cost nothing."""

    def add_part(self, name: str, *rest: Any, **more: Any) -> None:
        pass

    def add(self, name: str, *rest: Any, **more: Any) -> None:
        pass

    def read(self) -> dict[str, Digest]:
        return {}


def set_receipts(on: bool) -> None:
    """Let all transfers of this process compute digests, or not."""
    chosen = Digests if on else NoDigests
    for name in ("weights.process_group", "roles.actor_critic", "rollout.weight_rows"):
        sys.modules[f"rolepool.{name}"].Digests = chosen  # type: ignore[attr-defined]


def model_on_meta(shape: dict[str, Any], dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)


def fill(model: nn.Module, device: str, seed: int) -> None:
    """Make the tensors of a model on its device, with random numbers."""
    model.to_empty(device=device)
    tied: Any = model
    tied.tie_weights()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter
            local = local.to_local() if hasattr(local, "to_local") else local
            local.normal_(0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()


class BenchActor(Actor):
    """An actor that only has weights."""

    def __init__(self, config: Config, shape: dict[str, Any]) -> None:
        model = model_on_meta(shape, torch.float32)
        if self.world_size > 1:
            mesh = torch.distributed.init_device_mesh(
                self.device, (self.world_size,), mesh_dim_names=("shard",)
            )
            shard_over(mesh, model, decoder_layers(model), self.device)
        fill(model, self.device, seed=self.rank)
        placed = FrozenModel.__new__(FrozenModel)
        placed.device = self.device
        placed.model = model
        placed._moves = []
        self.weights = WeightSource(placed, torch.bfloat16)
        self._sent = Digests()
        self._sender = None
        self._model = model

    @register(Dispatch.ONE_TO_ALL)
    def receipts(self, on: bool) -> None:
        set_receipts(on)
        self._sent = (Digests if on else NoDigests)()

    @register(Dispatch.ONE_TO_ALL)
    def take_step(self, rate: float) -> None:
        """One step of AdamW with random gradients."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(True)
            parameter.grad = torch.randn_like(parameter)
            # One weight at a time, because its two states are as large as the weight.
            torch.optim.AdamW([parameter], lr=rate, fused=self.device == "cuda").step()
            parameter.grad = None

    @register(Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def change(self, share: float) -> None:
        """Give this share of the values another value, at random places."""
        for parameter in self._model.parameters():
            local: Any = parameter
            local = local.to_local() if hasattr(local, "to_local") else local
            is_changed = torch.rand_like(local) < share
            local[is_changed] += 1.0

    @register(Dispatch.ONE_TO_ALL)
    def copy_s(self, num_bytes: int) -> dict[str, float]:
        """How long a copy of so many bytes takes in this process."""
        source = torch.ones(num_bytes, dtype=torch.uint8)
        seconds = {"host to host": timed(lambda: torch.empty_like(source).copy_(source))}
        if self.device != "cpu":
            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            on_gpu = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)

            def to_host() -> None:
                pinned.copy_(on_gpu)
                torch.cuda.synchronize()

            def on_device() -> None:
                on_gpu.clone()
                torch.cuda.synchronize()

            seconds["GPU to pinned host"] = timed(to_host)
            seconds["inside of the GPU"] = timed(on_device)
        return seconds


class BenchRollout(Rollout):
    """A rollout that only has an engine's weights."""

    def __init__(self, config: Config, shape: dict[str, Any]) -> None:
        model = model_on_meta(shape, torch.bfloat16)
        own = None
        if self.context.dims.tp > 1:
            own = Shard(model.config, self.context.dims.tp, self.context.tp_rank)
            own.keep_own_part(model)
        fill(model, self.device, seed=100)
        self.engine = StreamedEngine(model.requires_grad_(False))
        self.engine.shard = own
        self._has_warned = True
        self._receiver = None

    @register(Dispatch.ONE_TO_ALL)
    def receipts(self, on: bool) -> None:
        set_receipts(on)

    @property
    def _engine_for_parts(self) -> StreamedEngine:
        engine: Any = self.engine
        return engine  # type: ignore[no-any-return]

    @register(Dispatch.ONE_TO_ALL)
    def held_bytes(self) -> int:
        model: Any = self.engine.model  # type: ignore[attr-defined]
        return sum(parameter.nbytes for parameter in model.parameters())


def timed(action: Callable[[], object]) -> float:
    """The shortest of three times."""
    taken_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        action()
        taken_s.append(time.perf_counter() - start_s)
    return min(taken_s)


class Bench:
    """The processes, and what was measured so far."""

    def __init__(self, actor: RoleProxy, rollout: RoleProxy, rounds: int) -> None:
        self.actor = actor
        self.rollout = rollout
        self.results: dict[str, Any] = {}
        self._rounds = rounds
        self._version = 0

    def channel(self, kind: type[Channel], **options: Any) -> Any:
        return kind(self.actor.with_blocking(False), self.rollout.with_blocking(False), **options)

    def measure(self, name: str, channel: Any, before: Callable[[], object] = lambda: None) -> None:
        """Transfer weights a few times, and note the median."""
        taken_s: list[float] = []
        inside_s: list[float] = []
        sent: list[Any] = []
        for _ in range(self._rounds + 1):
            before()
            self._version += 1
            start_s = time.perf_counter()
            calls = channel.send(self._version)
            if isinstance(channel, ProcessGroup):
                sent = calls[0].get()
            channel.check()
            taken_s.append(time.perf_counter() - start_s)
            spans = [span for call in calls for span in call.spans()]
            inside_s.append(max(span.duration_s for span in spans))
        result: dict[str, Any] = {
            "seconds": statistics.median(taken_s[1:]),
            "first_s": taken_s[0],
            "longest_call_s": statistics.median(inside_s[1:]),
            "rounds_s": taken_s[1:],
        }
        if sent:
            result["bytes"] = sum(one.num_bytes for one in sent)
            num_values = sum(one.num_values for one in sent)
            if all(one.num_changed is not None for one in sent):
                result["changed"] = sum(one.num_changed for one in sent) / num_values
        self.results[name] = result
        show(name, result)

    def set_receipts(self, on: bool) -> None:
        self.actor.receipts(on)
        self.rollout.receipts(on)


def show(name: str, result: dict[str, Any]) -> None:
    line = f"  {name:38} {result['seconds'] * 1e3:10.1f} ms"
    line += f"   longest call {result['longest_call_s'] * 1e3:9.1f} ms"
    if "bytes" in result:
        gb_per_s = result["bytes"] / result["seconds"] / 1e9
        line += f"   {result['bytes'] / MB:10.2f} MB  {gb_per_s:7.2f} GB/s"
    if "changed" in result:
        line += f"   changed {100 * result['changed']:.3f}%"
    print(line, flush=True)


def measure_all(bench: Bench, rates: Sequence[float], shares: Sequence[float]) -> None:
    held = bench.rollout.held_bytes()
    engine_mb = sum(held) / MB
    print(f"the engines hold {engine_mb:.1f} MB on {len(held)} processes")
    bench.results["engine_mb"] = engine_mb
    full = bench.channel(ProcessGroup)
    bench.measure("full", full)
    bench.set_receipts(False)
    bench.measure("full, without receipts", full)
    bench.set_receipts(True)

    delta = bench.channel(ProcessGroup, sends_changes=True)
    bench.measure("delta, nothing has changed", delta)
    for rate in rates:
        bench.measure(f"delta, a step at {rate:g}", delta, lambda: bench.actor.take_step(rate))  # noqa: B023
    for share in shares:
        bench.measure(f"delta, {share:.2%} changed", delta, lambda: bench.actor.change(share))  # noqa: B023
    bench.set_receipts(False)
    name = f"delta, {shares[0]:.2%} changed, without receipts"
    bench.measure(name, delta, lambda: bench.actor.change(shares[0]))
    bench.set_receipts(True)

    bench.measure("shared memory", bench.channel(SharedMemory))
    copies = bench.actor.copy_s(int(held[0] * bench.rollout.dims.tp))[0]
    bench.results["copy_s"] = copies
    for what, seconds in copies.items():
        print(f"  copy of one model, {what:19} {seconds * 1e3:10.1f} ms")


class OutOfTimeError(BaseException):
    """The limit has passed."""


is_out_of_time = False


def stop(*_: object) -> None:
    global is_out_of_time
    is_out_of_time = True
    raise OutOfTimeError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=Path, help="a folder with a config.json")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--limit", type=int, default=600, help="seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape: dict[str, Any] = MIDDLE
    if options.shape is not None:
        shape = json.loads((options.shape / "config.json").read_text())
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(options.limit)

    num_processes = options.trainers + options.engines
    if options.device == "cuda":
        lanes.NUM_GPUS = num_processes
        lanes.share_one_gpu()
    # Worker processes import the classes of this file, and what the user's folders have.
    folders = [str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    num_params = sum(one.numel() for one in model_on_meta(shape, torch.bfloat16).parameters())
    results: dict[str, Any] = {"device": options.device, "parameters": num_params}
    results |= {key: getattr(options, key) for key in ("trainers", "engines", "tp", "rounds")}
    print(
        f"{num_params / 1e6:.0f} million parameters; {options.trainers} trainers, "
        f"{options.engines} engine processes, tensor parallel {options.tp}, on {options.device}"
    )
    code = 0
    bench: Bench | None = None
    try:
        ray.init(
            address="local",
            num_cpus=num_processes + 2,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            **({"num_gpus": num_processes} if options.device == "cuda" else {}),
        )
        keys = [
            f"trainer.device={options.device}",
            f"trainer.n_gpus_per_node={num_processes}",
            "placement.strategy=custom",
            f"placement.pools.train=[{options.trainers}]",
            f"placement.pools.generate=[{options.engines}]",
            *(f"placement.roles.{role}=train" for role in ("actor", "critic", "ref")),
            "placement.roles.rollout=generate",
        ]
        config = load_config([], keys).config
        with Cluster(build_plan(config)) as cluster:
            dims = ParallelDims(dp=options.engines // options.tp, tp=options.tp)
            actor = cluster.groups["train"].add_role("actor", worker("BenchActor"), config, shape)
            rollout = cluster.groups["generate"].add_role(
                "rollout", worker("BenchRollout"), config, shape, dims=dims
            )
            bench = Bench(actor, rollout, options.rounds)
            measure_all(bench, options.rates, options.shares)
    except BaseException:
        # An error in the middle of a function of Ray becomes another one.
        if not is_out_of_time:
            raise
        print(f"stopped after {options.limit} s; what is above was measured", flush=True)
        code = 1
    finally:
        signal.alarm(0)
        results["ways"] = {} if bench is None else bench.results
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
        ray.shutdown()
    return code


def worker(name: str) -> Any:
    """A class of this file under the module name that worker processes import it by."""
    import weight_transfer

    return getattr(weight_transfer, name)


if __name__ == "__main__":
    sys.exit(main())
