"""A chain: numbered immutable objects, each appended by exactly one writer.

Reads     the chain's folder: one LIST of one key finds the head, a GET reads a version
Writes    the next version, by creating an object only if it is absent: the only commit there is
Repeat    safe: a version carries its writer's id, so after a lost answer the writer reads the version back

    head -> build the next body -> invariants(old, new) -> create -- taken ------> read back: own id = won, else lost
              ^                                              '----- no answer --> read back: absent and head not moved = again
              '------------------- lost: rebase on the new head ------------------'

Nothing here knows about tables. `docs/FORMAT.md`, "Chains", has the bytes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import get_ident
from typing import Generic, Literal, TypeVar

import msgspec

from lakeupsert import clock
from lakeupsert.decoding import UNREADABLE, decoder_of
from lakeupsert.errors import ConfigurationError, DamagedTableError, TryAgainError
from lakeupsert.retries import CHAIN_ATTEMPTS, LOST_PAUSE_SECONDS, SEND_PAUSE_SECONDS, SENDS
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore, StoreUnavailableError, UnknownOutcomeError
from lakeupsert.table import metadata

FORMAT = 2
"""The format version of every object that this lakeupsert writes. It refuses a higher one."""

LARGEST = 10**20 - 1
FRESH_SECONDS = 3600.0
"""How old a head may be to append after it, and how long a create may take to count as won (trimming keeps 7 days)."""
REMEMBERED = 100
"""How many of its last tries a chain remembers: `ingest` makes one for each batch, for months."""

Body = TypeVar("Body")
Answer = TypeVar("Answer")


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    kind: str
    number: int
    write_id: str
    parent: str | None
    written_at: str
    body: msgspec.Raw


@dataclass(frozen=True)
class Link(Generic[Body]):
    """One version of a chain, as read or as written.

    Attributes:
        read_at: `clock.elapsed` when it was last seen to be the head.
        etag: of the object, if it was read as the head.
    """

    number: int
    write_id: str
    parent: str | None
    written_at: str
    body: Body
    read_at: float
    etag: str = field(default="", compare=False)


@dataclass(frozen=True)
class Outcome(Generic[Body]):
    """How an append ended. Only after *lost* may the writer delete what the version would have named."""

    result: Literal["won", "lost", "unknown"]
    link: Link[Body] | None = None


@dataclass
class _Try:
    """One call of `Chain.append`; ``unknown`` also while it waits for an answer."""

    number: int
    write_id: str
    result: Literal["won", "lost", "unknown"] = "unknown"


class Held:
    """The heads that the leader of a table takes from memory, without a LIST (ADR 0060). Other threads of its process look.

    A version that is appended behind an old head finds its number taken. Then no head counts that was seen before.

    Attributes:
        leader: the thread that leads.
    """

    def __init__(self) -> None:
        self.leader: int | None = None
        self._looked_at = self._lost_at = 0.0

    @property
    def leads(self) -> bool:
        return self.leader == get_ident()

    def covers(self, seen_at: float, *, partition: bool = False) -> bool:
        """Whether the head that was seen then is taken for the head. ``partition``: of a partition's chain."""
        return self.leads and (self._lost_at if partition else max(self._lost_at, self._looked_at)) < seen_at

    def look(self) -> None:
        """Let the leader look once at each chain that is not a partition's."""
        self._looked_at = clock.elapsed()

    def forget(self) -> None:
        """Let the leader look once at each chain."""
        self._lost_at = clock.elapsed()


