"""The commit protocol in every order of calls: an explicit-state model checker without dependencies.

    python docs/model/protocol.py            every configuration and every planted bug, one line each
    python docs/model/protocol.py -v NAME    one of them, with its shortest counterexample
    python docs/model/protocol.py --list     the names

`Flow` is append, dedupe, compact, publish, latest; `Cleaning` is one chain with trimming, fence and vacuum.
One step of an actor is one call of the store. Every interleaving within the bounds is visited.
"""

import sys
import time
from array import array
from itertools import combinations, pairwise
from typing import NamedTuple

# ---------------------------------------------------------------- explorer


def explore(model, limit=4_000_000):
    """Breadth first, so the first problem found has the shortest trace. Returns (problem, trace, states, seconds)."""
    begun = time.monotonic()
    first = model.initial()
    seen = {first: 0}
    parent = array("l", [-1])
    sources, targets = array("l"), array("l")
    level = [first]
    while level:
        following = []
        for state in level:
            here = seen[state]
            for label, fault, after, problem in model.steps(state):
                if problem:
                    trace = [*path(model, seen, parent, here), label]
                    return problem, trace, len(seen), time.monotonic() - begun
                there = seen.get(after)
                if there is None:
                    there = seen[after] = len(seen)
                    parent.append(here)
                    following.append(after)
                    if len(seen) > limit:
                        return "BOUND: more states than the limit", [], len(seen), time.monotonic() - begun
                if not fault and there != here:
                    sources.append(here)
                    targets.append(there)
        level = following
    stuck = cannot_reach_goal(model, seen, sources, targets)
    seconds = time.monotonic() - begun
    if stuck is not None:
        return (
            "G5: from here, even without another fault, the goal is out of reach",
            path(model, seen, parent, stuck),
            len(seen),
            seconds,
        )
    return None, [], len(seen), seconds


def cannot_reach_goal(model, seen, sources, targets):
    """The first state from which no fault-free path leads to the goal (liveness under fairness), or None."""
    states = list(seen)
    reaches = bytearray(len(states))
    heads = array("l", [-1]) * len(states)
    links = array("l", [-1]) * len(sources)
    for edge, target in enumerate(targets):
        links[edge] = heads[target]
        heads[target] = edge
    todo = [i for i, state in enumerate(states) if model.goal(state)]
    for i in todo:
        reaches[i] = 1
    while todo:
        edge = heads[todo.pop()]
        while edge >= 0:
            if not reaches[sources[edge]]:
                reaches[sources[edge]] = 1
                todo.append(sources[edge])
            edge = links[edge]
    stuck = reaches.find(0)
    return None if stuck < 0 else stuck


def path(model, seen, parent, index):
    states = list(seen)
    chain = [index]
    while parent[chain[-1]] >= 0:
        chain.append(parent[chain[-1]])
    chain.reverse()
    labels = []
    for before, after in pairwise(chain):
        labels.append(next(label for label, _, state, _ in model.steps(states[before]) if state == states[after]))
    return labels


# ---------------------------------------------------------------- the flow


class Record(NamedTuple):
    key: str
    order: int
    source: str
    delete: bool = False


def landing(**partitions):
    return {p: tuple(Record(*r) for r in rows) for p, rows in partitions.items()}


# name: (landing files, bucket of a key). Equal ordering values, a delete, and late data are in each.
TABLES = {
    "wide": [  # both files touch both partitions; k1 in A is a tie, k1 in B is deleted
        landing(A=[("k1", 10, "f0.0"), ("k2", 10, "f0.1")], B=[("k1", 5, "f0.2")]),
        landing(A=[("k1", 10, "f1.0"), ("k2", 9, "f1.1")], B=[("k1", 7, "f1.2", True)]),
    ],
    "narrow": [  # the second file touches A alone
        landing(A=[("k1", 10, "f0.0"), ("k2", 10, "f0.1")], B=[("k1", 5, "f0.2")]),
        landing(A=[("k1", 10, "f1.0", True), ("k1", 10, "f1.1")]),
    ],
    "empty": [  # every row of the second file went to quarantine: it touches nothing
        landing(A=[("k1", 10, "f0.0")], B=[("k1", 5, "f0.2")]),
        landing(),
    ],
}
BUCKET = {"k1": 0, "k2": 1}
BUCKETS = 2


class Entry(NamedTuple):  # of the ledger
    writer: int  # the write id: the actor that still has to read back, else -1
    files: tuple
    data: bool  # its appended files exist
    stamp: int


class Version(NamedTuple):  # of a partition's manifest
    writer: int
    merged: int
    buckets: tuple  # per bucket (entry id, ((rows, keys in the deletion vector), ...))


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
    others: tuple  # compactor, reader
    flight: tuple  # creates that were sent and may still land
    budget: tuple  # crashes, lost answers, delayed creates


IDLE = ("idle",)
WON, LOST, UNKNOWN = "won", "lost", "unknown"


