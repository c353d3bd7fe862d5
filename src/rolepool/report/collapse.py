"""Signs that a run is about to collapse: responses say less and less about the policy that learns
from them, while its gradients grow.

Owns which steps are compared, and the thresholds. The text is in `tables.yaml`, and `findings` says
what to change.
"""

from statistics import median
from typing import NamedTuple

from rolepool.report.metrics_by_step import MetricsByStep, finite_values
from rolepool.report.run import ReadRun

SAMPLE_SIZE = "rollout_corr/rollout_is_eff_sample_size"
CHI2 = "rollout_corr/chi2_token"
GRADIENT_NORM = "actor/grad_norm"
MIN_STEPS = 5
"""Steps that are needed on each side of the comparison."""
PART = 4
"""The first fourth of the steps is compared with the last one."""
SMALLER = 0.8
"""The effective sample size has fallen if it is at most this part of the first one ..."""
LARGER = 2.0
"""... and the gradient norm has risen if it is at least this many times the first one."""


class Collapse(NamedTuple):
    """Medians over the first and over the last steps that were compared."""

    first_size: float
    last_size: float
    first_norm: float
    last_norm: float
    num_steps: int
    """The number of steps on each side."""


def signs_of_collapse(run: ReadRun) -> Collapse | None:
    """What the two metrics were at first and in the end; None if they do not predict a collapse, or
    if the run does not have them."""
    sizes = _sample_sizes(run.metrics)
    norms = finite_values(run.metrics, GRADIENT_NORM)
    steps = sorted(sizes.keys() & norms.keys())
    count = len(steps) // PART
    if count < MIN_STEPS:
        return None
    first = steps[:count]
    last = steps[-count:]
    compared = Collapse(
        first_size=median(sizes[step] for step in first),
        last_size=median(sizes[step] for step in last),
        first_norm=median(norms[step] for step in first),
        last_norm=median(norms[step] for step in last),
        num_steps=count,
    )
    has_fallen = compared.last_size <= SMALLER * compared.first_size
    has_risen = compared.last_norm >= LARGER * compared.first_norm
    if has_fallen and has_risen:
        return compared
    return None


def _sample_sizes(metrics: MetricsByStep) -> dict[int, float]:
    """The effective sample size of each step, as a fraction of its tokens. Without weights, it is
    the one that weights of tokens would have: their mean is about 1, and the mean of their squares
    is 1 + chi2."""
    sizes = finite_values(metrics, SAMPLE_SIZE)
    if sizes:
        return sizes
    by_chi2: dict[int, float] = {}
    for step, chi2 in finite_values(metrics, CHI2).items():
        by_chi2[step] = 1 / (1 + max(0.0, chi2))
    return by_chi2
