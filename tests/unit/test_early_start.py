"""What starts before torch is imported, and what processes import while they start."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.metrics.spans import RULE_POOL
from rolepool.placement import build_plan
from rolepool.trainer.early_start import may_begin_early, modules_of

LLAMA = "transformers.models.llama.modeling_llama"
SPLIT = ["trainer.n_gpus_per_node=2", "trainer.device=cpu", "placement.strategy=split"]


def test_processes_can_be_started_without_torch(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "import sys, rolepool.trainer.early_start as early; assert early.begin_early\n"
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    ended = python("-c", code)
    assert ended.stdout == "[]\n", ended.stderr


def modules(demo: Demo, *words: str) -> dict[str, list[str]]:
    config = load_config([], [f"actor_rollout_ref.model.path={demo.model}", *SPLIT, *words]).config
    return modules_of(config, build_plan(config))


def test_each_pool_imports_what_its_roles_need(demo: Demo) -> None:
    named = modules(demo)
    assert named == {
        "actor_rollout_ref_pool": [
            "rolepool.roles.actor_critic",
            LLAMA,
            "rolepool.roles.rollout",
            "rolepool.rollout.native",
        ],
        "critic_pool": ["rolepool.roles.actor_critic", LLAMA],
        RULE_POOL: ["rolepool.roles.rule_reward"],
    }
    for name in set().union(*named.values()):
        __import__(name)


def test_only_processes_on_gpus_import_what_compiles(demo: Demo) -> None:
    config = load_config([], [f"actor_rollout_ref.model.path={demo.model}", *SPLIT]).config
    plan = build_plan(config)
    on_gpu = modules_of(config, plan, on_gpu=True)
    for name, names in modules_of(config, plan).items():
        assert "torch._inductor.compile_fx" not in names
        assert ("torch._inductor.compile_fx" in on_gpu[name]) == (name in plan.pools)


def test_modules_of_users_are_not_imported_before_their_role_is_built(demo: Demo) -> None:
    named = modules(demo, "actor_rollout_ref.rollout.name=my_engines:engine")
    assert not any("my_engines" in names for names in named.values())


def test_a_model_that_is_not_on_disk_is_imported_later(demo: Demo) -> None:
    named = modules(demo, "critic.model.path=someone/a-model-that-is-nowhere")
    assert named["critic_pool"] == ["rolepool.roles.actor_critic"]


def test_nothing_starts_early_if_the_run_may_not_fit_its_folder(tmp_path: Path) -> None:
    def may_begin(*words: str) -> bool:
        return may_begin_early(load_config([], list(words)).config)

    folder = f"trainer.default_local_dir={tmp_path}"
    assert may_begin(folder)
    assert may_begin(f"{folder}/new")
    resumes = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"]
    assert not may_begin(f"{folder}/new", *resumes)
    (tmp_path / "metrics.jsonl").touch()
    assert not may_begin(folder)
    assert not may_begin(f"{folder}/metrics.jsonl")
