"""The earlier home of functions that are in `worker`."""

from rolepool.protocol.worker import random_state, set_random_state

__all__ = ["random_state", "set_random_state"]