class Flow:
    PARTITIONS = ("A", "B")

    def __init__(
        self,
        table="wide",
        bug=None,
        lag=False,
        appenders=2,
        workers=2,
        publishers=1,
        compactors=0,
        readers=0,
        faults=(1, 1, 1),
    ):
        self.files = TABLES[table]
        self.bug, self.lag = bug, lag
        self.size = (appenders, workers, publishers, compactors, readers)
        self.faults = faults
        self.truths = {}

    def initial(self):
        appenders, workers, publishers, compactors, readers = self.size
        empty = Version(-1, 0, ((0, ()),) * BUCKETS)
        others = (("compactor", IDLE),) * compactors + (("reader", IDLE),) * readers
        nothing = Snapshot(-1, 0, (0,) * len(self.PARTITIONS), ())
        return World(
            (),
            ((empty,),) * len(self.PARTITIONS),
            (nothing,),
            (IDLE,) * appenders,
            (IDLE,) * workers,
            (IDLE,) * publishers,
            others,
            (),
            self.faults,
        )

    # -- what the ledger says

    def touches(self, ledger, p, n):
        return any(self.PARTITIONS[p] in self.files[f] for f in ledger[n - 1].files)

    def last_touch(self, ledger, p, n):
        return next((b for b in range(n, 0, -1) if self.touches(ledger, p, b)), 0)

    def rows(self, ledger, p, batches):
        return [r for b in batches for f in ledger[b - 1].files for r in self.files[f].get(self.PARTITIONS[p], ())]

    def truth(self, ledger, p, n):
        """G1: the winner of every key over the batches <= n, by rank."""
        memo = (p, tuple(e.files for e in ledger[:n]))
        if memo not in self.truths:
            best = {}
            for place, r in enumerate(self.rows(ledger, p, range(1, n + 1))):
                if r.key not in best or (r.order, place) > best[r.key][0]:
                    best[r.key] = ((r.order, place), r)
            self.truths[memo] = {k: r for k, (_, r) in best.items()}
        return self.truths[memo]

    # -- what a manifest says

    @staticmethod
    def live(files):
        return [r for rows, vector in files for r in rows if r.key not in vector]

    def merge(self, files, rows):
        """Incoming rows, in ledger order, against the rows of one bucket; a delta file and vectors come out."""
        stored = {r.key: r for r in self.live(files)}
        best = dict(stored)
        for r in rows:
            old = best.get(r.key)
            if old is None or r.order > old.order or (r.order == old.order and self.bug != "incoming loses ties"):
                best[r.key] = r
        winners = tuple(sorted(r for k, r in best.items() if r is not stored.get(k)))
        if not winners:
            return files
        keys = {r.key for r in winners}
        kept = tuple((rs, tuple(sorted(set(v) | (keys & {r.key for r in rs})))) for rs, v in files)
        return (*kept, (winners, ()))

    def pending(self, world, p, n, start, merged):
        last = len(world.ledger) if self.bug == "merge beyond the message's batch" else n
        return [b for b in range(max(start, merged) + 1, last + 1) if self.touches(world.ledger, p, b)]

    def results(self, world, p, n, start, head):
        """Per touched bucket: the entry it read, and what replaces it."""
        rows = self.rows(world.ledger, p, self.pending(world, p, n, start, head.merged))
        out = []
        for b, (entry, files) in enumerate(head.buckets):
            mine = [r for r in rows if BUCKET[r.key] == b]
            if mine:
                out.append((b, entry, self.merge(files, mine)))
        return tuple(out)

    # -- appends to the three chains, with what must hold

    def check_ledger(self, world, entry):
        taken = {f for e in world.ledger for f in e.files}
        if taken & set(entry.files):
            return "G4: a landing file is counted twice in the ledger"
        if world.ledger and entry.stamp and entry.stamp <= world.ledger[-1].stamp:
            return "G1: the receipt stamp of a later batch is not above that of an earlier one"
        return None

    def check_version(self, world, p, version, merges=True):
        old = world.chains[p][-1]
        if version.merged < old.merged:
            return "`merged` falls"
        rows = [r for _, files in version.buckets for r in self.live(files)]
        if len({r.key for r in rows}) < len(rows):
            return f"a key is twice in partition {self.PARTITIONS[p]}"
        truth = self.truth(world.ledger, p, version.merged)
        if {r.key: r for r in rows} != truth:
            got, want = sorted(r.source for r in rows), sorted(r.source for r in truth.values())
            name = self.PARTITIONS[p]
            return f"G1/G3: partition {name} says merged={version.merged} and holds {got}, the ledger up to there says {want}"
        return None

    def check_snapshot(self, world, snap):
        old = world.snapshots[-1]
        if snap.batch < old.batch or any(a < b for a, b in zip(snap.versions, old.versions, strict=False)):
            return "publish is not monotone"
        for p, v in enumerate(snap.versions):
            merged, want = world.chains[p][v].merged, self.last_touch(world.ledger, p, snap.batch)
            if merged > want or (merged < want and p not in snap.lagging):
                shown = f"partition {self.PARTITIONS[p]} at merged={merged}"
                return (
                    f"G3: snapshot {snap.batch} shows {shown}, whole batches need {want}, and it is not named lagging"
                )
        return None

    def land(self, world, chain, body):
        """The effect of a create whose number was free."""
        if chain == "L":
            return world._replace(ledger=(*world.ledger, body)), self.check_ledger(world, body)
        if chain == "S":
            return world._replace(snapshots=(*world.snapshots, body)), self.check_snapshot(world, body)
        chains = (*world.chains[:chain], world.chains[chain] + (body,), *world.chains[chain + 1 :])
        return world._replace(chains=chains), self.check_version(world, chain, body)

    def numbers(self, world, chain):
        return world.ledger if chain == "L" else world.snapshots if chain == "S" else world.chains[chain]

    def head(self, world, chain):
        return len(self.numbers(world, chain)) - (0 if chain == "L" else 1)

    def at(self, world, chain, n):
        return self.numbers(world, chain)[n - 1 if chain == "L" else n]

    def forget(self, world, actor):
        """The actor no longer asks for its write id, so it need not be told apart in the state."""

        def clean(items):
            if not any(i.writer == actor for i in items):
                return items
            return tuple(i._replace(writer=-1) if i.writer == actor else i for i in items)

        flight = self.sort((c, n, b._replace(writer=-1) if b.writer == actor else b) for c, n, b in world.flight)
        return world._replace(
            ledger=clean(world.ledger),
            chains=tuple(map(clean, world.chains)),
            snapshots=clean(world.snapshots),
            flight=flight,
        )

    @staticmethod
    def sort(flight):
        return tuple(sorted(flight, key=lambda f: (str(f[0]), *f[1:])))

    def tidy(self, world):
        """A late create of a taken number has no effect; idle twins are interchangeable."""
        if world.flight:
            world = world._replace(flight=tuple(f for f in world.flight if f[1] > self.head(world, f[0])))
        asking = any(s[0] in (UNKNOWN, "again") for s in world.workers + world.appenders)
        if not asking:
            world = world._replace(workers=tuple(sorted(world.workers)), appenders=tuple(sorted(world.appenders)))
        return world

    def create(self, world, actor, chain, n, body):
        """Every way a create-if-absent can go: (what happened, fault, world, problem, what the caller knows)."""
        crashes, lost, delayed = world.budget
        if self.head(world, chain) >= n:
            mine = self.at(world, chain, n).writer == actor
            yield (
                f"create {n}: exists, read back: " + ("my own id" if mine else "another's"),
                False,
                world,
                None,
                WON if mine else LOST,
            )
            return
        done, problem = self.land(world, chain, body)
        yield f"create {n}: done", False, done, problem, WON
        if lost:
            done, problem = self.land(
                world._replace(budget=(crashes, lost - 1, delayed)), chain, body._replace(writer=actor)
            )
            yield f"create {n}: done, but the ANSWER IS LOST", True, done, problem, UNKNOWN
        if delayed:
            sent = world._replace(
                budget=(crashes, lost, delayed - 1),
                flight=self.sort((*world.flight, (chain, n, body._replace(writer=actor)))),
            )
            yield f"create {n}: DELAYED on its way, no answer", True, sent, None, UNKNOWN

    def read_back(self, world, actor, chain, n):
        if self.head(world, chain) < n:
            return None
        return WON if self.at(world, chain, n).writer == actor else LOST

    # -- steps

    def steps(self, world):
        for label, fault, after, problem in self.raw_steps(world):
            yield label, fault, self.tidy(after), problem

    def raw_steps(self, world):
        first_worker = len(world.appenders)
        first_publisher = first_worker + len(world.workers)
        first_other = first_publisher + len(world.publishers)
        groups = (
            ("appenders", 0, "appender", self.append),
            ("workers", first_worker, "worker", self.dedupe),
            ("publishers", first_publisher, "publisher", self.publish),
            ("others", first_other, "", self.other),
        )
        for field, base, name, act in groups:
            actors = getattr(world, field)
            for i, state in enumerate(actors):
                if i and state == actors[i - 1] and state[0] == "idle":
                    continue

                def put(w, s, field=field, i=i):
                    now = getattr(w, field)
                    return w._replace(**{field: (*now[:i], s, *now[i + 1 :])})

                who = f"{name or state[0]} {i + 1}"
                for label, fault, after, problem in act(world, base + i, state, put):
                    yield f"{who}: {label}", fault, after, problem
                busy = state[1] if field == "others" else state
                if world.budget[0] and busy[0] not in ("idle", "end"):
                    crashes, lost, delayed = world.budget
                    after = self.forget(put(world, (state[0], IDLE) if field == "others" else IDLE), base + i)._replace(
                        budget=(crashes - 1, lost, delayed)
                    )
                    problem = (
                        "G5: a batch is acknowledged, its writer is gone, and its data does not exist"
                        if busy[0] == "claimed"
                        else None
                    )
                    yield f"{who}: CRASHES", True, after, problem
        for i, (chain, n, body) in enumerate(world.flight):
            after, problem = self.land(world._replace(flight=world.flight[:i] + world.flight[i + 1 :]), chain, body)
            yield f"store: the delayed create of {self.name(chain)} {n} lands", True, after, problem

    def name(self, chain):
        return {"L": "ledger", "S": "snapshot"}.get(chain) or f"manifest {self.PARTITIONS[chain]}"

    def append(self, world, me, state, put):
        pc = state[0]
        if pc == "idle":
            taken = {f for e in world.ledger for f in e.files}
            free = [f for f in range(len(self.files)) if f not in taken]
            stamps = (1, 2) if self.bug == "stamp taken once, kept over a lost race" else (0,)
            last = world.ledger[-1].stamp if world.ledger else 0
            for size in range(1, len(free) + 1):
                for files in combinations(free, size):
                    for s in stamps:
                        nxt = "put" if self.bug == "claim before data" else "write"
                        yield (
                            f"lists landing {[f'f{f}' for f in files]}, ledger head {len(world.ledger)}",
                            False,
                            put(world, (nxt, len(world.ledger), files, last + s if s else 0)),
                            None,
                        )
            return
        if pc == "claimed":
            entry = world.ledger[state[1] - 1]._replace(data=True)
            yield (
                "writes its data files",
                False,
                put(world._replace(ledger=(*world.ledger[: state[1] - 1], entry, *world.ledger[state[1] :])), IDLE),
                None,
            )
            return
        _, head, files, stamp = state
        rest = state[1:]
        if pc == "write":
            yield "writes its data files", False, put(world, ("put", *rest)), None
        elif pc in ("put", "again"):
            entry = Entry(-1, files, self.bug != "claim before data", stamp)
            for label, fault, after, problem, known in self.create(world, me, "L", head + 1, entry):
                if known == WON:
                    after = put(
                        self.forget(after, me), ("claimed", head + 1) if self.bug == "claim before data" else IDLE
                    )
                else:
                    after = put(after, (known, *rest))
                yield f"ledger {label}", fault, after, problem
        elif pc == UNKNOWN:
            if self.bug == "lost answer taken as lost":
                mine = self.read_back(world, me, "L", head + 1) == WON
                yield (
                    "takes no answer for a lost race and deletes its files",
                    False,
                    put(self.forget(world, me), IDLE),
                    "G6: files of a batch that was won are deleted" if mine else None,
                )
                return
            known = self.read_back(world, me, "L", head + 1)
            if known is None:
                yield (
                    f"reads back ledger {head + 1}: absent, will send the same bytes",
                    False,
                    put(world, ("again", *rest)),
                    None,
                )
            elif known == WON:
                yield f"reads back ledger {head + 1}: own id, won", False, put(self.forget(world, me), IDLE), None
            else:
                yield (
                    f"reads back ledger {head + 1}: another's, lost",
                    False,
                    put(self.forget(world, me), (LOST, *rest)),
                    None,
                )
        elif pc == LOST:
            taken = {f for e in world.ledger for f in e.files}
            if taken & set(files) and self.bug != "no look at the winner's files":
                yield "its files are taken: discards its work", False, put(world, IDLE), None
            else:
                yield (
                    f"rebases on ledger head {len(world.ledger)}",
                    False,
                    put(world, ("put", len(world.ledger), files, stamp)),
                    None,
                )

    def start(self, world, p):
        """Where the search for pending batches begins (at or below it, all of them are merged)."""
        snap = world.snapshots[-1]
        if p in snap.lagging and self.bug != "pending from the snapshot's batch":
            return world.chains[p][snap.versions[p]].merged
        return snap.batch

    def dedupe(self, world, me, state, put):
        # Messages may be lost, doubled and reordered, and reconcile sends them again: any message about any
        # batch of the ledger may come at any time. Those that would be acked at once are left out.
        pc = state[0]
        if pc == "idle":
            for n in range(1, len(world.ledger) + 1):
                for p in range(len(self.PARTITIONS)):
                    if self.touches(world.ledger, p, n) and world.chains[p][-1].merged < n:
                        yield (
                            f"gets message ({self.PARTITIONS[p]}, batch {n}), reads snapshot {world.snapshots[-1].batch}",
                            False,
                            put(world, ("got", p, n, self.start(world, p))),
                            None,
                        )
            return
        p, n, start = state[1:4]
        chain, last = world.chains[p], len(world.chains[p]) - 1
        if pc == "got":
            if chain[last].merged >= n:
                yield (
                    f"reads manifest {self.PARTITIONS[p]} v{last}: already merged, acks",
                    False,
                    put(world, IDLE),
                    None,
                )
            else:
                results = self.results(world, p, n, start, chain[last])
                merged, batches = chain[last].merged, self.pending(world, p, n, start, chain[last].merged)
                yield (
                    f"reads manifest {self.PARTITIONS[p]} v{last} (merged={merged}), merges batches {batches}",
                    False,
                    put(world, ("put", p, n, start, last, results)),
                    None,
                )
        elif pc in ("put", "again"):
            head, results = state[4:]
            buckets = list(chain[head].buckets)
            for b, _, files in results:
                buckets[b] = (head + 1, files)
            version = Version(-1, n, tuple(buckets))
            for label, fault, after, problem, known in self.create(world, me, p, head + 1, version):
                after = (
                    put(self.forget(after, me), IDLE)
                    if known == WON
                    else put(after, (known, p, n, start, head, results))
                )
                yield f"manifest {self.PARTITIONS[p]} (merged={n}) {label}", fault, after, problem
        elif pc == UNKNOWN:
            head, results = state[4:]
            known = self.read_back(world, me, p, head + 1)
            if self.bug == "worker takes lost answer as lost":
                yield (
                    "takes no answer for a lost race and deletes its files",
                    False,
                    put(self.forget(world, me), IDLE),
                    "G6: files named by the manifest are deleted" if known == WON else None,
                )
            elif known is None:
                yield (
                    f"reads back {self.PARTITIONS[p]} v{head + 1}: absent, will send the same bytes",
                    False,
                    put(world, ("again", *state[1:])),
                    None,
                )
            elif known == WON:
                yield (
                    f"reads back {self.PARTITIONS[p]} v{head + 1}: own id, won, acks",
                    False,
                    put(self.forget(world, me), IDLE),
                    None,
                )
            else:
                yield (
                    f"reads back {self.PARTITIONS[p]} v{head + 1}: another's, lost",
                    False,
                    put(self.forget(world, me), (LOST, *state[1:])),
                    None,
                )
        elif pc == LOST:
            results = state[5]
            new = chain[last]
            if new.merged >= n:
                yield (
                    f"reads manifest {self.PARTITIONS[p]} v{last}: already merged, acks",
                    False,
                    put(world, IDLE),
                    None,
                )
                return
            fresh = {b: (e, files) for b, e, files in self.results(world, p, n, start, new)}
            for b, entry, files in results:
                now, stored = new.buckets[b]
                if now == entry:
                    fresh[b] = (entry, files)
                elif self.bug == "rebase keeps both delta sets":
                    fresh[b] = (now, stored + files[-1:])
            yield (
                f"rebases on {self.PARTITIONS[p]} v{last} (merged={new.merged})",
                False,
                put(world, ("put", p, n, start, last, tuple((b, *e) for b, e in sorted(fresh.items())))),
                None,
            )

    def publish(self, world, me, state, put):
        pc = state[0]
        snap = world.snapshots[-1]
        if pc == "idle":
            if snap.batch < len(world.ledger) or snap.lagging:
                yield (
                    f"reads snapshot {snap.batch} and ledger head {len(world.ledger)}",
                    False,
                    put(world, ("look", len(world.snapshots), len(world.ledger), ())),
                    None,
                )
        elif pc == "look":
            _, number, upto, seen = state
            if len(seen) < len(self.PARTITIONS):
                p = len(seen)
                yield (
                    f"reads manifests of {self.PARTITIONS[p]} up to v{len(world.chains[p]) - 1}",
                    False,
                    put(world, ("look", number, upto, (*seen, len(world.chains[p])))),
                    None,
                )
                return
            found = False
            for n in range(upto, 0, -1):
                body = self.candidate(world, world.snapshots[number - 1], n, seen)
                if body:
                    found = True
                    yield (
                        f"can publish batch {n}"
                        + (f", lagging {[self.PARTITIONS[p] for p in body.lagging]}" if body.lagging else ""),
                        False,
                        put(world, ("put", number, body)),
                        None,
                    )
            if not found:
                yield "nothing complete", False, put(world, IDLE), None
        elif pc in ("put", "again"):
            _, number, body = state
            for label, fault, after, problem, known in self.create(world, me, "S", number, body):
                after = put(after, state if known == UNKNOWN else IDLE)
                after = put(after, (UNKNOWN, number, body)) if known == UNKNOWN else self.forget(after, me)
                yield f"snapshot of batch {body.batch} {label}", fault, after, problem
        elif pc == UNKNOWN:
            known = self.read_back(world, me, "S", state[1])
            if known is None:
                yield "reads back: absent, will send the same bytes", False, put(world, ("again", *state[1:])), None
            else:
                yield f"reads back: {known}", False, put(self.forget(world, me), IDLE), None

    def candidate(self, world, old, n, seen):
        """The snapshot of batch n from the versions seen, or None."""
        if n < old.batch or (n == old.batch and (not old.lagging or self.bug == "a batch is published once")):
            return None
        versions, lagging = [], []
        for p in range(len(self.PARTITIONS)):
            chain = world.chains[p][: seen[p]]
            want = self.last_touch(world.ledger, p, n)
            if self.bug == "publish heads whatever is merged":
                versions.append(len(chain) - 1)
                continue
            exact = [v for v, m in enumerate(chain) if m.merged == want]
            if exact:
                versions.append(exact[-1])
                continue
            if self.bug == "publish looks at the partitions of batch N alone" and not self.touches(world.ledger, p, n):
                versions.append(old.versions[p])
            elif self.lag:
                versions.append(max(v for v, m in enumerate(chain) if m.merged <= n))
                lagging.append(p)
            else:
                return None
        body = Snapshot(-1, n, tuple(versions), tuple(lagging))
        return None if (body.batch, body.versions) == (old.batch, old.versions) else body

    def other(self, world, me, state, put):
        kind, inner = state
        yield from (self.compact if kind == "compactor" else self.latest)(
            world, me, inner, lambda w, s: put(w, (kind, s))
        )

    def compact(self, world, me, state, put):
        """Rewrites every bucket of partition A into one file, once; the same `merged`."""
        pc = state[0]
        chain, last = world.chains[0], len(world.chains[0]) - 1
        if pc == "idle":
            if any(files for _, files in chain[last].buckets):
                yield f"reads manifest A v{last}", False, put(world, ("put", last, self.compacted(chain[last]))), None
        elif pc in ("put", "again"):
            _, head, results = state
            if self.bug == "compaction overwrites what it did not read" and last > head:
                head, results = last, tuple((b, chain[last].buckets[b][0], f) for b, _, f in results)
            buckets = list(chain[head].buckets)
            for b, _, files in results:
                buckets[b] = (head + 1, files)
            for label, fault, after, problem, known in self.create(
                world, me, 0, head + 1, Version(-1, chain[head].merged, tuple(buckets))
            ):
                after = put(self.forget(after, me), ("end",)) if known == WON else put(after, (known, head, results))
                yield f"compacted manifest A {label}", fault, after, problem
        elif pc == UNKNOWN:
            known = self.read_back(world, me, 0, state[1] + 1)
            if known is None:
                yield "reads back: absent, will send the same bytes", False, put(world, ("again", *state[1:])), None
            else:
                yield (
                    f"reads back: {known}",
                    False,
                    put(self.forget(world, me), ("end",) if known == WON else (LOST, *state[1:])),
                    None,
                )
        elif pc == LOST:
            kept = tuple(r for r in state[2] if chain[last].buckets[r[0]][0] == r[1])
            yield (
                f"rebases on A v{last}, keeps {len(kept)} of {len(state[2])} entries",
                False,
                put(world, ("put", last, kept) if kept else IDLE),
                None,
            )

    def compacted(self, version):
        return tuple(
            (b, entry, ((tuple(sorted(self.live(files))), ()),))
            for b, (entry, files) in enumerate(version.buckets)
            if files
        )

    def latest(self, world, me, state, put):
        """The reader's choice `latest`: whole batches up to one ledger number, whatever workers do meanwhile."""
        pc = state[0]
        if pc == "idle":
            if world.ledger:
                yield (
                    f"reads snapshot {world.snapshots[-1].batch} and ledger head {len(world.ledger)}",
                    False,
                    put(world, ("read", len(world.snapshots) - 1, len(world.ledger), ())),
                    None,
                )
        elif pc == "read":
            _, s, upto, shown = state
            p, snap = len(shown), world.snapshots[s]
            touched = any(self.touches(world.ledger, p, b) for b in range(snap.batch + 1, upto + 1))
            if self.bug != "latest forgets lagging partitions":
                touched = touched or p in snap.lagging
            chain = world.chains[p]
            v = (
                len(chain) - 1
                if self.bug == "latest takes the head"
                else max(i for i, m in enumerate(chain) if m.merged <= upto)
            )
            if not touched:
                v = snap.versions[p]
            pending = (
                [b for b in range(chain[v].merged + 1, upto + 1) if self.touches(world.ledger, p, b)] if touched else []
            )
            files = tuple(f for _, fs in chain[v].buckets for f in fs)
            got = {r.key: r for r in self.live(self.merge(files, self.rows(world.ledger, p, pending)))}
            problem = None
            if got != self.truth(world.ledger, p, upto):
                found = f"{self.PARTITIONS[p]} v{v} (merged={chain[v].merged}) and pending {pending}"
                problem = f"G3: `latest` up to batch {upto} shows {found}: not the batches <= {upto}"
            shown += (v,)
            after = ("end",) if len(shown) == len(self.PARTITIONS) else ("read", s, upto, shown)
            yield (
                f"reads {self.PARTITIONS[p]} v{v} (merged={chain[v].merged}) and pending {pending}",
                False,
                put(world, after),
                problem,
            )

    def goal(self, world):
        if sum(len(e.files) for e in world.ledger) < len(self.files):
            return False
        snap = world.snapshots[-1]
        return snap.batch == len(world.ledger) and not snap.lagging and all(e.data for e in world.ledger)


