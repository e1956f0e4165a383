"""What a service counts: Prometheus metrics at /metrics, and the last two minutes second by second for the page."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

SECONDS = 120
"""Length of the series."""
MOST_SAMPLES = 2000
"""Most latencies kept of one second."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

disable_created_metrics()  # a second line for every counter, which helps no one


@dataclass
class Second:
    """What happened within one second."""

    at: int
    units: int = 0
    requests: int = 0
    latencies: list[float] = field(default_factory=list)


def quantile(values: list[float], q: float) -> float:
    """The q-quantile of sorted values by the nearest rank; 0 of none."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class Metrics:
    """Counts of one service. All methods may be called from any thread.

    Args:
        unit: what the service processes: "events" or "tokens".
        clock: the time in seconds since 1970.
    """

    def __init__(self, unit: str, clock: Callable[[], float] = time.time) -> None:
        self.unit, self._clock, self._lock = unit, clock, threading.Lock()
        self._seconds: deque[Second] = deque(maxlen=SECONDS + 1)
        self.registry = CollectorRegistry()
        self._units = Counter(f"prism_{unit}", f"{unit.capitalize()} processed.", registry=self.registry)
        self._requests = Counter(
            "prism_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._duration = Histogram(
            "prism_request_seconds", "Time to answer a request.", ["route"], buckets=BUCKETS, registry=self.registry
        )
        self.running = Gauge("prism_requests_running", "Requests being answered.", registry=self.registry)

    def counter(self, name: str, text: str) -> Counter:
        """Another counter of this service."""
        return Counter(f"prism_{name}", text, registry=self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Another gauge, read when /metrics is asked for."""
        Gauge(f"prism_{name}", text, registry=self.registry).set_function(read)

    def add(self, units: int) -> None:
        """Count events or tokens."""
        self._units.inc(units)
        with self._lock:
            self._now().units += units

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._duration.labels(route).observe(seconds)
        if not route.startswith("/api/") and not route.startswith("/v1/") and route != "/rank":
            return  # the page and /metrics itself are not what the latency graph is about
        if route in ("/api/stats", "/api/health/live", "/api/health/ready"):
            return
        with self._lock:
            now = self._now()
            now.requests += 1
            if len(now.latencies) < MOST_SAMPLES:
                now.latencies.append(seconds)

    def _now(self) -> Second:
        at = int(self._clock())
        if not self._seconds or self._seconds[-1].at < at:
            self._seconds.append(Second(at))
        return self._seconds[-1]

    def series(self) -> dict[str, list[Any]]:
        """The last 120 seconds, oldest first, without the one that has not ended: counts, and p50 and p99 in ms."""
        end = int(self._clock())
        with self._lock:
            kept = {second.at: second for second in self._seconds}
            found = [kept.get(at, Second(at)) for at in range(end - SECONDS, end)]
            latencies = [sorted(second.latencies) for second in found]
        return {
            "Second": [second.at for second in found],
            self.unit.capitalize(): [second.units for second in found],
            "Requests": [second.requests for second in found],
            "P50": [round(1000 * quantile(times, 0.5), 3) for times in latencies],
            "P99": [round(1000 * quantile(times, 0.99), 3) for times in latencies],
        }

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
