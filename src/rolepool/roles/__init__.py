"""Roles: one class, one file each. What they compute with is in `models` and `algorithm`; who calls them, elsewhere."""
