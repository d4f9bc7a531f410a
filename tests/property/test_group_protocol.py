"""Groups (ADR 0066) as a small model: every order of calls of leaders, a worker, a rewrite, a publisher and a vacuum is visited.

A leader publishes merges without a version of their own: a snapshot's entry is a *preview* of what the chain's version and the
batches behind it come to, in a group object. The chain stays the only truth that writers build on. One step is one call of the
store. A create may be done, lose, be done with its answer lost, or arrive late; an actor may crash at each step. Age protects
nothing here: a vacuum deletes whatever its fences allow.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

STATES = 400_000
"""More are a mistake in the bounds of a case."""


class Version(NamedTuple):
    """Of a partition's chain; also what a leader has in memory. ``batches`` are those whose rows it has."""

    writer: str
    batches: tuple[int, ...]
    rewritten: bool
    files: frozenset[str]
    fence: int = -1

    @property
    def merged(self) -> int:
        return max(self.batches, default=0)


class Entry(NamedTuple):
    """A partition in a snapshot. With a ``group`` it shows ``body``, otherwise the chain's version."""

    version: int
    body: Version
    group: str = ""


class Snapshot(NamedTuple):
    writer: str
    batch: int
    entries: tuple[Entry, ...]


class State(NamedTuple):
    """``files`` and ``groups`` have the start of their writers: versions of the chain, and snapshots."""

    ledger: int
    packs: frozenset[int]
    chains: tuple[tuple[Version, ...], ...]
    snapshots: tuple[Snapshot, ...]
    files: frozenset[tuple[str, int, int]]
    groups: frozenset[tuple[str, int]]
    actors: tuple["Own", ...]
    flight: tuple[tuple[int, int, Version | Snapshot], ...]
    faults: tuple[int, int, int]


Own = tuple[Any, ...]
"""The state of an actor: what it does next, in which try, and what it has in memory."""
Step = tuple[str, bool, State, str | None]
"""What happens, whether it is a fault, the state after it, and which promise it breaks."""
Act = tuple[str, bool, State, Own, str | None]
"""A step, with the actor's own next state before the promise."""
IDLE = ("idle", 0)