# ---------------------------------------------------------------- one chain: trimming, fence, vacuum


class Link(NamedTuple):
    number: int
    writer: tuple
    parent: tuple
    refs: tuple
    fence: int
    born: int


class Yard(NamedTuple):
    chain: tuple
    kept: int  # the version that the oldest retained snapshot names
    files: tuple  # (write id, start) of what exists
    writers: tuple
    vacuum: tuple
    flight: tuple
    now: int  # one tick is over an hour, two are over seven days
    budget: tuple


class Cleaning:
    """Writers that may stall at every step, a vacuum with its fence, trimming, a clock."""

    def __init__(self, bug=None, writers=2, ticks=2, faults=(0, 0, 1), suspended=False):
        self.bug, self.writers, self.ticks, self.faults = bug, writers, ticks, faults
        self.suspended = suspended  # a writer may sleep for days between the look at its clock and the create

    def initial(self):
        origin = (-1, 0)
        return Yard(
            (Link(0, origin, None, (origin,), 0, 0),),
            0,
            ((origin, 0),),
            tuple(("idle", 0) for _ in range(self.writers)),
            ("idle",),
            (),
            0,
            self.faults,
        )

    def goal(self, yard):
        return all(w[0] == "end" for w in yard.writers)

    @staticmethod
    def get(yard, number):
        return next((v for v in yard.chain if v.number == number), None)

    def inspect(self, yard):
        exist = {f for f, _ in yard.files}
        for v in yard.chain:
            if v.number >= yard.kept and not set(v.refs) <= exist:
                return f"G6: version {v.number} names a file that vacuum removed"
        return None

    def land(self, yard, link):
        link = link._replace(born=yard.now)
        head = yard.chain[-1].number
        problem = None
        if link.number <= head and not self.suspended:
            problem = f"a stalled writer takes number {link.number}, which was trimmed (head {head})"
        return yard._replace(chain=tuple(sorted((*yard.chain, link)))), problem

    def truthful(self, yard, wid):
        """The head descends from the version with this write id (older ancestors may have been trimmed)."""
        here = yard.chain[-1]
        by_id = {v.writer: v for v in yard.chain}
        while here is not None and here.writer != wid:
            here = by_id.get(here.parent)
        return here is not None

    def create(self, yard, link):
        crashes, lost, delayed = yard.budget
        there = self.get(yard, link.number)
        if there:
            yield (
                f"create {link.number}: exists, read back: "
                + ("my own id" if there.writer == link.writer else "another's"),
                False,
                yard,
                None,
                WON if there.writer == link.writer else LOST,
            )
            return
        done, problem = self.land(yard, link)
        yield f"create {link.number}: done", False, done, problem, WON
        if lost:
            yield (
                f"create {link.number}: done, but the ANSWER IS LOST",
                True,
                done._replace(budget=(crashes, lost - 1, delayed)),
                problem,
                UNKNOWN,
            )
        if delayed:
            yield (
                f"create {link.number}: DELAYED on its way, no answer",
                True,
                yard._replace(budget=(crashes, lost, delayed - 1), flight=(*yard.flight, (link, yard.now))),
                None,
                UNKNOWN,
            )

    def steps(self, yard):
        for label, fault, after, problem in self.raw_steps(yard):
            yield label, fault, after, problem or self.inspect(after)

    def raw_steps(self, yard):
        for i, state in enumerate(yard.writers):

            def put(y, s, i=i):
                return y._replace(writers=(*y.writers[:i], s, *y.writers[i + 1 :]))

            for label, fault, after, problem in self.write(yard, i, state, put):
                yield f"writer {i + 1}: {label}", fault, after, problem
            crashes, lost, delayed = yard.budget
            if crashes and state[0] not in ("idle", "end"):
                yield (
                    f"writer {i + 1}: CRASHES",
                    True,
                    put(yard, ("idle", state[1] + 1))._replace(budget=(crashes - 1, lost, delayed)),
                    None,
                )
        yield from self.clean(yard)
        head = yard.chain[-1]
        if yard.kept < head.number:
            yield (
                f"expire: the oldest retained snapshot now names version {head.number}",
                False,
                yard._replace(kept=head.number),
                None,
            )
        age = 0 if self.bug == "trimming without the 7-day rule" else 2
        floor = head.number if self.bug == "trimming what a retained snapshot follows" else yard.kept
        for v in yard.chain:
            if v.number < floor and yard.now - v.born >= age:
                problem = "G6: a version that a retained snapshot names is trimmed" if v.number >= yard.kept else None
                yield (
                    f"trim: version {v.number}",
                    False,
                    yard._replace(chain=tuple(x for x in yard.chain if x != v)),
                    problem,
                )
                break
        for i, (link, _) in enumerate(yard.flight):
            rest = yard._replace(flight=yard.flight[:i] + yard.flight[i + 1 :])
            if self.get(yard, link.number):
                yield f"store: the delayed create {link.number} fails", False, rest, None
            else:
                after, problem = self.land(rest, link)
                yield f"store: the delayed create {link.number} lands", True, after, problem
        if yard.now < self.ticks:
            now = yard.now + 1
            yield (
                f"clock: tick {now}",
                False,
                yard._replace(now=now, flight=tuple(f for f in yard.flight if now - f[1] < 2)),
                None,
            )

    def fenced(self, head, start):
        return head.fence > start and self.bug != "writer rebases across the fence"

    def write(self, yard, i, state, put):
        pc, attempt = state[:2]
        wid, head = (i, attempt), yard.chain[-1]
        if pc == "idle":
            yield (
                f"starts, reads head {head.number}",
                False,
                put(yard, ("begun", attempt, head.number, head, yard.now)),
                None,
            )
        elif pc == "begun":
            yield (
                "writes its file",
                False,
                put(yard._replace(files=tuple(sorted((*yard.files, (wid, state[2]))))), ("ready", *state[1:])),
                None,
            )
        elif pc in ("ready", "send"):
            _, _, start, base, read = state
            if pc == "ready" and yard.now > read and self.bug != "head not read again":
                if self.fenced(head, start):
                    yield (
                        f"its head is old, reads head {head.number}: fenced, starts again",
                        False,
                        put(yard, ("idle", attempt + 1)),
                        None,
                    )
                else:
                    yield (
                        f"its head is old, reads head {head.number}",
                        False,
                        put(yard, ("ready", attempt, start, head, yard.now)),
                        None,
                    )
                return
            if pc == "ready" and self.suspended:
                yield "looks at its clock: head is fresh", False, put(yard, ("send", *state[1:])), None
                return
            link = Link(
                base.number + 1, wid, base.writer, tuple(sorted(set(base.refs) - {(-1, 0)} | {wid})), base.fence, 0
            )
            for label, fault, after, problem, known in self.create(yard, link):
                if known == WON:
                    yield label, fault, *self.believe(after, wid, attempt, start, put, problem)
                else:
                    yield label, fault, put(after, (known, *state[1:])), problem
        elif pc == UNKNOWN:
            number = state[3].number + 1
            there = self.get(yard, number)
            if there is None and head.number >= number:
                mine = (wid, state[2])
                if self.bug == "own version trimmed taken as lost":
                    yield (
                        f"reads back {number}: trimmed, head {head.number}: takes it for lost, deletes its file",
                        False,
                        put(yard._replace(files=tuple(f for f in yard.files if f != mine)), ("idle", attempt + 1)),
                        None,
                    )
                else:
                    yield (
                        f"reads back {number}: trimmed, head {head.number}: unknown for ever, its file stays, starts again",
                        False,
                        put(yard, ("idle", attempt + 1)),
                        None,
                    )
            elif there is None:
                yield (
                    f"reads back {number}: absent, will send the same bytes",
                    False,
                    put(yard, ("ready", *state[1:])),
                    None,
                )
            elif there.writer == wid:
                yield f"reads back {number}: own id", False, *self.believe(yard, wid, attempt, state[2], put, None)
            else:
                yield f"reads back {number}: another's, lost", False, put(yard, (LOST, *state[1:])), None
        elif pc == LOST:
            if self.fenced(head, state[2]):
                yield f"reads head {head.number}: fenced, starts again", False, put(yard, ("idle", attempt + 1)), None
            else:
                yield (
                    f"rebases on head {head.number}",
                    False,
                    put(yard, ("ready", attempt, state[2], head, yard.now)),
                    None,
                )

    def believe(self, yard, wid, attempt, start, put, problem):
        """What a writer does that finds its own id at the number it asked for."""
        true = self.truthful(yard, wid)
        if self.suspended and self.bug != "success is believed" and not true:
            return put(yard, ("idle", attempt + 1)), problem
        return put(yard, ("end", 0)), problem or (
            None if true else "a writer believes it won, and the head does not descend from its version"
        )

    def clean(self, yard):
        def put(y, *s):
            return y._replace(vacuum=s)

        pc, head = yard.vacuum[0], yard.chain[-1]
        if pc == "idle":
            if self.bug == "vacuum without fence":
                yield "vacuum: lists garbage", False, put(yard, "delete", self.garbage(yard, head.number + 1)), None
            elif self.bug == "vacuum decides before its fence":
                yield (
                    "vacuum: lists garbage",
                    False,
                    put(yard, "fence", head, yard.now, self.garbage(yard, head.number + 1)),
                    None,
                )
            else:
                yield f"vacuum: reads head {head.number}", False, put(yard, "fence", head, yard.now, None), None
        elif pc == "fence":
            _, base, read, found = yard.vacuum
            number = base.number + 1
            if yard.now > read and self.bug != "the fence is appended on an old head":
                yield (
                    f"vacuum: its head is old, reads head {head.number}",
                    False,
                    put(yard, "fence", head, yard.now, found),
                    None,
                )
            elif self.get(yard, number):
                yield (
                    f"vacuum: create {number} (fence): exists, reads head {head.number}",
                    False,
                    put(yard, "fence", head, yard.now, found),
                    None,
                )
            else:
                after, problem = self.land(yard, Link(number, (9, number), base.writer, base.refs, number, 0))
                yield (
                    f"vacuum: create {number} (fence: starts below {number} may not commit): done",
                    False,
                    put(after, "list", number) if found is None else put(after, "delete", found),
                    problem,
                )
        elif pc == "list":
            found = self.garbage(yard, yard.vacuum[1])
            yield (
                f"vacuum: lists what no version >= {yard.kept} names and began before the fence: {len(found)} files",
                False,
                put(yard, "delete", found),
                None,
            )
        elif pc == "delete" and yard.vacuum[1]:
            first, *rest = yard.vacuum[1]
            yield (
                f"vacuum: deletes the file of {'the first version' if first[0] < 0 else f'writer {first[0] + 1}'}",
                False,
                put(yard._replace(files=tuple(f for f in yard.files if f[0] != first)), "delete", tuple(rest)),
                None,
            )

    def garbage(self, yard, fence):
        needed = {f for v in yard.chain if v.number >= yard.kept for f in v.refs}
        return tuple(f for f, start in yard.files if f not in needed and start < fence)


