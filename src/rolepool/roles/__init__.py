"""The built-in roles, one class per file. They compute with `models` and `algorithm`; `trainer` calls them."""
