"""The earlier home of functions that are in `worker`."""

from rolepool.protocol.worker import part, part_times

__all__ = ["part", "part_times"]
