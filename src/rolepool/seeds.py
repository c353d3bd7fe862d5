"""Seeds that depend on what they are for and on nothing else."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed that depends on all parts and on nothing else; the same on every machine."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