# ---------------------------------------------------------------- what is run

NARROW = {"appenders": 1, "workers": 1, "faults": (0, 0, 0)}
LAG = {"lag": True, "appenders": 1, "workers": 1, "faults": (0, 0, 0)}

CORRECT = {
    "flow, no fault": lambda: Flow("wide", faults=(0, 0, 0)),
    "flow, one appender, crash and delayed create": lambda: Flow("wide", appenders=1, faults=(1, 0, 1)),
    "flow, one appender, crash and lost answer": lambda: Flow("wide", appenders=1, faults=(1, 1, 0)),
    "flow, one worker, crash and delayed create": lambda: Flow("narrow", workers=1, faults=(1, 0, 1)),
    "flow, one worker, lost answer": lambda: Flow("narrow", workers=1, faults=(0, 1, 0)),
    "flow, batch that touches nothing, every fault": lambda: Flow("empty", appenders=1, faults=(1, 1, 1)),
    "flow, lag policy, crash": lambda: Flow("wide", lag=True, appenders=1, workers=1, faults=(1, 1, 1)),
    "flow, lag policy, two publishers": lambda: Flow(
        "narrow", lag=True, appenders=1, workers=1, publishers=2, faults=(0, 0, 0)
    ),
    "flow, compaction": lambda: Flow("wide", appenders=1, workers=1, compactors=1, faults=(1, 0, 1)),
    "flow, reader of latest, lag policy": lambda: Flow(
        "wide", lag=True, appenders=1, workers=1, readers=1, faults=(0, 0, 0)
    ),
    "cleaning, crash": lambda: Cleaning(faults=(1, 0, 0)),
    "cleaning, lost answer": lambda: Cleaning(faults=(0, 1, 0)),
    "cleaning, delayed create": lambda: Cleaning(faults=(0, 0, 1)),
    "cleaning, suspended writers that check descent": lambda: Cleaning(faults=(0, 0, 0), suspended=True),
}

