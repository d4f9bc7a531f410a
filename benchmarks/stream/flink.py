"""Flink CDC: a table of PostgreSQL, and each of its changes, into a table of Iceberg, in this process.

Reads     PostgreSQL's table `sales` (`database.py`)
Writes    WORK/table, a warehouse of Hadoop's catalog with the table db.t; WORK/checkpoints
Repeat    in another folder. It ends with its standard input

    build/capture/venv/bin/python benchmarks/stream/flink.py WORK PORT SECONDS JAR...

It runs in the environment of `make capture`, which has JPype. SECONDS: between two checkpoints, each of which is a commit.
"""

import sys
from pathlib import Path

import jpype

COLUMNS = "id BIGINT, `day` DATE, tx INT, store INT, cents BIGINT, status STRING, note STRING"
# What Flink's own start script opens.
OPENED = (
    "java.lang",
    "java.util",
    "java.util.concurrent",
    "java.net",
    "java.nio",
    "java.text",
    "java.time",
    "sun.nio.ch",
)


def main(work: Path, port: str, seconds: str, jars: list[str]) -> None:
    opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in OPENED]
    jpype.startJVM("-Xmx4g", "-Duser.timezone=UTC", *opened, classpath=jars, convertStrings=True)
    settings = {
        "execution.checkpointing.interval": f"{float(seconds) * 1000:.0f} ms",
        "execution.checkpointing.dir": f"file://{work}/checkpoints",
        "parallelism.default": "1",  # more would write more files
        "table.local-time-zone": "UTC",
    }
    configuration = jpype.JClass("org.apache.flink.configuration.Configuration")()
    for name, value in settings.items():
        configuration.setString(name, value)
    mode = jpype.JClass("org.apache.flink.table.api.EnvironmentSettings").newInstance().inStreamingMode()
    environment = mode.withConfiguration(configuration).build()
    tables = jpype.JClass("org.apache.flink.table.api.TableEnvironment").create(environment)
    for statement in statements(work, port):
        result = tables.executeSql(statement)
    sys.stdin.read()
    result.getJobClient().get().cancel().get()


def statements(work: Path, port: str) -> list[str]:
    source = {
        "connector": "postgres-cdc",
        "hostname": "127.0.0.1",
        "port": port,
        "username": "postgres",
        "password": "postgres",
        "database-name": "postgres",
        "schema-name": "public",
        "table-name": "sales",
        "slot.name": "flink",
        "decoding.plugin.name": "pgoutput",
        "scan.incremental.snapshot.enabled": "true",
    }
    catalog = {"type": "iceberg", "catalog-type": "hadoop", "warehouse": f"file://{work}/table"}
    table = {"format-version": "2", "write.upsert.enabled": "true"}
    # A row's day follows from its id, so (id, day) is a key, too. Iceberg wants the partition in the key of an upsert.
    key = "PRIMARY KEY (id, `day`) NOT ENFORCED"
    return [
        f"CREATE TABLE sales ({COLUMNS}, {key}) WITH ({_listed(source)})",
        f"CREATE CATALOG lake WITH ({_listed(catalog)})",
        "CREATE DATABASE lake.db",
        f"CREATE TABLE lake.db.t ({COLUMNS}, {key}) PARTITIONED BY (`day`) WITH ({_listed(table)})",
        "INSERT INTO lake.db.t SELECT * FROM sales",
    ]


def _listed(options: dict[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in options.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
