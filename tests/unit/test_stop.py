"""How workers are asked to stop."""

import threading

from lakeupsert.pipeline.stop import Stop

PATIENCE = 60.0


def test_signal_that_interrupts_a_wait_sets_the_event() -> None:
    """The lock is held here as it is in the part of `wait` that a handler may interrupt."""
    stop = Stop()
    interrupted = threading.Event()

    def wait_and_be_interrupted() -> None:
        with stop._cond:  # type: ignore[attr-defined]
            stop.set_from_signal()
            interrupted.set()

    threading.Thread(target=wait_and_be_interrupted, daemon=True).start()
    assert interrupted.wait(PATIENCE)
    assert stop.wait(PATIENCE)
