"""Receipts: what the sender of weights sent, and what an engine has got.

Owns the comparison of the two, and the line with which a difference stops a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rolepool.errors import RolepoolError, first_few
from rolepool.weights.digests import Digest, sum_of
from rolepool.weights.regions import Region
from rolepool.weights.routes import Held

_MAX_NAMES = 3


class WeightsDifferError(RolepoolError):
    """An engine has other weights than those that were sent to it."""


@dataclass(frozen=True)
class Receipt:
    """What one side of a transfer says about it."""

    version: int
    digests: Mapping[str, Digest] = field(default_factory=dict)
    """By the name of the weight. Empty if the weights are shared."""
    is_shared: bool = False
    """Whether the engine generates with the trainer's own tensors. Then nothing was copied, so
    there is nothing to compare."""


@dataclass(frozen=True)
class Delivery:
    """What both sides of a transfer inside of one process say about it."""

    sent: Receipt | None
    """None if another rank says it."""
    got: Receipt | None
    """None if the engine gives no receipts."""


NOTHING_TO_COMPARE = Delivery(sent=None, got=None)
"""What a process says that has compared both sides itself."""


def check_receipt(sent: Receipt, got: Receipt | None, receiver: str) -> None:
    """Compare the two receipts of a transfer. `receiver` is who has the second one, in words.

    Raises WeightsDifferError with one line that names the first tensors that differ. An engine
    without a receipt is accepted.
    """
    if got is None or got.is_shared:
        return
    if sent.version != got.version:
        raise WeightsDifferError(
            f"{receiver} has version {got.version} of the weights, and version {sent.version} was "
            "sent; update_weights must take the version that it is given"
        )
    differences = list(differences_between(sent.digests, got.digests))
    if differences:
        raise WeightsDifferError(
            f"weights of version {sent.version} changed on their way to {receiver}: "
            f"{first_few(differences, _MAX_NAMES, '; ')}; nothing was generated with them; run the "
            "same command again, and see docs/troubleshooting.md, under Weights"
        )


def check_parts(
    sent: Receipt, parts: Sequence[Receipt], held: Sequence[Held], receivers: Sequence[str]
) -> None:
    """Compare a receipt of whole weights with those of ranks that together hold one copy of them or
    more. The digests of the parts of a copy add up to that of the whole.

    Raises WeightsDifferError. The line names the rank if it holds the weight alone, and otherwise
    all ranks that hold a part of it.
    """
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in sent.digests:
        for ranks in _copies([regions[name] for regions in held]):
            names_of.setdefault(ranks, []).append(name)
    for ranks, names in names_of.items():
        of_sender = {name: sent.digests[name] for name in names}
        of_ranks: list[dict[str, Digest]] = []
        for rank in ranks:
            digests = parts[rank].digests
            of_ranks.append({name: digests[name] for name in names if name in digests})
        receiver = " and ".join(receivers[rank] for rank in ranks)
        got = Receipt(parts[ranks[0]].version, sum_of(of_ranks))
        check_receipt(Receipt(sent.version, of_sender), got, receiver)


def _copies(regions: Sequence[Region]) -> Iterator[tuple[int, ...]]:
    """The ranks that together hold one copy of a weight, for each copy, from the part that each rank
    holds. Ranks with the same part are in different copies."""
    holders: dict[Region, list[int]] = {}
    for rank, region in enumerate(regions):
        if region.num_elements:
            holders.setdefault(region, []).append(rank)
    num_copies = max((len(ranks) for ranks in holders.values()), default=0)
    for copy in range(num_copies):
        yield tuple(ranks[min(copy, len(ranks) - 1)] for ranks in holders.values())


def differences_between(sent: Mapping[str, Digest], got: Mapping[str, Digest]) -> Iterator[str]:
    """The tensors that differ, in words. Tied weights have one of their names on both sides."""
    for name, of_sender in sent.items():
        of_receiver = got.get(name)
        if of_receiver is None:
            yield f"{name} did not arrive"
        elif of_sender[:2] != of_receiver[:2]:
            yield f"{name} is {_kind(of_receiver)}, and {_kind(of_sender)} was sent"
        elif of_sender != of_receiver:
            yield f"{name} has digest {of_receiver.number:016x}, and {of_sender.number:016x} was sent"
    for name in got:
        if name not in sent:
            yield f"{name} arrived, and was not sent"


def _kind(digest: Digest) -> str:
    return f"{digest.dtype} {list(digest.shape)}"
