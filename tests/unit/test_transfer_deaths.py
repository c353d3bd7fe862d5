"""Processes that die or stop in the middle of a transfer of weights: nobody waits for them for
ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from rolepool.protocol.stores import listening_store

PROGRAM = Path(__file__).with_name("transfer_process.py")
NUM_RANKS = 4
TIMEOUT_S = 60.0
VICTIMS = {"a sender": [1], "a receiver": [2], "one of each": [0, 3], "both senders": [0, 1]}


class Rank:
    """A process that transfers weights."""

    def __init__(self, rank: int, port: int, secret: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(port), secret],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.num_transfers = 0
        self.end = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("transferred"):
                self.num_transfers += 1
            else:
                self.end += line

    def send(self, what: signal.Signals) -> None:
        os.kill(self.process.pid, what)

    def abort(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("abort\n")
        self.process.stdin.flush()

    def has_ended(self, within_s: float) -> bool:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(TIMEOUT_S)
        return True


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """All ranks, when each of them has ended a few transfers."""
    store = listening_store("127.0.0.1", NUM_RANKS)
    secret = token_hex(8)
    ranks = [Rank(rank, store.port, secret) for rank in range(NUM_RANKS)]
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while min(rank.num_transfers for rank in ranks) < 3:
            assert time.monotonic() < deadline, [rank.end for rank in ranks]
            time.sleep(0.01)
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait(TIMEOUT_S)


@pytest.mark.parametrize("victims", VICTIMS.values(), ids=VICTIMS)
def test_ranks_that_die_end_the_transfer_of_all_others(
    ranks: list[Rank], victims: list[int]
) -> None:
    for victim in victims:
        ranks[victim].send(signal.SIGKILL)
    for number, rank in enumerate(ranks):
        assert rank.has_ended(within_s=20), f"rank {number} still waits"
        if number not in victims:
            assert rank.end.startswith("ended: weights: the transfer lost another rank"), rank.end


def test_the_wait_for_a_rank_that_has_stopped_can_be_aborted(ranks: list[Rank]) -> None:
    ranks[0].send(signal.SIGSTOP)
    time.sleep(0.5)
    counts = [rank.num_transfers for rank in ranks]
    time.sleep(0.5)
    assert [rank.num_transfers for rank in ranks] == counts, "they wait for the stopped rank"
    assert not any(rank.has_ended(within_s=0.1) for rank in ranks[1:])
    for rank in ranks[1:]:
        rank.abort()
    for rank in ranks[1:]:
        assert rank.has_ended(within_s=20)
        assert rank.end.startswith("ended: weights: the transfer ")
    assert any("the test said so" in rank.end for rank in ranks[1:])
