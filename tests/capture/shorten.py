"""The critical events of a recording, for `tests/integration/test_event_order.py`: `python shorten.py FOLDER > feed.jsonl`.

These are all events of the keys whose row is wrong by LSN, of transactions that were open during the snapshot, of inserts that
waited, and of a few other keys. What the order does not need is left out. The last line has the rows of the database.
"""

import json
import sys
from pathlib import Path

FIELDS = ("connector", "snapshot", "sequence", "lsn", "ts_us", "file", "pos", "row")
MOST, KEYS = 250, 40


def main(folder: str) -> None:
    lines = (Path(folder) / "feed-1.tsv").read_text().splitlines()
    parts = (line.split("\t", 1) for line in lines)
    events = [event for topic, value in parts if topic.endswith(".wide") and (event := json.loads(value))]
    rows = {row[0]: row[:4] for row in json.loads((Path(folder) / "rows-1.json").read_text())["wide"]}
    by_key: dict[int, list[dict]] = {}
    for event in events:
        by_key.setdefault((event["after"] or event["before"])["id"], []).append(event)
    critical = [key for key, found in by_key.items() if key >= 8000 or _is_wrong_by_lsn(found, rows.get(key))]
    others = sorted((key for key in by_key if key < KEYS), key=lambda key: len(by_key[key]))
    chosen: set[int] = set()
    for key in [*critical, *others]:
        if sum(len(by_key[one]) for one in (*chosen, key)) <= MOST:
            chosen.add(key)
    for event in events:
        if (event["after"] or event["before"])["id"] in chosen:
            print(json.dumps(_short(event)))
    print(json.dumps({"rows": [row for key, row in sorted(rows.items()) if key in chosen]}))


def _is_wrong_by_lsn(events: list[dict], row: list | None) -> bool:
    last = max(enumerate(events), key=lambda one: (one[1]["source"].get("lsn") or -1, one[0]))[1]
    found = None if last["op"] == "d" else [last["after"][name] for name in ("id", "u", "area", "v")]
    return found != row


def _short(event: dict) -> dict:
    sides = {
        side: event[side] and {name: event[side][name] for name in ("id", "u", "area", "v")}
        for side in ("before", "after")
    }
    source = {name: event["source"][name] for name in FIELDS if event["source"].get(name) is not None}
    return {**sides, "op": event["op"], "ts_ms": event["ts_ms"], "source": source}


if __name__ == "__main__":
    main(sys.argv[1])