class Chain(Generic[Body]):
    """The chain in one folder.

    Args:
        kind: what the versions are, for example ``ledger``; written into each version and checked on reading.
        body_type: a msgspec struct.
        check: raises if the new body must not follow the old one (None at the start of the chain); runs before every append.
        parse: parses encoded parts of a body at an address; raises if they can't be parsed.
        held: the one of the table.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        kind: str,
        body_type: type[Body],
        check: Callable[[Body | None, Body], None],
        parse: Callable[[Body, str], object] = lambda body, where: None,
        held: Held | None = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._kind = kind
        self._body_type = body_type
        self._check = check
        self._parse = parse
        self._tries: deque[_Try] = deque(maxlen=REMEMBERED)
        self._tried = 0
        self._held = held or Held()
        self._last: Link[Body] | None = None  # the head, as this object read or appended it last

    def head(self, known: Link[Body] | None = None, *, least: int = -1) -> Link[Body] | None:
        """The newest version, or None if the chain is empty. If it still is ``known``, it is not read again.

        A leader takes it from memory, unless that one is below ``known`` or ``least``, which are known to be there.
        """
        last, least = self._last, max(least, known.number if known else -1)
        if last is not None and last.number >= least and self._held.covers(last.read_at):
            return last
        read_at, info = clock.elapsed(), self._newest()
        self._last = self.listed_head(info, read_at, known) if info else None
        return self._last

    def listed_head(self, info: ObjectInfo, read_at: float, known: Link[Body] | None = None) -> Link[Body]:
        """The version that a listing since ``read_at`` has as the newest. If it is ``known``, it is not read again.

        A number alone does not identify a version that was read: if the head is lost, another one takes its number.
        """
        number = self.number(info.name)
        fresh = known is not None and read_at - known.read_at < FRESH_SECONDS
        if known is not None and known.number == number and known.etag in (info.etag, "" if fresh else None):
            return replace(known, read_at=read_at, etag=info.etag)
        try:
            return replace(self._read(number, read_at), etag=info.etag)
        except NotFoundError:  # appended behind and trimmed since it was listed
            read_at, newer = clock.elapsed(), self._newest()
            if newer is None or self.number(newer.name) <= number:
                raise
            return self.listed_head(newer, read_at)

    def newest_number(self) -> int | None:
        """The head's number, by one LIST; None if the chain is empty."""
        info = self._newest()
        return self.number(info.name) if info else None

    def _newest(self) -> ObjectInfo | None:
        return next(iter(self._store.list(self.prefix, limit=1)), None)

    def get(self, number: int) -> Link[Body] | None:
        """One version, or None if that number does not exist (not yet written, or trimmed)."""
        try:
            return self._read(number, clock.elapsed())
        except NotFoundError:
            return None

    def numbers(self) -> Iterator[int]:
        """The existing numbers, newest first; old ones may have been trimmed."""
        for info in self._store.list(self.prefix):
            yield self.number(info.name)

    def between(self, low: int, high: int) -> Iterator[Link[Body]]:
        """The versions with low < number <= high, ascending; all of them must exist."""
        for number in range(low + 1, high + 1):
            link = self.get(number)
            if link is None:
                raise DamagedTableError(
                    "missing-version",
                    f"{self._kind} version {number} is missing: {self._store.uri(self.name(number))}. "
                    f"Versions up to {high} exist, so something other than lakeupsert deleted it.",
                    next=metadata.FROM_BACKUP,
                )
            yield link

    def append(self, body: Body, after: Link[Body] | None) -> Outcome[Body]:
        """Append ``body`` after the version ``after`` (None: start the chain), once.

        Raises what the invariants raise, and StoreUnavailableError if the store does not answer. Then the outcome is unknown and
        nothing may be deleted.
        """
        self._check(after.body if after else None, body)
        begun = clock.elapsed() if after is None else after.read_at
        if after is not None and clock.elapsed() - begun > FRESH_SECONDS:
            # A stalled writer must not take a number that existed and has been trimmed since.
            begun = clock.elapsed()
            if self.newest_number() != after.number:
                self._held.forget()
                return Outcome("lost")
        link = Link(
            number=0 if after is None else after.number + 1,
            write_id=clock.new_id(),
            parent=None if after is None else after.write_id,
            written_at=clock.now().isoformat(),
            body=body,
            read_at=clock.elapsed(),
        )
        this = _Try(link.number, link.write_id)
        self._tries.append(this)  # before sending: an interrupt may come before the answer
        self._tried += 1
        result = this.result = self._send(link)
        if result == "won" and clock.elapsed() - begun > FRESH_SECONDS:
            result = this.result = "won" if self._descends(link) else "unknown"
        if result == "won":
            self._last = link
            return Outcome(result, link)
        self._held.forget()
        return Outcome(result)

    def tries(self) -> int:
        """How often this object has tried to append a version."""
        return self._tried

    def find_appended(self, since: int = 0) -> tuple[list[int], bool]:
        """The numbers of the versions that this object appended after its first ``since`` tries, and whether that is certain.

        Only the last `REMEMBERED` are known. If an interrupt or a silent store cut a try off, its version is read back, which may
        raise. A version that is not there may still appear.
        """
        numbers, certain = [], True
        for this in [*self._tries][-(self._tried - since) :] if self._tried > since else ():
            if this.result == "unknown":
                link = self.get(this.number)
                if link is not None:
                    this.result = "won" if link.write_id == this.write_id else "lost"
                certain = certain and link is not None
            if this.result == "won":
                numbers.append(this.number)
        return numbers, certain

    def extend(
        self,
        build: Callable[[Link[Body] | None], Body | None],
        attempts: int = CHAIN_ATTEMPTS,
        behind: Link[Body] | None = None,
    ) -> Link[Body] | None:
        """Append what ``build`` returns for the head, and try again after each lost race; None if it returns None.

        For bodies without files of their own; a caller that has to write files again calls `append`. If the chain ends before
        ``behind``, a version that is missing, that one stands for the head.
        """

        def attempt() -> Link[Body] | Lost | None:
            head = self.head()
            if behind is not None and (head is None or head.number < behind.number):
                head = behind
            body = build(head)
            if body is None:
                return None
            return self.append(body, head).link or LOST

        return until_won(self._store.uri(self._folder), attempt, attempts)

    @property
    def prefix(self) -> str:
        """The beginning of all its objects' names, which a store lists from the head on."""
        return f"{self._folder}/v"

    def number(self, name: str) -> int:
        """The number in an object's name."""
        return LARGEST - int(name.removeprefix(self.prefix).removesuffix(".json"))

    def name(self, number: int) -> str:
        """The object's name."""
        # Counting down, so that the first name of an ordered listing is the head, however long the chain.
        return f"{self._folder}/v{LARGEST - number:020d}.json"

    # -- how

    def _read(self, number: int, read_at: float) -> Link[Body]:
        name = self.name(number)
        what = f"version {number} of the chain {self._kind}"
        envelope = metadata.decode(self._store.get(name), _Envelope, lambda: self._store.uri(name), what)
        refuse_newer(self._store.uri(name), envelope.format)
        try:
            if (envelope.kind, envelope.number) != (self._kind, number):
                raise ValueError(f"it says {envelope.kind} {envelope.number}")
            body = decoder_of(self._body_type).decode(envelope.body)
            datetime.fromisoformat(envelope.written_at)
            self._parse(body, self._store.uri(name))
        except (
            *UNREADABLE,
            ValueError,
            KeyError,
            OSError,
            NotImplementedError,
        ) as e:  # the last two: Arrow's, of a schema
            raise metadata.damaged(self._store.uri(name), what, str(e)) from e
        return Link(number, envelope.write_id, envelope.parent, envelope.written_at, body, read_at)

    def _send(self, link: Link[Body]) -> Literal["won", "lost", "unknown"]:
        data = metadata.encode(
            _Envelope(
                format=FORMAT,
                kind=self._kind,
                number=link.number,
                write_id=link.write_id,
                parent=link.parent,
                written_at=link.written_at,
                body=msgspec.Raw(msgspec.json.encode(link.body)),
            )
        )
        name = self.name(link.number)
        for _ in sends():
            try:
                if self._store.create(name, data):
                    return "won"
            except UnknownOutcomeError:
                pass
            # Taken or unknown: only the stored version can answer (one of our own retries may have found our own version).
            stored = self.get(link.number)
            head = self.newest_number() if stored is None else None
            if head is not None and head >= link.number:
                stored = self.get(link.number)  # a late create may have arrived since
                if stored is None:
                    return "unknown"  # it existed and was trimmed: whose it was can't be found out any more
            if stored is not None:
                return "won" if stored.write_id == link.write_id else "lost"
        raise StoreUnavailableError(
            "store-unreachable",
            f"{self._store.uri(name)}: {SENDS} attempts to create it got no answer. It may still appear; "
            "nothing that it names was deleted.",
            next="run the same command again; it finds out what happened",
        )

    def _descends(self, link: Link[Body]) -> bool:
        """Whether the head is ``link`` or a descendant of it by parent ids."""
        newest = self.newest_number()
        here = None if newest is None else self.get(newest)
        while here is not None and here.number > link.number:
            below = self.get(here.number - 1)
            here = below if below is not None and below.write_id == here.parent else None
        return here is not None and here.write_id == link.write_id