@dataclass(frozen=True)
class Table:
    """What acts on it, and how much may go wrong: crashes, lost answers, late creates.

    Attributes:
        touches: for each batch, the partitions that it touches.
        tries: in how many tries an actor writes files of its own; later ones write those of the last again.
        ends: whether all of it is to be shown in the end; not so if nobody merges what a leader has left.
        bug: the rule that is broken.
    """

    touches: tuple[tuple[int, ...], ...]
    actors: tuple[str, ...]
    faults: tuple[int, int, int] = (0, 0, 0)
    tries: int = 0
    ends: bool = True
    bug: str = ""

    # -- what the table's state says

    def initial(self) -> State:
        count = 1 + max(p for touched in self.touches for p in touched)
        empty = Version("", (), rewritten=False, files=frozenset())
        first = Snapshot("", 0, (Entry(0, empty),) * count)
        return State(
            0,
            frozenset(),
            ((empty,),) * count,
            (first,),
            frozenset(),
            frozenset(),
            (IDLE,) * len(self.actors),
            (),
            self.faults,
        )

    def due(self, partition: int, low: int, high: int) -> tuple[int, ...]:
        return tuple(b for b in range(low + 1, high + 1) if partition in self.touches[b - 1])

    def goal(self, s: State) -> bool:
        """Readers see all batches, and what was rewritten."""
        last = s.snapshots[-1]
        shown = all(e.body.rewritten == chain[-1].rewritten for e, chain in zip(last.entries, s.chains, strict=True))
        return s.ledger == len(self.touches) == last.batch and shown

    def problem(self, s: State) -> str | None:
        """What must hold in each state."""
        stored, groups = {name for name, _, _ in s.files}, {name for name, _ in s.groups}
        for p, (entry, chain) in enumerate(zip(s.snapshots[-1].entries, s.chains, strict=True)):
            if entry.group and entry.group not in groups:
                return f"the newest snapshot names a group that is gone (partition {p})"
            if not entry.body.files <= stored:
                return f"readers of partition {p} need a file that is gone"
            if not all(version.files <= stored for version in chain[entry.version :]):
                return f"a version of partition {p} that may be published needs a file that is gone"
            if missing := set(self.due(p, chain[-1].merged, s.ledger)) - s.packs:
                return f"partition {p} has not merged batches {sorted(missing)}, and their packs are gone"
        return None

    def check_version(self, s: State, p: int, version: Version) -> str | None:
        old = s.chains[p][-1]
        if version.merged < old.merged:
            return f"`merged` of partition {p} falls"
        if version.batches != self.due(p, 0, version.merged):
            return f"a version of partition {p} lacks batches: {version.batches}"
        return f"the rewrite of partition {p} is lost" if old.rewritten and not version.rewritten else None

    def check_snapshot(self, s: State, new: Snapshot) -> str | None:
        old = s.snapshots[-1]
        if new.batch < old.batch:
            return "the batch of snapshots falls"
        for p, (before, now) in enumerate(zip(old.entries, new.entries, strict=True)):
            if now.body.batches != self.due(p, 0, new.batch):
                return f"snapshot of batch {new.batch} shows {now.body.batches} of partition {p}"
            if now.version < before.version:
                return f"readers of partition {p} go back to an older version"
            if before.body.rewritten and not now.body.rewritten:
                return f"the rewrite of partition {p} is hidden again"
        return None

    # -- creates

    def land(self, s: State, where: int, number: int, body: Version | Snapshot) -> tuple[State, str | None]:
        """``where``: a partition, or -1 for the snapshots."""
        if isinstance(body, Snapshot):
            return s._replace(snapshots=(*s.snapshots, body)), self.check_snapshot(s, body)
        chain = (*s.chains[where], body)
        return s._replace(chains=(*s.chains[:where], chain, *s.chains[where + 1 :])), self.check_version(s, where, body)

    def at(self, s: State, where: int, number: int) -> Version | Snapshot | None:
        chain = s.snapshots if where < 0 else s.chains[where]
        return chain[number] if number < len(chain) else None

    def create(
        self, s: State, where: int, number: int, body: Version | Snapshot
    ) -> Iterator[tuple[str, bool, State, str | None, str]]:
        crashes, lost, late = s.faults
        if (stored := self.at(s, where, number)) is not None:
            yield "finds it taken", False, s, None, "won" if stored.writer == body.writer else "lost"
            return
        done, problem = self.land(s, where, number, body)
        yield "done", False, done, problem, "won"
        if lost:
            yield "done, its answer is lost", True, done._replace(faults=(crashes, lost - 1, late)), problem, "unknown"
        if late:
            sent = s._replace(flight=(*s.flight, (where, number, body)), faults=(crashes, lost, late - 1))
            yield "late, no answer", True, sent, None, "unknown"

    def steps(self, s: State) -> Iterator[Step]:
        for label, fault, after, problem in self._steps(s):
            after = after._replace(flight=tuple(f for f in after.flight if self.at(after, f[0], f[1]) is None))
            yield label, fault, after, problem or self.problem(after)

    def _steps(self, s: State) -> Iterator[Step]:
        if s.ledger < len(self.touches):
            number = s.ledger + 1
            yield f"append {number}", False, s._replace(ledger=number, packs=s.packs | {number}), None
        for i, (where, number, body) in enumerate(s.flight):
            after, problem = self.land(s._replace(flight=(*s.flight[:i], *s.flight[i + 1 :])), where, number, body)
            yield f"late create {number} of {where} lands", True, after, problem
        for i, name in enumerate(self.actors):
            kind, state = name.rstrip("0123456789"), s.actors[i]
            for label, fault, after, now, problem in getattr(self, kind)(s, f"{name}.{state[1]}", state):
                yield f"{name} {label}", fault, after._replace(actors=(*s.actors[:i], now, *s.actors[i + 1 :])), problem
            if s.faults[0] and state[0] not in ("idle", "end"):
                after = s._replace(faults=(s.faults[0] - 1, *s.faults[1:]))
                yield (
                    f"{name} crashes",
                    True,
                    after._replace(actors=(*s.actors[:i], self.again(state), *s.actors[i + 1 :])),
                    None,
                )

    def again(self, state: Own) -> Own:
        return ("idle", min(state[1] + 1, self.tries))

    def commit(
        self, s: State, state: Own, where: int, number: int, body: Version | Snapshot, won: Own, lost: Own
    ) -> Iterator[Act]:
        """A create with all its ends; ``state`` sends the same bytes again if nothing is stored after a lost answer."""
        for label, fault, after, problem, known in self.create(s, where, number, body):
            yield (
                f"creates {number} of {where}: {label}",
                fault,
                after,
                {"won": won, "lost": lost, "unknown": state}[known],
                problem,
            )

    # -- actors

    def leader(self, s: State, me: str, state: Own) -> Iterator[Act]:
        """State: what, try, known snapshot, heads in memory (a version's number, the body, is it a preview), what to commit."""
        what, tried = state[:2]
        if what == "idle":
            yield "looks at the snapshots", False, s, ("heads", tried, len(s.snapshots) - 1, ()), None
            return
        known, heads = state[2:4]
        if what == "heads":
            chain = s.chains[len(heads)]
            heads = (*heads, (len(chain) - 1, chain[-1], False))
            yield (
                "looks at a head",
                False,
                s,
                ("leads" if len(heads) == len(s.chains) else "heads", tried, known, heads),
                None,
            )
        elif what == "leads":
            yield from self._lead(s, me, state)
        elif what == "group":
            name = f"group {me} {known + 1} {s.snapshots[known].batch}"
            yield (
                "writes a group",
                False,
                s._replace(groups=s.groups | {(name, known + 1)}),
                ("publish", *state[1:4], name),
                None,
            )
        elif what == "publish":
            new = self.next_snapshot(s, me, s.snapshots[known], heads, state[4])
            forget = self.again(state)
            if self.bug == "a leader that lost keeps what it has":
                forget = ("leads", tried, len(s.snapshots) - 1, heads)
            yield from self.commit(s, state, -1, known + 1, new, ("leads", tried, known + 1, heads), forget)
        else:
            p, number, body = state[4:]
            won = ("leads", tried, known, (*heads[:p], (number, body, False), *heads[p + 1 :]))
            lost = self.again(state)
            if self.bug == "a leader commits behind a version that it has not read":
                lost = ("version", tried, known, heads, p, number + 1, body)
            yield from self.commit(s, state, p, number, body, won, lost)

    def _lead(self, s: State, me: str, state: Own) -> Iterator[Act]:
        _, tried, known, heads = state[:4]
        newest = len(s.snapshots) - 1
        if known < newest:
            # The look of each minute. What it has in memory was read before the fence that this snapshot may be.
            kept = self.bug == "a leader keeps heads when another one publishes"
            yield (
                "sees another's snapshot",
                False,
                s,
                (("leads", tried, newest, heads) if kept else self.again(state)),
                None,
            )
        for p, (number, body, _) in enumerate(heads):
            pending = self.due(p, body.merged, s.ledger)
            if pending and not set(pending) <= s.packs:
                yield "finds packs gone", False, s, self.again(state), None
            elif pending:
                name = f"{me} {p} {number} {pending[-1]} {int(body.rewritten)}"
                merged = Version(name, (*body.batches, *pending), body.rewritten, body.files | {name})
                written = s._replace(files=s.files | {(name, p, number + 1)})
                preview = (*heads[:p], (number, merged, True), *heads[p + 1 :])
                yield f"merges {pending} in {p}", False, written, ("leads", tried, known, preview), None
                yield (
                    f"merges {pending} in {p} for the chain",
                    False,
                    written,
                    ("version", tried, known, heads, p, number + 1, merged),
                    None,
                )
        batch = s.snapshots[known].batch if known <= newest else 0
        whole = min((self._whole_until(p, body, s.ledger) for p, (_, body, _) in enumerate(heads)), default=0)
        if whole > batch:
            yield "publishes", False, s, ("group", tried, known, heads), None

    def _whole_until(self, p: int, body: Version, ledger: int) -> int:
        following = self.due(p, body.merged, ledger)
        return following[0] - 1 if following else ledger

    def next_snapshot(self, s: State, me: str, old: Snapshot, heads: Own, group: str) -> Snapshot:
        """The leader's: it shows its heads, previews by the group."""
        batch = min(self._whole_until(p, body, s.ledger) for p, (_, body, _) in enumerate(heads))
        entries = tuple(
            before
            if before.body.batches == body.batches
            and before.version == number
            and before.body.rewritten == body.rewritten
            else Entry(number, body, group if preview else "")
            for before, (number, body, preview) in zip(old.entries, heads, strict=True)
        )
        return Snapshot(f"{me} {len(s.snapshots)} {group}", batch, entries)

    def worker(self, s: State, me: str, state: Own) -> Iterator[Act]:
        """Merges a partition up to any batch that its chain lacks. It may have looked at the snapshots long ago."""
        what, tried = state[:2]
        if what == "idle":
            yield "looks at the snapshots", False, s, ("looked", tried, len(s.snapshots) - 1), None
        elif what == "looked":
            for p, chain in enumerate(s.chains):
                head = chain[-1]
                shown = s.snapshots[state[2]]
                # Unless a group shows more, a snapshot says that the chain has every batch up to its own.
                ahead = shown.entries[p].body.merged > head.merged
                low = head.merged if ahead else max(head.merged, self._covered(p, shown))
                if self.bug == "a preview counts as merged in the chain":
                    low = max(head.merged, self._covered(p, shown))
                pending = self.due(p, low, s.ledger)
                if not pending:
                    yield "finds nothing to merge", False, s, ("idle", tried), None
                    continue
                if not set(pending) <= s.packs:
                    yield "finds packs gone", False, s, self.again(state), None
                    continue
                name = f"{me} {p} {len(chain)} {pending[-1]}"
                body = Version(name, (*head.batches, *pending), head.rewritten, head.files | {name})
                written = s._replace(files=s.files | {(name, p, len(chain))})
                yield f"merges {pending} in {p}", False, written, ("put", tried, p, len(chain), body), None
        else:
            p, number, body = state[2:]
            yield from self.commit(s, state, p, number, body, self.again(state), self.again(state))

    def _covered(self, p: int, shown: Snapshot) -> int:
        return max(self.due(p, 0, shown.batch), default=0)

    def rewriter(self, s: State, me: str, state: Own) -> Iterator[Act]:
        """Rewrites partition 0 once; what readers see changes, as after a reprocess from landing files."""
        what, tried = state[:2]
        head = s.chains[0][-1]
        if what == "idle" and head.batches and not head.rewritten:
            number = len(s.chains[0])
            body = Version(f"{me} {number}", head.batches, rewritten=True, files=frozenset({f"{me} {number}"}))
            yield (
                "rewrites",
                False,
                s._replace(files=s.files | {(body.writer, 0, number)}),
                ("put", tried, number, body),
                None,
            )
        elif what == "put":
            yield from self.commit(s, state, 0, state[2], state[3], ("end", tried), self.again(state))

    def publisher(self, s: State, me: str, state: Own) -> Iterator[Act]:
        """Shows chains, and keeps a preview where a chain has less. Snapshots of several batches are tried, the newest first."""
        what, tried = state[:2]
        if what == "idle":
            yield "looks at the snapshots", False, s, ("look", tried, len(s.snapshots) - 1), None
            return
        if what == "put":
            yield from self.commit(s, state, -1, state[2], state[3], self.again(state), self.again(state))
            return
        old = s.snapshots[state[2]]
        for batch in range(s.ledger, old.batch - 1, -1):
            entries = [self._entry(s, p, old, batch) for p in range(len(s.chains))]
            if None not in entries:
                new = Snapshot(f"{me} {state[2] + 1}", batch, tuple(e for e in entries if e is not None))
                if (new.batch, new.entries) != (old.batch, old.entries):
                    yield f"builds batch {batch}", False, s, ("put", tried, state[2] + 1, new), None
                    return
        yield "has nothing to show", False, s, ("idle", tried), None

    def _entry(self, s: State, p: int, old: Snapshot, batch: int) -> Entry | None:
        before, wanted = old.entries[p], self.due(p, 0, batch)
        for number in range(len(s.chains[p]) - 1, before.version - 1, -1):
            if s.chains[p][number].batches == wanted and (number > before.version or not before.group):
                return Entry(number, s.chains[p][number])
        return before if before.body.batches == wanted else None

    def vacuum(self, s: State, me: str, state: Own) -> Iterator[Act]:
        """Fences chains, then the snapshots, then looks, then deletes. Only the newest snapshot is kept."""
        what, tried = state[:2]
        last = len(s.chains) - 1
        order = [*range(last + 1), -1]
        if self.bug == "a vacuum does not fence the snapshots":
            order = order[:-1]
        if self.bug == "a vacuum fences the snapshots first":
            order = [-1, *range(last + 1)]
        if what == "idle":
            yield "begins", False, s, ("fence", tried, 0, ()), None
        elif what == "fence":
            done, fences = state[2:]
            where = order[done]
            chain = s.snapshots if where < 0 else s.chains[where]
            number = len(chain)
            body = chain[-1]._replace(writer=f"{me} {number} fence")
            body = body if isinstance(body, Snapshot) else body._replace(fence=number)
            after, problem = self.land(s, where, number, body)  # it reads the head again until it wins
            done, fences = done + 1, (*fences, (where, number))
            yield (
                f"fences {where} at {number}",
                False,
                after,
                ("fence" if done < len(order) else "look", tried, done, fences),
                problem,
            )
        elif what == "look":
            yield "looks", False, s, ("delete", tried, self._garbage(s, dict(state[3]))), None
        elif what == "delete" and (garbage := state[2]):
            first = garbage[0]
            yield f"deletes {first}", False, self._without(s, first), ("delete", tried, garbage[1:]), None
        elif what == "delete":
            yield "ends", False, s, ("end", tried), None

    def _garbage(self, s: State, fences: dict[int, int]) -> Own:
        newest = s.snapshots[-1]
        shown = newest.entries
        previews = self.bug != "a vacuum deletes what only a preview names"
        needed = {f for e in shown if previews or not e.group for f in e.body.files}
        needed |= {f for e, chain in zip(shown, s.chains, strict=True) for v in chain[e.version :] for f in v.files}
        files = [f for f in s.files if f[0] not in needed and f[2] <= fences[f[1]]]
        named = {e.group for e in shown} if self.bug != "a vacuum deletes a group that a snapshot names" else set()
        groups = [g for g in s.groups if g[0] not in named and g[1] <= fences.get(-1, 10**6)]
        covered = [
            e.body.merged if self.bug == "packs go that only a preview has merged" else c[-1].merged
            for e, c in zip(shown, s.chains, strict=True)
        ]
        packs = [b for b in s.packs if all(covered[p] >= b for p in self.touches[b - 1])]
        return (*sorted(files), *sorted(groups), *sorted(packs))

    def _without(self, s: State, one: Own | int) -> State:
        if isinstance(one, int):
            return s._replace(packs=s.packs - {one})
        return s._replace(groups=s.groups - {one}) if len(one) == 2 else s._replace(files=s.files - {one})


