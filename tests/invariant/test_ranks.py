"""However many ranks share an update, sharded or replicated, it is the same update: real gloo
processes, float64."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from exact_norms import use_exact_norms
from rolepool.config.model_keys import FsdpConfig, OptimConfig
from rolepool.models.micro_batches import by_rows
from rolepool.models.ranks import rank_and_count, whole
from rolepool.models.training import TrainedModel
from rolepool.placement import ParallelDims

ROWS, NUM_STEPS, VOCABULARY = 12, 3, 50
TOLERANCE = 1e-12


def build(fsdp_size: int) -> TrainedModel:
    """A small Llama whose sizes three ranks cut into uneven pieces."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return TrainedModel(
        LlamaForCausalLM(config).to(torch.float64),  # type: ignore[no-untyped-call]
        device="cpu",
        dims=ParallelDims.over(rank_and_count()[1], shard=fsdp_size),
        optim=OptimConfig(lr=1e-3),
        fsdp=FsdpConfig(fsdp_size=fsdp_size),
        grad_clip=1.0,
        num_steps=NUM_STEPS,
    )


def update(fsdp_size: int, rows_per_pass: int) -> dict[str, Tensor]:
    """Gradients of every step as the optimizer sees them, their norms, and the weights after the
    last step."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    trained, seen = build(fsdp_size), {}
    for step in range(NUM_STEPS):
        tokens = torch.randint(
            VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(step)
        )[rank::num_ranks]

        def loss_of(
            rows: Sequence[int], tokens: Tensor = tokens
        ) -> tuple[Tensor, dict[str, Tensor]]:
            logits = trained.model(input_ids=tokens[rows], use_cache=False).logits
            return (logits.logsumexp(-1) - logits[..., 0] + logits[..., 0] ** 2).mean() * len(
                rows
            ) / ROWS, {}

        def look(*_: object, step: int = step) -> None:
            for name, parameter in trained.model.named_parameters():
                assert parameter.grad is not None
                seen[f"{step}/{name}"] = whole(parameter.grad).clone()

        hook = trained.optimizer.register_step_pre_hook(look)
        seen[f"{step}/norm"] = trained.step(by_rows(len(tokens), rows_per_pass), loss_of)[
            "grad_norm"
        ]
        hook.remove()
    seen.update(
        {name: whole(tensor).clone() for name, tensor in trained.model.state_dict().items()}
    )
    return seen


def update_on_rank(rank: int, num_ranks: int, fsdp_sizes: Sequence[int], folder: Path) -> None:
    use_exact_norms()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    for fsdp_size in fsdp_sizes:
        torch.save(update(fsdp_size, rows_per_pass=2), folder / f"{fsdp_size}_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("num_ranks", "fsdp_sizes"),
    [(2, (-1, 1)), (3, (-1,)), pytest.param(4, (2,), marks=pytest.mark.slow)],
)
def test_gradients_and_weights_do_not_depend_on_the_number_of_ranks_and_copies(
    num_ranks: int, fsdp_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    expected = update(-1, rows_per_pass=ROWS)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["transformers.models.llama.modeling_llama"]
    )
    start_processes(
        update_on_rank, (num_ranks, fsdp_sizes, tmp_path), num_ranks, start_method="forkserver"
    )
    for file in sorted(tmp_path.glob("*.pt")):
        found = torch.load(file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{file.stem}: {name}"
            )
    assert len(list(tmp_path.glob("*.pt"))) == num_ranks * len(fsdp_sizes)
