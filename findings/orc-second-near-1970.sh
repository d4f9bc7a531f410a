#!/usr/bin/env bash
# Guess: readers of ORC agree on a TIMESTAMP, since all of them are ORC's own libraries.
# Truth: pyarrow's ORC is a second off between 1970-01-01 00:00 of the writer's zone and of UTC if there is a fraction: late in Kolkata,
#        early in New York. pyorc, with the same library in another version, and ORC for Java read what was written.
# Versions: pyarrow 26.0.1, pyorc 0.12.0. Seen 2026-11-27.
# It matters for every lake that takes ORC from a machine whose clock is not UTC's. docs/FORMATS.md has how lakeupsert corrects it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyarrow==26.0.1 pyorc==0.12.0
cat > try.py <<'PYTHON'
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pyarrow
import pyorc
from pyarrow import orc

print("pyarrow", pyarrow.__version__, "pyorc", pyorc.__version__)
off = {}
for zone, hours in (("Asia/Kolkata", -1), ("America/New_York", 1)):
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hours, milliseconds=500)
    with open("a.orc", "wb") as file, pyorc.Writer(file, "struct<t:timestamp>", timezone=ZoneInfo(zone)) as writer:
        writer.write((moment,))
    with open("a.orc", "rb") as file:
        ((by_pyorc,),) = pyorc.Reader(file)
    by_pyarrow = orc.ORCFile("a.orc").read()["t"][0].as_py()
    clock = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    off[zone] = (by_pyarrow - clock).total_seconds()
    print(f"{zone}: a clock there showed {clock}, pyorc reads {by_pyorc:%H:%M:%S.%f}, pyarrow {by_pyarrow:%H:%M:%S.%f}")
raise SystemExit(off != {"Asia/Kolkata": 1.0, "America/New_York": -1.0})
PYTHON
venv/bin/python try.py
