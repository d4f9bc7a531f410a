"""Results as JSON and as text for people. Nothing is read or printed here."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from lakeupsert.cli.reads import reads_result, reads_text
from lakeupsert.config import toml_key
from lakeupsert.phrases import count, duration, short_list, size, when
from lakeupsert.variables import references

if TYPE_CHECKING:
    from lakeupsert.config import Config, TableSettings
    from lakeupsert.operations.run import RunResult
    from lakeupsert.pipeline.append.commit import AppendResult
    from lakeupsert.pipeline.merge.commit import PartitionResult
    from lakeupsert.pipeline.publish import PublishResult
    from lakeupsert.pipeline.publishers import PublisherStanding
    from lakeupsert.queue import QueueStats
    from lakeupsert.report.status import Status
    from lakeupsert.report.totals import MergeTotals
    from lakeupsert.table.chain import Link
    from lakeupsert.table.ledger import ChosenHost
    from lakeupsert.table.manifest import Changes
    from lakeupsert.table.snapshot import Snapshot

LABEL_WIDTH = 13
NOT_CHECKED = (
    "manifests (`lakeupsert doctor`)",
    "rows (`lakeupsert reconcile`)",
    "values (`lakeupsert reconcile --deep`)",
)
"""What a verdict of `status` does not rest on."""
BELOW_FLOOR = "below_floor, unknown keys older than forgotten deletes or than a full extract (`lakeupsert quarantine`)"


# ---------------------------------------------------------------- shapes of `result`


def append_result(appended: "AppendResult | None") -> dict[str, object]:
    if appended is None:
        return {"batches": []}
    entry = appended.entry
    rows = ("rows_read", "rows_appended", "rows_superseded", "rows_quarantined", "keys_moved", "unknown_deletes")
    batch = {
        "number": appended.number,
        "id": entry.batch_id,
        "files": len(entry.files),
        **fields(entry, *rows, "hollow_deletes", "incomplete_creates", "contrary", "skipped"),
        "keys_in_several_partitions": appended.scattered,
        "bytes_written": sum(t.bytes for t in entry.touched.values()),
        "touched_partitions": list(entry.touched),
        "host": host_result(entry.host),
    }
    return {"batches": [batch]}


def fields(value: object, *names: str) -> dict[str, object]:
    """These attributes of a result, as they are in JSON under the same names."""
    return {name: getattr(value, name) for name in names}


def host_result(host: "ChosenHost | None") -> dict[str, object] | None:
    if host is None:
        return None
    return {"name": host.name, "landing_bytes": host.landing_bytes, "reason": _host_reason(host)}


def dedupe_result(results: "Sequence[PartitionResult]") -> dict[str, object]:
    def shape(result: "PartitionResult") -> dict[str, object]:
        names = [f.name for f in dataclasses.fields(result) if f.name not in ("error", "units")]
        changes, seconds = changes_result(result.changes), round(result.seconds, 3)
        return {**fields(result, *names), "changes": changes, "seconds": seconds}

    return {"partitions": [shape(r) for r in results]}


def totals_result(totals: "MergeTotals") -> dict[str, object]:
    names = [f.name for f in dataclasses.fields(totals) if f.name != "failures"]
    figures = {"seconds": round(totals.seconds, 3), "changes": changes_result(totals.changes)}
    return {**fields(totals, *names), **figures, "failed": len(totals.failures)}


def publish_result(published: "PublishResult") -> dict[str, object]:
    return {
        **fields(published, "snapshot", "batch", "partitions_changed", "rows"),
        "lagging": list(published.lagging),
        "publishers": publishers_result(published.publishers),
    }


def publishers_result(standings: "Mapping[str, PublisherStanding]") -> dict[str, object]:
    return {
        name: {
            **fields(standing, "snapshot", "behind", "warning"),
            "problem": standing.problem and fields(standing.problem, "code", "message"),
        }
        for name, standing in standings.items()
    }


def run_result(ran: "RunResult", requests: dict[str, int]) -> dict[str, object]:
    return {
        "host": host_result(ran.host),
        "append": append_result(ran.append),
        "dedupe": dedupe_result(ran.dedupe),
        "publish": publish_result(ran.publish),
        "requests": requests,
        "plan": ran.predicted
        and {
            "predicted": fields(ran.predicted, "bytes_read", "bytes_written"),
            "measured": dict(zip(("bytes_read", "bytes_written"), _measured(ran), strict=True)),
        },
    }


def _measured(ran: "RunResult") -> tuple[int, int]:
    return sum(r.bytes_read for r in ran.dedupe), sum(r.bytes_written for r in ran.dedupe)


def status_result(status: "Status") -> dict[str, object]:
    # The error object has what failed, the answer has the warnings, and only `status --watch` shows `behind`.
    omitted = ("failed", "behind", "large_queue", "warnings")
    names = [f.name for f in dataclasses.fields(status) if f.name not in omitted]
    queue, large = status.queue, status.large_queue
    return {
        **fields(status, *names),
        "freshness": dataclasses.asdict(status.freshness),
        "reads": reads_result(status.reads),
        "lagging": list(status.lagging),
        "queue": msgspec.structs.asdict(queue) if queue else dict.fromkeys(("visible", "leased", "dead")),
        "publishers": publishers_result(status.publishers),
        "host": host_result(status.host),
        **({"large_queue": msgspec.structs.asdict(large)} if large else {}),
    }


def changes_result(changes: "Changes") -> dict[str, int]:
    return msgspec.structs.asdict(changes)


def history_result(snapshots: "Sequence[Link[Snapshot]]", tags: dict[str, int]) -> dict[str, object]:
    return {
        "snapshots": [
            {
                "number": link.number,
                **fields(link.body, "batch", "rows", "bytes"),
                "published_at": link.written_at,
                "partitions": link.body.partitions_with_rows,
                "lagging": list(link.body.lagging),
                "changes": changes_result(link.body.changes),
                "tags": _tags_of(tags, link.number),
            }
            for link in snapshots
        ]
    }


def config_result(config: "Config", names: Sequence[str]) -> dict[str, object]:
    """Every setting of these tables and its origin. A setting without an origin has its default."""
    return {
        "path": config.path,
        "profile": config.profile,
        **_hooks(config),
        "tables": {
            name: {"settings": msgspec.to_builtins(config.tables[name]), "origins": config.origins[name]}
            for name in names
        },
    }


# ---------------------------------------------------------------- text for people

Fact = tuple[str, str]
"""A label and its text."""


def host_facts(host: "ChosenHost | None") -> list[Fact]:
    """Where a night ran, and why; nothing if the caller said where."""
    return [] if host is None or host.landing_bytes is None else [("host", host_text(host))]


def host_text(host: "ChosenHost") -> str:
    return f"{host.name}: {_host_reason(host)}"


def _host_reason(host: "ChosenHost") -> str:
    if host.landing_bytes is None:
        return "its call named it"
    from lakeupsert.engine.by_name import SPARK_PAYS_BYTES  # imports Arrow

    limit = f"Spark pays from {size(SPARK_PAYS_BYTES)}"
    landed = f"{size(host.landing_bytes)} landed, and {limit}"
    return f"{landed}, but Spark can't run here: {host.missing}" if host.missing else landed


def block(heading: str, facts: Sequence[Fact]) -> str:
    return "\n".join([heading, *(f"  {label:<{LABEL_WIDTH}}{text}" for label, text in facts)])


def columns(rows: Sequence[Sequence[str]], align: Callable[[str, int], str]) -> list[str]:
    """A line for each row. The cells of a column are as wide as its widest."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_REPLAY = "`lakeupsert append --replay-quarantine` and `lakeupsert run`"