def sends() -> Iterator[None]:
    """One item for each time that an object is sent whose create got no answer, after a pause from the second one on."""
    for attempt in range(SENDS):
        if attempt:
            clock.sleep(clock.jitter(SEND_PAUSE_SECONDS * 2 ** (attempt - 1)))
        yield


def refuse_newer(where: str, format_: int, requires: Sequence[str] = ()) -> None:
    """Raise ConfigurationError if a later lakeupsert wrote the object at ``where``: in a later format, or in this one with
    features that it ``requires`` its readers to know. This lakeupsert knows none."""
    if format_ > FORMAT or requires:
        features = f" and requires {', '.join(requires)}" if requires else ""
        raise ConfigurationError(
            "newer-format",
            f"{where} has format {format_}{features}; this lakeupsert reads format {FORMAT} and older.",
            next="upgrade lakeupsert on this machine (pip install --upgrade lakeupsert)",
        )


class Repeat:
    """The result of an attempt that must start again."""


class Lost(Repeat):
    """It starts at the new heads, since another writer was faster."""


LOST = Lost()


def until_won(where: str, attempt: Callable[[], Answer | Repeat], attempts: int = CHAIN_ATTEMPTS) -> Answer:
    """Call ``attempt`` until it returns anything but a `Repeat`, and return that. It waits before each repetition, with jitter.

    Raises TryAgainError after ``attempts`` lost races; ``where`` is the address that the error names.
    """
    for number in range(attempts):
        answer = attempt()
        if not isinstance(answer, Repeat):
            return answer
        clock.sleep(clock.jitter(LOST_PAUSE_SECONDS * 2 ** min(number, 7)))
    raise races_exhausted(where, attempts)


def races_exhausted(where: str, attempts: int) -> TryAgainError:
    return TryAgainError(
        "races-exhausted",
        f"{where}: another writer was faster in each of {attempts} attempts. Nothing was committed here and nothing was lost.",
        next="run the same command again when fewer writers are at work",
    )
