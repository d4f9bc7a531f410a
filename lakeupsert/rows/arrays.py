"""Names for values of Arrow and numpy, for signatures. A schema is a ``pa.Schema``, one type a ``pa.DataType``."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Rows = pa.Table
"""n rows."""
Column = pa.Array | pa.ChunkedArray
"""One value, or null, of each of n rows."""
Mask = NDArray[np.bool_]
"""Which of n rows are meant."""
Indices = NDArray[np.int64]
"""Places of rows among others, from 0 on."""
Hashes = NDArray[np.uint64]
"""One hash of each of n rows."""