_UNTRIED = ("malformed", "missing_column")  # `engine.replay.UNTRIED`, which would import Arrow
REMEDIES = {
    "ambiguous_date": f"leave only the correct format in `dates` under [read]; then {_REPLAY}",
    "bad_type": f"if the values are correct, give the column a wider type in `schema`; then {_REPLAY}",
    "unknown_key": f'once a record of the key has come, {_REPLAY}; or set `unknown_deletes = "keep"`',
    "unreadable_file": "correct the file, or the settings that say how it is read, and land it again",
    "unreadable_partition": f"mend the partition (`lakeupsert reconcile` names what is damaged), then {_REPLAY}",
    "future_order": f"when that time has come, {_REPLAY}",
}
"""By reason: what to do about refused rows that need no correction."""


def append_facts(appended: "AppendResult | None", settings: "TableSettings") -> list[Fact]:
    if appended is None:
        return [("appended", f"nothing: no new file in {settings.landing} (names that begin with _ or . do not count)")]
    entry = appended.entry
    source = f"replay of {count(entry.rows_read, 'quarantined row')}"
    source = source if entry.replayed else count(len(entry.files), "file")
    by = "in the batch" if settings.key_scope == "partition" else "in the batch or by rows of other partitions"
    superseded = f", {entry.rows_superseded:,} of them superseded {by}" if entry.rows_superseded else ""
    facts = [
        ("appended", f"batch {appended.number}: {source}, {count(entry.rows_appended, 'row')}{superseded}"),
        ("", f"touching {count(len(entry.touched), 'partition')}: {short_list(list(entry.touched)) or 'none'}"),
    ]
    if entry.keys_moved:
        facts.append(("", f"{count(entry.keys_moved, 'key')} moved from one partition to another"))
    if entry.unknown_deletes and "unknown_key" not in entry.quarantined:
        unknown = count(entry.unknown_deletes, "delete")
        facts.append(("", f"{unknown} of keys that no record has come for, kept for older ones"))
    if appended.scattered:
        occur = f"{count(appended.scattered, 'key')} {'occurs' if appended.scattered == 1 else 'occur'} in several partitions"
        facts.append(("", f'{occur}; each partition keeps its own row (key_scope = "partition")'))
    if entry.skipped:
        facts.append(("skipped", skipped_records(entry.skipped)))
    if entry.rows_quarantined:
        facts.append(("quarantined", f"{quarantined_rows(appended)} (`lakeupsert quarantine` shows them)"))
        facts += [("", f"in {place}") for place in quarantine_places(appended, settings)]
        facts += [("", f"{code}, for example {appended.examples[code]}") for code in sorted(appended.examples)]
        facts += [("", f"{', '.join(codes)}: {remedy}") for remedy, codes in _remedies(appended).items()]
    return facts


