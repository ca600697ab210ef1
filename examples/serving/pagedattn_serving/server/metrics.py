"""Prometheus' metrics of a server; each server has a registry of its own."""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagedattn_serving.engine.owners import CACHED, FREE
from pagedattn_serving.server.tickets import State

PREFIX = "pagedattn_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What the web server counts; `state` is what the engine's side said last."""

    def __init__(self) -> None:
        self.state, registry = State(), CollectorRegistry()
        self.registry = registry
        self.requests = Counter(
            f"{PREFIX}requests",
            "Ended requests: stop, length, cancelled, error or refused.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(f"{PREFIX}prompt_tokens", "Of prompts.", registry=registry)
        self.tokens = Counter(f"{PREFIX}generated_tokens", "Of answers.", registry=registry)
        self.first = self._seconds("time_to_first_token", "Until text came.")
        self.whole = self._seconds("request", "Until the answer was complete.")
        registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers, as families of metrics."""
        owners = Tally(self.state.owners)
        total, free, cached = len(self.state.owners), owners[FREE], owners[CACHED]
        blocks = GaugeMetricFamily(f"{PREFIX}blocks", "Of the pool, by use.", labels=["use"])
        for use, count in {"free": free, "cached": cached, "owned": total - free - cached}.items():
            blocks.add_metric([use], count)
        yield blocks
        for name, value in self.state.gauges.items():
            yield GaugeMetricFamily(PREFIX + name, name.replace("_", " "), value)
        for name, value in self.state.counters.items():
            yield CounterMetricFamily(PREFIX + name, name.replace("_", " "), value)

    def _seconds(self, name: str, text: str) -> Histogram:
        options = {"buckets": SECONDS, "registry": self.registry}
        return Histogram(f"{PREFIX}{name}_seconds", text, **options)
