"""A message whose schema is known by its text is the message that it is without that."""

import numpy as np
import pytest

from lakeupsert.landing.formats.connect import schema_of
from lakeupsert.landing.formats.jsonlines import decode_each
from lakeupsert.landing.formats.jsonvalues import decode

FIELDS = '{"type":"struct","fields":[{"type":"struct","field":"after","fields":[{"type":"int32","field":"a"}]}]}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"schema":{FIELDS},"payload":{{"op":"c","after":{{"a":1.50}}}}}}',
        f'{{"payload":{{"op":"c"}},"schema":{FIELDS}}}',
        f'{{"schema":{FIELDS},"payload":{{}},"more":1}}',
        '{"schema":null,"payload":{"a":1e3}}',
        '{"schema":{"version":1.10},"payload":1.50}',  # a row with such columns, from quarantine
        '{"schema":1.50,"payload":{"schema":1,"payload":2}}',
        '{"a":1}',
    ],
)
def test_it_is_the_same_message(text: str) -> None:
    block = decode_each([text.encode()], np.zeros(1, np.int64), lambda message: [message], stated=True)
    [schema] = block.schemas or [schema_of(None)]
    assert block.rows == [decode(text)]
    assert schema.meanings == schema_of(decode(text)).meanings