def _remedies(appended: "AppendResult") -> dict[str, list[str]]:
    """What to do about refused rows, with the reasons that it is about."""
    found: dict[str, list[str]] = {}
    for code in sorted(appended.entry.quarantined):
        remedy = "fix these rows at the source and land them again, in a new or corrected file"
        if "[tables." in appended.examples.get(code, ""):  # the example says which setting
            again = "land the rows again, in a new file" if code in _UNTRIED else _REPLAY
            remedy = f"set that, then {again}"
        found.setdefault(REMEDIES.get(code, remedy), []).append(code)
    return found


def skipped_records(skipped: "Mapping[str, int]") -> str:
    """Records that are not the table's rows, by kind."""
    several = {"row of another table": "rows of other tables", "row of an erased key": "rows of erased keys"}
    return ", ".join(f"{n:,} {kind if n == 1 else several.get(kind, f'{kind}s')}" for kind, n in skipped.items())


def quarantined_rows(appended: "AppendResult") -> str:
    entry = appended.entry
    reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in entry.quarantined.items())
    return f"{entry.rows_quarantined:,} of {count(entry.rows_read, 'row')}: {reasons}"


def quarantine_places(appended: "AppendResult", settings: "TableSettings") -> list[str]:
    """The quarantine file, or its folder if the batch has several."""
    names = [f.name for f in appended.entry.quarantine]
    folder = settings.processed.rstrip("/")
    return [f"{folder}/{names[0] if len(names) == 1 else names[0].rpartition('/')[0]}"] if names else []


