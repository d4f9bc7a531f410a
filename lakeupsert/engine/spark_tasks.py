"""What a Spark task does beside its work: check what its executor has, pass errors on, and give up what kills its process.

Nobody has looked at an executor before a task runs there. It may have another pyarrow or lakeupsert, or no credentials, and the
memory of a task is known only once the task has died.
"""

import base64
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark import TaskContext, cloudpickle

import lakeupsert
from lakeupsert.engine.attempts import Found, Item
from lakeupsert.errors import ConfigurationError, ExecutorError, LakeupsertError, TaskDiedError
from lakeupsert.retries import SPARK_TRIES

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What `mapInArrow` runs."""
OLDEST_PYARROW = 21
OF_THE_MACHINE = ("bad-credentials", "extra-missing", "s3-settings")
"""Codes of errors that are no fault of an item: where they come up, every item of that machine fails."""
UNFIT = "unfit for lakeupsert: "
_ERROR = "error of lakeupsert: "


@dataclass(frozen=True)
class TaskMemory:
    """What the Python process of a task may use, and how to give it more; both are sentences."""

    amount: str
    more: str

    def died(self, reason: str, *, then: str = "") -> TaskDiedError:
        """``then``: what to run with more memory, if nobody else says it."""
        return TaskDiedError(
            "task-died",
            f"The Python process of a Spark task was killed, or ran out of memory ({reason}). {self.amount} "
            "The task committed nothing, so no reader sees what it wrote.",
            next=self.more + then,
        )


def ship(function: Task) -> Task:
    """The function for executors: it first checks their lakeupsert and pyarrow, and an error of ours in it reaches the driver."""
    body, version, oldest = cloudpickle.dumps(partial(_pass_errors, function)), lakeupsert.__version__, OLDEST_PYARROW

    # Pickled by value. Names no module but these, so that it also begins where the others can't be imported.
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if lakeupsert.__version__ != version:
            raise RuntimeError(f"{UNFIT}they have lakeupsert {lakeupsert.__version__}, and the driver has {version}")
        if int(pa.__version__.partition(".")[0]) < oldest:
            raise RuntimeError(f"{UNFIT}they have pyarrow {pa.__version__}, and lakeupsert needs {oldest} or newer")
        yield from pickle.loads(body)(batches)

    return run


def _pass_errors(function: Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from function(batches)
    except LakeupsertError as e:
        raise RuntimeError(_ERROR + base64.b64encode(pickle.dumps(e)).decode()) from e


def passed_error(text: str) -> LakeupsertError | None:
    """The error that a task raised, from Spark's text; None if it is not one of ours."""
    found = re.search(_ERROR + r"([\w+/]+=*)", text)
    if found is None:
        return None
    error: LakeupsertError = pickle.loads(base64.b64decode(found[1]))
    return error if (unfit := as_unfit(error)) is None else unfit


def attempt_in_task(function: Callable[[Item], Found], item: Item, memory: TaskMemory) -> Found | Exception:
    """As `attempt`, and a TaskDiedError if memory is too small or the last `SPARK_TRIES` of the task ended without an answer."""
    try:
        require_a_try(memory)
        return function(item)
    except Exception as e:
        return explain_death(e, memory)


def require_a_try(memory: TaskMemory) -> None:
    """Raises TaskDiedError if `SPARK_TRIES` of this task ended without an answer: probably their processes were killed.

    Spark does not tell why they ended. Lost executors and speculative copies count too, so the item may still be good.
    """
    context = TaskContext.get()
    if context is not None and context.attemptNumber() >= SPARK_TRIES:
        raise memory.died(f"{SPARK_TRIES} tries before this one gave no answer")


def explain_death(error: Exception, memory: TaskMemory) -> Exception:
    return memory.died(str(error) or "MemoryError") if isinstance(error, MemoryError) else error


def require_fit(found: Sequence[Found | Exception]) -> list[Found | Exception]:
    """The same. Raises ExecutorError if one is an error of the machine that it ran on."""
    for one in found:
        if (unfit := as_unfit(one)) is not None:
            raise unfit
    return [*found]


def as_unfit(found: object) -> ExecutorError | None:
    """The error as one of Spark's executors, if it is one of the machine where it was raised."""
    if not isinstance(found, ConfigurationError) or found.code not in OF_THE_MACHINE:
        return None
    return ExecutorError(
        found.code,
        f"On Spark's executors: {found.message} Their tasks committed nothing, so no reader sees what they wrote.",
        next=f"on the executors, {found.next}; their environment is set with spark.executorEnv.NAME (docs/SPARK.md)",
    )
