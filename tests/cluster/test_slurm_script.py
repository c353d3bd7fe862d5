"""examples/slurm.sbatch on two nodes. Small programs stand in for Slurm's; Ray, the nodes and the
training are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_helpers import wait_until
from node_namespaces import ADDRESSES, TwoNodes, output_of, why_no_nodes

FAKE_SLURM = Path(__file__).parent / "fake_slurm"
SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sbatch"
JOB = "4711"
SHORT = "trainer.test_freq=-1 trainer.val_before_train=false"


class Slurm:
    """A job on some of two nodes, which are called `one` and `two`."""

    def __init__(self, nodes: TwoNodes, folder: Path) -> None:
        self.nodes, self.folder, self.work = nodes, folder / "slurm", folder / "work"
        self.folder.mkdir()
        self.work.mkdir()
        for name, node in (("one", nodes.one), ("two", nodes.two)):
            os.mkfifo(self.folder / name)
            node.start(f"exec '{FAKE_SLURM}/agent' {name}", folder, FAKE_SLURM=str(self.folder))

    def submit(self, arguments: str, names: str, **environment: str) -> subprocess.Popen[str]:
        """Run the script on the first node, as sbatch does."""
        return self.nodes.one.start(
            f"exec bash '{SCRIPT}' {arguments}",
            self.work,
            PATH=f"{FAKE_SLURM}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            FAKE_SLURM=str(self.folder),
            SLURM_JOB_ID=JOB,
            SLURM_JOB_NODELIST=names,
            SLURM_CPUS_PER_TASK="2",
            **environment,
        )

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()

    def steps(self, run: str) -> list[int]:
        file = self.work / "runs" / run / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row["step"] for row in rows if "training/epoch" in row]

    def leftovers(self) -> list[str]:
        """What the job has left behind on the nodes: its folder, and processes of Ray."""
        look = f"ls -d $TMPDIR/rolepool-{JOB} 2> /dev/null || true; ps -eo comm= | grep -E 'raylet|gcs_server' || true"
        listed = [node.run(look, self.work) for node in (self.nodes.one, self.nodes.two)]
        return [line for lines in listed for line in lines.splitlines()]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    reason = why_no_nodes()
    if reason is not None:
        pytest.skip(reason)
    with TwoNodes(tmp_path) as nodes:
        yield Slurm(nodes, tmp_path)


def script_of(job: subprocess.Popen[str]) -> psutil.Process:
    """The process of the script, which is the child of the program that enters the node."""
    (script,) = psutil.Process(job.pid).children()
    return script


@pytest.mark.slow
def test_the_demo_trains_on_two_nodes_and_nothing_of_it_is_left(slurm: Slurm) -> None:
    arguments = f"demo_split {SHORT} trainer.n_gpus_per_node=1 placement.split.axis=node trainer.save_freq=2"
    job = slurm.submit(f"{arguments} trainer.total_training_steps=2", "one,two")
    output = output_of(job, 200)
    assert job.returncode == 0, output
    assert slurm.steps("demo_split") == [1, 2]
    spans = [
        json.loads(line)
        for line in (slurm.work / "runs/demo_split/spans.jsonl").read_text().splitlines()
    ]
    assert {span["node"] for span in spans if span["role"] == "actor"} == {ADDRESSES[0]}
    assert {span["node"] for span in spans if span["role"] == "critic"} == {ADDRESSES[1]}
    assert slurm.leftovers() == []
    assert not slurm.requeued


@pytest.mark.slow
def test_before_the_time_limit_the_job_saves_a_step_returns_to_the_queue_and_resumes(
    slurm: Slurm,
) -> None:
    arguments = f"demo {SHORT} trainer.total_training_steps"
    job = slurm.submit(f"{arguments}=1000", "one")
    wait_until(lambda: len(slurm.steps("demo")) >= 2 or job.poll() is not None, timeout_s=150)
    assert job.poll() is None, output_of(job, 1)
    script_of(job).send_signal(signal.SIGUSR1)
    output = output_of(job, 100)
    assert job.returncode == 143, output
    assert slurm.requeued and f"job {JOB} returns to the queue" in output
    assert slurm.leftovers() == []
    last = slurm.steps("demo")[-1]
    assert (
        slurm.work / "runs" / "demo" / "checkpoints" / f"step_{last:06d}" / "trainer.json"
    ).is_file()

    job = slurm.submit(f"{arguments}={last + 1}", "one")
    output = output_of(job, 150)
    assert job.returncode == 0, output
    assert f"resuming from step {last} " in output
    assert slurm.steps("demo") == list(range(1, last + 2))


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_training_and_a_cancelled_job_does_not_return(
    slurm: Slurm,
) -> None:
    job = slurm.submit("demo trainer.nodes=2", "one")
    output = output_of(job, 100)
    assert job.returncode == 2, output
    assert "error: trainer.nodes=2: unknown key; did you mean trainer.nnodes?" in output

    job = slurm.submit(f"demo {SHORT} trainer.total_training_steps=1000", "one")
    wait_until(lambda: len(slurm.steps("demo")) >= 1 or job.poll() is not None, timeout_s=150)
    script_of(job).send_signal(signal.SIGTERM)
    output = output_of(job, 100)
    assert job.returncode == 143, output
    assert list((slurm.work / "runs" / "demo" / "checkpoints").iterdir()), "the step is saved"
    assert slurm.leftovers() == [] and not slurm.requeued


@pytest.mark.slow
def test_a_node_that_does_not_join_ends_the_job_in_time(slurm: Slurm) -> None:
    slurm.nodes.two.in_network("ip", "link", "set", "eth0", "down")
    job = slurm.submit("demo", "one,two", START_TIMEOUT_S="30")
    output = output_of(job, 120)
    assert job.returncode == 1, output
    assert "all 2 nodes have joined" in output
    assert slurm.leftovers() == []
