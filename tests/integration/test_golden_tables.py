"""Tables that lakeupsert 0.1.0 wrote (tests/golden/make_tables.py) are read, merged, compacted and vacuumed by this one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.lake import Lake

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def make_tables(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(GOLDEN / "make_tables.py")


@pytest.mark.parametrize("name", sorted(path.name.split(".")[0] for path in (GOLDEN / "tables").iterdir()))
def test_an_earlier_table_lives_on(name: str, make_tables: ModuleType, tmp_path: Path) -> None:
    def plain(rows: object) -> object:
        return json.loads(json.dumps(rows, default=make_tables.as_text))

    shutil.unpack_archive(GOLDEN / "tables" / f"{name}.tar.gz", tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_text())
    lake = Lake(tmp_path / "lake", **make_tables.CASES[name].settings)
    assert plain(make_tables.read(lake)) == expected["before"]
    shutil.copy(tmp_path / "later.jsonl", tmp_path / "lake" / "landing")
    lake.run()
    assert plain(make_tables.read(lake)) == expected["after"]
    newest = str(max(int(number) for number in expected["after"] if number != "history"))
    for step in (lambda: lake.table.compact(full=True), lambda: lake.table.vacuum(dry=False)):
        step()
        lake.reopen()
        proof = lake.table.reconcile(deep=True).proof
        assert proof
        assert all(one.balanced for one in proof)
        assert plain(lake.rows()) == expected["after"][newest]
        if lake.settings.history:
            assert plain(lake.table.to_arrow(history=True).read_all().to_pylist()) == expected["after"]["history"]
