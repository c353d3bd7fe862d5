"""A rank that transfers weights again and again, as a process. Prints a line after each transfer,
and its error when it ends. A line on its standard input aborts its waits, as the driver does.

    python transfer_process.py RANK PORT SECRET
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

import torch
from transfer_ranks import held_parts, matrix_of, weight_of

from rolepool.protocol.aborting import abort_all
from rolepool.weights.group import MeetingPoint, TransferError, TransferGroup
from rolepool.weights.process_group import Receiver, Sender
from rolepool.weights.regions import Region
from rolepool.weights.routes import Layout, Trainer, Weight, own_region

NUM_WEIGHTS = 10
SHAPE = (512, 1024)
BUCKET_BYTES = 2**20


def make_layout() -> Layout:
    """Two shards, and two engine ranks that have half of the columns each."""
    weights = [
        Weight(f"weight {number}", SHAPE, "float32", 4, is_sharded=True)
        for number in range(NUM_WEIGHTS)
    ]
    half = SHAPE[1] // 2
    engines = []
    for columns in ((0, half), (half, SHAPE[1])):
        engines.append({weight.name: Region((0, SHAPE[0]), columns) for weight in weights})
    return Layout(weights, Trainer(2, 2), engines)


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def abort_when_told() -> None:
    sys.stdin.readline()
    abort_all("the test said so")


def main() -> None:
    rank = int(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    threading.Thread(target=abort_when_told, daemon=True).start()
    layout = make_layout()
    point = MeetingPoint("127.0.0.1", int(sys.argv[2]), sys.argv[3])
    whole = {weight.name: torch.randn(SHAPE) for weight in layout.weights}
    assert weight_of("weight 0", whole["weight 0"]) == layout.weights[0]

    def own_rows(weight: Weight) -> torch.Tensor:
        first, end = own_region(weight, layout.trainer, rank).rows
        return matrix_of(whole[weight.name])[first:end]

    try:
        group = TransferGroup(point, rank, layout.num_ranks, "cpu")
        if rank < layout.trainer.num_ranks:
            sender = Sender(group, layout, rank, "cpu", BUCKET_BYTES)
            transfer = partial(sender.send, own_rows)
        else:
            engine = rank - layout.trainer.num_ranks
            receiver = Receiver(group, layout, engine, "cpu", BUCKET_BYTES)
            model = {name: part.clone() for name, part in held_parts(layout, whole, engine).items()}
            transfer = partial(receiver.receive, model)  # type: ignore[arg-type]
        while True:
            transfer()
            tell("transferred")
    except TransferError as error:
        tell(f"ended: {error}")


if __name__ == "__main__":
    main()
