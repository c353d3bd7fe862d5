"""What the receipts of weight transfers cost: microseconds per MB, and the share of an update.

    python benchmarks/weight_receipts.py [--device cpu] [--shape recipes/shapes/qwen2-tiny]
    python benchmarks/weight_receipts.py --device cuda --shape recipes/shapes/qwen2.5-0.5b

Prints the time of the digest of single tensors of several sizes; of all weights of a model, tensor
by tensor, as a transfer computes it; of a transfer from a model in training to an engine's model in
the same process, with receipts on both sides and as plain copies; and of one update of the model on
`--tokens` tokens. Medians of `--repeats` rounds after one that warms up. `--json FILE` writes the
numbers to a file.

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

ROOT = Path(__file__).parent.parent
MB = 10**6
SIZES_MB = (0.01, 0.1, 1.0, 10.0, 100.0)
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

    print(f"digest of one tensor on {device}, bfloat16:")
    by_size: dict[str, float] = {}
    for size_mb in SIZES_MB:
        tensor = torch.randn(int(size_mb * MB / 2), device=device).bfloat16()
        taken_s = seconds(partial(digest_all, {"": tensor}), device, repeats)
        by_size[f"{size_mb:g}"] = taken_s * 1e6 / size_mb
        print(f"  {size_mb:6g} MB {taken_s * 1e6:10.0f} us {taken_s * 1e6 / size_mb:8.1f} us/MB")
    results["us_per_mb_by_mb"] = by_size

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