BUGS = {
    "claim before data": lambda b: Flow(bug=b, appenders=1, workers=1),
    "no look at the winner's files": lambda b: Flow(bug=b, workers=1),
    "lost answer taken as lost": lambda b: Flow(bug=b, workers=1),
    "worker takes lost answer as lost": lambda b: Flow(bug=b, appenders=1),
    "stamp taken once, kept over a lost race": lambda b: Flow(bug=b, workers=1, faults=(0, 0, 0)),
    "merge beyond the message's batch": lambda b: Flow(bug=b, **NARROW),
    "incoming loses ties": lambda b: Flow(bug=b, **NARROW),
    "rebase keeps both delta sets": lambda b: Flow(bug=b, appenders=1, faults=(0, 0, 0)),
    "compaction overwrites what it did not read": lambda b: Flow(bug=b, appenders=1, compactors=1, faults=(0, 0, 0)),
    "publish heads whatever is merged": lambda b: Flow(bug=b, **NARROW),
    "publish looks at the partitions of batch N alone": lambda b: Flow("narrow", bug=b, **NARROW),
    "publish looks at the partitions of batch N alone, N touches none": lambda b: Flow(
        "empty", bug="publish looks at the partitions of batch N alone", **NARROW
    ),
    "pending from the snapshot's batch": lambda b: Flow("wide", bug=b, **LAG),
    "a batch is published once": lambda b: Flow("wide", bug=b, **LAG),
    "latest takes the head": lambda b: Flow("wide", bug=b, readers=1, **NARROW),
    "latest forgets lagging partitions": lambda b: Flow("wide", bug=b, readers=1, **LAG),
    "trimming without the 7-day rule": lambda b: Cleaning(b),
    "trimming what a retained snapshot follows": lambda b: Cleaning(b),
    "head not read again": lambda b: Cleaning(b),
    "the fence is appended on an old head": lambda b: Cleaning(b, faults=(0, 0, 0)),
    "vacuum without fence": lambda b: Cleaning(b),
    "vacuum decides before its fence": lambda b: Cleaning(b),
    "writer rebases across the fence": lambda b: Cleaning(b),
    "own version trimmed taken as lost": lambda b: Cleaning(b, faults=(0, 1, 0)),
    "success is believed": lambda b: Cleaning(b, suspended=True),
}


def main(arguments, correct, bugs):
    verbose = "-v" in arguments
    wanted = [a for a in arguments if not a.startswith("-")]
    if "--list" in arguments:
        print(*correct, *bugs, sep="\n")
        return 0
    wrong = 0
    for name in wanted or [*correct, *bugs]:
        planted = name in bugs
        problem, trace, states, seconds = explore(bugs[name](name) if planted else correct[name]())
        wrong += planted != bool(problem)
        verdict = ("caught" if problem else "MISSED") if planted else ("HOLE" if problem else "holds")
        print(
            f"{verdict:7} {name}: {states:,} states, {seconds:.1f} s"
            + (f", {len(trace)} steps: {problem}" if problem else ""),
            flush=True,
        )
        if problem and (verbose or not planted):
            for i, label in enumerate(trace, 1):
                print(f"    {i:2} {label}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CORRECT, BUGS))