def dedupe_facts(results: "Sequence[PartitionResult]") -> list[Fact]:
    merged = [r for r in results if r.status == "merged"]
    large = [r.partition for r in results if r.status == "large"]
    spark = [("", f"{count(len(large), 'partition')} left to Spark: {short_list(large)}")] if large else []
    if not merged:
        return [("merged", "nothing: the queue was empty" if not results else "nothing"), *spark]
    rows_in, written = sum(r.rows_in for r in merged), sum(r.bytes_written for r in merged)
    rows_out, refused = {r.partition: r.rows_out for r in merged}, sum(r.rows_refused for r in merged)
    rows = f"{count(rows_in, 'row')} in, {sum(rows_out.values()):,} out"
    return [
        ("merged", f"{count(len(rows_out), 'partition')}: {rows}, {size(written)} written"),
        *([("keys", keys)] if (keys := _changed_keys([r.changes for r in merged])) else []),
        *spark,
        *([("refused", f"{count(refused, 'row')} in quarantine: {BELOW_FLOOR}")] if refused else []),
    ]


def totals_facts(totals: "MergeTotals") -> list[Fact]:
    """Of a worker that waits for messages, which does not remember each partition."""
    merges = f"{count(totals.merged, 'merge')}: {count(totals.rows_in, 'row')} in, {size(totals.bytes_written)} written"
    facts = [("merged", merges if totals.merged else "nothing")]
    if keys := _changed_keys([totals.changes]):
        facts.append(("keys", keys))
    if totals.large:
        facts.append(("", f"{count(totals.large, 'partition')} left to Spark"))
    if totals.rows_refused:
        facts.append(("refused", f"{count(totals.rows_refused, 'row')} in quarantine: {BELOW_FLOOR}"))
    return facts


def _changed_keys(changes: "Sequence[Changes]") -> str:
    totals = [(name, sum(getattr(c, name) for c in changes)) for name in changes[0].__struct_fields__]
    words = ((name.replace("_", " "), total) for name, total in totals if total)
    return ", ".join(f"{total:,} {name.replace('deletes', 'delete') if total == 1 else name}" for name, total in words)


def predicted_facts(ran: "RunResult") -> list[Fact]:
    if ran.predicted is None:
        return []
    read, written = map(size, _measured(ran))
    predicted = f"{size(ran.predicted.bytes_read)} read, {size(ran.predicted.bytes_written)} written"
    return [("predicted", f"{predicted}; measured {read} and {written}")]


def publish_facts(published: "PublishResult") -> list[Fact]:
    if published.snapshot is None:
        return [("published", "nothing yet")]
    snapshot = f"snapshot {published.snapshot}: {count(published.rows, 'row')}"
    if not published.partitions_changed:
        return [("published", f"{snapshot}, unchanged")]
    newest = {name: one.snapshot for name, one in published.publishers.items() if one.is_newest}
    shown = [(name, f"version {snapshot}") for name, snapshot in newest.items()]
    return [("published", f"{snapshot}, {count(published.partitions_changed, 'partition')} changed"), *shown]


def took_fact(seconds: float, requests: dict[str, int]) -> Fact:
    by_call = ", ".join(f"{n:,} {call}" for call, n in requests.items() if n)
    sent = f"{count(sum(requests.values()), 'request')}{f' ({by_call})' if by_call else ''}"
    return "took", f"{duration(seconds)}, {sent}"


def status_facts(status: "Status") -> list[Fact]:
    snapshot = "none yet"
    if status.snapshot is not None and status.published_at is not None:
        snapshot = f"{status.snapshot}, published {when(status.published_at)}, up to batch {status.batch}"
    large, hollow = status.large_queue, count(status.deletes_without_row, "delete")
    quarantined = " (`lakeupsert quarantine`)" if status.quarantined else ""
    spark = f"; for Spark {large.visible:,}, {large.leased:,}, {large.dead:,} of these" if large else ""
    return [
        ("snapshot", snapshot),
        *([("host", f"{host_text(status.host)} (last batch)")] if status.host else []),
        ("rows", f"{status.rows:,} in {count(status.partitions, 'partition')}, {size(status.bytes)}"),
        ("readers open", reads_text(status.reads)),
        *freshness_facts(status),
        ("dirty", count(status.dirty, "partition") if status.dirty else "none"),
        ("lagging", short_list(status.lagging) if status.lagging else "none"),
        ("failed", short_list(tuple(status.failed)) if status.failed else "none"),
        ("queue", f"{_messages(status.queue)}{spark}"),
        ("quarantined", f"{count(status.quarantined, 'row')} now{quarantined}"),
        *([("deletes", f"{hollow} of the last snapshot found no row")] if status.deletes_without_row else []),
        *([("skipped", f"{skipped_records(status.skipped)}, of all batches")] if status.skipped else []),
        *zip(("not checked", "", ""), NOT_CHECKED, strict=True),
        *(
            (name, "not known" if standing.behind is None else f"{count(standing.behind, 'snapshot')} behind")
            for name, standing in status.publishers.items()
        ),
    ]


