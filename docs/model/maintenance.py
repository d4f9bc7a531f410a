"""The upkeep of a table during a night, in every order: restore, reprocess, tombstone expiry, failed marks, vacuum, units.

    python docs/model/maintenance.py            every configuration and every planted bug, one line each
    python docs/model/maintenance.py -v NAME    one of them, with its shortest counterexample
    python docs/model/maintenance.py --list     the names

`Upkeep` is a table of two partitions; `Units` is one big partition that workers merge in parts.
The explorer, the store and the faults are those of protocol.py.
"""

import sys
from typing import NamedTuple

from protocol import IDLE, LOST, UNKNOWN, WON, Flow, landing, main

# ---------------------------------------------------------------- a table under upkeep

# Bucket 0 holds k1 and k3, bucket 1 holds k2. k1 is deleted in f1; f2 is late for k1, low for k3, a tie for k2.
FILES = [
    landing(A=[("k1", 10, "f0.0"), ("k2", 10, "f0.1")], B=[("k1", 5, "f0.2")]),
    landing(A=[("k1", 12, "f1.0", True), ("k2", 9, "f1.1")], B=[("k1", 7, "f1.2")]),
    landing(A=[("k1", 11, "f2.0"), ("k3", 3, "f2.1"), ("k2", 10, "f2.2")]),
    landing(B=[("k1", 8, "f3.0")]),
]
BUCKET = {"k1": 0, "k2": 1, "k3": 0}
BUCKETS = 2
NEW = -1  # the id of a bucket entry until its manifest is committed


class Entry(NamedTuple):  # of the ledger: a batch, a restore or a fence
    writer: int
    kind: str
    files: tuple = ()
    again: bool = False
    back: int = 0  # a restore: the batch of the snapshot it goes back to
    bases: tuple = ()  # a restore: per partition the manifest version to go back to, or None where untouched


class Row(NamedTuple):
    key: str
    order: int
    delete: bool
    batch: int  # for the checker; no rule looks at it
    source: str


class Bucket(NamedTuple):  # an entry of a manifest
    id: int
    rows: tuple = ()  # tombstones are rows with delete
    floor: int = 0
    superseded: int = 0
    dropped: int = 0
    refused: tuple = ()  # (batch, source): what the quarantine objects name


class Version(NamedTuple):
    writer: int
    merged: int
    buckets: tuple
    withdrawn: int = 0
    failed: int = 0


class Snapshot(NamedTuple):
    writer: int
    batch: int
    versions: tuple
    lagging: tuple


class World(NamedTuple):
    ledger: tuple
    chains: tuple
    snapshots: tuple
    appenders: tuple
    workers: tuple
    publishers: tuple
    others: tuple
    flight: tuple
    budget: tuple
    kept: int = 0  # the oldest retained snapshot
    gone: tuple = ()  # what vacuum removed: ("appended", partition, batch), ("entry", partition, bucket, id)
    poison: tuple = ()  # (partition, batch) that cannot be merged


