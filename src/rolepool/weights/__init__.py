"""Weights on their way from the model in training to the engines that generate with it.

Owns the channels between the two (`channels`), the parts of weights that ranks hold (`regions`), and
the receipts with which each transfer ends (`receipts`, `digests`, `digest_kernels`). Where the weights
come from is `rolepool.models.weights`, and what an engine does with them is the business of the
engine.
"""
