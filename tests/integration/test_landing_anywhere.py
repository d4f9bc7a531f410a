"""Landing zones on file systems of fsspec: nights, what counts as unchanged, and what is refused."""

import asyncio
import io
import json
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import orc

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.storage import NotFoundError, ObjectReader, open_landing, open_store
from lakeupsert.storage.fsspec_reader import FsspecReader
from tests.harness.servers import HOST

Land = Callable[[str, bytes], None]


def lines(*rows: tuple[str, int, str]) -> bytes:
    return "".join(json.dumps({"k": k, "v": v, "d": d, "ts": v}) + "\n" for k, v, d in rows).encode()


class Zone:
    """A landing zone that tests fill, and a table that takes from it."""

    def __init__(self, address: str, land: Land, folder: Path, later: Callable[[], None] = lambda: None) -> None:
        self.address = address
        self.land = land
        self.later = later  # whatever a file system needs to see that a file of the same size has changed
        self.config = folder / "lakeupsert.toml"
        self.config.write_text(
            f'[tables.t]\nlanding = "{address}"\nprocessed = "{folder}/processed"\nkey = ["k"]\npartition_by = ["d"]\n'
            'order_by = ["ts"]\n[tables.t.schema]\nd = "date"\n'
        )

    def call(self, *command: str, code: int = 0) -> Any:
        done = CliRunner().invoke(main, [*command, "--config", str(self.config), "--json"])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    def run(self, code: int = 0) -> Any:
        return self.call("run", "--host", "local", "--workers", "1", code=code)

    def rows(self) -> set[tuple[str, int]]:
        from lakeupsert import Table

        return {(r["k"], r["v"]) for r in Table.open(str(self.config)).to_arrow().read_all().to_pylist()}


@contextmanager
def in_memory(folder: Path) -> Iterator[Zone]:
    fs, root = fsspec.filesystem("memory"), f"/{clock.new_id()}/landing"
    yield Zone(f"memory:/{root}", lambda name, data: fs.pipe_file(f"{root}/{name}", data), folder)


@contextmanager
def in_zip(folder: Path) -> Iterator[Zone]:
    path = folder / "landing.zip"
    files: dict[str, bytes] = {}

    def land(name: str, data: bytes) -> None:
        files[f"in/{name}"] = data
        with zipfile.ZipFile(path.with_suffix(".new"), "w", zipfile.ZIP_DEFLATED) as archive:
            for each, content in files.items():
                archive.writestr(each, content)
        path.with_suffix(".new").replace(path)

    yield Zone(f"zip://in::{path}", land, folder)


def filled(folder: Path) -> tuple[Path, Land, Callable[[], None]]:
    root, number = folder / "served", iter(range(1, 100))
    root.mkdir()

    def land(name: str, data: bytes) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    def later() -> None:
        seconds = 1_700_000_000 + next(number)
        for path in root.rglob("*"):
            os.utime(path, (seconds, seconds))

    return root, land, later