class Upkeep(Flow):
    def __init__(
        self,
        bug=None,
        files=(0, 1),
        workers=1,
        others=(),
        poison=(),
        repair=False,
        skip=False,
        publishers=1,
        faults=(0, 0, 0),
        snapshots=9,
    ):
        self.files, self.bug, self.poison, self.repair, self.skip, self.faults = (
            [FILES[f] for f in files],
            bug,
            poison,
            repair,
            skip,
            faults,
        )
        self.size = (workers, publishers, others)
        self.lives, self.snapshot_limit = {}, snapshots

    def initial(self):
        workers, publishers, others = self.size
        empty = Version(-1, 0, tuple(Bucket(0) for _ in range(BUCKETS)))
        return World(
            (),
            ((empty,), (empty,)),
            (Snapshot(-1, 0, (0, 0), ()),),
            (IDLE,),
            (IDLE,) * workers,
            (IDLE,) * publishers,
            tuple((o, IDLE) for o in others),
            (),
            self.faults,
            poison=self.poison,
        )

    # -- what the ledger says

    def live(self, ledger, n):
        """The batches that count at ledger number n: a restore makes it what it was at the number it goes back to."""
        memo = tuple((e.kind, e.back) for e in ledger[:n])
        if memo not in self.lives:
            last = ledger[n - 1] if n else None
            if last is None:
                out = ()
            elif last.kind == "batch":
                out = (*self.live(ledger, n - 1), n)
            else:
                out = self.live(ledger, last.back if last.kind == "restore" else n - 1)
            self.lives[memo] = out
        return self.lives[memo]

    def carries(self, entry, p):
        return entry.kind == "batch" and any(self.PARTITIONS[p] in self.files[f] for f in entry.files)

    def touches(self, ledger, p, n):
        e = ledger[n - 1]
        return self.carries(e, p) or (e.kind == "restore" and e.bases[p] is not None)

    def rows(self, ledger, p, b, bucket=None):
        rows = [
            Row(r.key, r.order, r.delete, b, r.source)
            for f in ledger[b - 1].files
            for r in self.files[f].get(self.PARTITIONS[p], ())
        ]
        return rows if bucket is None else [r for r in rows if BUCKET[r.key] == bucket]

    def counting(self, ledger, p, n):
        return [b for b in self.live(ledger, n) if self.carries(ledger[b - 1], p)]

    # -- merging

    def merge(self, bucket, rows):
        best = {r.key: r for r in bucket.rows}
        superseded, refused, won = bucket.superseded, bucket.refused, False
        for r in rows:
            old = best.get(r.key)
            if old is None and r.order < bucket.floor:
                refused += ((r.batch, r.source),)
                continue
            superseded += old is not None
            if old is None or r.order >= old.order:
                best[r.key], won = r, True
        keep = self.bug == "an entry keeps its id when nothing wins" and not won
        return bucket._replace(
            id=bucket.id if keep else NEW, rows=tuple(sorted(best.values())), superseded=superseded, refused=refused
        )

    def build(self, world, p, n, head):
        """Partition p from manifest `head` to ledger number n: (results, withdrawn, batches read), or None if files are gone."""
        ledger, base = world.ledger, head
        back = [
            r for r in range(head.merged + 1, n + 1) if ledger[r - 1].kind == "restore" and self.touches(ledger, p, r)
        ]
        if back:
            base = world.chains[p][ledger[back[-1] - 1].bases[p]]
        want, have = self.counting(ledger, p, n), self.counting(ledger, p, base.merged)
        if self.bug == "withdrawn as of the newest entry":
            newest = self.live(ledger, len(ledger))
            want = [b for b in want if b in newest or b in have]
        assert set(have) <= set(want) or self.bug, (have, want)
        add = [b for b in want if b not in have]
        if self.bug == "restore puts the old version back as it was" and back:
            add = [b for b in add if b > back[-1]]
        reads = {*add, *back[-1:]}
        if self.bug == "pending batches in order, withdrawn or not":
            reads |= {b for b in range(head.merged + 1, n + 1) if self.carries(ledger[b - 1], p)}
        if any(("appended", p, b) in world.gone for b in reads):
            return None
        withdrawn = base.withdrawn
        if self.bug != "withdrawn rows are not counted":
            withdrawn += sum(
                len(self.rows(ledger, p, b))
                for b in range(base.merged + 1, n + 1)
                if self.carries(ledger[b - 1], p) and b not in want
            )
        results = []
        for i, old in enumerate(base.buckets):
            rows = [r for b in add for r in self.rows(ledger, p, b, i)]
            if rows or base is not head:
                results.append((i, head.buckets[i].id, self.merge(old, rows) if rows else old))
        return tuple(results), withdrawn, reads

    def base(self, world, p, v, n):
        """The version to go back to: where v lags across a restore, what that restore goes back to."""
        for r in range(n, world.chains[p][v].merged, -1):
            e = world.ledger[r - 1]
            if (
                e.kind == "restore"
                and e.bases[p] is not None
                and self.bug != "restore takes a version that lags across a restore"
            ):
                return e.bases[p]
        return v

    def rebuild(self, world, p, head):
        """Reprocess from landing: every bucket from the ledger's files with their first ranks."""
        number = (
            len(world.ledger) if self.bug == "reprocess leaves out what the newest entry withdraws" else head.merged
        )
        batches = [b for b in self.counting(world.ledger, p, number) if b <= head.merged]
        if self.bug == "reprocess takes the files in listing order":
            batches = sorted(batches, key=lambda b: [-f for f in world.ledger[b - 1].files])
        results = []
        for i, old in enumerate(head.buckets):
            rows = [
                r
                for b in batches
                for r in self.rows(world.ledger, p, b, i)
                if (r.batch, r.source) not in old.refused or self.bug == "reprocess brings refused rows back"
            ]
            fresh = Bucket(NEW, floor=old.floor if self.bug == "reprocess tests the floor" else 0)
            fresh = self.merge(fresh, rows)
            refused = fresh.refused + (() if self.bug == "reprocess brings refused rows back" else old.refused)
            low = [r for r in fresh.rows if r.delete and r.order <= old.floor]
            if self.bug == "reprocess forgets the floor":
                fresh = fresh._replace(
                    rows=tuple(r for r in fresh.rows if r not in low), dropped=len(low), refused=refused
                )
            else:
                fresh = fresh._replace(
                    rows=tuple(r for r in fresh.rows if r not in low),
                    dropped=len(low),
                    refused=refused,
                    floor=old.floor,
                )
            results.append((i, old.id, fresh))
        return tuple(results)

    def rewritten(self, head):
        """Reprocess from what is stored, or a compaction: the same rows in a new entry."""
        return tuple((i, b.id, b._replace(id=NEW)) for i, b in enumerate(head.buckets) if b.rows)

    def expired(self, head):
        """Tombstones are dropped, their greatest rank stays as the floor."""
        out = []
        for i, b in enumerate(head.buckets):
            dead = [r for r in b.rows if r.delete]
            if dead:
                floor = (
                    0 if self.bug == "tombstones dropped without a floor" else max(b.floor, *(r.order for r in dead))
                )
                out.append(
                    (
                        i,
                        b.id,
                        b._replace(
                            id=NEW,
                            rows=tuple(r for r in b.rows if not r.delete),
                            floor=floor,
                            dropped=b.dropped + len(dead),
                        ),
                    )
                )
        return tuple(out)

    def version(self, world, p, number, results, **changes):
        head = world.chains[p][number - 1]
        buckets = list(head.buckets)
        for i, _, b in results:
            buckets[i] = b._replace(id=number) if b.id == NEW else b
        return head._replace(writer=-1, buckets=tuple(buckets), **changes)

    # -- what must hold at every append

    def check_ledger(self, world, entry):
        if entry.kind != "batch":
            return None
        now = (*world.ledger, entry)
        files = [f for b in self.live(now, len(now)) for f in now[b - 1].files]
        if len(set(files)) < len(files):
            return "G4: a landing file is counted twice"
        if not entry.again and any(set(e.files) & set(entry.files) for e in world.ledger):
            return "a withdrawn file comes back by itself"
        return None

    def check_version(self, world, p, version):
        old, name, n = world.chains[p][-1], self.PARTITIONS[p], version.merged
        if n < old.merged:
            return "`merged` falls"
        refused = {r for b in version.buckets for r in b.refused}
        best, deleted = {}, {}
        for b in self.counting(world.ledger, p, n):
            for r in self.rows(world.ledger, p, b):
                if r.delete:
                    deleted[r.key] = max(deleted.get(r.key, (0, 0)), (r.order, r.batch))
                if (r.batch, r.source) not in refused and (r.key not in best or r.order >= best[r.key].order):
                    best[r.key] = r
        stored = [r for b in version.buckets for r in b.rows]
        got = sorted(f"{r.source} of batch {r.batch}" for r in stored if not r.delete)
        want = sorted(f"{r.source} of batch {r.batch}" for r in best.values() if not r.delete)
        if any((r.order, r.batch) < deleted.get(r.key, (0, 0)) for r in stored if not r.delete):
            return f"G2: a deleted key of partition {name} is back: {got}"
        if got != want:
            return f"G1: partition {name} says merged={n} and holds {got}, the ledger up to there (less withdrawn) says {want}"
        if n == old.merged and {r for r in stored if not r.delete} != {
            r for b in old.buckets for r in b.rows if not r.delete
        }:
            return f"G1: upkeep at merged={n} changes the rows of partition {name}: now {got}"
        appended = sum(
            len(self.rows(world.ledger, p, b)) for b in range(1, n + 1) if self.carries(world.ledger[b - 1], p)
        )
        counts = [
            len(stored),
            *(sum(c) for c in zip(*((b.superseded, b.dropped, len(b.refused)) for b in version.buckets), strict=False)),
            version.withdrawn,
        ]
        if appended != sum(counts):
            kinds = "live and tombstones, superseded, dropped, refused, withdrawn"
            return f"reconcile: partition {name} at merged={n}: appended {appended}, but {kinds} are {counts}"
        if any(("entry", p, i, b.id) in world.gone for i, b in enumerate(version.buckets)):
            return f"G6: a manifest of {name} is committed that names a file which vacuum removed"
        return None

    def check_snapshot(self, world, snap):
        for p, v in enumerate(snap.versions):
            at = world.chains[p][v].merged
            if p not in snap.lagging and self.counting(world.ledger, p, at) != self.counting(
                world.ledger, p, snap.batch
            ):
                shown, counts = self.counting(world.ledger, p, at), self.counting(world.ledger, p, snap.batch)
                return f"G3: snapshot {snap.batch} shows batches {shown} of partition {self.PARTITIONS[p]}, {counts} count there"
        return Flow.check_snapshot(self, world, snap)

    def tidy(self, world):
        if world.flight:
            world = world._replace(flight=tuple(f for f in world.flight if f[1] > self.head(world, f[0])))
        if not any(s[0] in (UNKNOWN, "again") for s in world.workers):
            world = world._replace(workers=tuple(sorted(world.workers)))
        return world

    # -- the night

    def append(self, world, me, state, put):
        yield from self.load(world, me, state, put, again=False)

    def load(self, world, me, state, put, again):
        """`append`, or `append --again`, of the next file."""
        pc, ledger = state[0], world.ledger
        if pc == "idle":
            counted = {f for b in self.live(ledger, len(ledger)) for f in ledger[b - 1].files}
            ever = {f for e in ledger for f in e.files}
            free = (
                sorted(ever - counted)
                if again
                else [
                    f
                    for f in range(len(self.files))
                    if f not in (counted if self.bug == "withdrawn files count as free" else ever)
                ]
            )
            if free:
                yield (
                    f"lists f{free[0]}, ledger head {len(ledger)}",
                    False,
                    put(world, ("put", len(ledger) + 1, free[0])),
                    None,
                )
            return
        if pc == "end":
            return
        number, f = state[1:3]
        end = ("end",) if again else IDLE
        if pc in ("put", "again"):
            for label, fault, after, problem, known in self.create(
                world, me, "L", number, Entry(-1, "batch", (f,), again)
            ):
                if known == LOST and self.bug == "append --again does not list again":
                    after = put(self.forget(after, me), ("put", len(after.ledger) + 1, f))
                else:
                    after = (
                        put(after, (UNKNOWN, number, f))
                        if known == UNKNOWN
                        else put(self.forget(after, me), end if known == WON else IDLE)
                    )
                yield f"ledger {label} (batch of f{f})", fault, after, problem
        else:
            known = self.read_back(world, me, "L", number)
            after = (
                put(world, ("again", number, f))
                if known is None
                else put(self.forget(world, me), end if known == WON else IDLE)
            )
            yield f"reads back ledger {number}: {known or 'absent, will send the same bytes'}", False, after, None

    def dedupe(self, world, me, state, put):
        pc = state[0]
        if pc == "idle":
            for n in range(1, len(world.ledger) + 1):
                for p in range(len(self.PARTITIONS)):
                    head = world.chains[p][-1]
                    if self.touches(world.ledger, p, n) and head.merged < n and not (head.failed >= n and world.poison):
                        yield f"gets message ({self.PARTITIONS[p]}, {n})", False, put(world, ("got", p, n)), None
            return
        p, n = state[1:3]
        name, chain = self.PARTITIONS[p], world.chains[p]
        head = chain[-1]
        if pc in ("got", LOST):
            if head.merged >= n:
                yield f"reads {name} v{len(chain) - 1}: merged={head.merged}, acks", False, put(world, IDLE), None
                return
            built = self.build(world, p, n, head)
            if built is None:
                yield (
                    f"reads {name} v{len(chain) - 1}: an appended file is gone, gives the message back",
                    False,
                    put(world, IDLE),
                    None,
                )
                return
            results, withdrawn, reads = built
            cause = world.poison and (
                self.repair or any(e.kind == "batch" for e in world.ledger[world.poison[1] - 1 : world.poison[1]])
            )
            if (
                cause and world.poison[0] == p and world.poison[1] in reads
            ):  # unless it is repaired, a batch fails for ever, not a restore
                if not head.failed:
                    yield (
                        f"reads {name} v{len(chain) - 1} (merged={head.merged}), fails on batch {world.poison[1]}",
                        False,
                        put(world, ("mark", p, n, len(chain))),
                        None,
                    )
                else:
                    yield f"fails on batch {world.poison[1]}, {name} is marked already", False, put(world, IDLE), None
                return
            if pc == LOST:  # only entries still identical at the new head are committed, the rest is redone
                mine = {i: (e, b) for i, e, b in state[3]}
                results = tuple(
                    (i, e, mine[i][1]) if i in mine and mine[i][0] == e else (i, e, b) for i, e, b in results
                )
            yield (
                f"reads {name} v{len(chain) - 1} (merged={head.merged}), merges {sorted(reads)}",
                False,
                put(world, ("put", p, n, len(chain), results, withdrawn)),
                None,
            )
        elif pc in ("put", "again"):
            number, results, withdrawn = state[3:]
            failed = chain[number - 1].failed
            body = self.version(
                world, p, number, results, merged=n, withdrawn=withdrawn, failed=failed if failed > n else 0
            )
            for label, fault, after, problem, known in self.create(world, me, p, number, body):
                after = (
                    put(after, (UNKNOWN, *state[1:]))
                    if known == UNKNOWN
                    else put(self.forget(after, me), IDLE if known == WON else (LOST, p, n, results))
                )
                yield f"{name} v{number} (merged={n}) {label}", fault, after, problem
        elif pc == UNKNOWN:
            number = state[3]
            known = self.read_back(world, me, p, number)
            after = (
                put(world, ("again", *state[1:]))
                if known is None
                else put(self.forget(world, me), IDLE if known == WON else (LOST, p, n, state[4]))
            )
            yield f"reads back {name} v{number}: {known or 'absent, will send the same bytes'}", False, after, None
        elif pc == "mark":
            number = state[3]
            if number < len(chain) and self.bug == "a failed mark is appended over a merge":
                number = len(chain)
            if number < len(chain):
                gone = head.merged >= n or head.failed
                yield (
                    f"{name} v{number} (failed at {n}): exists; head is merged={head.merged}",
                    False,
                    put(world, IDLE if gone else ("mark", p, n, len(chain))),
                    None,
                )
            else:
                after, problem = self.land(world, p, chain[-1]._replace(writer=-1, failed=n))
                yield (
                    f"{name} v{number} (merged={chain[-1].merged}, failed at {n}): done",
                    False,
                    put(after, IDLE),
                    problem,
                )

    def publish(self, world, me, state, put):
        pc, number = state[0], len(world.snapshots)
        if pc == "idle":
            for n in range(len(world.ledger), 0, -1):
                body = self.candidate(world, world.snapshots[-1], n)
                if body and number < self.snapshot_limit:
                    yield (
                        f"can publish {n}: versions {body.versions}"
                        + (f", lagging {[self.PARTITIONS[p] for p in body.lagging]}" if body.lagging else ""),
                        False,
                        put(world, ("put", number, body)),
                        None,
                    )
                    return
        elif pc in ("put", "again"):
            for label, fault, after, problem, known in self.create(world, me, "S", state[1], state[2]):
                yield (
                    f"snapshot {state[2].batch} {label}",
                    fault,
                    put(after, (UNKNOWN, *state[1:])) if known == UNKNOWN else put(self.forget(after, me), IDLE),
                    problem,
                )
        else:
            known = self.read_back(world, me, "S", state[1])
            yield (
                f"reads back: {known or 'absent, will send the same bytes'}",
                False,
                put(world, ("again", *state[1:])) if known is None else put(self.forget(world, me), IDLE),
                None,
            )

    def candidate(self, world, old, n, _=None):
        if n < old.batch or (
            n == old.batch and not old.lagging and self.bug == "only a lagging partition is published again"
        ):
            return None
        versions, lagging = [], []
        for p, chain in enumerate(world.chains):
            want = self.last_touch(world.ledger, p, n)
            exact = [v for v, m in enumerate(chain) if m.merged == want]
            if exact and not (
                chain[-1].failed and chain[-1].failed <= n and self.bug == "a failed mark is appended over a merge"
            ):
                versions.append(exact[-1])
            elif self.skip and 0 < chain[-1].failed <= n:
                versions.append(max(v for v, m in enumerate(chain) if m.merged <= n))
                lagging.append(p)
            else:
                return None
        # A mark is a version too, but nobody needs a snapshot for it.
        content = [[world.chains[p][v][1:4] for p, v in enumerate(vs)] for vs in (versions, old.versions)]
        return None if n == old.batch and content[0] == content[1] else Snapshot(-1, n, tuple(versions), tuple(lagging))

    # -- upkeep

    def other(self, world, me, state, put):
        kind, inner = state

        def set_(w, s):
            return put(w, (kind, s))

        if kind.startswith("append --again"):
            yield from self.load(world, me, inner, set_, again=True)
        elif kind == "restore":
            yield from self.restore(world, me, inner, set_)
        elif kind == "vacuum":
            yield from self.vacuum(world, me, inner, set_)
        elif kind == "reader":
            yield from self.latest(world, me, inner, set_)
        else:
            yield from self.rewrite(world, me, kind, inner, set_)

    def raw_steps(self, world):
        yield from Flow.raw_steps(self, world)
        failed = any(c[-1].failed for c in world.chains)
        if world.poison and self.repair and failed and world.poison[1] <= len(world.ledger):
            yield "operator: removes the cause, redrives", False, world._replace(poison=()), None

    def restore(self, world, me, state, put):
        pc, ledger = state[0], world.ledger
        if pc == "idle":
            for s in range(world.kept, len(world.snapshots)):
                snap = world.snapshots[s]
                before, after = set(self.live(ledger, len(ledger))), set(self.live(ledger, snap.batch))
                changed = before ^ after
                if not changed:
                    continue
                bases = []
                for p, chain in enumerate(world.chains):
                    hit = any(self.carries(ledger[b - 1], p) for b in changed)
                    if self.bug == "restore touches only partitions that changed yet":
                        hit = hit and chain[-1].merged > chain[snap.versions[p]].merged
                    bases.append(self.base(world, p, snap.versions[p], snap.batch) if hit else None)
                if any(
                    b is not None
                    and any(("entry", p, i, k.id) in world.gone for i, k in enumerate(world.chains[p][b].buckets))
                    for p, b in enumerate(bases)
                ):
                    continue  # refuses: a version that it would have to name is gone
                yield (
                    f"reads snapshot number {s} (batch {snap.batch}, versions {snap.versions}), ledger head {len(ledger)}",
                    False,
                    put(world, ("put", len(ledger) + 1, snap.batch, tuple(bases))),
                    None,
                )
            return
        if pc == "end":
            return
        number, back, bases = state[1:]
        if pc in ("put", "again"):
            for label, fault, after, problem, known in self.create(
                world, me, "L", number, Entry(-1, "restore", back=back, bases=bases)
            ):
                if known == LOST and self.bug == "restore keeps its list over a lost race":
                    after = put(self.forget(after, me), ("put", len(after.ledger) + 1, back, bases))
                else:
                    after = (
                        put(after, (UNKNOWN, *state[1:]))
                        if known == UNKNOWN
                        else put(self.forget(after, me), ("end",) if known == WON else IDLE)
                    )
                yield f"ledger {label} (restore to batch {back})", fault, after, problem
        else:
            known = self.read_back(world, me, "L", number)
            after = (
                put(world, ("again", *state[1:]))
                if known is None
                else put(self.forget(world, me), ("end",) if known == WON else IDLE)
            )
            yield f"reads back ledger {number}: {known or 'absent, will send the same bytes'}", False, after, None

    def latest(self, world, me, state, put):
        """The reader's choice `latest`: what dedupe would make of each partition, pending restores included."""
        if state[0] == "idle" and world.ledger:
            yield f"reads ledger head {len(world.ledger)}", False, put(world, ("snapshot", len(world.ledger))), None
        elif state[0] == "snapshot":
            snap = world.snapshots[-1]
            yield (
                f"reads snapshot {snap.batch}",
                False,
                put(
                    world,
                    (
                        "read",
                        state[1] if self.bug == "latest stops below its snapshot" else max(state[1], snap.batch),
                        len(world.snapshots) - 1,
                        0,
                    ),
                ),
                None,
            )
        elif state[0] == "read":
            _, upto, s, p = state
            snap, chain = world.snapshots[s], world.chains[p]
            v = snap.versions[p]
            if p in snap.lagging or any(self.touches(world.ledger, p, b) for b in range(snap.batch + 1, upto + 1)):
                v = max(i for i, m in enumerate(chain) if m.merged <= max(upto, chain[v].merged))
            problem, shown = None, chain[v]
            whole = max(upto, snap.batch)
            if shown.merged <= upto:
                built = self.build(world, p, upto, shown)
                if built is not None and self.bug == "latest merges only batches":
                    add = [
                        b
                        for b in range(shown.merged + 1, upto + 1)
                        if self.carries(world.ledger[b - 1], p) and b in self.live(world.ledger, upto)
                    ]
                    built = (
                        tuple(
                            (i, 0, self.merge(k, [r for b in add for r in self.rows(world.ledger, p, b, i)]))
                            for i, k in enumerate(shown.buckets)
                        ),
                    )
                if built is not None:
                    buckets = list(chain[v].buckets)
                    for i, _, k in built[0]:
                        buckets[i] = k
                    best = {}
                    for b in self.counting(world.ledger, p, whole):
                        for r in self.rows(world.ledger, p, b):
                            if r.key not in best or r.order >= best[r.key].order:
                                best[r.key] = r
                    got = sorted(f"{r.source} of batch {r.batch}" for k in buckets for r in k.rows if not r.delete)
                    want = sorted(f"{r.source} of batch {r.batch}" for r in best.values() if not r.delete)
                    problem = (
                        None
                        if got == want
                        else f"G3: `latest` up to {whole} shows {got} of partition {self.PARTITIONS[p]}, not {want}"
                    )
            yield (
                f"reads {self.PARTITIONS[p]} v{v} (merged={chain[v].merged}) and what is pending",
                False,
                put(world, ("end",) if p else ("read", upto, s, 1)),
                problem,
            )

    def rewrite(self, world, me, kind, state, put):
        """Reprocess, compaction or tombstone expiry of partition A, once: replaces what it read, at the same `merged`."""
        pc, chain = state[0], world.chains[0]
        head = chain[-1]

        def made():
            if kind == "reprocess landing":
                return self.rebuild(world, 0, head)
            return self.expired(head) if kind == "expire tombstones" else self.rewritten(head)

        if pc == "idle":
            results = made() if head.merged else ()
            if results:
                yield (
                    f"reads A v{len(chain) - 1} (merged={head.merged})",
                    False,
                    put(world, ("put", len(chain), results)),
                    None,
                )
        elif pc in ("put", "again"):
            number, results = state[1:]
            body = self.version(world, 0, number, results)
            if number < len(chain) and self.bug == "reprocess overwrites what it did not read":
                number = len(chain)
                body = self.version(world, 0, number, results)
            for label, fault, after, problem, known in self.create(world, me, 0, number, body):
                after = (
                    put(after, (UNKNOWN, number, results))
                    if known == UNKNOWN
                    else put(self.forget(after, me), ("end",) if known == WON else (LOST, results))
                )
                yield f"A v{number} (merged={chain[number - 1].merged}) {label}", fault, after, problem
        elif pc == UNKNOWN:
            known = self.read_back(world, me, 0, state[1])
            after = (
                put(world, ("again", *state[1:]))
                if known is None
                else put(self.forget(world, me), ("end",) if known == WON else (LOST, state[2]))
            )
            yield f"reads back A v{state[1]}: {known or 'absent, will send the same bytes'}", False, after, None
        elif pc == LOST:
            kept = {i: (e, b) for i, e, b in state[1] if head.buckets[i].id == e}
            results = tuple((i, e, kept[i][1]) if i in kept else (i, e, b) for i, e, b in made())
            yield (
                f"rebases on A v{len(chain) - 1} (merged={head.merged}), keeps buckets {sorted(kept)}",
                False,
                put(world, ("put", len(chain), results) if results else IDLE),
                None,
            )

    def vacuum(self, world, me, state, put):
        pc = state[0]
        if pc == "idle" and world.snapshots[-1].batch:
            if world.kept < len(world.snapshots) - 1:
                yield f"expires snapshot number {world.kept}", False, world._replace(kept=world.kept + 1), None
            if self.bug == "vacuum without a fence on the ledger":
                yield "lists garbage", False, put(world, ("delete", self.garbage(world))), None
            else:
                yield (
                    f"reads ledger head {len(world.ledger)}",
                    False,
                    put(world, ("fence", len(world.ledger) + 1)),
                    None,
                )
        elif pc == "fence":
            if len(world.ledger) >= state[1]:
                yield (
                    f"ledger {state[1]} (fence): exists, reads the head again",
                    False,
                    put(world, ("fence", len(world.ledger) + 1)),
                    None,
                )
            else:
                yield (
                    f"ledger {state[1]} (fence): done",
                    False,
                    put(world._replace(ledger=(*world.ledger, Entry(-1, "fence"))), ("list",)),
                    None,
                )
        elif pc == "list":
            found = self.garbage(world)
            yield f"lists garbage: {len(found)} things", False, put(world, ("delete", found)), None
        elif pc == "delete":
            after = put(world._replace(gone=tuple(sorted({*world.gone, *state[1]}))), ("end",))
            yield f"deletes {list(state[1])}", False, after, self.inspect(after)

    def garbage(self, world):
        """What no retained snapshot, no head and no unmerged ledger entry (a restore is one) can need."""
        out = []
        for p, chain in enumerate(world.chains):
            versions = {s.versions[p] for s in world.snapshots[world.kept :]}
            oldest = min(versions)
            needed = set(range(oldest, len(chain)))
            if self.bug != "a pending restore keeps nothing":
                needed |= {
                    e.bases[p]
                    for n, e in enumerate(world.ledger, 1)
                    if e.kind == "restore" and e.bases[p] is not None and chain[-1].merged < n
                }
            entries = {(i, b.id) for v in needed for i, b in enumerate(chain[v].buckets)}
            out += [
                ("entry", p, i, b.id)
                for v in chain
                for i, b in enumerate(v.buckets)
                if b.id and (i, b.id) not in entries
            ]
            if self.bug == "covered by the snapshot's batch":
                low = min(s.batch for s in world.snapshots[world.kept :])
            else:
                low = min(chain[v].merged for v in needed)
            out += [("appended", p, b) for b in range(1, low + 1) if self.carries(world.ledger[b - 1], p)]
        return tuple(sorted(set(out) - set(world.gone)))

    def inspect(self, world):
        for s in world.snapshots[world.kept :]:
            for p, v in enumerate(s.versions):
                if any(("entry", p, i, b.id) in world.gone for i, b in enumerate(world.chains[p][v].buckets)):
                    return f"G6: snapshot {s.batch} names a file that vacuum removed"
        return None

    def goal(self, world):
        """Everything is loaded, and a snapshot shows the newest version of every partition at the last batch."""
        snap = world.snapshots[-1]
        if len({f for e in world.ledger for f in e.files}) < len(self.files) or snap.lagging:
            return False
        for p, v in enumerate(snap.versions):
            head = world.chains[p][-1]
            if (
                head.merged != self.last_touch(world.ledger, p, len(world.ledger))
                or world.chains[p][v].buckets != head.buckets
                or head.failed
            ):
                return False
        return True


