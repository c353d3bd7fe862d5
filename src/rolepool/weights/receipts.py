"""Receipts: what the sender of weights sent, and what an engine has got.

Owns the comparison of the two, and the line with which a difference stops a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rolepool.errors import RolepoolError, first_few
from rolepool.weights.digests import Digest

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
