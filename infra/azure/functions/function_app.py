"""A table's two phases as Azure Functions: the same calls as the command line, on one host, a message at a time.

    append      every hour, UTC; appends where it is 2 am in LAKEUPSERT_ZONE, as the platform's own time zone setting does
                nothing for Python on Linux
    dedupe      a message of LAKEUPSERT_QUEUE; merges its partition, and publishes where no other is left to merge
    reconcile   every ten minutes; sends what got lost, marks what died, publishes what is whole

Settings  LAKEUPSERT_CONFIG, the address of lakeupsert.toml; it is read in each call, so that a change holds from the next on.
          LAKEUPSERT_TABLE, the one table of the queue; LAKEUPSERT_ZONE, such as Europe/Berlin
Repeat    safe
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import azure.functions as func

from lakeupsert import Table, TryAgainError, clock
from lakeupsert.config import load
from lakeupsert.storage import adls  # noqa: F401  azure's packages are imported while the host begins, not in a call

MARGIN_SECONDS = 15.0
"""What is not done so long before the function's time is up goes back to the queue. Longer: less time to merge. Too short: the
host kills the function first, and its message is hidden for ten minutes more."""
HOUR = 2
EARLY = timedelta(minutes=5)
MEMORY_BYTES = 1 << 62
"""None is told to a function; what its container may take is found where it works."""

log = logging.getLogger("lakeupsert.functions")
app = func.FunctionApp()


@contextmanager
def table() -> Iterator[Table]:
    name = os.environ["LAKEUPSERT_TABLE"]
    config = load(os.environ["LAKEUPSERT_CONFIG"])
    found = Table(name, config.tables[name], origins=config.origins[name])
    try:
        yield found
    finally:
        found.close()


@app.timer_trigger(schedule="0 0 * * * *", arg_name="timer", use_monitor=True)
@app.retry(strategy="fixed_delay", max_retry_count="3", delay_interval="00:05:00")
def append(timer: func.TimerRequest) -> None:
    if not is_night(clock.now(), ZoneInfo(os.environ["LAKEUPSERT_ZONE"])):
        return
    with table() as of_app:
        batch = of_app.append(host="local", warn=log.warning)
    for warning in batch.warnings if batch else ():
        log.warning("%s", warning)
    log.info("appended: batch %s", batch.number if batch else None)
    if batch:  # an alert waits for this line
        log.info("rows: %d appended, %d quarantined", batch.entry.rows_appended, batch.entry.rows_quarantined)


@app.queue_trigger(arg_name="message", queue_name="%LAKEUPSERT_QUEUE%", connection="AzureWebJobsStorage")
def dedupe(message: func.QueueMessage) -> None:
    begun, limit = clock.elapsed(), limit_seconds()
    record = {
        "id": message.id,
        "popReceipt": message.pop_receipt,
        "body": message.get_body(),
        "dequeueCount": message.dequeue_count,
    }
    with table() as of_app:
        back = of_app.dedupe_received(
            [record],
            workers=1,
            memory_bytes=MEMORY_BYTES,
            seconds_left=lambda: limit - MARGIN_SECONDS - (clock.elapsed() - begun),
        )
    if back:  # the host would delete it
        raise TryAgainError("given-back", f"message {message.id} went back to the queue.", next="see the log above")


@app.timer_trigger(schedule="0 */10 * * * *", arg_name="timer", use_monitor=True)
def reconcile(timer: func.TimerRequest) -> None:
    with table() as of_app:
        if of_app.exists():
            found = of_app.reconcile(counted=False)
            log.info("reconciled: %d sent again, snapshot %s", found.resent, found.published)
            # an alert waits for this line, too
            log.info("waiting: %d partitions", len(found.publish.waiting))
            if found.publish.failed:  # an alert waits for this line
                log.error("failed partitions: %d, such as %s", len(found.publish.failed), min(found.publish.failed))


def is_night(now: datetime, zone: ZoneInfo) -> bool:
    """Whether this is the hour of the zone's 2 am: once a day, also where clocks skip that hour or have it twice.

    The host may call a little early, and up to 55 minutes late.
    """
    now += EARLY
    due = datetime.combine(now.astimezone(zone).date(), time(HOUR), zone).astimezone(UTC)
    return timedelta() <= now - due < timedelta(hours=1)


def limit_seconds() -> float:
    """The host's functionTimeout: of host.json, or of the setting that goes before it."""
    given = os.environ.get("AzureFunctionsJobHost__functionTimeout")  # noqa: SIM112  the host's spelling
    if given is None:
        given = json.loads((Path(__file__).parent / "host.json").read_text())["functionTimeout"]
    hours, minutes, seconds = map(int, given.split(":"))
    return timedelta(hours=hours, minutes=minutes, seconds=seconds).total_seconds()
