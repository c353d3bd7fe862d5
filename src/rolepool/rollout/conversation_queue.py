"""What conversations wait for: completions of one engine, and tools in other processes.

All conversations of a batch run on one event loop. Between two steps of the engine, those that wait
for neither the engine nor a tool continue, and their requests join the batch.
"""

import asyncio
from collections.abc import Callable, Sequence

from rolepool.data.tools import Outcome, ToolProcess
from rolepool.rollout.engine import Completion, Request, Session


class ConversationQueue:
    """The requests of all conversations and the session that answers them, and the processes for
    tools."""

    def __init__(self, session: Session, processes: Sequence[ToolProcess]) -> None:
        self._session = session
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running: dict[int, asyncio.Future[Completion]] = {}
        """By the number of the request in the session."""
        self._changed = asyncio.Event()
        """A request waits, or a conversation has ended."""
        self.errors: list[str] = []
        """The errors of tools."""
        self._idle_processes: asyncio.LifoQueue[ToolProcess] = asyncio.LifoQueue()
        for process in processes:
            self._idle_processes.put_nowait(process)

    async def generate(self, request: Request) -> Completion:
        """Wait for the completion of a request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, future))
        self._changed.set()
        return await future

    async def run(self, function: Callable[..., object], *arguments: object) -> Outcome:
        """Call a function in the next process that is idle."""
        process = await self._idle_processes.get()
        try:
            outcome = await process.call(function, *arguments)
        finally:
            self._idle_processes.put_nowait(process)
        if outcome.error is not None:
            self.errors.append(outcome.error)
        return outcome

    async def serve(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        """Run the engine until all tasks have ended. They run between its steps."""
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)  # lets every conversation run until it waits
            if self._waiting:
                requests, futures = zip(*self._waiting, strict=True)
                self._waiting.clear()
                numbers = self._session.submit(requests)
                self._running.update(zip(numbers, futures, strict=True))
            if self._running:
                ended = self._session.step()
                for number, completion in ended:
                    future = self._running.pop(number)
                    if not future.cancelled():  # a rollout function may stop waiting
                        future.set_result(completion)
            else:
                self._changed.clear()
                await self._changed.wait()
