"""What the receipts of weight transfers cost: microseconds per MB, and the share of an update.

    python benchmarks/weight_receipts.py [--device cpu] [--shape recipes/shapes/qwen2-tiny]
    python benchmarks/weight_receipts.py --device cuda --shape recipes/shapes/qwen2.5-0.5b

Prints the time of the digest of single tensors of several sizes, and of parts of one; of all weights
of a model, tensor by tensor, as a transfer computes it; of a transfer from a model in training to an engine's model in
the same process, with receipts on both sides and as plain copies; and of one update of the model on
`--tokens` tokens. Medians of `--repeats` rounds after one that warms up. `--json FILE` writes the
numbers to a file.

On a GPU the digests of single tensors are also computed with torch's operations, which take the place
of the Triton kernel where there is no Triton, and the time of a copy of the tensor is printed, which
reads and writes it once.

It also computes digests of the same tensors on the CPU, and fails if they differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rolepool.config import load_config
from rolepool.models.training import TrainedModel
from rolepool.models.weights import WeightSource
from rolepool.placement import ParallelDims
from rolepool.rollout.engine import StreamedEngine
from rolepool.weights.digests import Digests, digests_of
from rolepool.weights.receipts import Receipt, check_receipt
from rolepool.weights.regions import Region

ROOT = Path(__file__).parent.parent
MB = 10**6
SIZES_MB = (0.01, 0.1, 1.0, 10.0, 100.0)
GPU_SIZES_MB = (*SIZES_MB, 1000.0)
ROW_ELEMENTS = 1000
PART_SHAPE = (5000, 10_000)
"""The shape of the tensor of which parts are read, in elements of two bytes."""
ROW_TOKENS = 512
CHECKED_TENSORS = 20


def seconds(action: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of an action, after a first one that warms up."""

    def once() -> float:
        start_s = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    once()
    return statistics.median(once() for _ in range(repeats))


def make_model(shape: Path, device: str, dtype: torch.dtype) -> Any:
    model_config = AutoConfig.from_pretrained(str(shape))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config)
    return model.to(dtype)


def make_trained(model: nn.Module, device: str) -> TrainedModel:
    keys = load_config([], []).config.actor_rollout_ref.actor
    return TrainedModel(
        model,
        device=device,
        dims=ParallelDims(),
        optim=keys.optim,
        fsdp=keys.fsdp_config,
        grad_clip=1.0,
        num_steps=100,
    )


