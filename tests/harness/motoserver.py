"""moto's server with a lock that makes conditional writes atomic, as in S3. Without it, two threads could both win.

python -m tests.harness.motoserver -H 127.0.0.1 -p PORT

With LAKEUPSERT_MOTO_LOSES_RACES, a number of seconds, in the environment, it keeps conditions only of creates that come one after
the other: so long after it looked whether a name is free, it writes. Adobe S3Mock 5.2.0 does so within a shorter time.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from moto.s3.responses import S3Response
from moto.server import main

LOSES_RACES = "LAKEUPSERT_MOTO_LOSES_RACES"
_LOCK = threading.RLock()
P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(operation: Callable[P, R]) -> Callable[P, R]:
    @wraps(operation)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _LOCK:
            return operation(*args, **kwargs)

    return locked


def _look_then_write(seconds: float) -> Callable[[S3Response], object]:
    put = S3Response.put_object

    def put_object(self: S3Response) -> object:
        if self.headers.get("If-None-Match") == "*":
            name = self.parse_key_name()
            if self.backend.get_object(self.bucket_name, name) is None:
                time.sleep(seconds)
                self.headers = {key: value for key, value in self.headers.items() if key.lower() != "if-none-match"}
        return put(self)

    return put_object


if __name__ == "__main__":
    loses_races = os.environ.get(LOSES_RACES)
    if loses_races:
        S3Response.put_object = _look_then_write(float(loses_races))
    else:
        S3Response.put_object = _one_at_a_time(S3Response.put_object)
    for name in ("copy_object", "delete_object", "_key_response_post"):
        setattr(S3Response, name, _one_at_a_time(getattr(S3Response, name)))
    main()
