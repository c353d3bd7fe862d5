"""Models: loading, sharding, forward passes, training. Tensors and modules; no roles, no ray."""
