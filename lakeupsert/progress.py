"""How far a call is, told to whoever started it: texts, of which some know their share of the whole."""

from collections.abc import Callable


class Share(str):
    """A text about work of which a known part is done.

    Attributes:
        done, total: in one unit, for example bytes or partitions.
    """

    done: float
    total: float

    def __new__(cls, text: str, done: float, total: float) -> "Share":
        share = super().__new__(cls, text)
        share.done, share.total = done, total
        return share


class Countdown:
    """Tells the share of work of which only what is left is known, as of messages in a queue."""

    def __init__(self, what: str, progress: Callable[[str], None]) -> None:
        """``what``: for example ``merging partitions``."""
        self._what, self._progress = what, progress
        self._most = 0

    def __call__(self, left: int) -> None:
        self._most = max(self._most, left)
        self._progress(Share(f"{self._what}, {left:,} left", self._most - left, self._most))