def explore(table: Table) -> tuple[str | None, list[str], int]:
    """Every state, breadth first: the first problem, the steps to it, and how many states were seen."""
    first = table.initial()
    seen: dict[State, tuple[State, str] | None] = {first: None}
    edges: dict[State, list[State]] = {}
    level = [first]

    def path(state: State, *more: str) -> list[str]:
        labels, step = [*more], seen[state]
        while step is not None:
            labels.insert(0, step[1])
            step = seen[step[0]]
        return labels

    while level:
        following = []
        for state in level:
            for label, fault, after, problem in table.steps(state):
                if problem:
                    return problem, path(state, label), len(seen)
                if after not in seen:
                    seen[after] = state, label
                    following.append(after)
                    assert len(seen) < STATES, "too many states"
                if not fault:
                    edges.setdefault(after, []).append(state)
        level = following
    if not table.ends:
        return None, [], len(seen)
    reached = {state for state in seen if table.goal(state)}
    todo = [*reached]
    while todo:
        for state in edges.get(todo.pop(), ()):
            if state not in reached:
                reached.add(state)
                todo.append(state)
    stuck = next((state for state in seen if state not in reached), None)
    return (
        ("nothing leads to the goal any more", path(stuck), len(seen)) if stuck is not None else (None, [], len(seen))
    )


