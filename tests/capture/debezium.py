"""Run one connector of Debezium: `python debezium.py JARS PROPERTIES OUTPUT`, until standard input ends.

Each record is a line `topic TAB value` of OUTPUT. It is written before the connector hears that it was taken, so after SIGKILL
the next run sends some records again, as after any crash.
"""

import json
import sys
import threading
from pathlib import Path

import jpype


def main(jars: str, properties: str, output: str) -> None:
    options = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    jpype.startJVM(*options, classpath=[str(jar) for jar in Path(jars).glob("*.jar")])
    sink = Path(output).open("a", encoding="utf-8")  # noqa: SIM115

    @jpype.JImplements("io.debezium.engine.DebeziumEngine$ChangeConsumer")
    class Consumer:
        @jpype.JOverride
        def handleBatch(self, records, committer):  # noqa: N802
            for record in records:
                value = record.value()
                sink.write(f"{record.destination()}\t{'null' if value is None else value}\n")
            sink.flush()
            for record in records:
                committer.markProcessed(record)
            committer.markBatchFinished()

        @jpype.JOverride
        def supportsTombstoneEvents(self):  # noqa: N802
            return True

    settings = jpype.JClass("java.util.Properties")()
    for name, value in json.loads(Path(properties).read_text()).items():
        settings.setProperty(name, str(value))
    kind = jpype.JClass("io.debezium.engine.format.Json")
    engine = (
        jpype.JClass("io.debezium.engine.DebeziumEngine").create(kind).using(settings).notifying(Consumer()).build()
    )
    thread = threading.Thread(target=engine.run)
    thread.start()
    sys.stdin.read()
    engine.close()
    thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
