"""A server that loses races is refused before anything is written, however well it keeps conditions of creates in turn."""

from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage import LocalStore, StoreUnavailableError, UnknownOutcomeError, open_store, races, remote
from tests.harness.lake import Lake, row
from tests.harness.motoserver import LOSES_RACES
from tests.harness.proxy import FaultProxy
from tests.harness.servers import Server, moto

NewPlace = Callable[[Server], str]


@pytest.fixture(scope="module")
def loser() -> Iterator[Server]:
    """cloud: a server in front of which conditions hold in turn, and not in a race."""
    with moto({LOSES_RACES: "0.05"}) as server:
        yield server


def lake_on(folder: Path, place: str) -> Lake:
    return Lake(folder, landing=f"{folder}/landing", processed=f"{place}/processed", queue=str(folder / "queue.sqlite"))


def keys(place: str) -> list[str]:
    listed = boto3.client("s3").list_objects_v2(Bucket=place.removeprefix("s3://"))
    return [entry["Key"] for entry in listed.get("Contents", ())]


def test_server_that_loses_races_is_refused_before_anything_is_written(
    loser: Server, new_place: NewPlace, tmp_path: Path
) -> None:
    lake = lake_on(tmp_path, place := new_place(loser))
    lake.land("a.jsonl", [row("a", 0, 1)])
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=loser.url) as raised:
            lake.table.run(host="local", workers=1)
        assert raised.value.code == "conditions-ignored"
        assert keys(place) == [f"processed/{remote.PROBE}"]
        lake.reopen()


def test_table_of_another_server_is_raced_before_the_first_write(
    moto: Server, loser: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the bucket was moved to the server that loses."""
    lake = lake_on(tmp_path, place := new_place(moto))
    lake.land("a.jsonl", [row("a", 0, 1)])
    lake.run()
    copies = {key: boto3.client("s3").get_object(Bucket=place[5:], Key=key)["Body"].read() for key in keys(place)}
    for name, value in loser.env.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=place[5:])
    for key, body in copies.items():
        boto3.client("s3").put_object(Bucket=place[5:], Key=key, Body=body)
    lake.reopen()
    lake.land("b.jsonl", [row("b", 0, 2)])
    with pytest.raises(ConfigurationError) as raised:
        lake.table.run(host="local", workers=1)
    assert raised.value.code == "conditions-ignored"
    assert sorted(keys(place)) == sorted(copies)
    assert [r["k"] for r in lake.rows()] == ["a"]


def test_server_that_keeps_races_is_raced_once(
    moto: Server, new_proxy: Callable[[Server], FaultProxy], new_place: NewPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RACES", 10)
    proxy = new_proxy(moto)
    place = new_place(proxy.server)
    for name in ("a", "b"):
        proxy.log.clear()
        assert open_store(place).create(name, b"x")
        puts = [event for event in proxy.log if event.method == "PUT"]
        assert len(puts) == {"a": 2 + races.WRITERS * 10 + 1 + 1, "b": 1 + 1}[name]
    assert [found.name for found in open_store(place).list("")] == ["a", "b"]
    assert len(keys(place)) == 2 + 2  # the objects of the races are deleted
    for puts_expected in (1 + races.WRITERS * 10 + 1 + 1, 1 + 1):
        monkeypatch.setattr("tests.harness.proxy._Handler.server_version", "Another/2.0")
        proxy.log.clear()
        assert open_store(place).create(f"c-{puts_expected}", b"x")
        assert len([event for event in proxy.log if event.method == "PUT"]) == puts_expected


class Careless(LocalStore):
    """Lets everybody win some names: a third, as Adobe S3Mock 5.2.0 does."""

    def create(self, name: str, data: bytes) -> bool:
        taken = Path(self._path(name)).exists() and int(name[-2:]) % 3
        if not taken:
            Path(self._path(name)).parent.mkdir(parents=True, exist_ok=True)
            Path(self._path(name)).write_bytes(data)
        return not taken


def test_races_find_a_third_of_several_winners(tmp_path: Path) -> None:
    chance_of_missing = (1 - 13 / 40) ** 40
    assert chance_of_missing < 1e-6
    store = Careless(tmp_path)
    names = [f"r-{number:02}" for number in range(1, 41)]
    wrong = races.race(store, store.create, names)
    assert wrong is not None
    assert "8 won" in wrong
    safe = LocalStore(tmp_path / "safe")
    assert races.race(safe, safe.create, names) is None


@pytest.mark.parametrize("answer", [None, True])
def test_race_whose_stored_bytes_are_no_winners_is_wrong(tmp_path: Path, answer: bool | None) -> None:
    """As of s3s-fs 0.14.1 and s3rver 3.7.1."""
    store = LocalStore(tmp_path)
    store.create("a", b"of nobody")
    first = iter([answer])
    wrong = races.race(store, lambda name, body: next(first, False), ["a"])
    assert wrong is not None


def test_store_that_answers_no_create_loses_no_races(tmp_path: Path) -> None:
    """As of a server whose disk fills up during the races: it was refused with the advice to use another server."""

    def create(name: str, body: bytes) -> bool:
        raise UnknownOutcomeError(name)

    with pytest.raises(StoreUnavailableError, match="none of 8 creates was answered"):
        races.race(LocalStore(tmp_path), create, ["a"])
