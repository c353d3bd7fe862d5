"""Tables of the reports: which metrics are shown and how, and the texts of findings. They are in `tables.yaml`."""

from pathlib import Path

from rolepool.config.base import Items, Section, read_table


class Tables(Section):
    """The content of `tables.yaml`."""

    work_keys: Items[str]
    """The keys that define the work of a step. Other keys, such as placement and micro-batches, may differ."""
    curves: dict[str, Items[str]]
    """The charts of the report page: the title, and patterns of the metrics in it."""
    units: dict[str, str]
    """Metrics of the plots `overview` and `throughput`."""
    series_colors: Items[str]
    """Colours of lines that are no operations (runs, pools, GPUs), used in this order and then repeated."""
    hatches: Items[str]
    """Patterns that tell runs apart if colours already tell operations apart."""
    findings: dict[str, str]
    """The text of each kind of finding. `duration` after a colon writes seconds in a unit that needs no exponent."""


TABLES = read_table(Path(__file__).with_suffix(".yaml"), Tables)
