"""What the Dockerfile installs, without docker; and in it the job of examples/kuberay.yaml, without
Kubernetes: a head without CPUs for Ray, a worker node, and `ray job submit`, as KubeRay calls
it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_helpers import wait_until
from node_namespaces import ADDRESSES, TwoNodes, output_of, why_no_nodes

from dockerfile import read_stages

# What torch itself requires in exact versions, and what is there before the first step.
NOT_PINNED = re.compile(r"nvidia-.*|cuda-.*|triton|pip|rolepool")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(
    command: str, folder: Path, programs: Path, timeout_s: float = 300, **variables: str
) -> str:
    """The output of a shell command that must succeed, with the programs of an environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{programs}:{environment['PATH']}", **variables}
    ended = subprocess.run(
        ["sh", "-ec", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def programs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs that the steps of the target `cpu` install, except those of Debian. It takes
    minutes and 2 GB."""
    folder = tmp_path_factory.mktemp("image")
    environment, source = folder / "environment", folder / "source"
    source.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    for name, words in read_stages(root / "Dockerfile")["cpu"]:
        if name == "COPY":
            for copied in words.split()[:-1]:
                copy(root / copied, source / copied)
        elif name == "RUN" and not words.startswith(("apt-get", "useradd")):
            run(words, source, environment / "bin", timeout_s=800, TORCH_INDEX="")
    return environment / "bin"


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, target, symlinks=True, ignore=skipped)
    else:
        shutil.copy(source, target)


def test_exactly_the_pinned_packages_are_installed_and_the_demo_trains(
    root: Path, programs: Path, tmp_path: Path
) -> None:
    listed = json.loads(run("pip list --format=json", tmp_path, programs))
    installed = {normal(one["name"]): one["version"].split("+")[0] for one in listed}
    lines = [
        line.split("==")
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line
    ]
    pinned = {normal(name): version for name, version in lines}
    wrong = {name: version for name, version in installed.items() if pinned.get(name) != version}
    assert [name for name in wrong if not NOT_PINNED.fullmatch(name)] == []
    assert "aiohttp" in installed, "Ray's job server needs it"

    assert "2 pools on 2 of 2 CPU slots" in run("rolepool plan demo_split", tmp_path, programs)
    short = "trainer.total_training_steps=2 trainer.test_freq=-1 trainer.save_freq=-1"
    assert "run folder: runs/demo_split" in run(
        f"rolepool train demo_split {short}", tmp_path, programs
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_only_torch_comes_from_the_index_for_cpus(root: Path, tmp_path: Path) -> None:
    """With a wheel that is called torch and contains nothing."""
    environment, index = tmp_path / "environment", tmp_path / "index" / "torch"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    index.mkdir(parents=True)
    (version,) = re.findall(
        r"^torch==(.*)$", (root / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    for local in (version, "9.0.0"):
        write_empty_wheel(index, f"{local}+cpu")
    links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in sorted(index.iterdir()))
    (index / "index.html").write_text(f"<html><body>{links}</body></html>")
    (step,) = [
        words
        for _, words in read_stages(root / "Dockerfile")["cpu"]
        if "TORCH_INDEX" in words and "pip" in words
    ]
    run(step, root, environment / "bin", TORCH_INDEX=index.parent.as_uri())
    listed = json.loads(run("pip list --format=json", tmp_path, environment / "bin"))
    assert {one["name"]: one["version"] for one in listed}["torch"] == f"{version}+cpu"


def write_empty_wheel(folder: Path, version: str) -> None:
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


# A job on Kubernetes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    reason = why_no_nodes()
    if reason is not None:
        pytest.skip(reason)
    with TwoNodes(tmp_path) as nodes:
        yield nodes


def test_the_job_of_the_manifest_trains_beside_a_head_without_slots_stops_and_resumes(
    root: Path, programs: Path, nodes: TwoNodes, tmp_path: Path
) -> None:
    (job,) = [
        one
        for one in yaml.safe_load_all((root / "examples/kuberay.yaml").read_text())
        if one["kind"] == "RayJob"
    ]
    cluster = job["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "RAY_AUTH_MODE": cluster["authOptions"]["mode"],
        "RAY_AUTH_TOKEN": "0" * 64,
        **{one["name"]: one["value"] for one in head["template"]["spec"]["containers"][0]["env"]},
    }
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "300", (
        "Ray's default, 3, is too short for a step"
    )
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = (
        "20"  # Ray waits for all of it, also if the run has ended
    )
    options = " ".join(f"--{name}={value}" for name, value in head["rayStartParams"].items())
    work = tmp_path / "work"
    work.mkdir()
    nodes.one.run(f"ray start --head --port=6379 {options}", work, **variables)
    nodes.two.run(f"ray start --address={ADDRESSES[0]}:6379 --num-cpus=2", work, **variables)
    healthy = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read())"
    for node in (nodes.one, nodes.two):
        url = "http://localhost:52365/api/local_raylet_healthz"
        assert "success" in node.run(f"python -c '{healthy}' {url}", work, **variables), (
            "KubeRay asks for it"
        )

    entry = shlex.join(demo_of(shlex.split(job["spec"]["entrypoint"])))
    submit = f"ray job submit --address http://{ADDRESSES[0]}:8265 --submission-id"
    training = nodes.one.start(
        f"{submit} first -- {entry} trainer.total_training_steps=1000", work, **variables
    )
    rows = work / "runs" / "job" / "metrics.jsonl"
    wait_until(lambda: training.poll() is not None or steps_of(rows)[1:] != [], timeout_s=200)
    assert training.poll() is None, output_of(training, 1)
    nodes.one.run("ray job stop --no-wait first", work, **variables)
    output = output_of(training, 60)
    last = steps_of(rows)[-1]
    assert (work / f"runs/job/checkpoints/step_{last:06d}/trainer.json").is_file(), output

    output = nodes.one.run(
        f"{submit} second -- {entry} trainer.total_training_steps={last + 1}", work, **variables
    )
    assert f"resuming from step {last} " in output and "succeeded" in output
    spans = [json.loads(line) for line in (work / "runs/job/spans.jsonl").read_text().splitlines()]
    assert {span["node"] for span in spans if span["role"] in ("actor", "critic")} == {ADDRESSES[1]}


def demo_of(words: list[str]) -> list[str]:
    """The same command for the demo, on one node with two CPU slots. Later keys win over earlier
    ones."""
    files = {
        "data.train_files": "train.jsonl",
        "data.val_files": "val.jsonl",
        "actor_rollout_ref.model.path": "model",
    }
    keys = {
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 2,
        "trainer.test_freq": -1,
    }
    keys |= {"trainer.default_local_dir": "runs/job", "trainer.val_before_train": "false"}
    keys |= {key: f"runs/demo_data/{file}" for key, file in files.items()}
    return [
        "rolepool",
        "train",
        "demo_split",
        *words[3:],
        *(f"{key}={value}" for key, value in keys.items()),
    ]


def steps_of(file: Path) -> list[int]:
    rows: list[dict[str, Any]] = []
    if file.exists():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["step"] for row in rows if "training/epoch" in row]
