"""`[sources.NAME]`: what is refused, and what no message says."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.config import DatabaseSource, parse
from lakeupsert.errors import ConfigurationError

TABLE = '[tables.t]\nlanding = "l"\nprocessed = "p"\nkey = ["k"]\npartition_by = []\n'
SOURCE = {
    "from": '"postgresql://me@db:5433/shop"',
    "table": '"t"',
    "tables": '["public.orders"]',
    "password_file": '"secret"',
}


def config(name: str = "shop", **settings: str) -> str:
    return f"{TABLE}[sources.{name}]\n" + "\n".join(f"{key} = {value}" for key, value in {**SOURCE, **settings}.items())


def test_settings_of_a_database() -> None:
    found = parse("/lake/lakeupsert.toml", config(bytes='"1MiB"').encode()).sources["shop"]
    assert isinstance(found, DatabaseSource)
    assert (found.server.hostname, found.server.port, found.tables) == ("db", 5433, ("public.orders",))
    assert (found.password_file, found.most_bytes, found.seconds) == ("/lake/secret", 1 << 20, 1.0)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (config(**{"from": '"postgresql://me:hidden@db/shop"'}), "credential-in-configuration", "SHOP__PASSWORD"),
        (config(**{"from": '"oracle://me@db/shop"'}), "bad-setting", "postgresql://"),
        (config(**{"from": '"mariadb://me@db/shop"'}), "bad-setting", "connector for MariaDB"),
        (config(table='"u"'), "bad-setting", "no such table"),
        (config(tabels='["a"]'), "unknown-setting", "Did you mean 'tables'"),
        (config(tables="[]"), "bad-setting", "tables"),
        (config(bytes='"many"'), "bad-setting", "64MiB"),
        (config(seconds="0"), "bad-setting", "seconds"),
        (config("Shop"), "bad-setting", "small letter"),
        (config("endpoint"), "bad-setting", "serve"),
        (config(**{"from": '"postgresql://me@db:54x2/shop"'}), "bad-setting", "USER@HOST:PORT"),
        (config(**{"from": '"postgresql://me@db:99999/shop"'}), "bad-setting", "USER@HOST:PORT"),
        (config(**{"from": '"postgresql://me@a,b/shop"'}), "bad-setting", "USER@HOST:PORT"),
        (config(**{"from": '"postgresql://me@[h/shop"'}), "bad-setting", "USER@HOST:PORT"),
        (config(**{"from": '"postgresql://me@db/shop?sslmode=require"'}), "bad-setting", "USER@HOST:PORT"),
    ],
)
def test_slips_are_refused(text: str, code: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse("lakeupsert.toml", text.encode())
    assert (caught.value.code, "hidden" in str(caught.value)) == (code, False)
    assert says in f"{caught.value.message} {caught.value.next}"


@pytest.mark.parametrize(("name", "says"), [("shop", "password_file"), ("shops", "Did you mean 'shop'")])
def test_source_that_can_not_begin(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "lakeupsert.toml").write_text(config())
    answer = CliRunner().invoke(main, ["capture", name, "--config", str(tmp_path / "lakeupsert.toml")])
    assert answer.exit_code == 2
    assert says in answer.output


def test_variables_and_the_environment_set_a_source_as_they_set_a_table() -> None:
    text = config(**{"from": '"postgresql://me@${DB_HOST}:5433/shop"', "tables": '["${SCHEMA}.orders"]'})
    environment = {
        "DB_HOST": "elsewhere",
        "SCHEMA": "sales",
        "LAKEUPSERT__SOURCES__SHOP__SECONDS": "0.5",
        "LAKEUPSERT__SOURCES__SHOP__PASSWORD": "not [a setting",
        "LAKEUPSERT__SOURCES__OTHER__SECONDS": "7",
    }
    found = parse("/lake/lakeupsert.toml", text.encode(), environment).sources["shop"]
    assert isinstance(found, DatabaseSource)
    assert (found.server.hostname, found.tables, found.seconds) == ("elsewhere", ("sales.orders",), 0.5)


@pytest.mark.parametrize(
    ("text", "variables", "code", "says"),
    [
        (config(), {"SECONDS": "soon"}, "bad-setting", "variable LAKEUPSERT__SOURCES__SHOP__SECONDS"),
        (config(seconds="0"), {"ROWS": "7"}, "bad-setting", "lakeupsert.toml: [sources.shop]"),
        (config(), {"SECOND": "1"}, "unknown-setting", "variable LAKEUPSERT__SOURCES__SHOP__SECOND: "),
        (config(), {"FROM": "postgresql://me:hidden@db/shop"}, "credential-in-configuration", "SHOP__PASSWORD"),
        (config(**{"from": '"postgresql://me:${PW}@db/shop"'}), {}, "credential-in-configuration", "SHOP__PASSWORD"),
        (config(**{"from": '"postgresql://${ME}@db/shop"'}), {}, "unset-variable", "[sources.shop]: from"),
        (config(**{"from": '"${URL}"'}), {"URL": "postgresql://x:hidden@d/s"}, "credential-in-configuration", "SHOP"),
    ],
)
def test_slips_in_the_environment_are_named(text: str, variables: dict[str, str], code: str, says: str) -> None:
    environment = {
        name if name == "URL" else f"LAKEUPSERT__SOURCES__SHOP__{name}": variables[name] for name in variables
    }
    with pytest.raises(ConfigurationError) as caught:
        parse("lakeupsert.toml", text.encode(), environment)
    assert (caught.value.code, "hidden" in str(caught.value)) == (code, False)
    assert says in f"{caught.value.message} {caught.value.next}"