@contextmanager
def over_http(folder: Path) -> Iterator[Zone]:
    """A server that knows no ranges, and whose listing has names alone."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *given: object) -> None:
            pass

    root, land, later = filled(folder)
    with ThreadingHTTPServer((HOST, 0), partial(Quiet, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Zone(f"http://{HOST}:{server.server_port}/", land, folder, later)
        server.shutdown()


@contextmanager
def over_sftp(folder: Path) -> Iterator[Zone]:
    import asyncssh

    class Anybody(asyncssh.SSHServer):
        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return password == "secret"

    root, land, later = filled(folder)
    loop = asyncio.new_event_loop()
    key = asyncssh.generate_private_key("ssh-ed25519")
    serve = partial(asyncssh.listen, HOST, 0, server_host_keys=[key], server_factory=Anybody, sftp_factory=True)
    server = loop.run_until_complete(serve())
    known = folder / "known_hosts"
    known.write_text(f"[{HOST}]:{server.get_port()} {key.export_public_key().decode()}")
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as settings:  # as fsspec reads them from FSSPEC_SFTP_PASSWORD or ~/.config/fsspec
        settings.setitem(fsspec.config.conf, "sftp", {"password": "secret", "known_hosts": str(known)})
        yield Zone(f"sftp://somebody@{HOST}:{server.get_port()}{root}", land, folder, later)
    fsspec.get_filesystem_class("sftp").clear_instance_cache()

    async def close() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


KINDS = {"memory": in_memory, "zip": in_zip, "http": over_http, "sftp": over_sftp}


@pytest.fixture(params=KINDS)
def zone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Zone]:
    with KINDS[request.param](tmp_path) as zone:
        yield zone


def test_nights_take_what_is_new_or_replaced_and_nothing_twice(zone: Zone) -> None:
    zone.land("one/a.jsonl", lines(("a", 1, "2020-01-01"), ("b", 1, "2020-01-02")))
    zone.land("two/b.jsonl", lines(("c", 1, "2020-01-01")))
    first = zone.run()
    assert first["warnings"] == []
    assert first["result"]["append"]["batches"][0]["files"] == 2
    assert zone.rows() == {("a", 1), ("b", 1), ("c", 1)}
    assert zone.call("reconcile", "--deep")["ok"]
    assert zone.run()["result"]["append"]["batches"] == []

    zone.later()
    zone.land("two/b.jsonl", lines(("c", 2, "2020-01-01")))  # the same size
    zone.later()
    zone.land("two/c.jsonl", lines(("d", 1, "2020-01-03")))
    assert zone.run()["result"]["append"]["batches"][0]["files"] == 2
    assert zone.rows() == {("a", 1), ("b", 1), ("c", 2), ("d", 1)}


def test_file_is_read_as_it_was_listed_or_not_at_all(zone: Zone) -> None:
    zone.land("a.jsonl", b"1")
    reader = open_landing(zone.address)
    listed = next(reader.list(""))
    assert listed == reader.head("a.jsonl")
    with reader.open("a.jsonl", listed.etag) as file:
        assert file.read() == b"1"
    zone.later()
    zone.land("a.jsonl", b"2")
    zone.later()
    assert next(reader.list("")).etag != listed.etag
    with pytest.raises(NotFoundError):
        reader.open("a.jsonl", listed.etag)
    with pytest.raises(NotFoundError):
        reader.open("absent.jsonl")
    assert reader.head("absent.jsonl") is None
    assert pickle.loads(pickle.dumps(reader)).get("a.jsonl") == b"2"


def damage(archive: Path, name: str) -> bytes:
    """Change a byte of a member. Returns the whole archive."""
    whole = archive.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(name.encode()) + len(name) + 5] ^= 255
    archive.write_bytes(damaged)
    return whole


@pytest.mark.few(2)
@pytest.mark.parametrize("part_bytes", [10, 1 << 24])
@pytest.mark.parametrize("is_first", [True, False], ids=["first batch", "later batch"])
def test_damaged_file_of_an_archive_goes_to_quarantine_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, is_first: bool
) -> None:
    monkeypatch.setattr("lakeupsert.storage.fsspec_reader.PART_BYTES", part_bytes)
    with in_zip(tmp_path) as zone:
        if not is_first:
            zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
            zone.run()
        for name in "abc":
            zone.land(f"{name}.jsonl", lines((name, 1, "2020-01-01")))
        archive, member = tmp_path / "landing.zip", "in/b.jsonl"
        damage(archive, member)
        [batch] = zone.run()["result"]["append"]["batches"]
        assert batch["rows_quarantined"] == 1
        assert zone.rows() == {("a", 1), ("c", 1)}
        [refused] = zone.call("quarantine")["result"]["shown"]
        assert (refused["reason_code"], refused["file"]) == ("unreadable_file", "b.jsonl")
        assert zone.run()["result"]["append"]["batches"] == []
        zone.land("d.jsonl", lines(("d", 1, "2020-01-01")))
        whole = damage(archive, member)
        [batch] = zone.run()["result"]["append"]["batches"]
        assert (batch["files"], batch["rows_quarantined"]) == (1, 0)
        archive.write_bytes(whole)  # with the checksum that it had
        assert zone.run()["result"]["append"]["batches"][0]["files"] == 1
        assert zone.rows() == {(name, 1) for name in "abcd"}
        assert zone.run()["result"]["append"]["batches"] == []
        assert zone.call("reconcile", "--deep")["ok"]


@pytest.mark.parametrize("format_", ["parquet", "orc"])
def test_damage_is_known_for_what_it_is_in_formats_that_are_read_by_ranges(
    tmp_path: Path, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.storage.fsspec_reader.PART_BYTES", 10)
    rows, sink = pa.table({"k": ["x", "y"], "v": [1, 1], "ts": [1, 1], "d": ["2020-01-01"] * 2}), io.BytesIO()
    pq.write_table(rows, sink) if format_ == "parquet" else orc.write_table(rows, sink)
    with in_zip(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
        zone.land(f"b.{format_}", sink.getvalue())
        whole = damage(tmp_path / "landing.zip", f"in/b.{format_}")
        assert zone.run()["result"]["append"]["batches"][0]["rows_quarantined"] == 1
        (tmp_path / "landing.zip").write_bytes(whole)
        zone.run()
        assert zone.rows() == {("a", 1), ("x", 1), ("y", 1)}


@pytest.mark.parametrize("kind", ["memory", "zip", "sftp"])
def test_large_file_is_read_by_ranges(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.storage.fsspec_reader.PART_BYTES", 10)
    with KINDS[kind](tmp_path) as zone:
        data = bytes(range(100))
        zone.land("a.bin", data)
        reads_ranges(open_landing(zone.address), data)


def reads_ranges(reader: ObjectReader, data: bytes) -> None:
    with reader.open("a.bin") as file:
        assert [found.name for found in reader.list("")] == ["a.bin"]  # an archive is opened again
        assert file.size() == 100
        file.seek(90)
        assert file.read(5) == data[90:95]
    assert reader.get("a.bin", (3, 4)) == data[3:7]


def test_reader_has_no_way_to_write() -> None:
    assert not {"create", "write", "delete"} & set(dir(FsspecReader))


# -- what is told


@contextmanager
def memory_of(kind: type) -> Iterator[None]:
    fsspec.register_implementation("memory", kind, clobber=True)
    try:
        yield
    finally:
        fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


class Bare(MemoryFileSystem):  # type: ignore[misc]
    """Tells nothing of a file but its size."""

    find = AbstractFileSystem.find

    def ls(self, path: str, detail: bool = True, **given: Any) -> list[Any]:
        found = super().ls(path, detail=True, **given)
        return [{k: v for k, v in info.items() if k != "created"} for info in found]

    def info(self, path: str, **given: Any) -> dict[str, Any]:
        return {k: v for k, v in super().info(path, **given).items() if k != "created"}


def test_file_known_by_its_size_alone_is_a_warning(tmp_path: Path) -> None:
    with memory_of(Bare), in_memory(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
        [warning] = zone.run()["warnings"]
        assert "reports only the size of 1 file" in warning
        zone.land("a.jsonl", lines(("a", 2, "2020-01-01")))  # the risk that the warning names
        assert zone.run()["result"]["append"]["batches"] == []
        zone.land("a.jsonl", lines(("a", 3, "2020-01-01"), ("b", 3, "2020-01-01")))
        zone.run()
        assert zone.rows() == {("a", 3), ("b", 3)}


def test_folder_that_can_not_be_listed_is_not_left_out(tmp_path: Path) -> None:
    class Closed(MemoryFileSystem):  # type: ignore[misc]
        find = AbstractFileSystem.find

        def ls(self, path: str, detail: bool = True, **given: Any) -> list[Any]:
            if path.endswith("closed"):
                raise PermissionError(path)
            found: list[Any] = super().ls(path, detail, **given)
            return found

    with memory_of(Closed), in_memory(tmp_path) as zone:
        zone.land("open/a.jsonl", lines(("a", 1, "2020-01-01")))
        zone.land("closed/b.jsonl", lines(("b", 1, "2020-01-01")))
        error = zone.run(code=2)["error"]
        assert (error["code"], error["data_changed"]) == ("not-permitted", False)


def test_zone_that_is_not_there_is_told(zone: Zone) -> None:
    missing = open_landing(
        "::".join([f"{zone.address.split('::')[0].rstrip('/')}/absent", *zone.address.split("::")[1:]])
    )
    with pytest.raises(ConfigurationError) as raised:
        list(missing.list(""))
    assert raised.value.code == "no-landing"


def test_file_that_vanishes_after_the_listing_is_left_out(tmp_path: Path) -> None:
    with over_http(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
        zone.land("b.jsonl", lines(("b", 1, "2020-01-01")))
        found = open_landing(zone.address).list("")
        assert next(found).name == "a.jsonl"
        (tmp_path / "served/b.jsonl").unlink()
        assert list(found) == []


def test_link_is_its_file(tmp_path: Path) -> None:
    with over_sftp(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
        outside = tmp_path / "b.jsonl"
        outside.write_bytes(lines(("b", 1, "2020-01-01")))
        (tmp_path / "served/b.jsonl").symlink_to(outside)
        (tmp_path / "served/gone.jsonl").symlink_to(tmp_path / "gone")
        assert zone.run()["warnings"] == []
        assert zone.rows() == {("a", 1), ("b", 1)}
        assert zone.run()["result"]["append"]["batches"] == []


def test_server_that_does_not_answer_is_told(tmp_path: Path) -> None:
    with over_http(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
    error = zone.run(code=75)["error"]
    assert (error["code"], error["data_changed"]) == ("store-unreachable", False)


@pytest.mark.parametrize("settings", [{"password": "secret"}, {"password": "wrong", "known_hosts": None}])
def test_host_that_is_not_known_and_password_that_is_wrong_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without ~/.ssh/known_hosts
    with over_sftp(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01")))
        monkeypatch.setitem(fsspec.config.conf, "sftp", settings)
        error = zone.run(code=2)["error"]
    assert (error["code"], error["data_changed"]) == ("not-permitted", False)


@pytest.mark.parametrize(
    ("address", "code", "told"),
    [
        ("sftp://me:secret@host/landing", "credential-in-configuration", "landing"),
        ("zip://in::sftp://me:secret@host/x.zip", "credential-in-configuration", "has a password"),
        ("zip:///data/landing.zip", "bad-setting", "zip://::/path/archive.zip"),
        ("zip://in::landing.zip", "bad-setting", "absolute path"),
        ("simplecache::http://host/landing", "bad-setting", "cache"),
        ("zip://in::filecache::http://host/x.zip", "bad-setting", "cache"),
        ("nope://host/landing", "unknown-store", "nope://"),
        ("dropbox://landing", "extra-missing", "dropboxdrivefs"),
    ],
)
def test_address_that_is_refused(tmp_path: Path, address: str, code: str, told: str) -> None:
    zone = Zone(address, lambda name, data: None, tmp_path)
    error = zone.run(code=2)["error"]
    assert error["code"] == code
    assert told in error["message"] + error["next"]
    assert "secret" not in json.dumps(error)
    assert not (tmp_path / "processed").exists()


@pytest.mark.parametrize(
    ("protocol", "package", "extra"), [("sftp", "sshfs", "[sftp]"), ("hf", "huggingface_hub", "[hf]")]
)
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str, package: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(ConfigurationError, match=package) as raised:
        open_landing(f"{protocol}://somebody@host/landing")
    assert raised.value.code == "extra-missing"
    assert extra in raised.value.next


def test_missing_library_of_hadoop_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    error = Zone("hdfs://namenode:8020/landing", lambda name, data: None, tmp_path).run(code=2)["error"]
    assert (error["code"], error["data_changed"]) == ("extra-missing", False)
    assert "HADOOP_HOME" in error["next"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("address", ["sftp://somebody@host/lake", "hf://datasets/a/b", "zip://::/data/x.zip"])
def test_processed_zone_there_is_refused_with_the_reason(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigurationError, match="only if its name is free") as raised:
        open_store(address)
    assert raised.value.code == "landing-only"
    zone = Zone(str(tmp_path / "landing"), lambda name, data: None, tmp_path)
    zone.config.write_text(
        zone.config.read_text().replace(f"{tmp_path}/processed", address) + f'queue = "{tmp_path}/q"\n'
    )
    text = zone.config.read_text().replace('[tables.t.schema]\nd = "date"\n', "")
    zone.config.write_text(text)
    assert zone.run(code=2)["error"]["code"] == "landing-only"


def test_init_proposes_a_processed_zone_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with in_zip(tmp_path) as zone:
        zone.land("a.jsonl", lines(("a", 1, "2020-01-01"), ("b", 2, "2020-01-01")))
        done = CliRunner().invoke(main, ["init", zone.address, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    proposed = json.loads(done.stdout)["result"]["proposed"]
    assert proposed["landing"] == zone.address
    assert proposed["processed"] == str(tmp_path / "processed")
