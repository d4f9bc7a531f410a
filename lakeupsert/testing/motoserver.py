"""moto's server with a lock that makes conditional writes atomic, as in S3. Without it, two threads could both win.

python -m lakeupsert.testing.motoserver -H 127.0.0.1 -p PORT
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from moto.s3.responses import S3Response
from moto.server import main

_LOCK = threading.RLock()
P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(operation: Callable[P, R]) -> Callable[P, R]:
    @wraps(operation)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _LOCK:
            return operation(*args, **kwargs)

    return locked


if __name__ == "__main__":
    for name in ("put_object", "copy_object", "delete_object", "_key_response_post"):
        setattr(S3Response, name, _one_at_a_time(getattr(S3Response, name)))
    main()