def _messages(queue: "QueueStats | None") -> str:
    if queue is None:
        return "unknown: the queue can't be read"
    return f"{queue.visible:,} waiting, {queue.leased:,} being worked on, {queue.dead:,} dead"


def freshness_facts(status: "Status") -> list[Fact]:
    found = status.freshness
    by_age = sorted(found.sources.items(), key=lambda one: -(one[1].age_seconds or 0))
    sources = short_list([f"{name} {one.text}" for name, one in by_age])
    return [
        ("newest data", "none" if found.age_seconds is None else f"{duration(found.age_seconds)} old"),
        *([("of sources", sources)] if sources else []),
        *([("held back by", found.held_text)] if found.held_by else []),
    ]


def history_text(snapshots: "Sequence[Link[Snapshot]]", tags: dict[str, int]) -> str:
    if not snapshots:
        return "No snapshot yet."
    first = ("snapshot", "batch", "published", "partitions", "rows")
    rows = [(*first, "inserted", "updated", "deleted", "size", "lagging", "tags")]
    for link in snapshots:
        body = link.body
        changes = (f"{body.changes.inserted:,}", f"{body.changes.updated:,}", f"{body.changes.deleted:,}")
        rows_of = (f"{body.partitions_with_rows:,}", f"{body.rows:,}")
        numbers = (*rows_of, *changes, size(body.bytes), f"{len(body.lagging):,}")
        tag_names = ", ".join(_tags_of(tags, link.number))
        rows.append((str(link.number), str(body.batch), when(link.written_at), *numbers, tag_names))
    return "\n".join(columns(rows, str.rjust))


def _tags_of(tags: dict[str, int], number: int) -> list[str]:
    return sorted(name for name, snapshot in tags.items() if snapshot == number)


def config_text(config: "Config", names: Sequence[str]) -> str:
    """TOML that loads as the same settings. Comments give the origin of each."""
    profile = f"; profile: {config.profile}" if config.profile else ""
    lines = [f"# effective settings; file: {config.path}{profile}"]
    lines += [f"{name} = {toml_value(hook)}" for name, hook in _hooks(config).items() if hook is not None]
    for name in names:
        settings = msgspec.to_builtins(config.tables[name])
        origins = config.origins[name]
        parts = {key: value for key, value in settings.items() if isinstance(value, dict)}
        plain = {key: toml_value(value) for key, value in settings.items() if key not in parts and value is not None}
        width = max(len(key) + len(value) for key, value in plain.items()) + 3
        lines += ["", f"[tables.{toml_key(name)}]"]
        for key, value in plain.items():
            lines.append(f"{f'{key} = {value}':<{width}}  # {origins.get(key, 'default')}")
        for part, values in parts.items():
            if values:
                lines += ["", f"[tables.{toml_key(name)}.{part}]  # {origins.get(part, 'default')}"]
                lines += [
                    f"{toml_key(key)} = {toml_value(value)}" for key, value in values.items() if value is not None
                ]
    return "\n".join(lines)


def _hooks(config: "Config") -> dict[str, object]:
    """The hooks as they are written: variables keep their names, and addresses without one only show their server."""
    return {name: _shown(getattr(config.hooks, name)) for name in config.hooks.__struct_fields__}


def _shown(hook: object) -> object:
    if not isinstance(hook, str) or references(hook):
        return hook
    parts = urlsplit(hook)
    return f"{parts.scheme}://{parts.hostname}/..."


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{toml_key(key)} = {toml_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)  # JSON and TOML write strings, numbers and booleans the same