def update(trained: TrainedModel, tokens: Tensor) -> None:
    """One optimizer step on rows of tokens, one row at a time."""

    def loss_of(rows: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        model: Any = trained.model
        batch = tokens[list(rows)]
        loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss, {}

    with trained.on_device(training=True):
        trained.step([[row] for row in range(len(tokens))], loss_of)


def digest_all(weights: dict[str, Tensor]) -> None:
    digests = Digests()
    for name, weight in weights.items():
        digests.add(name, weight)
    digests.read()


def add_all(digests: Digests, tensor: Tensor) -> None:
    digests.add("", tensor)
    digests.read()


def measure_sizes(device: str, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds per MB of single matrices, by what is done with them and by their size."""
    sizes_mb = GPU_SIZES_MB if device == "cuda" else SIZES_MB
    columns = ["digest"]
    if device == "cuda":
        columns += ["torch's operations", "copy"]
    print(f"digest of one bfloat16 matrix with rows of {ROW_ELEMENTS} on {device}, us/MB:")
    print(f"  {'MB':>6} " + " ".join(f"{column:>18}" for column in columns))
    by_action: dict[str, dict[str, float]] = {column: {} for column in columns}
    for size_mb in sizes_mb:
        num_rows = int(size_mb * MB / 2 / ROW_ELEMENTS)
        tensor = torch.randn(num_rows, ROW_ELEMENTS, device=device).bfloat16()
        actions: dict[str, Callable[[], object]] = {"digest": partial(digest_all, {"": tensor})}
        if device == "cuda":
            plain = Digests(uses_triton=False)
            actions["torch's operations"] = partial(add_all, plain, tensor)
            actions["copy"] = partial(torch.empty_like(tensor).copy_, tensor)
        for action, act in actions.items():
            taken_s = seconds(act, device, repeats)
            by_action[action][f"{size_mb:g}"] = taken_s * 1e6 / size_mb
        row = [by_action[action][f"{size_mb:g}"] for action in columns]
        print(f"  {size_mb:6g} " + " ".join(f"{number:18.2f}" for number in row))
    return by_action


def measure_parts(device: str, repeats: int) -> dict[str, float]:
    """Microseconds per MB of parts of a matrix that are read where they lie, and of a vector."""
    num_rows, num_columns = PART_SHAPE
    whole = torch.randn(*PART_SHAPE, device=device).bfloat16()
    vector = torch.randn(10_000, device=device).bfloat16()
    regions = {
        "half of the rows": Region((0, num_rows // 2), (0, num_columns)),
        "half of the columns": Region((0, num_rows), (num_columns // 2, num_columns)),
        "the same from within a word": Region((0, num_rows), (num_columns // 2 + 1, num_columns)),
    }
    by_part: dict[str, float] = {}

    def add_part(region: Region) -> None:
        digests = Digests()
        part = whole[slice(*region.rows), slice(*region.columns)]
        digests.add_part("", part, region, whole.shape)
        digests.read()

    for name, region in regions.items():
        taken_s = seconds(partial(add_part, region), device, repeats)
        by_part[name] = taken_s * 1e6 / (2 * region.num_elements / MB)
    vector_s = seconds(partial(digest_all, {"": vector}), device, repeats)
    by_part["a vector of 10,000"] = vector_s * 1e6 / (vector.nbytes / MB)
    print(f"parts of a bfloat16 matrix of {num_rows} x {num_columns}, and a vector, us/MB:")
    for name, us_per_mb in by_part.items():
        print(f"  {name:28} {us_per_mb:9.2f}")
    return by_part


class Transfer:
    """All weights of a model in training to the model of an engine."""

    def __init__(self, source: WeightSource, engine: StreamedEngine) -> None:
        self._source = source
        self._engine = engine
        self._version = 0

    def with_receipts(self) -> None:
        self._version += 1
        digests = Digests()
        with self._source.open() as tensors:

            def noted() -> Any:
                for name, tensor in tensors:
                    digests.add(name, tensor)
                    yield name, tensor

            got = self._engine.update_weights(noted(), self._version)
        check_receipt(Receipt(self._version, digests.read()), got, "the engine")

    def plain(self) -> None:
        targets = self._engine.model.state_dict()
        with torch.no_grad(), self._source.open() as tensors:
            for name, tensor in tensors:
                targets[name].copy_(tensor)


def check_devices(weights: dict[str, Tensor]) -> None:
    """Stop with an error if a digest on this device is not that on the CPU."""
    some = list(weights.items())[:CHECKED_TENSORS]
    here = digests_of(some)
    on_cpu = digests_of((name, weight.cpu()) for name, weight in some)
    wrong = [name for name in here if here[name] != on_cpu[name]]
    if wrong:
        raise SystemExit(f"error: the digests of {wrong} are not those on the CPU")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=Path, default=ROOT / "recipes/shapes/qwen2-tiny")
    parser.add_argument("--tokens", type=int, default=16 * ROW_TOKENS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device: str = options.device
    repeats: int = options.repeats
    if device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(1)
    results: dict[str, Any] = {"device": device, "shape": options.shape.name}

    by_action = measure_sizes(device, repeats)
    results["us_per_mb_by_mb"] = by_action.pop("digest")
    results["others_us_per_mb_by_mb"] = by_action
    results["parts_us_per_mb"] = measure_parts(device, repeats)

    rollout_dtype = torch.float32 if device == "cpu" else torch.bfloat16
    trained = make_trained(make_model(options.shape, device, torch.float32), device)
    engine = StreamedEngine(make_model(options.shape, device, rollout_dtype).requires_grad_(False))
    source = WeightSource(trained, None if device == "cpu" else rollout_dtype)
    with source.open() as tensors:
        weights = dict(tensors)
    check_devices(weights)
    size_mb = sum(weight.nbytes for weight in weights.values()) / MB
    digest_s = seconds(partial(digest_all, weights), device, repeats)
    weights.clear()  # gathered tensors would take memory
    transfer = Transfer(source, engine)
    peak_bytes = 0
    plain_s = seconds(transfer.plain, device, repeats)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
    receipts_s = seconds(transfer.with_receipts, device, repeats)
    if device == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    vocab_size = engine.model.config.vocab_size
    tokens = torch.randint(vocab_size, (options.tokens // ROW_TOKENS, ROW_TOKENS), device=device)
    update_s = seconds(lambda: update(trained, tokens), device, repeats)

    results |= {
        "model_mb": size_mb,
        "digest_s": digest_s,
        "us_per_mb": digest_s * 1e6 / size_mb,
        "plain_transfer_s": plain_s,
        "transfer_with_receipts_s": receipts_s,
        "transfer_peak_bytes": peak_bytes,
        "update_s": update_s,
        "update_tokens": tokens.numel(),
        "share_of_update": (receipts_s - plain_s) / update_s,
    }
    print(f"{options.shape.name}, {size_mb:.1f} MB as the rollout has it:")
    print(
        f"  digests of all weights, one side {digest_s * 1e3:9.2f} ms  {results['us_per_mb']:.1f} us/MB"
    )
    print(f"  transfer in the process, plain   {plain_s * 1e3:9.2f} ms")
    print(f"  the same with both receipts      {receipts_s * 1e3:9.2f} ms")
    if device == "cuda":
        print(
            f"  memory of that transfer          {peak_bytes / 2**20:9.1f} MiB more than before it"
        )
    print(f"  update on {tokens.numel()} tokens {update_s * 1e3:20.2f} ms")
    print(f"  receipts are {results['share_of_update']:.2%} of the update")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
