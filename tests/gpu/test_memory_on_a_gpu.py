"""Memory of roles on a real GPU: what is free, what a share allows, what is offloaded, and passes
that fit."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rolepool.config import Config, load_config
from rolepool.data.demo import make_demo
from rolepool.placement import Role, build_plan
from rolepool.placement.estimate import GIB, estimate_memory
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.out_of_memory import (
    explain_out_of_memory,
    free_bytes,
    is_out_of_memory,
    wanted_bytes,
)
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

pytestmark = pytest.mark.gpu

ROWS, WIDTH, SHARE = 8, 16, 0.1


@pytest.fixture
def small_share() -> Iterator[None]:
    torch.cuda.set_per_process_memory_fraction(SHARE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def batch(num_rows: int = ROWS, width: int = WIDTH) -> DataProto:
    ids = torch.randint(4, 12, (num_rows * width,), generator=torch.Generator().manual_seed(1))
    half = torch.full((num_rows,), width // 2)
    names = ("old_log_probs", "advantages", "values", "returns")
    floats = {key: ragged(torch.randn(int(half.sum())), half) for key in names}
    return DataProto.from_dict(
        {"input_ids": ragged(ids, 2 * half), "num_prompt_tokens": half, **floats}
    )


def test_what_is_free_is_bounded_by_the_share_and_asking_for_more_is_out_of_memory(
    small_share: None,
) -> None:
    _, total = torch.cuda.mem_get_info()
    assert 0 < free_bytes("cuda") <= SHARE * total
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(int(2 * SHARE * total), dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
    assert wanted_bytes(caught.value) == pytest.approx(2 * SHARE * total, rel=0.01)
    assert explain_out_of_memory("a rank", caught.value, "cuda", [])[0].endswith("free on its GPU")
    before, held = free_bytes("cuda"), torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert before - free_bytes("cuda") == pytest.approx(held.nbytes, rel=0.1)


def test_offloaded_models_leave_the_gpu_between_uses_and_train_the_same(
    one_rank: None, tmp_path: Path
) -> None:
    model = make_demo(tmp_path / "demo").model

    def run(offload: str) -> tuple[float, torch.Tensor, int]:
        words = [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_batch_size={ROWS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
            f"data.max_prompt_length={WIDTH // 2}",
            f"data.max_response_length={WIDTH // 2}",
            f"actor_rollout_ref.actor.fsdp_config.param_offload={offload}",
            f"actor_rollout_ref.actor.fsdp_config.optimizer_offload={offload}",
            f"actor_rollout_ref.ref.fsdp_config.param_offload={offload}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
        ]
        config = load_config([], words).config
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        data = batch()
        with made_in(WorkerContext(role="actor", device="cuda")):
            actor, reference = (
                Actor(config, ActorSetup(num_training_steps=2)),
                Reference(config, Setup()),
            )
        for _ in range(2):
            norm = actor.update_actor(data)["actor/grad_norm"]
        log_probs = actor.compute_log_prob(data).batch["old_log_probs"].values()
        reference.compute_ref_log_prob(data)
        return norm, log_probs, torch.cuda.memory_allocated() - before

    norm, log_probs, resident = run("false")
    norm_away, log_probs_away, left = run("true")
    assert norm_away == pytest.approx(norm, rel=1e-3)
    torch.testing.assert_close(log_probs_away, log_probs, rtol=1e-2, atol=1e-2)
    assert left < resident / 10


# What the plan says

SEQUENCES, LENGTH, PASS_TOKENS = 64, 512, 8192


@pytest.fixture(scope="module")
def four_layers(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Layers and vocabulary of the 0.5B shape, in a model that is made in seconds."""
    folder = tmp_path_factory.mktemp("model")
    content = json.loads(
        (root / "recipes/shapes/qwen2.5-0.5b/config.json").read_text(encoding="utf-8")
    )
    with torch.device("cuda"):
        shape = AutoConfig.for_model(**{**content, "num_hidden_layers": 4})
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
        shape.num_labels = 1
        rewarding = AutoModelForSequenceClassification.from_config(shape, dtype=torch.bfloat16)
    rewarding.save_pretrained(folder / "reward")
    return load_config(
        [],
        [
            f"actor_rollout_ref.model.path={folder}",
            f"critic.model.path={folder}",
            "reward_model.enable=true",
            f"reward_model.model.path={folder / 'reward'}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "critic.model.enable_gradient_checkpointing=false",
            "algorithm.use_kl_in_reward=true",
            "actor_rollout_ref.rollout.ignore_eos=true",
            f"data.train_batch_size={SEQUENCES}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={SEQUENCES}",
            f"data.max_prompt_length={LENGTH // 2}",
            f"data.max_response_length={LENGTH // 2}",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={PASS_TOKENS}",
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
            f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={PASS_TOKENS}",
            "critic.use_dynamic_bsz=true",
            f"critic.ppo_max_token_len_per_gpu={PASS_TOKENS}",
            "reward_model.use_dynamic_bsz=true",
            "trainer.n_gpus_per_node=1",
        ],
    ).config


def work_of(role: Role, config: Config) -> Callable[[], object]:
    """The role is made; what takes most of it is to be called."""
    data = batch(SEQUENCES, LENGTH)
    if role == Role.Actor:
        actor = Actor(config, ActorSetup(num_training_steps=2))
        return lambda: actor.update_actor(data)
    if role == Role.Critic:
        critic = Critic(config, TrainingSetup(num_training_steps=2))
        return lambda: critic.update_critic(data)
    if role == Role.RefPolicy:
        reference = Reference(config, Setup())
        return lambda: reference.compute_ref_log_prob(data)
    if role == Role.RewardModel:
        reward_model = RewardModel(config, RewardModelSetup())
        return lambda: reward_model.compute_scores(data)
    rollout, ids = Rollout(config, RolloutSetup()), data.to_padded().batch["prompts"].tolist()
    columns = {
        "raw_prompt_ids": ids,
        "uid": list(range(SEQUENCES)),
        "sample_index": [0] * SEQUENCES,
    }
    prompts = DataProto.from_dict(non_tensors=columns)
    return lambda: rollout.generate_sequences(prompts)


@pytest.mark.parametrize(
    "role", [Role.Actor, Role.Critic, Role.RefPolicy, Role.Rollout, Role.RewardModel]
)
def test_a_role_takes_what_the_plan_says(one_rank: None, four_layers: Config, role: Role) -> None:
    (pool,) = estimate_memory(four_layers, build_plan(four_layers), None).pools.values()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with made_in(WorkerContext(role=role, device="cuda")):
        work = work_of(role, four_layers)
    work()
    torch.cuda.reset_peak_memory_stats()
    work()
    peak = torch.cuda.max_memory_allocated() - before
    torch._C._cuda_clearCublasWorkspaces()  # the process's, not the role's
    left = torch.cuda.memory_allocated() - before
    planned = pool.roles[role]
    print(
        f"{role}: at work {peak / GIB:.2f} GiB, planned {planned.working / GIB:.2f}; "
        f"at rest {left / GIB:.2f}, planned {planned.idle / GIB:.2f}"
    )
    assert planned.working == pytest.approx(peak, rel=0.15)
    assert planned.idle == pytest.approx(left, rel=0.15)
