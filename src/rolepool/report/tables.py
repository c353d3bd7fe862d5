"""The tables of all reports: which metrics are shown and how, and the texts of findings.

Owns the form of `tables.yaml`. Does not know who shows what.
"""

from pathlib import Path

from rolepool.config.base import Items, Section, read_table


class Tables(Section):
    """The content of `tables.yaml`."""

    work_keys: Items[str]
    """The keys that define the work of a step. Other keys, such as placement and micro-batches, may
    differ."""
    curves: dict[str, Items[str]]
    """The charts of the report page: the title, and patterns of the metrics in it. `{unit}` is a
    GPU or a CPU slot."""
    figures: dict[str, dict[str, str]]
    """The plots with a panel for each metric: patterns of the metrics, and their units."""
    series_colors: Items[str]
    """Colours of lines and bars that are no operations (runs, pools, GPUs), used in this order and
    then repeated."""
    findings: dict[str, str]
    """The text of each kind of finding. Names that end with `_s` stand for seconds with their
    unit."""


TABLES = read_table(Path(__file__).with_name("tables.yaml"), Tables)