ONE, TWO = ((0,),), ((0,), (0,))
"""Batches of one partition."""
CASES = {
    "a leader and a worker": Table(TWO, ("leader1", "worker1")),
    "two leaders": Table(TWO, ("leader1", "leader2")),
    "two partitions": Table(((0, 1), (0,)), ("leader1", "worker1")),
    "a rewrite": Table(TWO, ("leader1", "rewriter1", "publisher1"), ends=False),
    "a rewrite and a worker": Table(ONE, ("leader1", "rewriter1", "worker1", "publisher1")),
    "a vacuum": Table(ONE, ("leader1", "worker1", "vacuum1"), tries=1),
    "a vacuum and two leaders": Table(ONE, ("leader1", "leader2", "vacuum1")),
    "a crash and a lost answer": Table(TWO, ("leader1", "worker1"), faults=(1, 1, 0)),
    "a late create": Table(TWO, ("leader1", "worker1"), faults=(0, 0, 1)),
    "a late create beside a vacuum": Table(ONE, ("leader1", "vacuum1"), faults=(0, 0, 1), tries=1),
}
BUGS = {
    "a leader commits behind a version that it has not read": ("a rewrite", "is lost"),
    "a leader that lost keeps what it has": ("a rewrite", "older version"),
    "a leader keeps heads when another one publishes": ("a rewrite", "older version"),
    "a preview counts as merged in the chain": ("a leader and a worker", "lacks batches"),
    "a vacuum does not fence the snapshots": ("a vacuum", "gone"),
    "a vacuum fences the snapshots first": ("a vacuum", "gone"),
    "a vacuum deletes what only a preview names": ("a vacuum", "need a file"),
    "a vacuum deletes a group that a snapshot names": ("a vacuum", "a group that is gone"),
    "packs go that only a preview has merged": ("a vacuum", "their packs are gone"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_order_of_calls_keeps_what_groups_promise(case: str) -> None:
    problem, trace, _ = explore(CASES[case])

    assert problem is None, "\n".join([problem or "", *trace])


@pytest.mark.few(len(BUGS))
@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_rule_is_found(bug: str) -> None:
    case, expected = BUGS[bug]

    problem, trace, _ = explore(replace(CASES[case], bug=bug))

    assert expected in (problem or "nothing"), "\n".join(trace)
