"""The rate of requests: how it begins, rises and falls, and what many processes make of one store that limits them."""

import heapq
import random
from collections import deque

import pytest

from lakeupsert import clock
from lakeupsert.retries import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, REFUSED_ATTEMPTS
from lakeupsert.storage.remote import (
    BURST_SECONDS,
    GROWTH_AFTER_REFUSAL,
    LEAST_RATE,
    SHRINKAGE,
    START_RATE,
    STEP_SECONDS,
    Pace,
    pause,
)

chance = random.Random(0)


class Virtual(clock.Source):
    """Time that passes only where somebody sleeps or sets it."""

    def __init__(self) -> None:
        self.at = 0.0
        self.slept: list[float] = []

    def elapsed(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds

    def jitter(self, seconds: float) -> float:
        return seconds


def send(pace: Pace, requests: int) -> None:
    for _ in range(requests):
        pace.wait()


def test_process_that_sends_less_than_its_rate_never_waits() -> None:
    with clock.use(source := Virtual()):
        pace = Pace()
        for _ in range(50):
            send(pace, int(START_RATE * BURST_SECONDS) - 1)
            source.at += BURST_SECONDS
        assert source.slept == []
        assert pace.rate == START_RATE


def test_rate_rises_only_while_it_is_used_up() -> None:
    with clock.use(source := Virtual()):
        pace = Pace()
        send(pace, 20_000)
        assert START_RATE * 2 < 20_000 / source.at < pace.rate
        risen = pace.rate
        source.at += 3600
        send(pace, 10)
        assert pace.rate == risen


def test_refusals_of_one_second_lower_the_rate_once_and_never_to_nothing() -> None:
    with clock.use(source := Virtual()):
        pace = Pace()
        send(pace, sent := 40)
        for _ in range(100):
            pace.slow_down()
        assert pace.rate == pytest.approx(sent * SHRINKAGE)
        for _ in range(100):
            source.at += STEP_SECONDS
            pace.slow_down()
        assert pace.rate == LEAST_RATE
        source.at += STEP_SECONDS
        send(pace, 2)
        assert pace.rate == pytest.approx(LEAST_RATE * GROWTH_AFTER_REFUSAL)


def test_pauses_double_up_to_a_limit() -> None:
    with clock.use(source := Virtual()):
        for attempt in range(6):
            pause(attempt)
        assert source.slept == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def night(workers: int, requests: int, limit: int, at_once: int, latency: float) -> tuple[float, float, int]:
    """Seconds, the share of requests that were refused, and the most attempts of one request.

    Each of so many ``workers`` sends ``requests``, ``at_once`` of them, to a store that takes ``limit`` in any second and answers
    after ``latency`` seconds.
    """
    with clock.use(source := Virtual()):
        paces = [Pace() for _ in range(workers)]
        left = [requests] * workers
        passed: deque[float] = deque()
        refused = most = 0
        events = [(0.0, False, worker, -1) for worker in range(workers) for _ in range(at_once)]
        heapq.heapify(events)
        while events:
            source.at, sent, worker, attempt = heapq.heappop(events)
            if not sent:
                if attempt < 0:
                    if not left[worker]:
                        continue
                    left[worker] -= 1
                heapq.heappush(events, (source.at + paces[worker].reserve(), True, worker, max(attempt, 0)))
                continue
            most = max(most, attempt + 1)
            while passed and source.at - passed[0] > 1:
                passed.popleft()
            if len(passed) < limit:
                passed.append(source.at)
                heapq.heappush(events, (source.at + latency, False, worker, -1))
            else:
                refused += 1
                paces[worker].slow_down()
                longest = min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2**attempt)
                heapq.heappush(events, (source.at + chance.uniform(0, longest), False, worker, attempt + 1))
        return source.at, refused / (refused + workers * requests), most


S3_READS = 5500
PLANNED = 15_185
"""Reads a second that a first night was planned with."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("workers", "at_once", "latency", "most_refused", "most_attempts"),
    [
        (1024, 1, 1024 / PLANNED, 0.05, 6),  # the plan's own: so many workers with a request under way each
        (50, 16, 0.03, 0.02, 7),
        (500, 16, 0.03, 0.15, 10),
    ],
)
def test_first_night_over_the_limit_of_s3_goes_on_near_it(
    workers: int, at_once: int, latency: float, most_refused: float, most_attempts: int
) -> None:
    seconds, refused, attempts = night(workers, 20 * PLANNED // workers, S3_READS, at_once, latency)
    assert refused < most_refused
    assert attempts <= most_attempts < REFUSED_ATTEMPTS
    assert seconds < 2 * 20 * PLANNED / S3_READS
