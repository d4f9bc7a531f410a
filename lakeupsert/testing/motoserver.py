"""moto's server with conditional writes that are atomic between its threads, as S3's are: two would win without the lock.

python -m lakeupsert.testing.motoserver -H 127.0.0.1 -p PORT
"""

import threading
from functools import wraps
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_LOCK = threading.RLock()


def _alone(operation: Any) -> Any:
    @wraps(operation)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            return operation(*args, **kwargs)

    return locked


if __name__ == "__main__":
    for name in ("put_object", "copy_object", "delete_object", "_key_response_post"):
        setattr(S3Response, name, _alone(getattr(S3Response, name)))
    main()
