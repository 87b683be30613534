"""A discrete-event simulation of servers: pieces of work queue at one after another, in the order they come."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

__all__ = ["Simulation"]


class Simulation:
    """Servers (a link's port, a NIC, the SMs of a GPU) and pieces of work that take their way through them.

    A server has one or more equal places; a piece that comes takes the place that is free first and holds it for its
    bytes over the rate, and `item_us` for each of its rows. What arrives at one time is served in the order of the
    pieces' numbers, so a run depends on nothing but its input.
    """

    def __init__(self) -> None:
        self._us_of_byte: list[float] = []
        self._item_us: list[float] = []
        self._delay_us: list[float] = []  # after a piece has left, until it is at its next server
        self._places: list[list[float]] = []  # when each is free; a heap
        self.busy_us: list[float] = []
        self.num_bytes: list[int] = []
        self._ways: list[tuple[int, ...]] = []  # servers
        self._sizes: list[tuple[int, ...]] = []  # bytes at each of them
        self._items: list[int] = []
        self._waits: list[int] = []  # for how many other pieces
        self._next: list[list[int]] = []
        self._ready_us: list[float] = []
        self.end_us: list[float] = []

    def server(self, gbps: float, num_places: int = 1, delay_us: float = 0.0, item_us: float = 0.0) -> int:
        """Add a server and return its number; `gbps` is of each place. Local."""
        self._us_of_byte.append(1e-3 / gbps)
        self._item_us.append(item_us)
        self._delay_us.append(delay_us)
        self._places.append([0.0] * num_places)
        self.busy_us.append(0.0)
        self.num_bytes.append(0)
        return len(self._places) - 1

    def piece(
        self,
        way: tuple[int, ...],
        sizes: tuple[int, ...],
        num_items: int = 1,
        after: tuple[int, ...] = (),
        ready_us: float = 0.0,
    ) -> int:
        """Add a piece of work and return its number. Local.

        `way`: the servers, one after another; `sizes`: its bytes at each. It sets out at `ready_us`, and when all
        pieces of `after` have ended.
        """
        number = len(self._ways)
        self._ways.append(way)
        self._sizes.append(sizes)
        self._items.append(num_items)
        self._waits.append(len(after))
        self._next.append([])
        self._ready_us.append(ready_us)
        self.end_us.append(-1.0)
        for other in after:
            self._next[other].append(number)
        return number

    def run(self) -> float:
        """Let all pieces take their way once; return when the last has ended, 0 without pieces. Local, blocking."""
        start = self._ready_us
        waits = list(self._waits)
        events = [(start[n], n, 0) for n in range(len(self._ways)) if not waits[n]]
        heapify(events)
        last = 0.0
        while events:
            now, number, step = heappop(events)
            way = self._ways[number]
            if step == len(way):
                self.end_us[number] = now
                last = max(last, now)
                for other in self._next[number]:
                    start[other] = max(start[other], now)
                    waits[other] -= 1
                    if not waits[other]:
                        heappush(events, (start[other], other, 0))
                continue
            server, size = way[step], self._sizes[number][step]
            took = size * self._us_of_byte[server] + self._items[number] * self._item_us[server]
            places = self._places[server]
            end = max(now, places[0]) + took
            heapreplace(places, end)
            self.busy_us[server] += took
            self.num_bytes[server] += size
            heappush(events, (end + self._delay_us[server], number, step + 1))
        return last
