"""The numbers of `Buffer.stats()` for Prometheus; needs the metrics extra (prometheus-client).

prometheus-client is the reference implementation of the exposition format and of its server: nothing of either is about
moving tokens.

    from epcy import metrics
    metrics.serve(9400 + comm.rank)     # http://host:9400/metrics
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from epcy.backends.meter import meters
from epcy.errors import BackendUnavailableError

__all__ = ["Collector", "register", "serve"]


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise BackendUnavailableError(
            f"epcy.metrics: prometheus-client cannot be imported ({error}); pip install 'epcy[metrics]'"
        ) from None
    return prometheus_client


class Collector:
    """What a Prometheus registry asks on every scrape: the numbers of all live Buffers of this process.

    Local; a scrape may come at any moment of a call, from another thread. `stats(reset=True)` on a Buffer starts its
    counters at 0 again, which Prometheus takes for a restart.
    """

    def collect(self) -> Iterator[Any]:
        """Give one metric family after the other."""
        _prometheus()
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        labels = ["rank", "buffer", "backend"]
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        calls = counter("epcy_calls", "Calls that ended.", labels=labels)
        busy = counter("epcy_busy_seconds", "Time inside of calls.", labels=labels)
        moved = counter("epcy_bytes", "Payload bytes that crossed between ranks.", labels=labels)
        wait = counter("epcy_wait_seconds", "Time waiting for another rank.", labels=[*labels, "peer"])
        sent = counter("epcy_tokens_sent", "Tokens dispatched to a rank.", labels=[*labels, "peer"])
        came = counter("epcy_tokens_received", "Tokens that came from a rank.", labels=[*labels, "peer"])
        experts = counter("epcy_expert_tokens", "Tokens that came for an expert.", labels=[*labels, "expert"])
        uneven = gauge("epcy_imbalance", "Busiest local expert's tokens over the mean.", labels=labels)
        size = gauge("epcy_heap_bytes", "Bytes of a region of the heap.", labels=[*labels, "region"])
        used = gauge("epcy_heap_high_water_bytes", "Bytes ever in use.", labels=[*labels, "region"])
        times = SummaryMetricFamily("epcy_kernel_seconds", "Times of a kernel.", labels=[*labels, "kernel"])
        worst = gauge("epcy_kernel_quantile_seconds", "Quantiles.", labels=[*labels, "kernel", "quantile"])
        for meter in meters():
            s = meter.read()
            at = [str(s.rank), str(meter.number), s.backend]
            calls.add_metric(at, s.num_calls)
            busy.add_metric(at, s.busy_us * 1e-6)
            moved.add_metric(at, s.bytes_moved)
            uneven.add_metric(at, s.imbalance)
            for peer in range(s.num_ranks):
                wait.add_metric([*at, str(peer)], s.wait_us_per_peer[peer] * 1e-6)
                sent.add_metric([*at, str(peer)], s.tokens_to_rank[peer])
                came.add_metric([*at, str(peer)], s.tokens_from_rank[peer])
            for local, count in enumerate(s.tokens_per_expert):
                experts.add_metric([*at, str(s.rank * len(s.tokens_per_expert) + local)], count)
            for name, region in s.heap.items():
                size.add_metric([*at, name], region.num_bytes)
                used.add_metric([*at, name], region.high_water_bytes)
            for name, d in s.kernels.items():
                times.add_metric([*at, name], d.count, d.mean_us * d.count * 1e-6)
                for quantile, us in (("0.5", d.p50_us), ("0.95", d.p95_us), ("0.99", d.p99_us)):
                    worst.add_metric([*at, name, quantile], us * 1e-6)
        yield from (calls, busy, moved, wait, sent, came, experts, uneven, size, used, times, worst)


def register(registry: Any = None) -> Collector:
    """Add this process's Buffers to a registry (by default prometheus-client's own); return what was added. Local.

    Raises
    ------
    BackendUnavailableError
        prometheus-client is not installed.
    """
    client = _prometheus()
    collector = Collector()
    (client.REGISTRY if registry is None else registry).register(collector)
    return collector


def serve(port: int, addr: str = "127.0.0.1") -> Any:
    """Answer scrapes of this process's Buffers at http://addr:port/metrics, in a thread of its own.

    Local, does not block. Each rank needs a port of its own.

    Returns
    -------
    server, thread
        As of `prometheus_client.start_http_server`: server.shutdown() ends it.

    Raises
    ------
    BackendUnavailableError
        prometheus-client is not installed.
    OSError
        The port is taken.
    """
    client = _prometheus()
    registry = client.CollectorRegistry()
    register(registry)
    return client.start_http_server(port, addr, registry)
