"""What the server tells Prometheus about the runtime.

Ratios come twice: as gauges over all requests since the model was loaded, and as the two counters that each is made of,
of which Prometheus forms the ratio over any time. The acceptance length counts the tokens that a step yields, the bonus
token included; the acceptance rate is accepted drafts / proposed drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_trt.runtime.scheduler import ServingLoad

Reading = Callable[[ServingLoad], float | None]


def _ratio(part: str, whole: str) -> Reading:
    def read(load: ServingLoad) -> float | None:
        total = getattr(load.totals, whole)
        return getattr(load.totals, part) / total if total else None

    return read


def _total(name: str) -> Reading:
    return lambda load: getattr(load.totals, name)


COUNTERS: dict[str, tuple[str, Reading]] = {
    "dflash_trt_prompt_tokens_total": ("Prompt tokens processed", _total("prompt_tokens")),
    "dflash_trt_generated_tokens_total": ("Tokens generated", _total("generated_tokens")),
    "dflash_trt_steps_total": ("Verification steps, of each sequence", _total("steps")),
    "dflash_trt_step_tokens_total": ("Tokens that steps yielded, bonus tokens included", _total("step_tokens")),
    "dflash_trt_proposed_drafts_total": ("Drafted tokens put before the target", _total("proposed_drafts")),
    "dflash_trt_accepted_drafts_total": ("Drafted tokens accepted", _total("accepted_drafts")),
}
OUTCOMES = ("finished", "failed", "cancelled", "refused")
REQUESTS = "dflash_trt_requests_total"
GAUGES: dict[str, tuple[str, Reading]] = {
    "dflash_trt_acceptance_length": (
        "Mean tokens per step since loading, the bonus token included",
        _ratio("step_tokens", "steps"),
    ),
    "dflash_trt_acceptance_rate": (
        "Accepted / proposed draft tokens since loading",
        _ratio("accepted_drafts", "proposed_drafts"),
    ),
    "dflash_trt_queue_depth": ("Requests that wait for a slot", lambda load: load.queue_depth),
    "dflash_trt_slots_in_use": ("Sequences being decoded", lambda load: load.slots_in_use),
    "dflash_trt_slots": ("Sequences that can be decoded at once", lambda load: load.slots),
}


class Metrics:
    """The metrics of one model.

    Args:
        backend: `triton_python_backend_utils`.
        labels: of every metric.
    """

    def __init__(self, backend: Any, labels: Mapping[str, str]) -> None:
        family = backend.MetricFamily
        # Triton drops a metric with its family, so both are kept
        self._families: list[Any] = []
        self._values: dict[Any, float] = {}

        def metric(name: str, description: str, kind: Any) -> Any:
            self._families.append(family(name=name, description=description, kind=kind))
            return self._families[-1].Metric(labels=dict(labels))

        self._counters = [(metric(name, text, family.COUNTER), read) for name, (text, read) in COUNTERS.items()]
        requests = family(name=REQUESTS, description="Requests by how they ended", kind=family.COUNTER)
        self._families.append(requests)
        self._counters += [
            (requests.Metric(labels={**labels, "outcome": outcome}), _total(outcome)) for outcome in OUTCOMES
        ]
        self._refused = self._counters[-1][0]
        self._gauges = [(metric(name, text, family.GAUGE), read) for name, (text, read) in GAUGES.items()]

    def update(self, load: ServingLoad, refused: int) -> None:
        """Brings the metrics to what is going on; only what changed is sent to the server.

        Args:
            refused: requests besides those that the runtime refused.
        """
        for metric, read in self._counters:
            value = read(load)
            assert value is not None
            value += refused if metric is self._refused else 0
            grown = value - self._values.get(id(metric), 0)
            if grown > 0:
                metric.increment(grown)
                self._values[id(metric)] = value
        for metric, read in self._gauges:
            value = read(load)
            if value is not None and value != self._values.get(id(metric)):
                metric.set(value)
                self._values[id(metric)] = value
