"""The connection to Ray: a local Ray that the run starts, with a private folder, or a running one
that the user names.

Owns the settings of a local Ray, a second attempt if it does not start, noticing that a part of it
has died, and the removal of what the Ray of a killed driver has left. Workers that die while Ray
lives are the business of `rolepool.cluster.group`.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Required, TypedDict, Unpack

import psutil
import ray
import ray._private.worker as ray_worker
from ray._private import ray_constants, ray_logging
from ray.exceptions import RayError

from rolepool.cluster.titles import PREFIX
from rolepool.errors import PlacementError, RayDiedError, logger, one_line
from rolepool.files import left_behind, owned_folder

# A local Ray uses a token by default, and says so in a warning each time. Nothing has to be done
# about it.
logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
    lambda record: (
        not record.getMessage().startswith("Token authentication is enabled for this Ray cluster")
    )
)

WORKER_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables of all processes. With the default policy, the threads of several processes
waste the time of a few cores by active waiting."""
START_LIMIT = "RAY_gcs_server_port_wait_time_s"
SYSTEM_CONFIG: dict[str, object] = {"task_events_report_interval_ms": 0}
"""No record of each call. Ray's GCS process would keep the last 100,000 of them in memory, and
nothing here reads them (benchmarks/gcs_memory.py)."""
PARTS = {
    ray_constants.PROCESS_TYPE_RAYLET: "raylet",
    ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS server",
}
"""The processes without which Ray does not work."""
RAY_PARAGRAPHS = ("Raylet is terminated", "A worker died or was killed while executing a task")
"""How the paragraphs begin that Ray prints after a death, with up to 40 lines of a log. rolepool
says what happened."""
COLOUR_SWITCH = "RAY_COLOR_PREFIX"
PROBE_TIMEOUT_S = 30.0
PROBE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Ray aborts if it must use a token and finds none
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1])
"""
TOKEN_FIX = (
    "copy ~/.ray/auth_token of the first node to every node with mode 0600, and set RAY_AUTH_MODE=token for every "
    "`ray start` and for rolepool (docs/multinode.md)"
)


def connect(address: str | None, num_cpus: int, device: str) -> Callable[[], None]:
    """Join the Ray at `address`, or start a local one if it is None. Returns a function that
    disconnects from it again.

    If this process is connected to a Ray already, that one is used, and stays connected.
    """
    if ray.is_initialized():
        return lambda: None
    # WorkerErrors report what workers raise. Ray would print it again for every result that nobody
    # reads.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address is None:
        return local_ray(num_cpus, num_gpus=0 if device == "cpu" else None).close
    try:
        _probe(address)
        _init_ray(address=address)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise PlacementError(
            f"ray_kwargs.ray_init.address={address}: {_refusal(address, error)}"
        ) from None
    return ray.shutdown


class _RayOptions(TypedDict, total=False):
    """The arguments of `ray.init` that are used here."""

    address: Required[str]
    num_cpus: int
    num_gpus: int | None
    object_store_memory: int | None
    include_dashboard: bool
    _temp_dir: str
    _system_config: dict[str, object]


def _init_ray(**options: Unpack[_RayOptions]) -> None:
    """Start or join Ray, and keep the program's handler of SIGTERM, because Ray sets one that
    aborts."""
    before = signal.getsignal(signal.SIGTERM)
    _limit_what_ray_prints()
    is_local = options["address"] == "local"
    # Ray starts processes ahead of time, and uses them only for actors with the default
    # environment. So the processes of a local Ray inherit their variables from Ray instead.
    environment = None if is_local else {"env_vars": WORKER_VARIABLES}
    # A local Ray uses the loopback address, so that other machines cannot reach its ports. Ray has
    # this for Windows and macOS. Its variable RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 does the same on
    # Linux, but is read only while Ray is imported. tests/cluster/test_calls.py fails if this has
    # no effect.
    joins_clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = not is_local
    if "_system_config" in options:
        # A copy, because Ray writes into it where this Ray keeps its files, and the next one of this
        # process would look for that folder.
        options["_system_config"] = dict(options["_system_config"])
    try:
        with _variables_set(WORKER_VARIABLES if is_local else {}):
            ray.init(logging_level=logging.WARNING, runtime_env=environment, **options)
    except BaseException:
        ray.shutdown()  # stops the parts of Ray that have started
        raise
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = joins_clusters
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started in the block have these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _limit_what_ray_prints() -> None:
    """Drop the paragraphs of Ray that rolepool replaces with a line of its own, and colours outside
    of a terminal."""
    ray_logging.stdout_deduplicator.skip_re = re.compile(f"^({'|'.join(RAY_PARAGRAPHS)})")
    # A stream is None if the shell has closed it.
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    if os.environ.get("NO_COLOR") or not all(stream.isatty() for stream in streams):
        # Ray reads this variable whenever it prints a line of a worker. Without it, lines in a file
        # have colours, too.
        os.environ.setdefault(COLOUR_SWITCH, "0")


def _probe(address: str) -> None:
    """Raise an error at once if no Ray answers at the address, or if it refuses our token.

    Ray itself retries for minutes, with a warning for each attempt. So the first attempt is made in
    another process.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in address:
        return
    host_and_port = (host.strip("[]"), int(port))
    socket.create_connection(host_and_port, timeout=5.0).close()
    command = [sys.executable, "-P", "-c", PROBE, address]
    try:
        probe = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        problem = (
            f"a program listens there, but did not answer like Ray within {PROBE_TIMEOUT_S:g} s"
        )
        raise TimeoutError(problem) from None
    if probe.returncode:
        _, _, last_line = probe.stderr.strip().rpartition("\n")
        raise ConnectionError(last_line) from RuntimeError(probe.stderr)


