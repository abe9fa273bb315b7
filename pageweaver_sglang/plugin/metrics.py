"""PageWeaver's figures in SGLang's Prometheus endpoint (``--enable-metrics``).

SGLang collects from its processes through prometheus_client's multiprocess mode: every process keeps its values in
files of ``PROMETHEUS_MULTIPROC_DIR``, and whoever serves ``/metrics`` adds them up. So it is enough to make metrics in
the scheduler process, after SGLang has set that variable. The values are brought up to date by the thread of
:mod:`.operations`, not by the calls that they count.

Labels are bounded: ranks, arms, and at most :data:`.step3.MAX_REASONS` reasons, without the figures of one call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from . import compat

logger = logging.getLogger(__name__)

PREFIX = "pageweaver:"

# Histogram -> (meaning, label, upper bounds of the buckets).
HISTOGRAMS: dict[str, tuple[str, str | None, tuple[float, ...]]] = {
    "prefill_tokens": (
        "Query tokens of a forward pass's Step 3, by who served it.",
        "arm",
        (1, 16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    ),
    "step3_seconds": (
        "Seconds that a forward pass's Step 3 took on the GPU, all layers together; with the setting timing only.",
        None,
        (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    ),
    "verify_nrms": (
        "Difference from SGLang's Step 3, root mean square over that of its output; with verify_every only.",
        None,
        (0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.5, 1),
    ),
}
# Counter -> (meaning, label, the counter of :class:`.step3.Stats` that it shows).
COUNTERS: dict[str, tuple[str, str, str]] = {
    "step3_calls": ("Step 3 calls, one per sparse layer and forward pass, by who served them.", "arm", "calls_by_arm"),
    "step3_tokens": ("Query tokens of Step 3 calls, by who served them.", "arm", "tokens_by_arm"),
    "step3_fallbacks": (
        "Step 3 calls that SGLang's own function served although PageWeaver was asked.",
        "reason",
        "fallbacks_by_reason",
    ),
    "regroup_decisions": (
        "Calls by what mode auto decided, and why: regroup, first, probe, original, small.",
        "decision",
        "decisions",
    ),
    "measured_visits": (
        "Page visits of calls that mode auto measured, in groups of 8: in their original order, and after regrouping.",
        "kind",
        "measured_visits",
    ),
}

_families: dict[str, Any] = {}
"""By name, once per process: prometheus_client refuses a second one of the same name."""


class Metrics:
    """The metrics of this process.

    Args:
        labels: model name and ranks, on every metric; the same names for every instance in a process.

    Raises:
        ImportError: prometheus_client is not installed.
    """

    def __init__(self, labels: Mapping[str, str]):
        import prometheus_client

        self._labels = dict(labels)
        self._published: Counter[tuple[str, str]] = Counter()
        names = list(self._labels)
        for name, (meaning, label, _) in COUNTERS.items():
            if name not in _families:
                _families[name] = prometheus_client.Counter(PREFIX + name, meaning, [*names, label])
        for name, (meaning, label, buckets) in HISTOGRAMS.items():
            if name not in _families:
                own = names if label is None else [*names, label]
                _families[name] = prometheus_client.Histogram(PREFIX + name, meaning, own, buckets=buckets)
        if "serving" not in _families:
            meaning = "1 while PageWeaver serves in this process, 0 while it is switched off or disabled by an error."
            _families["serving"] = prometheus_client.Gauge(
                PREFIX + "serving", meaning, names, multiprocess_mode="mostrecent"
            )

    def publish(self, totals: Mapping[str, Mapping[str, int]], serving: bool) -> None:
        """Bring the counters up to ``totals`` (counter -> label value -> total) and set the gauge.

        A label value counts without the figures of one call: ``q must be bfloat16, got float16`` as
        ``q must be bfloat16``.
        """
        for name, by_label in totals.items():
            label = COUNTERS[name][1]
            for value, total in by_label.items():
                if more := total - self._published[name, value]:
                    own = {label: value.partition(", got ")[0]}
                    _families[name].labels(**self._labels, **own).inc(more)
                    self._published[name, value] = total
        _families["serving"].labels(**self._labels).set(int(serving))

    def observe(self, observations: Iterable[tuple[str, str | None, float]]) -> None:
        """Add (histogram, label value or None, figure) to the histograms."""
        for name, value, figure in observations:
            label = HISTOGRAMS[name][1]
            own = {} if label is None else {label: value}
            _families[name].labels(**self._labels, **own).observe(figure)


def make_metrics(runner: Any) -> Metrics | None:
    """The metrics of this process, or None where SGLang's are off."""
    enabled, model_name = compat.get_fields(runner.server_args, "enable_metrics", "served_model_name")
    if not enabled:
        return None
    try:
        return Metrics({"model_name": str(model_name)} | compat.ranks(runner))
    except ImportError as error:
        logger.warning("pageweaver: no metrics, prometheus_client cannot be imported: %s", error)
        return None
