"""The mover of a run: it collects requests to move and starts the processes that they need.

A request is a call, a file in the run folder, or a proposal of the rebalancer. The processes of a
move start in a thread while the run trains. When they have started, the run changes over after a
step (`rolepool.trainer.recovery`). Knows the planner, and neither steps nor the trainer.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolepool.cluster import Prepared
from rolepool.config import LoadedConfig
from rolepool.errors import PlacementError, one_line
from rolepool.placement import Plan
from rolepool.placement.roles import ROLE_SPECS
from rolepool.trainer.moves import (
    answer_request,
    changed_pools,
    check_move,
    moved,
    show_progress,
    take_request,
)
from rolepool.trainer.rebalancer import Rebalancer

if TYPE_CHECKING:
    from rolepool.trainer.deployment import Deployment
    from rolepool.trainer.journal import Journal


@dataclass
class Move:
    """A change to another placement, whose processes start while the run trains."""

    loaded: LoadedConfig
    plan: Plan
    starting: Future[Prepared]
    has_request: bool = False
    """Whether a file asks for it. If the file is gone, nobody wants it any more."""

    def close(self) -> None:
        """End processes that were started in vain."""
        if self.starting.exception() is None:
            prepared = self.starting.result()
            prepared.cleanup.close()


class Mover:
    """At most one move at a time."""

    def __init__(
        self, deployment: "Deployment", journal: "Journal", *, first_step: int, num_steps: int
    ) -> None:
        """`first_step` is the step after which the run began."""
        self._deployment = deployment
        self._journal = journal
        self._folder = journal.folder.path
        self._first_step = first_step
        self._starter = ThreadPoolExecutor(1)
        self._move: Move | None = None
        """The move whose processes are starting or have started."""
        self.rebalancer = Rebalancer(
            deployment,
            self._folder,
            journal.notice,
            first_step=first_step,
            num_steps=num_steps,
        )

    def ask(self, plan: Plan, loaded: LoadedConfig | None = None) -> Move:
        """Start the processes of a move. `loaded` is the config of the plan, if it is another one.
        Raises PlacementError if the run cannot move there."""
        now = self._deployment
        if loaded is None:
            loaded = now.loaded
        if self._move is not None:
            raise PlacementError("a move is under way; wait until it has ended")
        if plan.pools == now.plan.pools:
            raise PlacementError(f"the run has this placement already ({plan.in_words})")
        check_move(
            loaded.config,
            plan,
            now.cluster.gpu_memory_bytes,
            before=now.plan,
        )
        names = changed_pools(now.config, now.plan, loaded.config, plan)
        workers = [ROLE_SPECS[role].worker for role in plan.roles]
        starting = self._starter.submit(now.cluster.prepare, plan, names, workers)
        self._move = Move(loaded, plan, starting)
        self._journal.notice(f"starting processes for a move to {plan.in_words}")
        return self._move

    def after_step(self, number: int) -> Move | None:
        """Look for requests. Returns the move whose processes have started."""
        if self._move is None and number > self._first_step:
            self._ask_rebalancer(number)
        if self._move is None:
            self._ask_file()
        move = self._move
        if move is None or not move.starting.done():
            return None
        return move

    def _ask_rebalancer(self, number: int) -> None:
        proposal = self.rebalancer.after_step(number)
        if proposal is None:
            return
        try:
            plan, loaded = moved(self._deployment.config, proposal.words)
            self.ask(plan, loaded)
            self.rebalancer.accepted(proposal)
        except Exception as error:  # no prediction may stop training
            self.rebalancer.refused(error)

    def _ask_file(self) -> None:
        request = take_request(self._folder)
        if request is None:
            return
        try:
            plan, loaded = moved(self._deployment.config, request.words)
            move = self.ask(plan, loaded)
            move.has_request = True
            show_progress(self._folder, f"starting processes for {move.plan.in_words}")
        except Exception as error:  # a strategy or an extension of the user may raise anything
            self.drop(one_line(error))

    def is_wanted(self, move: Move) -> bool:
        """Whether the run should change over now. If not, the move is dropped."""
        problem = move.starting.exception()
        if problem is not None:
            self.drop(one_line(problem))
            return False
        if move.has_request and take_request(self._folder) is None:
            self.drop("the request was taken back")
            return False
        return True

    def begin_change(self, number: int) -> None:
        """The run changes over after this step."""
        show_progress(self._folder, f"changing over after step {number}")

    def end_change(self, move: Move, number: int, before: Plan, seconds: float) -> None:
        """The run has moved after this step, and stood still for so long."""
        self._move = None
        what = f"{before.in_words} -> {move.plan.in_words}"
        prepared = move.starting.result()
        self._journal.add_move(
            number,
            what,
            seconds,
            pools=list(prepared.processes),
        )
        self.rebalancer.has_moved(number + 1, seconds)
        words = f"moved after step {number}: {what} ({seconds:.1f} s)"
        self._journal.notice(words)
        answer_request(self._folder, words)

    def drop(self, reason: str) -> None:
        """Give up the move that was asked for, and say why."""
        answer_request(self._folder, reason, is_refused=True)
        if self._move is not None:
            self._journal.notice(f"the run did not move: {reason}")
            self._move.close()
            self._move = None
