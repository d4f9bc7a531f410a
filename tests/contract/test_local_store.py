"""The store's contract on a folder, and what is a folder's own: durability, room, rights."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage import LocalStore, ObjectStore, StoreUnavailableError, UnknownOutcomeError
from lakeupsert.testing.contracts import ObjectStoreContract


class TestLocalStore(ObjectStoreContract):
    def new_store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "root")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_commit_is_synced_before_it_is_reported(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Body first, then its name: file, link, folder; and each new folder in its parent."""
    calls: list[str] = []
    real_fsync, real_link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(f"fsync {_kind(fd)}"), real_fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (calls.append("link"), real_link(a, b))[1])
    store.create("chain/v1", b"x")
    assert calls[-2:] == ["link", "fsync folder"]
    assert calls.count("fsync file") == 1
    assert calls[:-2].count("fsync folder") >= 4  # root, _lakeupsert, _lakeupsert/tmp and chain, each in its parent


def _kind(descriptor: int) -> str:
    return "folder" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "file"


def test_folders_of_other_processes_are_synced_together(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Path(store.root) / "parts"
    for name in ("a", "b", "c"):
        (parent / name).mkdir(parents=True)
    calls: list[object] = []
    real_fsync, real_link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.fstat(fd).st_ino), real_fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (calls.append("link"), real_link(a, b))[1])
    for name in ("a", "b", "c", "new"):
        assert store.create(f"parts/{name}/1", b"x")
    synced = parent.stat().st_ino
    assert synced in calls[: calls.index("link")]  # before anything could be lost with a folder
    assert calls.count(synced) == 2  # once for the three that were there, once for the one that was not


def test_failed_sync_of_the_folder_is_an_unknown_outcome(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("chain/v1", b"x")
    linked = []
    real_fsync, real_link = os.fsync, os.link

    def fail_after_link(fd: int) -> None:
        if linked:
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(fd)

    monkeypatch.setattr(os, "link", lambda a, b: (linked.append(b), real_link(a, b))[1])
    monkeypatch.setattr(os, "fsync", fail_after_link)
    with pytest.raises(UnknownOutcomeError):
        store.create("chain/v2", b"x")
    with pytest.raises(StoreUnavailableError), store.write("data/1") as sink:  # no commit: it is written again
        sink.write(b"x")


def test_folder_whose_sync_failed_is_synced_by_the_next_write(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut could lose the folder with everything in it."""
    store.create("parts/1/v1", b"x")
    parent, synced, broken = (Path(store.root) / "parts").stat().st_ino, [], [True]
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if os.fstat(fd).st_ino == parent:
            if broken:
                raise OSError(errno.EIO, "Input/output error")
            synced.append(fd)
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailableError):
        store.create("parts/2/v1", b"x")
    broken.clear()
    assert store.create("parts/2/v1", b"x")
    assert synced


def test_file_system_without_hard_links_is_named_as_such(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(a: str, b: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # what link(2) says on FAT

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigurationError, match="hard links") as caught:
        store.create("a", b"x")
    assert caught.value.code == "no-hard-links"


def test_links_that_never_end_are_not_followed(tmp_path: Path, store: LocalStore) -> None:
    store.create("a/1", b"x")
    (tmp_path / "root/a/up").symlink_to(tmp_path / "root")
    (tmp_path / "root/a/self").symlink_to(tmp_path / "root/a/self")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/2").write_bytes(b"y")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/b").symlink_to(tmp_path / "elsewhere")
    store.create("c/3", b"z")
    (tmp_path / "root/a/c").symlink_to(tmp_path / "root/c")
    (tmp_path / "root/c/a").symlink_to(tmp_path / "root/a")
    assert [found.name for found in store.list("")] == ["a/1", "b/2", "c/3"]


def test_crash_inside_a_create_leaves_no_half_object(tmp_path: Path) -> None:
    """SIGKILL between the bytes and the name: the name stays free and listings show nothing."""
    code = (
        "import os, signal, sys; from lakeupsert.storage import LocalStore\n"
        "os.link = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)\n"
        "LocalStore(sys.argv[1]).create('chain/v1', b'x' * 100_000)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "root")], check=False)
    assert killed.returncode == -9
    store = LocalStore(tmp_path / "root")
    assert list(store.list("")) == []
    assert store.create("chain/v1", b"y") is True


def test_full_disk_is_try_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailableError) as caught:
        store.create("a", b"x")
    assert (caught.value.code, caught.value.exit_code) == ("disk-full", 75)
    assert list(store.list("")) == []


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write anywhere; test_read_only_folder_of_another_user covers it"
)
def test_read_only_folder_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o500)
    with pytest.raises(ConfigurationError, match="Not permitted"):
        LocalStore(tmp_path / "root").create("a", b"x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user; the test above covers the rest")
def test_read_only_folder_of_another_user_is_a_configuration_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    code = (
        "import os, sys; from lakeupsert.storage import LocalStore; os.setuid(65534)\n"
        "try: LocalStore(sys.argv[1]).create('a', b'x')\n"
        "except Exception as e: print(type(e).__name__, e.code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ConfigurationError not-permitted", done.stderr
