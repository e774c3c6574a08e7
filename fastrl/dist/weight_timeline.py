"""When each part of an update took place, on both ends, on the machine's one monotonic clock.

    sender    gather | pack | checksum | announce | wait       (wait: for a bucket to be freed)
    receiver  idle | load | checksum                           (idle: for the next bucket to be filled)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """One part of the work on one bucket; times in seconds."""

    part: str
    bucket: int
    start: float
    end: float
    seconds: float  # of work between them: pieces that alternate with others of the bucket are added up
    cpu: float  # time on a core, of this thread


class Timeline:
    """Collects the spans of one end, one for each part and bucket."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, int], Span] = {}
        self._inner = (0.0, 0.0)  # seconds and time on a core of the spans inside the one that is open

    @contextmanager
    def span(self, part: str, bucket: int) -> Iterator[None]:
        """Time what is done inside, without the spans inside it."""
        start, cpu = time.monotonic(), time.thread_time()
        outer, self._inner = self._inner, (0.0, 0.0)
        try:
            yield
        finally:
            end, used = time.monotonic(), time.thread_time() - cpu
            self.add(part, bucket, start, end, end - start - self._inner[0], used - self._inner[1])
            self._inner = outer[0] + end - start, outer[1] + used

    def add(self, part: str, bucket: int, start: float, end: float, seconds: float, cpu: float) -> None:
        """Add a span; those of the same part and bucket are put together."""
        known = self.spans.get((part, bucket))
        if known is not None:
            start, seconds, cpu = known.start, known.seconds + seconds, known.cpu + cpu
        self.spans[part, bucket] = Span(part, bucket, start, end, seconds, cpu)

    def to_json(self) -> list[list[Any]]:
        """As it goes over the line."""
        return [[s.part, s.bucket, s.start, s.end, s.seconds, s.cpu] for s in self.spans.values()]


def spans_from_json(fields: Iterable[list[Any]]) -> list[Span]:
    """The inverse of `Timeline.to_json`."""
    return [Span(str(part), int(bucket), *map(float, times)) for part, bucket, *times in fields]


def parts(spans: Iterable[Span]) -> dict[str, tuple[float, float]]:
    """part -> (seconds by the clock, seconds on a core), summed over buckets."""
    sums: dict[str, tuple[float, float]] = {}
    for span in spans:
        wall, cpu = sums.get(span.part, (0.0, 0.0))
        sums[span.part] = wall + span.seconds, cpu + span.cpu
    return sums
