"""Keepers of snapshots: one on each node owns the folder in shared memory into which the ranks of
that node write.

Owns these folders, and the second copy of each file on another node. The ranks write the files, and
the trainer knows when and which (`rolepool.trainer.checkpoint`). A rank's files are listed in the
order in which they are copied, with paths relative to the folder. The last one is its marker:
without the marker, the others do not count.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rolepool.cluster.answers import outcomes
from rolepool.cluster.nodes import live_nodes, pinned_to
from rolepool.errors import logger, one_line
from rolepool.files import owned_folder, write_atomically
from rolepool.placement.estimate import SHARED_MEMORY
from rolepool.protocol.futures import CallFuture

PREFIX = "rolepool-"
CHUNK_BYTES = 64 * 2**20
"""How much of a file is sent at once."""
POLL_S, WRITE_TIMEOUT_S = 0.1, 60.0
ANSWER_TIMEOUT_S = 600.0
"""The time in which a keeper must answer, also if it copies a large snapshot."""

Files = Sequence[Path]
"""The files of a rank. The last one is the marker."""
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
        folder = owned_folder(self._shared_memory, f"{PREFIX}{os.getpid()}-", f"{PREFIX}*")
        self.folder = self._cleanup.enter_context(folder)

    @ray.method(concurrency_group="serve")
    def where(self) -> tuple[Path, int]:
        """The folder, and the bytes that are free there. A folder that somebody has removed is made
        again."""
        if not self.folder.is_dir():
            self._make_folder()
        return self.folder, shutil.disk_usage(self.folder).free

    @ray.method(concurrency_group="serve")
    def number_of(self, files: Files) -> int | None:
        return self._number_of([self.folder / path for path in files])

    @ray.method(concurrency_group="serve")
    def read(self, path: Path, offset: int) -> bytes:
        """The next bytes of a file; none at its end."""
        with (self.folder / path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def fetch(
        self, number: int, ranks: Sequence[Files], sources: Sequence[Any], *written: Any
    ) -> bool:
        """Copy the files of ranks that are not here from a keeper that has them. Returns whether
        all are here now.

        If `written` are the replies of ranks, a GPU may still write to the files, and this waits
        for it.
        """
        deadline = time.monotonic() + (WRITE_TIMEOUT_S if written else 0)
        for files, source in product(ranks, sources):
            with suppress(RayError):  # the source has died
                while (
                    found := ray.get(source.number_of.remote(files))
                ) is None and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                if found == number and self.number_of(files) != number:  # type: ignore[operator]
                    self._copy(number, files, source)
        return all(self.number_of(files) == number for files in ranks)  # type: ignore[operator]

    def _copy(self, number: int, files: Files, source: Any) -> None:
        *others, marker = files
        for parent in reversed(marker.parents[:-1]):
            (self.folder / parent).mkdir(exist_ok=True)
        (self.folder / marker).unlink(missing_ok=True)
        for path in others:
            (self.folder / path).touch()
            with (self.folder / path).open(
                "r+b"
            ) as file:  # overwrites its memory, because new pages take longer
                while chunk := ray.get(source.read.remote(path, file.tell())):
                    file.write(chunk)
                file.truncate()
        text: bytes = ray.get(source.read.remote(marker, 0))
        if (
            ray.get(source.number_of.remote(files)) == number
        ):  # otherwise its ranks have begun to write the next one
            write_atomically(self.folder / marker, [text.decode()])

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
        is_alone = (
            set(nodes) == {ray.get_runtime_context().get_node_id()} and len(live_nodes()) == 1
        )
        self._here = Keeper(number_of) if is_alone else None
        self._actors = {node: self._start(node) for node in nodes if self._here is None}
        self._failing = set[str]()
        """The nodes about which there was a warning, and whose keepers have not answered since."""

    def _start(self, node: str) -> Any:
        actor_class = ray.remote(concurrency_groups={"serve": 2})(Keeper)  # type: ignore[call-overload]
        return actor_class.options(num_cpus=0, scheduling_strategy=pinned_to(node)).remote(
            self._number_of
        )

    def where(self, nodes: Collection[str]) -> dict[str, tuple[Path, int]]:
        """The folder on each node, and the bytes that are free there.

        A node is missing if its keeper has died or cannot make its folder.
        """
        return self._ask(nodes, "where")

    def copy(self, number: int, ranks: Sequence[tuple[Files, str]], written: CallFuture) -> None:
        """When the ranks of a role have written their files, copy them to another node. `ranks` has
        the node, too."""
        replies = [reply for call in written.calls for reply, _ in call.objects]
        ring = list(self._actors)
        for node, following in zip(ring, ring[1:] + ring[:1], strict=True):
            files = [files for files, there in ranks if there == node]
            if files and following != node:
                self._actors[following].fetch.remote(number, files, [self._actors[node]], *replies)

    def gather(self, number: int, ranks: Sequence[Files], nodes: Collection[str]) -> bool:
        """Copy to each of these nodes what it does not have of a role's snapshot. Returns whether
        it has all now."""
        answers = self._ask(nodes, "fetch", number, ranks, list(self._actors.values()))
        return all(answers.get(node) for node in nodes)

    def remove(self, place: str, nodes: Collection[str]) -> None:
        """Remove a folder below those of these nodes."""
        self._ask(nodes, "remove", place)

    def close(self) -> None:
        """Remove all folders."""
        self._ask(list(self._actors), "close")
        self._actors.clear()  # Ray ends an actor to which nobody has a reference

    def _ask(self, nodes: Collection[str], method: str, *args: Any) -> dict[str, Any]:
        """The answers of the keepers on these nodes. One that does not answer is replaced when it
        is asked again."""
        answers = (
            self._ask_actors(nodes, method, *args)
            if self._here is None
            else self._ask_here(nodes, method, *args)
        )
        good = {
            node: answer for node, answer in answers.items() if not isinstance(answer, Exception)
        }
        for node in answers.keys() - good.keys():
            if node not in self._failing:
                logger.warning(
                    "the snapshots on node %s are not used: %s", node, one_line(answers[node])
                )
            self._actors.pop(node, None)
            self._failing.add(node)
        self._failing -= good.keys()
        return good

    def _ask_here(self, nodes: Collection[str], method: str, *args: Any) -> dict[str, Any]:
        try:
            answer = getattr(self._here, method)(*args)
        except OSError as error:
            answer = error
        return dict.fromkeys(nodes, answer)

    def _ask_actors(self, nodes: Collection[str], method: str, *args: Any) -> dict[str, Any]:
        for node in nodes:
            if node not in self._actors:
                self._actors[node] = self._start(node)
        asked = {node: getattr(self._actors[node], method).remote(*args) for node in nodes}
        return dict(zip(asked, outcomes(asked.values(), ANSWER_TIMEOUT_S), strict=True))
