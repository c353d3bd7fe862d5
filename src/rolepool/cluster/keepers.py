"""Keepers of snapshots: one on each node owns the folder in shared memory into which the ranks of
that node write.

Owns these folders, and the second copy of each file on another node. The ranks write the files, and
the trainer knows when and which (`rolepool.trainer.snapshots`). A rank's files are listed in the
order in which they are copied, with paths relative to the folder. The last one is its marker:
without the marker, the others do not count.
"""

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import ray
from ray.exceptions import RayError

from rolepool.cluster.answers import ActorHandle, Answer, outcomes
from rolepool.cluster.calls import Argument, PackedReply, Value
from rolepool.cluster.nodes import live_nodes, pinned_to
from rolepool.errors import logger, one_line
from rolepool.files import owned_folder, write_atomically
from rolepool.placement.estimate import SHARED_MEMORY
from rolepool.protocol.futures import CallFuture

PREFIX = "rolepool-"
CHUNK_BYTES = 64 * 2**20
"""How much of a file is sent at once."""
POLL_S = 0.1
WRITE_TIMEOUT_S = 60.0
"""The time in which a GPU must have written the files of a rank."""
ANSWER_TIMEOUT_S = 600.0
"""The time in which a keeper must answer, also if it copies a large snapshot."""

Files = Sequence[Path]
"""The files of a rank. The last one is the marker."""
Answers = dict[str, Value]
"""What the keeper of each node answers."""
NumberOf = Callable[[Sequence[Path]], int | None]
"""The number of the snapshot in a rank's files; None if they are not complete."""