# ---------------------------------------------------------------- one big partition in units


class Part(NamedTuple):  # a bucket entry; a unit is one bucket here
    id: int
    batches: tuple
    files: tuple
    floor: int


class Whole(NamedTuple):  # a manifest
    merged: int
    parts: tuple
    fence: int


class Site(NamedTuple):
    chain: tuple
    kept: int  # the version that the oldest retained snapshot names
    results: tuple  # unit results: (name, part)
    files: tuple  # (file, start of its writer)
    workers: tuple
    upkeep: tuple  # compactor, vacuum
    budget: tuple  # crashes, lost answers


class Units:
    """Two batches, two units, workers that share them, an expiry of tombstones, vacuum with its fence."""

    def __init__(self, bug=None, workers=2, batches=2, faults=(0, 0), expiry=True, vacuum=True):
        self.bug, self.workers, self.batches, self.faults = bug, workers, batches, faults
        self.upkeep = (("idle",) if expiry else ("end",), ("idle",) if vacuum else ("end",))

    def initial(self):
        parts = tuple(Part(0, (), (("base", u),), 0) for u in range(2))
        return Site(
            (Whole(0, parts, 0),),
            0,
            (),
            tuple((("base", u), 0) for u in range(2)),
            (("idle", 0),) * self.workers,
            self.upkeep,
            self.faults,
        )

    def goal(self, site):
        return site.chain[-1].merged == self.batches

    def title(self, n, u, version):
        part = version.parts[u]
        if self.bug == "a unit result is named by batch and range alone":
            return (n, u, 0, version.fence)
        return (n, u, part.id, 0 if self.bug == "a unit result outlives the fence" else version.fence)

    def land(self, site, version):
        old, site = site.chain[-1], site._replace(chain=(*site.chain, version))
        problem = self.inspect(site)
        if any(a.floor < b.floor for a, b in zip(version.parts, old.parts, strict=False)):
            problem = "G2: a floor falls"
        if any(p.batches != tuple(range(1, version.merged + 1)) for p in version.parts):
            problem = (
                f"G1: the manifest says merged={version.merged}, its units hold {[p.batches for p in version.parts]}"
            )
        return site, problem

    def inspect(self, site):
        exist = {f for f, _ in site.files}
        for v in range(site.kept, len(site.chain)):
            if any(not set(p.files) <= exist for p in site.chain[v].parts):
                return f"G6: version {v} names a file that was removed"
        return None

    def steps(self, site):
        crashes, lost = site.budget
        for i, state in enumerate(site.workers):
            if i and state == site.workers[i - 1]:
                continue

            def put(s, state, i=i):
                return s._replace(workers=(*s.workers[:i], state, *s.workers[i + 1 :]))

            for label, fault, after, problem in self.work(site, i, state, put):
                yield f"worker {i + 1}: {label}", fault, after, problem
            if crashes and state[0] != "idle":
                yield (
                    f"worker {i + 1}: CRASHES",
                    True,
                    put(site, ("idle", state[1] + 1))._replace(budget=(crashes - 1, lost)),
                    None,
                )
        yield from self.expire(site)
        yield from self.clean(site)
        if site.kept < len(site.chain) - 1:
            yield (
                f"expire: the oldest retained snapshot now names v{len(site.chain) - 1}",
                False,
                site._replace(kept=len(site.chain) - 1),
                None,
            )

    def work(self, site, i, state, put):
        pc, attempt = state[:2]
        head, last = site.chain[-1], len(site.chain) - 1
        if pc == "idle":
            for n in range(head.merged + 1, self.batches + 1):
                yield (
                    f"gets message {n}, reads v{last} (merged={head.merged})",
                    False,
                    put(site, ("work", attempt, n, last, last)),
                    None,
                )
            return
        n, start, at = state[2:5]
        version, have = site.chain[at], dict(site.results)
        if pc == "work":
            names = [self.title(n, u, version) for u in range(2)]
            for u, name in sorted(enumerate(names), key=lambda pair: pair[0] != i):  # each begins at its own end
                if name not in have:
                    file = (i, attempt, *name)
                    after = site._replace(files=tuple(sorted({*site.files, (file, start)}, key=str)))
                    yield (
                        f"merges unit {u} of v{at} up to batch {n}, writes its file",
                        False,
                        put(after, ("unit", attempt, n, start, at, u, file)),
                        None,
                    )
                    break
            found = [have[m] for m in names if m in have]
            if len(found) == 2 or (found and self.bug == "a manifest is committed before all units"):
                parts = tuple(have.get(m, p) for m, p in zip(names, version.parts, strict=False))
                yield "finds all unit results", False, put(site, ("put", attempt, n, start, at, parts)), None
        elif pc == "unit":
            u, file = state[5:]
            name, part = self.title(n, u, version), version.parts[u]
            back = put(site, ("work", attempt, n, start, at))
            if name in have:
                yield f"unit result {name[:2]}: exists, takes it", False, back, None
                return
            body = Part(-1, tuple(range(1, n + 1)), (*part.files, file), part.floor)
            done = back._replace(results=tuple(sorted((*site.results, (name, body)), key=str)))
            yield f"unit result {name[:2]}: done", False, done, None
            if site.budget[1]:
                label = "done, but the ANSWER IS LOST"
                done = done._replace(budget=(site.budget[0], site.budget[1] - 1))
                if self.bug == "a unit's lost answer is taken as lost":
                    label += ", takes it for lost and deletes its file"
                    done = done._replace(files=tuple(f for f in done.files if f[0] != file))
                yield f"unit result {name[:2]}: {label}", True, done, None
        elif pc == "put":
            parts = state[5]
            if at < last:
                if head.merged >= n:
                    yield (
                        f"manifest v{at + 1}: exists; v{last} is merged={head.merged}, acks",
                        False,
                        put(site, ("idle", attempt)),
                        None,
                    )
                elif head.fence > start and self.bug != "a unit worker goes on across the fence":
                    yield (
                        f"manifest v{at + 1}: exists; v{last} has a fence above its start, begins again",
                        False,
                        put(site, ("idle", attempt)),
                        None,
                    )
                else:
                    yield (
                        f"manifest v{at + 1}: exists; goes on from v{last}",
                        False,
                        put(site, ("work", attempt, n, start, last)),
                        None,
                    )
                return
            new = tuple(p._replace(id=last + 1) for p in parts)
            after, problem = self.land(site, Whole(n, new, head.fence))
            yield f"manifest v{last + 1} (merged={n}): done", False, put(after, ("idle", attempt)), problem

    def expire(self, site):
        """Tombstones of unit 0 are dropped, once: another file, and a floor."""
        pc, head, last = site.upkeep[0], site.chain[-1], len(site.chain) - 1

        def put(s, *state):
            return s._replace(upkeep=(state, s.upkeep[1]))

        if pc[0] == "idle":
            if head.parts[0].floor == 0:
                file = ("expired", head.parts[0].id, head.fence)
                yield (
                    f"compactor: reads v{last}, writes unit 0 without tombstones",
                    False,
                    put(
                        site._replace(files=tuple(sorted({*site.files, (file, last)}, key=str))),
                        "put",
                        last,
                        last,
                        file,
                    ),
                    None,
                )
        elif pc[0] == "put":
            _, start, at, file = pc
            part = site.chain[at].parts[0]
            if at == last:
                new = Part(last + 1, part.batches, (file,), 1)
                after, problem = self.land(site, head._replace(parts=(new, head.parts[1])))
                yield f"compactor: manifest v{last + 1} (floor): done", False, put(after, "end"), problem
            elif head.fence > start or head.parts[0].id != part.id:
                yield f"compactor: manifest v{at + 1}: exists, begins again", False, put(site, "idle"), None
            else:
                yield f"compactor: rebases on v{last}", False, put(site, "put", start, last, file), None

    def clean(self, site):
        pc, head, last = site.upkeep[1], site.chain[-1], len(site.chain) - 1

        def put(s, *state):
            return s._replace(upkeep=(s.upkeep[0], state))

        if pc[0] == "idle":
            yield f"vacuum: reads v{last}", False, put(site, "fence", last), None
        elif pc[0] == "fence":
            if pc[1] < last:
                yield f"vacuum: v{pc[1] + 1} exists, reads v{last}", False, put(site, "fence", last), None
            else:
                after, problem = self.land(site, head._replace(fence=last + 1))
                yield f"vacuum: manifest v{last + 1} (fence): done", False, put(after, "list"), problem
        elif pc[0] == "list":
            needed = {f for v in range(site.kept, len(site.chain)) for p in site.chain[v].parts for f in p.files}
            found = tuple(f for f, start in site.files if f not in needed and start < head.fence)
            yield (
                f"vacuum: lists {len(found)} files that nothing needs and that began before the fence",
                False,
                put(site, "delete", found),
                None,
            )
        elif pc[0] == "delete":
            after = put(site._replace(files=tuple(f for f in site.files if f[0] not in pc[1])), "end")
            yield "vacuum: deletes them", False, after, self.inspect(after)


