"""S3 keeps the object store's contract on each server, and what only S3 can do wrong is told apart."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lakeupsert.storage import ObjectStore, open_store
from lakeupsert.testing.contracts import ObjectStoreContract
from lakeupsert.testing.servers import Server

NewBucket = Callable[[Server], str]


class TestS3Store(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def on_server(self, s3: Server, new_bucket: NewBucket) -> None:
        self.bucket = new_bucket(s3)

    def new_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"s3://{self.bucket}/lake")