class Keeper:
    """The folder of one node. It answers other keepers while it copies files itself."""

    def __init__(self, number_of: NumberOf, shared_memory: Path = SHARED_MEMORY) -> None:
        self._number_of = number_of
        self._shared_memory = shared_memory
        self._cleanup = ExitStack()
        self.folder = shared_memory / f"{PREFIX}none"
        """A folder that does not exist, as long as none could be made."""
        with suppress(OSError):  # `where` tries it again, and its caller reports the error
            self._make_folder()

    def _make_folder(self) -> None:
        self._cleanup.close()
        folder = owned_folder(
            self._shared_memory,
            prefix=f"{PREFIX}{os.getpid()}-",
            pattern=f"{PREFIX}*",
        )
        self.folder = self._cleanup.enter_context(folder)

    @ray.method(concurrency_group="serve")
    def where(self) -> tuple[Path, int]:
        """The folder, and the bytes that are free there. A folder that somebody has removed is made
        again."""
        if not self.folder.is_dir():
            self._make_folder()
        usage = shutil.disk_usage(self.folder)
        return self.folder, usage.free

    @ray.method(concurrency_group="serve")
    def number_of(self, files: Files) -> int | None:
        paths = [self.folder / path for path in files]
        return self._number_of(paths)

    @ray.method(concurrency_group="serve")
    def read(self, path: Path, offset: int) -> bytes:
        """The next bytes of a file; none at its end."""
        with (self.folder / path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def fetch(
        self,
        number: int,
        ranks: Sequence[Files],
        sources: Sequence[ActorHandle],
        *written: PackedReply,
    ) -> bool:
        """Copy the files of ranks that are not here from a keeper that has them. Returns whether
        all are here now.

        If `written` are the replies of ranks, a GPU may still write to the files, and this waits
        for it.
        """
        # Only files that are written now are awaited.
        wait_s = WRITE_TIMEOUT_S if written else 0
        deadline = time.monotonic() + wait_s
        for files, source in product(ranks, sources):
            with suppress(RayError):  # the source has died
                number_there = self._await_number(files, source, deadline)
                if number_there == number and not self._has(number, files):
                    self._copy(number, files, source)
        return all(self._has(number, files) for files in ranks)

    def _has(self, number: int, files: Files) -> bool:
        """Whether these files are those of this snapshot."""
        paths = [self.folder / path for path in files]
        return self._number_of(paths) == number

    @staticmethod
    def _await_number(files: Files, source: ActorHandle, deadline: float) -> int | None:
        """The number of the snapshot that a keeper has in these files, as soon as they are
        complete; None if they are not in time."""
        while True:
            number: int | None = ray.get(source.number_of.remote(files))
            if number is not None or time.monotonic() >= deadline:
                return number
            time.sleep(POLL_S)

    def _copy(self, number: int, files: Files, source: ActorHandle) -> None:
        *others, marker = files
        marker_here = self.folder / marker
        # `parents` begins with the innermost folder, and ends with ".".
        parents = reversed(marker.parents[:-1])
        for parent in parents:
            folder = self.folder / parent
            folder.mkdir(exist_ok=True)
        marker_here.unlink(missing_ok=True)
        for path in others:
            self._copy_file(path, source)
        text: bytes = ray.get(source.read.remote(marker, 0))
        number_there = ray.get(source.number_of.remote(files))
        # With another number, the ranks have begun to write the next snapshot.
        if number_there == number:
            write_atomically(marker_here, [text.decode()])

    def _copy_file(self, path: Path, source: ActorHandle) -> None:
        target = self.folder / path
        target.touch()
        # This overwrites the file's memory, because new pages take longer.
        with target.open("r+b") as file:
            while chunk := ray.get(source.read.remote(path, file.tell())):
                file.write(chunk)
            file.truncate()

    def remove(self, place: str) -> None:
        shutil.rmtree(self.folder / place, ignore_errors=True)

    @ray.method(concurrency_group="serve")
    def close(self) -> None:
        """Remove the folder. Who still writes to it by its old name gets an error."""
        self._cleanup.close()


class Keepers:
    """A keeper on each node. If the cluster has the driver's node only, the driver is the keeper
    itself."""

    def __init__(self, number_of: NumberOf, nodes: Collection[str]) -> None:
        """Start them. This does not wait until they have started."""
        self._number_of = number_of
        self._here: Keeper | None = None
        """The driver itself as the keeper; None if there are other nodes."""
        self._actors: dict[str, ActorHandle] = {}
        """The keeper of each node."""
        self._failing = set[str]()
        """The nodes about which there was a warning, and whose keepers have not answered since."""
        driver_node = ray.get_runtime_context().get_node_id()
        is_alone = set(nodes) == {driver_node} and len(live_nodes()) == 1
        if is_alone:
            self._here = Keeper(number_of)
        else:
            self._actors = {node: self._start(node) for node in nodes}

    def _start(self, node: str) -> ActorHandle:
        actor_class = ray.remote(concurrency_groups={"serve": 2})(Keeper)  # type: ignore[call-overload]
        with_options = actor_class.options(
            num_cpus=0,
            scheduling_strategy=pinned_to(node),
        )
        return with_options.remote(self._number_of)

    def where(self, nodes: Collection[str]) -> dict[str, tuple[Path, int]]:
        """The folder on each node, and the bytes that are free there.

        A node is missing if its keeper has died or cannot make its folder.
        """
        return self._ask(nodes, "where")

    def copy(self, number: int, ranks: Sequence[tuple[Files, str]], written: CallFuture) -> None:
        """When the ranks of a role have written their files, copy them to another node. `ranks` has
        the node, too."""
        if len(self._actors) < 2:
            return
        files_on: dict[str, list[Files]] = defaultdict(list)
        for files, node in ranks:
            files_on[node].append(files)
        # The keeper that copies gets the replies as arguments, so it starts when all are there.
        replies: list[Answer] = []
        for call in written.calls:
            replies += [reply for reply, _ in call.objects]
        # Each node has its second copy on the next one of the ring.
        ring = list(self._actors)
        next_in_ring = [*ring[1:], ring[0]]
        for node, following in zip(ring, next_in_ring, strict=True):
            files_here = files_on[node]
            if not files_here:
                continue
            source = self._actors[node]
            target = self._actors[following]
            target.fetch.remote(number, files_here, [source], *replies)

    def gather(self, number: int, ranks: Sequence[Files], nodes: Collection[str]) -> bool:
        """Copy to each of these nodes what it does not have of a role's snapshot. Returns whether
        it has all now."""
        sources = list(self._actors.values())
        answers = self._ask(nodes, "fetch", number, ranks, sources)
        return all(answers.get(node) for node in nodes)

    def remove(self, place: str, nodes: Collection[str]) -> None:
        """Remove a folder below those of these nodes."""
        self._ask(nodes, "remove", place)

    def close(self) -> None:
        """Remove all folders."""
        self._ask(list(self._actors), "close")
        self._actors.clear()  # Ray ends an actor to which nobody has a reference

    def _ask(self, nodes: Collection[str], method: str, *args: Argument) -> Answers:
        """The answers of the keepers on these nodes. One that does not answer is replaced when it
        is asked again."""
        if self._here is None:
            answers = self._ask_actors(nodes, method, *args)
        else:
            answers = self._ask_here(self._here, nodes, method, *args)
        good = {}
        for node, answer in answers.items():
            if not isinstance(answer, Exception):
                good[node] = answer
                continue
            if node not in self._failing:
                logger.warning(
                    "the snapshots on node %s are not used: %s",
                    node,
                    one_line(answer),
                )
            self._actors.pop(node, None)
            self._failing.add(node)
        self._failing -= good.keys()
        return good

    def _ask_here(
        self,
        keeper: Keeper,
        nodes: Collection[str],
        method: str,
        *args: Argument,
    ) -> Answers:
        try:
            answer = getattr(keeper, method)(*args)
        except OSError as error:
            answer = error
        return dict.fromkeys(nodes, answer)

    def _ask_actors(self, nodes: Collection[str], method: str, *args: Argument) -> Answers:
        asked: dict[str, Answer] = {}
        for node in nodes:
            if node not in self._actors:
                self._actors[node] = self._start(node)
            actor = self._actors[node]
            remote_method = getattr(actor, method)
            asked[node] = remote_method.remote(*args)
        answers = outcomes(asked.values(), ANSWER_TIMEOUT_S)
        return dict(zip(asked, answers, strict=True))
