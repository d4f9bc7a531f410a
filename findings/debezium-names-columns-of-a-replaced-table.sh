#!/usr/bin/env bash
# Guess: Debezium's connector for MariaDB follows DDL, so after `create or replace table` its events have the new table's columns.
# Truth: it knows `drop table` and `create table`, but a replaced table keeps the columns of the old one: the value of the new column
#   `w` comes as `v`, with exit code 0 and no warning. No event says that the old rows are gone either.
# Versions: Debezium 3.5.0 (Maven Central), MariaDB 10.11.19 (Debian's mariadb-server), Java 17, JPype1 1.6.0. Seen 2026-11-29.
# It matters for a lake: values land in a column that means something else.
set -euo pipefail
mariadbd --version # apt-get install mariadb-server openjdk-17-jre-headless maven
java -version 2>&1 | head -1
folder=$(mktemp -d)
user=()
if [ "$(id -u)" = 0 ]; then
    chown mysql "$folder"
    user=(--user=mysql)
fi
trap 'kill "$server" 2> /dev/null || true; wait "$server" 2> /dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check JPype1==1.6.0
cat > pom.xml <<'EOF'
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>f</groupId><artifactId>f</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>io.debezium</groupId><artifactId>debezium-connector-mariadb</artifactId><version>3.5.0.Final</version></dependency>
    <dependency><groupId>io.debezium</groupId><artifactId>debezium-embedded</artifactId><version>3.5.0.Final</version></dependency>
    <dependency><groupId>io.debezium</groupId><artifactId>debezium-storage-file</artifactId><version>3.5.0.Final</version></dependency>
  </dependencies>
</project>
EOF
mvn --quiet dependency:copy-dependencies -DoutputDirectory="$folder/jars" -DincludeScope=runtime
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
mariadb-install-db --no-defaults "${user[@]}" --datadir="$folder/data" --skip-test-db > /dev/null 2>&1
printf "create user d identified by 'd';\ngrant all on *.* to d;\ncreate database m;\n" > grants.sql
chmod 644 grants.sql
mariadbd --no-defaults "${user[@]}" --datadir="$folder/data" --socket="$folder/socket" --port="$port" --bind-address=127.0.0.1 \
    --log-bin=binlog --binlog-format=ROW --server-id=1 --init-file="$folder/grants.sql" 2> server.log &
server=$!
cat > follow.py <<'EOF'
import glob, json, subprocess, sys, threading, time
import jpype

folder, port = sys.argv[1:]
client = ["mariadb", "--no-defaults", "-h", "127.0.0.1", "-P", port, "-u", "d", "-pd", "m", "-e"]

def wait_for(done):
    end = time.time() + 60
    while not done():
        assert time.time() < end, seen
        time.sleep(0.2)

def sql(statement):
    return subprocess.run([*client, statement], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

seen = []
wait_for(lambda: sql("select 1"))
assert sql("create table t (id int primary key, v int); insert into t values (1, 10)")
jpype.startJVM("-Xmx512m", classpath=glob.glob(f"{folder}/jars/*.jar"))

@jpype.JImplements("io.debezium.engine.DebeziumEngine$ChangeConsumer")
class Consumer:
    @jpype.JOverride
    def handleBatch(self, records, committer):
        for record in records:
            value = json.loads(str(record.value())) if record.value() is not None else {}
            if "op" in value:
                seen.append((value["op"], value["after"]))
            committer.markProcessed(record)
        committer.markBatchFinished()

    @jpype.JOverride
    def supportsTombstoneEvents(self):
        return True

settings = jpype.JClass("java.util.Properties")()
for name, value in {
    "name": "f", "topic.prefix": "f", "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
    "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
    "offset.storage.file.filename": f"{folder}/offsets",
    "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
    "schema.history.internal.file.filename": f"{folder}/history",
    "database.hostname": "127.0.0.1", "database.port": port, "database.user": "d", "database.password": "d",
    "database.server.id": "7", "database.ssl.mode": "disable", "database.include.list": "m",
    "value.converter.schemas.enable": "false", "skipped.operations": "none",
}.items():
    settings.setProperty(name, value)
kind = jpype.JClass("io.debezium.engine.format.Json")
engine = jpype.JClass("io.debezium.engine.DebeziumEngine").create(kind).using(settings).notifying(Consumer()).build()
thread = threading.Thread(target=engine.run)
thread.start()
wait_for(lambda: len(seen) == 1)
assert sql("insert into t values (2, 20)")
wait_for(lambda: len(seen) == 2)
assert sql("create or replace table t (id int primary key, w int); insert into t values (3, 30)")
wait_for(lambda: len(seen) == 3)
assert sql("drop table t; create table t (id int primary key, w int); insert into t values (4, 40)")
wait_for(lambda: len(seen) == 4)
engine.close()
thread.join()
print("events:", seen)
assert seen == [("r", {"id": 1, "v": 10}), ("c", {"id": 2, "v": 20}), ("c", {"id": 3, "v": 30}), ("c", {"id": 4, "w": 40})]
EOF
venv/bin/python follow.py "$folder" "$port" 2> engine.log || { tail -5 engine.log; exit 1; }
