"""The earlier home of functions that are in `worker`."""

from rolepool.protocol.worker import explain_out_of_memory, is_out_of_memory

__all__ = ["explain_out_of_memory", "is_out_of_memory"]