# ---------------------------------------------------------------- what is run

CORRECT = {
    "restore, crash and lost answer": lambda: Upkeep(others=("restore",), faults=(1, 1, 0)),
    "restore beside a later batch, 2 workers": lambda: Upkeep(files=(0, 1, 2), workers=2, others=("restore",)),
    "restore, append --again twice": lambda: Upkeep(others=("restore", "append --again", "append --again 2")),
    "two restores": lambda: Upkeep(others=("restore", "restore")),
    "restore, vacuum": lambda: Upkeep(others=("restore", "vacuum")),
    "failed partition, hold, repaired": lambda: Upkeep(workers=2, poison=(0, 2), repair=True, faults=(1, 0, 0)),
    "failed partition, skip, repaired": lambda: Upkeep(
        files=(0, 1, 2), workers=2, poison=(0, 2), repair=True, skip=True
    ),
    "failed partition, hold, way out by restore": lambda: Upkeep(others=("restore",), poison=(0, 2)),
    "failed partition, skip, restore": lambda: Upkeep(
        files=(0, 1, 2), others=("restore",), poison=(0, 2), repair=True, skip=True
    ),
    "failed partition, skip, vacuum": lambda: Upkeep(others=("vacuum",), poison=(0, 2), repair=True, skip=True),
    "failed partition, skip, restore, vacuum": lambda: Upkeep(
        others=("restore", "vacuum"), poison=(0, 2), repair=True, skip=True
    ),
    "reprocess landing beside the night": lambda: Upkeep(workers=2, others=("reprocess landing",), faults=(1, 1, 0)),
    "reprocess landing, a later batch": lambda: Upkeep(files=(0, 1, 2), workers=2, others=("reprocess landing",)),
    "reprocess landing, tombstone expiry": lambda: Upkeep(
        files=(0, 1, 2), others=("reprocess landing", "expire tombstones")
    ),
    "reprocess stored, tombstone expiry": lambda: Upkeep(
        files=(0, 1, 2), others=("reprocess stored", "expire tombstones")
    ),
    "reprocess landing, restore": lambda: Upkeep(files=(0, 1, 2), others=("reprocess landing", "restore")),
    "tombstone expiry, restore": lambda: Upkeep(files=(0, 1, 2), others=("expire tombstones", "restore")),
    "reader of latest, restore": lambda: Upkeep(others=("restore", "reader")),
    "reader of latest, skip, restore": lambda: Upkeep(
        others=("restore", "reader"), poison=(0, 2), repair=True, skip=True
    ),
    "two restores, a partition that lags across the first": lambda: Upkeep(
        others=("restore", "restore"), poison=(0, 2), repair=True, skip=True
    ),
    "two restores, append --again": lambda: Upkeep(others=("restore", "restore", "append --again")),
    "units, 2 workers, expiry": lambda: Units(vacuum=False),
    "units, 2 workers, vacuum": lambda: Units(batches=1, expiry=False),
    "units, 2 batches, expiry, vacuum": lambda: Units(workers=1),
    "units, expiry, vacuum, crash and lost answer": lambda: Units(workers=1, batches=1, faults=(1, 1)),
}

