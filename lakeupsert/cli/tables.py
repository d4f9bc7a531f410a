"""One command for several tables."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import TYPE_CHECKING

from lakeupsert.cli.failures import as_lakeupsert_error
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.signals import Terminated
from lakeupsert.progress import Share

if TYPE_CHECKING:
    from lakeupsert.api import Table


def for_each_table(
    call: Call, run: "Callable[[Table], Answer]", *, parallel: int = 1, concurrently: bool = False
) -> Answer:
    """Run the command for each table, ``parallel`` of them at once, begun in the order of the configuration.

    A table that fails does not stop the others. The first failure in that order is the error of the call. With ``concurrently``,
    for calls that go on until they are stopped, all run at once, and the first failure stops all.
    """
    with call.open_tables() as tables:
        if len(tables) == 1:
            return run(tables[0])

        def run_guarded(table: "Table") -> Answer:
            try:
                answer = run(table)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                answer = Answer(None, error=as_lakeupsert_error(e, call))
            if answer.error is not None:
                call.account(answer.error, table)
            return answer

        answers: dict[str, Answer] = {}
        if concurrently or parallel > 1:
            threads = len(tables) if concurrently else parallel
            answers = _run_in_threads(call, tables, run_guarded, threads, until_failure=concurrently)
        else:
            for table in tables:
                if not call.stop.is_set():
                    answers[table.name] = answer = run_guarded(table)
                    if answer.error is not None and answer.error.code in ("interrupted", "terminated"):
                        break
    failed = [(name, a.error) for name, a in answers.items() if a.error]
    return Answer(
        {"tables": {name: a.result for name, a in answers.items()}},
        "\n\n".join(a.text for a in answers.values() if a.text),
        (
            *(f"{name}: {w}" for name, a in answers.items() for w in a.warnings),
            *(f"{name}: {e.message} Next: {e.next}" for name, e in failed[1:]),
        ),
        tuple(f"{name}: {w}" for name, a in answers.items() for w in a.json_warnings),
        failed[0][1] if failed else None,
    )


def _run_in_threads(
    call: Call, tables: "Sequence[Table]", run: "Callable[[Table], Answer]", threads: int, *, until_failure: bool
) -> dict[str, Answer]:
    """The answers by table. After a signal, tables that have not begun are left out. With ``until_failure``, the first failure
    stops the others, so that the process ends and can be started again."""

    def run_unless_stopped(table: "Table") -> Answer | None:
        return None if stop.is_set() else run(table)

    done, shown = 0, nullcontext(lambda text: None) if until_failure else call.progress("tables")
    with shown as progress, ThreadPoolExecutor(threads) as pool, call.stoppable() as stop:
        futures = {table.name: pool.submit(run_unless_stopped, table) for table in tables}
        try:
            for future in as_completed(futures.values()):
                answer = future.result()
                done += 1
                progress(Share(f"{done:,} of {len(tables):,} are done", done, len(tables), whole=True))
                if until_failure and answer is not None and answer.error:
                    break
        finally:
            if until_failure or done < len(tables):
                stop.set()
    return {name: answer for name, future in futures.items() if (answer := future.result()) is not None}
