#!/usr/bin/env bash
# Guess: `numpy.unpackbits(bits, count=n)` pads with zeros what is shorter than n, as its documentation says.
# Truth: it does, unless the array is empty: then the n values are whatever was in memory, also other numbers than 0 and 1.
# Versions: numpy 1.26.4, 2.4.6. Seen 2026-11-29.
# It matters where null bitmaps are read as empty ones: a row without columns seems to have some, and not the same ones each time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > unpack.py <<'PYTHON'
import numpy as np

print("numpy", np.__version__)
for shape in ((1,), (0,)):
    bits = np.zeros(shape, np.uint8)
    for n in (12, 100_000):
        used = [np.full(n, 7, np.uint8) for _ in range(20)]  # memory that NumPy uses again
        del used
        some = any(np.unpackbits(bits, count=n).any() for _ in range(20))
        print(len(bits), "bytes to", n, "values:", "not all are 0" if some else "all are 0")
PYTHON
for version in 1.26.4 2.4.6; do
    python3 -m venv "venv-$version"
    "venv-$version/bin/pip" install --quiet --disable-pip-version-check "numpy==$version"
    "venv-$version/bin/python" unpack.py
done | tee seen
diff seen - <<'SEEN'
numpy 1.26.4
1 bytes to 12 values: all are 0
1 bytes to 100000 values: all are 0
0 bytes to 12 values: not all are 0
0 bytes to 100000 values: not all are 0
numpy 2.4.6
1 bytes to 12 values: all are 0
1 bytes to 100000 values: all are 0
0 bytes to 12 values: not all are 0
0 bytes to 100000 values: not all are 0
SEEN
