"""The built-in roles. They compute with `models` and `algorithm`; `trainer` calls them."""
