"""Stop a rank, or let a reward function never return, in a run that trains, and see how long the
message takes.

    python benchmarks/stalls.py --limit 5                        all cases
    python benchmarks/stalls.py --case "rank 1" --case sleeps    those with these words, with rolepool's own limits

Each case is a run of the demo task on two CPU processes. After its second step comes the fault. The
limits of stalls and of reward functions are `--limit` seconds, if it is given. Prints a table:
seconds from the fault to the message, seconds from the fault to the end of the next step, the
message or the error that names the cause, and how the run ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rolepool.config import load_config
from rolepool.data.demo import Demo, make_demo
from rolepool.errors import RolepoolError
from rolepool.metrics.spans import RULE_POOL
from rolepool.trainer.loop import Observer, Trainer

FAULT_STEP, NUM_STEPS = 2, 5
REWARD = """
import re, time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    fault = Path({fault!r})
    if fault.exists():
        fault.unlink()
        {code}
    return float(solution_str == ground_truth)
"""
SLEEPS = "time.sleep(100_000)"
SPINS_IN_C = "sum(range(10**13))"
BACKTRACKS = 're.match(r"(a+)+$", "a" * 60 + "b")'
SPLIT = "placement.strategy=split"
LIMIT_KEYS = ("trainer.stall_timeout_s", "custom_reward_function.timeout_s")


class Fault(Observer):
    """Makes the fault after a step, and notes when it was reported and when the next step ended."""

    def __init__(self, make: Callable[[], None]) -> None:
        self._make = make
        self.fault_s = self.told_s = self.next_step_s = 0.0
        self.line = ""

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        if step == FAULT_STEP and "timing_s/step" in metrics and not self.fault_s:
            self._make()
            self.fault_s = time.monotonic()
        elif metrics.get("reward/failed/mean") and not self.told_s:
            self.tell(f"reward/failed/mean={metrics['reward/failed/mean']:.3g} in step {step}")
        if self.told_s and not self.next_step_s and "timing_s/step" in metrics:
            self.next_step_s = time.monotonic()

    def on_notice(self, line: str) -> None:
        if line.startswith("stall: ") and not self.told_s:
            self.tell(line)

    def tell(self, line: str) -> None:
        self.told_s, self.line = time.monotonic(), line


def run(
    demo: Demo, folder: Path, code: str | None, victim: tuple[str, int], *more: str
) -> list[str]:
    """One case; a row of the table."""
    fault_file, reward = folder / "fault", folder / "reward.py"
    folder.mkdir()
    reward.write_text(REWARD.format(fault=str(fault_file), code=code or "pass"), encoding="utf-8")
    keys = [
        f"actor_rollout_ref.model.path={demo.model}",
        f"data.train_files={demo.train_file}",
        "data.train_batch_size=16",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.default_local_dir={folder / 'run'}",
        f"custom_reward_function.path={reward}",
        *more,
    ]
    trainer = Trainer(load_config([], keys))

    def stop() -> None:
        pool, rank = victim
        os.kill(trainer.deployment.cluster.groups[pool].processes[rank].pid, signal.SIGSTOP)

    trainer.observer = fault = Fault(stop if code is None else fault_file.touch)
    try:
        trainer.run()
        ended = "all steps were trained"
    except RolepoolError as error:
        ended = f"error: {error.problems[0]}"
        if not fault.told_s:
            fault.tell(error.problems[0])
    next_step = f"{fault.next_step_s - fault.fault_s:.1f}" if fault.next_step_s else "-"
    return [f"{fault.told_s - fault.fault_s:.1f}", next_step, fault.line, ended]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit", type=float, help="seconds; default: the limits that rolepool has"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        help="words in the name of a case; default: all cases",
    )
    options = parser.parse_args()
    limits = [f"{key}={options.limit}" for key in LIMIT_KEYS] if options.limit else []
    zero = "custom_reward_function.on_error=zero"
    actor, critic, rule = ("actor_rollout_ref_pool", 0), ("critic_pool", 0), (RULE_POOL, 0)
    nobody = ("", 0)
    cases: dict[str, tuple[str | None, tuple[str, int], list[str]]] = {
        "SIGSTOP of rank 1 of the only pool": (None, ("global_pool", 1), []),
        "SIGSTOP of the actor's pool": (None, actor, [SPLIT]),
        "SIGSTOP of the critic's pool": (None, critic, [SPLIT]),
        "SIGSTOP of the reward process": (None, rule, []),
        "reward function sleeps, on_error=abort": (SLEEPS, nobody, []),
        "reward function sleeps, on_error=zero": (SLEEPS, nobody, [zero]),
        "reward function spins in C, on_error=zero": (SPINS_IN_C, nobody, [zero]),
        "regular expression backtracks, on_error=zero": (BACKTRACKS, nobody, [zero]),
    }
    with tempfile.TemporaryDirectory() as folder:
        demo = make_demo(Path(folder) / "demo")
        print("| fault | seconds to the message | to the next step | message | end of the run |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for number, (name, (code, victim, more)) in enumerate(cases.items()):
            if options.case and not any(words in name for words in options.case):
                continue
            row = run(demo, Path(folder) / f"case{number}", code, victim, *more, *limits)
            print(f"| {' | '.join([name, *row])} |".replace(folder, "..."), flush=True)


if __name__ == "__main__":
    main()
