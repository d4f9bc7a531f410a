"""Merge steps. Files of which many merges of a step need some rows are cut first, so that each merge reads its own.

An adopted partition that becomes 128 buckets is read once for the cut, and once as pieces. Without the cut, each of the 128
merges would read all of it. Only this module decides what is cut.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lakeupsert import clock
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.cut import CutOutput, CutTask, Kind
from lakeupsert.engine.merge import Engine, MergeOutput, MergeTask
from lakeupsert.engine.runs import runs
from lakeupsert.pipeline.merge.steps import Step
from lakeupsert.rows.datafiles import bytes_without_rows
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import DataFile, share

ALONE_BUCKETS = 4
"""One worker does the work of so many buckets' bytes without sharing it, and without a cut. More: a night waits longer for its
largest partition. Fewer: more messages and objects for work that one worker does in a minute."""
MOST_READS = 3
"""Up to so many merges read a file that is not cut. A cut reads it, writes it, and is read itself."""
MOST_PIECE_BITS = 12
"""A pack has at most 2^so many pieces. A partition needs more only if its `bucket` was once far smaller."""


@dataclass(frozen=True)
class Merge:
    """A step that was merged, as it was after its cuts.

    ``outputs``: one for each task; ``units``: in how many units; 0: by one worker, and no other one can commit its files.
    """

    step: Step
    outputs: Sequence[MergeOutput]
    engine: str
    seconds: float
    units: int = 0


def merge_steps(
    engine: Engine,
    store: ObjectStore,
    steps: Sequence[Step],
    discard: Callable[[Collection[str]], object],
    begun: float,
) -> list[Merge | Exception]:
    """Merge steps of one spec version, in one call of the engine that cuts and one that merges. They share the time since
    ``begun``.

    Returns what was merged, or the first error of a step; then the files of its other tasks are discarded.
    """
    ready = _cut(engine, store, steps, discard)
    to_merge = [step for step in ready if isinstance(step, Step)]
    tasks = [task for step in to_merge for task in step.tasks]
    try:
        outputs = iter(engine.merge(store, steps[0].spec, steps[0].spec_version, tasks) if tasks else ())
    finally:
        discard({file.name for step in to_merge for file in step.read if TableObjects.is_cut(file.name)})
    seconds = (clock.elapsed() - begun) / len(steps)
    found: list[Merge | Exception] = []
    for step in ready:
        if isinstance(step, Exception):
            found.append(step)
            continue
        of_step = [next(outputs) for _ in step.tasks]
        failure = next((output for output in of_step if isinstance(output, Exception)), None)
        merged = [output for output in of_step if not isinstance(output, Exception)]
        if failure:
            discard({name for output in merged for name in output.objects} - step.stored_objects)
        found.append(failure or Merge(step, merged, engine.name, seconds))
    return found


def _cut(
    engine: Engine, store: ObjectStore, steps: Sequence[Step], discard: Callable[[Collection[str]], object]
) -> list[Step | Exception]:
    """The same steps after everything was cut that must be, or the error of a step, whose other cuts are discarded."""
    cuts = [cuts_of(step) for step in steps]
    tasks = [cut.task for of_step in cuts for cut in of_step]
    outputs = iter(engine.cut(store, steps[0].spec, steps[0].spec_version, tasks) if tasks else ())
    found: list[Step | Exception] = []
    for step, of_step in zip(steps, cuts, strict=True):
        done = [next(outputs) for _ in of_step]
        failure = next((output for output in done if isinstance(output, Exception)), None)
        if failure:
            discard({name for output in done if isinstance(output, CutOutput) for name in output.objects})
        found.append(failure or (after_cut(step, of_step, all_or_raise(done)) if of_step else step))
    return found


@dataclass(frozen=True)
class _Group:
    """Files of one bucket that have the same role in their tasks: only these may replace each other."""

    role: str
    age: int
    kind: Kind
    bucket: int
    bits: int


@dataclass(frozen=True)
class Cut:
    """A task, and the files that its output replaces."""

    group: _Group
    task: CutTask


def cuts_of(step: Step) -> tuple[Cut, ...]:
    """What to cut before the step is merged: nothing if that spares little, or if the pieces would be mostly footers.

    A cut reads about one bucket's bytes, or one file, or as much as the footers of its pieces need to be a small part.
    """
    readers: Counter[DataFile] = Counter()
    groups: dict[_Group, dict[DataFile, int]] = {}
    bits: Counter[_Group] = Counter()
    for task in step.tasks:
        for group, number, file in _coarse_files(task):
            readers[file] += 1
            groups.setdefault(group, {})[file] = number
            bits[group] = max(bits[group], task.bits)
    coarse = {file for file, count in readers.items() if count > MOST_READS}
    if sum(file.bytes * (readers[file] - 1) for file in coarse) <= ALONE_BUCKETS * step.bucket_bytes:
        return ()
    footer = bytes_without_rows(step.spec.base_schema.types)
    found: list[Cut] = []
    for group, numbers in groups.items():
        files = {file: number for file, number in numbers.items() if file in coarse}
        more = min(bits[group] - group.bits, MOST_PIECE_BITS)
        if sum(file.bytes for file in files) < footer << more:
            continue
        for run in runs(files, lambda file: file.bytes, max(step.bucket_bytes, 4 * footer << more)):
            cut = CutTask(
                partition=step.partition,
                kind=group.kind,
                files=tuple(run),
                first=files[run[0]],
                bits=group.bits + more,
                up_to=step.up_to,
                start=step.start,
            )
            found.append(Cut(group, cut))
    return tuple(found)


def after_cut(step: Step, cuts: Sequence[Cut], outputs: Iterable[CutOutput]) -> Step:
    """The step whose merges read what was cut."""
    pieces: dict[_Group, list[DataFile]] = {}
    replaced: dict[_Group, set[DataFile]] = {}
    for cut, output in zip(cuts, outputs, strict=True):
        pieces.setdefault(cut.group, []).extend(output.files)
        replaced.setdefault(cut.group, set()).update(cut.task.files)
    tasks = tuple(_task_after(task, pieces, replaced) for task in step.tasks)
    return replace(step, tasks=tasks, cut_bytes=sum(cut.task.bytes for cut in cuts))


def _task_after(
    task: MergeTask, pieces: Mapping[_Group, Sequence[DataFile]], replaced: Mapping[_Group, set[DataFile]]
) -> MergeTask:
    """The same merge, reading its own pieces."""

    def with_pieces(role: str, age: int, files: tuple[DataFile, ...]) -> tuple[DataFile, ...]:
        found: list[DataFile] = []
        for group, gone in replaced.items():
            if (group.role, group.age) == (role, age) and not gone.isdisjoint(files):
                own = (file.within(task) for file in pieces[group] if share(file, task))
                found += [file for file in own if file.rows]
                files = tuple(file for file in files if file not in gone)
        return (*found, *files)

    base = with_pieces("base", 0, task.base)
    return replace(
        task,
        base=base,
        deltas=with_pieces("deltas", 0, task.deltas),
        batches=tuple(with_pieces("batch", age, files) for age, files in enumerate(task.batches, 1)),
        cut=not task.settled and base != task.base,
    )


def _coarse_files(task: MergeTask) -> Iterator[tuple[_Group, int, DataFile]]:
    """Files that have rows of other tasks, too, each with its number among the files of its role."""
    roles: list[tuple[str, int, Kind, Sequence[DataFile]]] = [
        ("base", 0, "stored" if task.settled else "adopted", task.base),
        ("deltas", 0, "stored", task.deltas),
        *(("batch", age, "appended", files) for age, files in enumerate(task.batches, 1)),
    ]
    for role, age, kind, files in roles:
        for number, file in enumerate(files):
            if share(file, task) < 1:
                yield _Group(role, age, kind, file.bucket, file.bits), number, file
