"""Each target with its seeds, and with some hundred others made of them."""

import random
from contextlib import suppress

import pytest

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import ALLOWED, TARGETS

TIMES = 40


@pytest.mark.parametrize("name", list(TARGETS))
def test_readers_refuse_in_words(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    for data in (*target.seeds, b"", *(mutated(rng, target.seeds) for _ in range(TIMES))):
        try:
            with suppress(*ALLOWED):
                target.run(data)
        except BaseException as e:
            e.add_note(f"{name}: {data!r}")
            raise
