"""Dockerfile, Slurm script and KubeRay manifest: what can be said about them without docker, Slurm
and Kubernetes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import Outcome
from dockerfile import Instruction, is_ignored, read_stages

TARGETS = ["cpu", "cuda"]


def pinned_version(root: Path, package: str) -> str:
    (version,) = re.findall(
        rf"^{package}==(.*)$", (root / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    return str(version)


def page_commands(root: Path, section: str) -> list[str]:
    """The lines of the command blocks of a section of docs/multinode.md."""
    parts = re.split(
        r"^## ", (root / "docs" / "multinode.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    (found,) = [part for part in parts if part.startswith(f"{section}\n")]
    blocks = re.findall(r"^```bash\n(.*?)\n```$", found, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


# The container


@pytest.fixture(params=TARGETS)
def stage(root: Path, request: pytest.FixtureRequest) -> list[Instruction]:
    return read_stages(root / "Dockerfile")[request.param]


def words_of(stage: list[Instruction], name: str) -> list[str]:
    return [words for kind, words in stage if kind == name]


def test_the_base_image_has_an_exact_version_of_a_python_that_we_support(
    root: Path, stage: list[Instruction]
) -> None:
    found = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-bookworm", stage[0].words)
    assert found is not None and stage[0].name == "FROM"
    supported = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    assert supported == ">=3.11,<3.15" and (3, 11) <= tuple(map(int, found.groups())) < (3, 15)


def test_what_is_copied_exists_and_nothing_else_is_sent_to_the_builder(
    root: Path, stage: list[Instruction]
) -> None:
    copied = {source for words in words_of(stage, "COPY") for source in words.split()[:-1]}
    assert copied == {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "src", "recipes"}
    ignore = root / ".dockerignore"
    assert all((root / source).exists() and not is_ignored(source, ignore) for source in copied)
    assert not is_ignored("src/rolepool/cli.py", ignore)
    for path in (
        ".git/config",
        ".venv/bin/python",
        "runs/demo/config.yaml",
        ".env",
        "id_rsa",
        "tests/conftest.py",
    ):
        assert is_ignored(path, ignore), path
    assert is_ignored("src/rolepool/__pycache__/cli.pyc", ignore) and is_ignored(
        "src/rolepool.egg-info", ignore
    )


def test_packages_have_the_pinned_versions_and_no_address_or_secret_is_in_the_file(
    root: Path, stage: list[Instruction]
) -> None:
    installs = [words for words in words_of(stage, "RUN") if "pip install" in words]
    assert installs and all(
        "-c constraints.txt" in words or "--no-deps" in words for words in installs
    )
    extras = re.findall(r"'\.\[(.*?)\]'", " ".join(installs))[0].split(",")
    optional = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(extras) <= set(optional) and "ray[default]>=2.50" in optional["dashboard"]
    for package in ("torch", "ray", "aiohttp", "opencensus", "datasets", "math-verify"):
        assert pinned_version(root, package)
    text = (root / "Dockerfile").read_text()
    assert "://" not in text and not re.search(r"(?i)(ARG|ENV).*(token|password|secret|key)", text)


def test_rolepool_is_started_by_a_user_who_is_not_root(stage: list[Instruction]) -> None:
    assert words_of(stage, "USER") == ["1000"] and stage[-1].name == "USER"
    assert "--uid 1000" in " ".join(words_of(stage, "RUN"))
    assert words_of(stage, "ENTRYPOINT") == ['["rolepool"]']


def test_the_page_builds_targets_that_exist_and_runs_what_it_has_built(root: Path) -> None:
    commands = [shlex.split(line) for line in page_commands(root, "In a container")]
    builds = [command for command in commands if command[:2] == ["docker", "build"]]
    targets = {
        command[command.index("--target") + 1]: command[command.index("-t") + 1]
        for command in builds
    }
    assert list(targets) == TARGETS
    runs = [command for command in commands if command[:2] == ["docker", "run"]]
    assert runs and all(set(command) & set(targets.values()) for command in runs)


# Slurm


def test_the_slurm_script_is_a_script_and_its_options_come_before_its_first_command(
    root: Path,
) -> None:
    script = root / "examples" / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    head, _, commands = text.partition("\nset -euo pipefail\n")
    assert "#SBATCH" not in commands
    assert all(line.startswith("#") or not line for line in head.splitlines()), (
        "Slurm stops reading at a command"
    )
    options = dict(
        line.split("--", 1)[1].split("=", 1)
        for line in re.findall(r"^#SBATCH .*=.*", head, re.MULTILINE)
    )
    assert options["nodes"] == options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("B:USR1@") and "#SBATCH --requeue" in head
    assert "examples/slurm.sbatch" in " ".join(page_commands(root, "With Slurm"))


def test_shellcheck_has_nothing_to_say(root: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    files = [
        root / "examples" / "slurm.sbatch",
        *sorted((root / "tests" / "cluster" / "fake_slurm").iterdir()),
    ]
    ended = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


# Kubernetes


class Quantity(str):
    """A number of units, such as 500m or 32Gi."""


class Required(dict[str, Any]):
    """Fields that must all be there."""


LABELS = {str: str}
SECURITY = {
    "runAsNonRoot": bool,
    "runAsUser": int,
    "fsGroup": int,
    "seccompProfile": Required({"type": {"RuntimeDefault"}}),
}
CONTAINER = {
    "name": str,
    "image": str,
    "ports": [Required({"name": str, "containerPort": int})],
    "env": [Required({"name": str, "value": str})],
    "resources": {"requests": {str: Quantity}, "limits": {str: Quantity}},
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [{"ALL"}]}},
    "volumeMounts": [Required({"name": str, "mountPath": str})],
}
VOLUME = {
    "name": str,
    "persistentVolumeClaim": Required({"claimName": str}),
    "emptyDir": {"medium": {"Memory"}, "sizeLimit": Quantity},
}
POD = {
    "spec": {
        "restartPolicy": {"Never"},
        "automountServiceAccountToken": bool,
        "securityContext": SECURITY,
        "containers": [CONTAINER],
        "volumes": [VOLUME],
    }
}
# The fields of ray.io/v1 that the manifest uses, as KubeRay's API reference (1.7) lists them. 1.5.1
# has them all.
RAY_JOB = Required(
    {
        "entrypoint": str,
        "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "submitterPodTemplate": POD,
        "rayClusterSpec": Required(
            {
                "rayVersion": str,
                "authOptions": Required({"mode": {"token", "disabled"}}),
                "headGroupSpec": Required({"rayStartParams": LABELS, "template": POD}),
                "workerGroupSpecs": [
                    Required(
                        {
                            "groupName": str,
                            "replicas": int,
                            "minReplicas": int,
                            "maxReplicas": int,
                            "rayStartParams": LABELS,
                            "template": POD,
                        }
                    )
                ],
            }
        ),
    }
)
CLAIM = Required(
    {
        "accessModes": [{"ReadWriteMany"}],
        "resources": Required({"requests": Required({"storage": Quantity})}),
    }
)
KINDS = {("ray.io/v1", "RayJob"): RAY_JOB, ("v1", "PersistentVolumeClaim"): CLAIM}


def problems_of(value: Any, expected: Any, path: str) -> Iterator[str]:
    """Where a value is not what is expected: a type, a set of values, a list of one kind, or fields
    by their names."""
    if isinstance(expected, list) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from problems_of(item, expected[0], f"{path}[{index}]")
    elif isinstance(expected, dict) and isinstance(value, dict):
        if isinstance(expected, Required):
            yield from (f"{path}.{name} is missing" for name in expected if name not in value)
        for name, item in value.items():
            if name not in expected and str not in expected:
                yield f"{path}.{name} is unknown"
            else:
                yield from problems_of(
                    item, expected.get(name, expected.get(str)), f"{path}.{name}"
                )
    elif isinstance(expected, set):
        if value not in expected:
            yield f"{path}={value!r} is not one of {expected}"
    elif expected is Quantity:
        if not re.fullmatch(r"\d+(m|Mi|Gi|Ti)?", str(value)):
            yield f"{path}={value!r} is not a quantity"
    elif type(value) is not expected:
        yield f"{path}={value!r} is not {expected}"


@pytest.fixture(scope="module")
def manifest(root: Path) -> dict[str, Any]:
    """The objects of the manifest by their kinds."""
    documents = yaml.safe_load_all((root / "examples" / "kuberay.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def test_every_field_of_the_manifest_is_known_and_has_its_type(manifest: dict[str, Any]) -> None:
    assert len(manifest) == len(KINDS)
    for kind, document in manifest.items():
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        fields = KINDS[document["apiVersion"], kind]
        assert list(problems_of(document["spec"], fields, kind)) == []
    job = manifest["RayJob"]["spec"]
    job = {**job, "backofLimit": 3, "entrypoint": 5, "submissionMode": "Job"}
    del job["rayClusterSpec"]
    assert list(problems_of(job, RAY_JOB, "RayJob")) == [
        "RayJob.rayClusterSpec is missing",
        "RayJob.entrypoint=5 is not <class 'str'>",
        f"RayJob.submissionMode='Job' is not one of {RAY_JOB['submissionMode']}",
        "RayJob.backofLimit is unknown",
    ], "and this test can fail"


def test_its_pods_fit_the_container_and_each_other(root: Path, manifest: dict[str, Any]) -> None:
    job = manifest["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["rayVersion"] == pinned_version(root, "ray")
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    pods = [part["template"]["spec"] for part in (cluster["headGroupSpec"], workers)]
    claim = manifest["PersistentVolumeClaim"]["metadata"]["name"]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {
            mount["mountPath"]: volumes[mount["name"]]
            for mount in pod["containers"][0]["volumeMounts"]
        }
        assert set(mounts) == {"/work", "/dev/shm"}
        assert mounts["/work"]["persistentVolumeClaim"]["claimName"] == claim
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    for pod in (*pods, job["submitterPodTemplate"]["spec"]):
        (container,) = pod["containers"]
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        )
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["image"] == "registry.example/rolepool:cuda"
    assert "token" not in str(job).replace("authOptions': {'mode': 'token'}", "").replace(
        "ServiceAccountToken", ""
    )


def test_its_entry_point_can_be_planned_on_its_nodes(
    rolepool: Callable[..., Outcome], manifest: dict[str, Any], root: Path
) -> None:
    job = manifest["RayJob"]["spec"]
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    num_gpus = int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    program, command, *words = shlex.split(job["entrypoint"])
    assert (program, command) == ("rolepool", "train") and not set("&|;<>$`") & set(
        job["entrypoint"]
    )
    assert (
        f"trainer.nnodes={workers['replicas']}" in words
        and f"trainer.n_gpus_per_node={num_gpus}" in words
    )
    model = f"actor_rollout_ref.model.path={root / 'recipes/shapes/deepseek-llm-7b-chat'}"
    planned = rolepool(
        "plan",
        *words,
        model,
        "--inventory",
        f"{workers['replicas']}x{num_gpus}",
        "--gpu-memory",
        "80",
    )
    assert planned.code == 0, planned.err
    assert "2 pools on 16 of 16 GPUs (nodes x GPUs: 2 x 8)" in planned.out


def test_the_page_applies_the_manifest(root: Path, manifest: dict[str, Any]) -> None:
    commands = page_commands(root, "On Kubernetes")
    assert "kubectl apply -f examples/kuberay.yaml" in commands
    assert all(command.removeprefix("job=$(").startswith("kubectl ") for command in commands)
    assert any(
        f"rayjob {manifest['RayJob']['metadata']['name']}" in command for command in commands
    )