BUGS = {
    "restore puts the old version back as it was": lambda b: Upkeep(
        bug=b, files=(0, 1, 2), others=("restore",), poison=(0, 2), repair=True, skip=True
    ),
    "restore touches only partitions that changed yet": lambda b: Upkeep(bug=b, others=("restore",)),
    "restore keeps its list over a lost race": lambda b: Upkeep(bug=b, files=(0, 2, 3), others=("restore",)),
    "withdrawn rows are not counted": lambda b: Upkeep(bug=b, others=("restore",)),
    "withdrawn as of the newest entry": lambda b: Upkeep(bug=b, others=("restore",)),
    "withdrawn files count as free": lambda b: Upkeep(bug=b, others=("restore",)),
    "append --again does not list again": lambda b: Upkeep(
        bug=b, others=("restore", "append --again", "append --again 2")
    ),
    "pending batches in order, withdrawn or not": lambda b: Upkeep(bug=b, others=("restore",), poison=(0, 2)),
    "a failed mark is appended over a merge": lambda b: Upkeep(bug=b, workers=2, poison=(0, 2), repair=True),
    "a pending restore keeps nothing": lambda b: Upkeep(bug=b, others=("restore", "vacuum")),
    "vacuum without a fence on the ledger": lambda b: Upkeep(bug=b, others=("restore", "vacuum")),
    "covered by the snapshot's batch": lambda b: Upkeep(
        bug=b, others=("vacuum",), poison=(0, 2), repair=True, skip=True
    ),
    "only a lagging partition is published again": lambda b: Upkeep(bug=b, others=("reprocess stored",)),
    "reprocess overwrites what it did not read": lambda b: Upkeep(bug=b, others=("reprocess landing",)),
    "reprocess leaves out what the newest entry withdraws": lambda b: Upkeep(
        bug=b, others=("reprocess landing", "restore")
    ),
    "reprocess takes the files in listing order": lambda b: Upkeep(
        bug=b, files=(0, 1, 2), others=("reprocess landing",)
    ),
    "reprocess tests the floor": lambda b: Upkeep(
        bug=b, files=(0, 1, 2), others=("reprocess landing", "expire tombstones")
    ),
    "reprocess brings refused rows back": lambda b: Upkeep(
        bug=b, files=(0, 1, 2), others=("reprocess landing", "expire tombstones")
    ),
    "reprocess forgets the floor": lambda b: Upkeep(
        bug=b, files=(0, 1, 2), others=("reprocess landing", "expire tombstones")
    ),
    "tombstones dropped without a floor": lambda b: Upkeep(bug=b, files=(0, 1, 2), others=("expire tombstones",)),
    "an entry keeps its id when nothing wins": lambda b: Upkeep(bug=b, others=("reprocess stored",)),
    "restore takes a version that lags across a restore": lambda b: Upkeep(
        bug=b, others=("restore", "restore"), poison=(0, 2), repair=True, skip=True
    ),
    "latest stops below its snapshot": lambda b: Upkeep(
        bug=b, others=("reader",), poison=(0, 2), repair=True, skip=True
    ),
    "latest merges only batches": lambda b: Upkeep(bug=b, others=("restore", "reader")),
    "a unit worker goes on across the fence": lambda b: Units(b),
    "a unit result is named by batch and range alone": lambda b: Units(b),
    "a unit result outlives the fence": lambda b: Units(b, faults=(1, 0)),
    "a manifest is committed before all units": lambda b: Units(b),
    "a unit's lost answer is taken as lost": lambda b: Units(b, faults=(0, 1)),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CORRECT, BUGS))
