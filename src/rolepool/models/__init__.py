"""Models: loading, sharding, forward passes, training. Does not know roles or Ray."""