def _refusal(address: str, error: Exception) -> str:
    """Why there is no connection, and what to change. It depends on the text of Ray's error."""
    said = f"{error}\n{error.__cause__}"
    if "resolve node to connect to" in said:
        return f"this node is not part of the Ray cluster there; run `ray start --address={address}` here first"
    if not re.search("authentication.token", said, re.IGNORECASE):
        fix = "start one with `ray start --head`, or remove the key to start a local Ray"
        return f"no Ray cluster answers there ({one_line(error)}); {fix}"
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return f"the Ray cluster there requires a token, but RAY_AUTH_MODE=token is not set here; {TOKEN_FIX}"
    if "InvalidAuthToken" in said:
        return (
            f"the token of this node differs from the token of the Ray cluster there; {TOKEN_FIX}"
        )
    return f"RAY_AUTH_MODE=token is set, but there is no token on this node; {TOKEN_FIX}"


# A local Ray


def local_ray(
    num_cpus: int, num_gpus: int | None, object_store_bytes: int | None = None
) -> ExitStack:
    """Start a Ray of this process, whose files only this user can read. It ends when the stack is
    closed. If the numbers of GPUs and bytes are None, Ray counts the GPUs, and chooses the size of
    its shared memory. Raises PlacementError if it does not start."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    make_token_private()
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(private_folder())
        _start_local_ray(
            address="local",  # never joins another Ray that happens to run on this machine
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            _temp_dir=str(folder),
            _system_config=SYSTEM_CONFIG,
        )
        cleanup.callback(ray.shutdown)
        return cleanup.pop_all()


def _start_local_ray(**options: Unpack[_RayOptions]) -> None:
    """Start Ray, and once more with a longer time limit if it does not start, because a busy
    machine can be too slow for Ray's own limits. Raises PlacementError."""
    try:
        _init_ray(**options)
        return
    except Exception as error:  # Ray raises errors of many types here, also plain `Exception`
        logger.warning(
            "Ray did not start (%s); trying once more with a longer time limit", one_line(error)
        )
    os.environ[START_LIMIT] = "180"
    try:
        _init_ray(**options)
    except Exception as error:
        fix = "stop other programs if the machine is busy, or see Ray's logs (/tmp/ray/session_latest/logs)"
        raise PlacementError(f"Ray did not start, twice ({one_line(error)}); {fix}") from None


def raise_if_ray_died() -> None:
    """Raise RayDiedError if a part of the Ray that this process started has ended. This costs a few
    microseconds."""
    node = ray_worker._global_node
    if node is None:
        return
    for kind, process in node.dead_processes():
        if kind not in PARTS:
            continue
        code = process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        log = node.get_logs_dir_path()
        raise RayDiedError(f"Ray's {PARTS[kind]} (pid {process.pid}) died: {how}; its log: {log}")


# Its private folder


def private_folder() -> AbstractContextManager[Path]:
    """A new folder, removed after the block. Folders that killed drivers of this user have left are
    removed first."""
    root = _private_root()
    pattern = "[!.]*"
    for folder in left_behind(root.glob(pattern)):
        _end_ray_in(folder)
    return owned_folder(root, "", pattern)


def make_token_private() -> None:
    """Make Ray's token file readable for this user only. Ray writes a token into it if it is
    empty."""
    token = Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
        with suppress(OSError):  # Ray says so if it cannot read its token
            token.parent.mkdir(exist_ok=True)
            token.touch(mode=0o600)
            token.chmod(0o600)


def _private_root() -> Path:
    """The folder of all private folders. Its path is short, because the paths of sockets must be
    short. Ray makes its own folder accessible to all users, so only the folder above it can be
    private."""
    root = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"rolepool-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.lstat().st_uid != os.getuid():  # it may also be a link that another user has made
        raise PlacementError(
            f"{root}: does not belong to this user; remove it, or set RAY_TMPDIR to another folder"
        )
    root.chmod(0o700)
    return root


def _end_ray_in(folder: Path) -> None:
    """End the processes of Ray that have a file of the folder open, such as their log."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if not _is_of_ray(process):  # listing open files takes longer than this
                continue
            paths = [Path(file.path) for file in process.open_files()]
            if any(path.is_relative_to(folder) for path in paths):
                process.kill()
                process.wait(timeout=5.0)


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether the command line of a process is that of a part of Ray, or of one of our workers."""
    titles = ("ray::", PREFIX)
    words = process.cmdline()
    return any(word.startswith(titles) or "/ray/" in word for word in words)
