"""The configuration: what is read, where from, and what is refused with which words."""

from pathlib import Path

import msgspec
import pytest

from lakeupsert.cli.set_up import config as config_command
from lakeupsert.config import Config, GlueSettings, HiveSettings, Reading, TableSettings, load
from lakeupsert.config.load import parse
from lakeupsert.errors import ConfigurationError

REQUIRED = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
"""

EXAMPLE = Path(config_command.__file__).with_name("example.toml").read_text("utf-8")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lakeupsert.toml"
    path.write_text(REQUIRED)
    return path


def read(file: Path, more: str = "", **environment: str) -> Config:
    file.write_text(REQUIRED + more)
    return load(str(file), environment)


def refused(file: Path, text: str, **environment: str) -> ConfigurationError:
    file.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        load(str(file), environment)
    assert raised.value.exit_code == 2
    assert raised.value.next
    return raised.value


def test_four_settings_are_enough_and_the_rest_has_defaults(file: Path) -> None:
    settings = read(file).tables["sales"]
    assert settings.order_by == ("record_timestamp",)
    assert (settings.format, settings.queue, settings.engine, settings.strategy) == ("auto", "auto", "arrow", "auto")
    assert (settings.on_failed_partition, settings.quarantine_limit) == ("hold", "1%")
    assert (settings.keep_snapshots, settings.superseded_retention) == (7, "24h")
    assert settings.schema == {}
    assert settings.delete is None


def test_relative_paths_are_relative_to_the_file(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    settings = read(file, 'queue = "queue.sqlite"').tables["sales"]
    assert settings.landing == str(tmp_path / "landing")
    assert settings.processed == str(tmp_path / "processed")
    assert settings.queue == str(tmp_path / "queue.sqlite")


def test_addresses_stay_as_they_are(file: Path) -> None:
    text = REQUIRED.replace('"landing"', '"abfss://container@account.dfs.core.windows.net/landing"')
    file.write_text(text)
    assert load(str(file), {}).tables["sales"].landing == "abfss://container@account.dfs.core.windows.net/landing"


def test_file_is_found_upward_from_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    below = tmp_path / "a/b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert load(None, {}).path == str(file)


def test_missing_file_tells_how_to_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="There is no lakeupsert") as raised:
        load(None, {})
    assert "lakeupsert config --example" in raised.value.next


def test_environment_wins_over_the_file_and_origins_tell(file: Path) -> None:
    variable = "LAKEUPSERT__TABLES__SALES__ENGINE"
    config = read(file, 'format = "csv"\nengine = "arrow"', **{variable: "spark"})
    assert config.tables["sales"].engine == "spark"
    assert config.origins["sales"]["engine"] == variable
    assert config.origins["sales"]["format"] == "file"
    assert "strategy" not in config.origins["sales"]


@pytest.mark.parametrize(
    ("variable", "text", "setting", "value"),
    [
        ("KEY", '["order_id", "line_no"]', "key", ("order_id", "line_no")),
        ("KEEP_SNAPSHOTS", "3", "keep_snapshots", 3),
        ("QUARANTINE_LIMIT", "5%", "quarantine_limit", "5%"),
        ("QUARANTINE_LIMIT", "12", "quarantine_limit", 12),
        ("LANDING_DATES", "%Y/%m/%d", "landing_dates", "%Y/%m/%d"),
    ],
)
def test_environment_value_is_toml_or_plain_text(
    file: Path, variable: str, text: str, setting: str, value: object
) -> None:
    settings = read(file, **{f"LAKEUPSERT__TABLES__SALES__{variable}": text}).tables["sales"]
    assert getattr(settings, setting) == value


def test_environment_reaches_into_the_parts_of_a_table(file: Path) -> None:
    environment = {
        "LAKEUPSERT__TABLES__SALES__DELETE__COLUMN": "op",
        "LAKEUPSERT__TABLES__SALES__DELETE__VALUES": '["D"]',
        "LAKEUPSERT__TABLES__SALES__SCHEMA__ID": "bigint",
    }
    config = read(file, '[tables.sales.schema]\nid = "string"\nday = "date"', **environment)
    settings = config.tables["sales"]
    assert settings.delete is not None
    assert (settings.delete.column, settings.delete.values, settings.delete.keep) == ("op", ("D",), False)
    assert settings.schema == {"id": "bigint", "day": "date"}
    assert config.origins["sales"]["delete"] == (
        "LAKEUPSERT__TABLES__SALES__DELETE__COLUMN, LAKEUPSERT__TABLES__SALES__DELETE__VALUES"
    )


def test_environment_finds_a_table_whose_name_is_no_variable(file: Path) -> None:
    file.write_text(REQUIRED.replace("[tables.sales]", '[tables."eu-sales"]'))
    config = load(str(file), {"LAKEUPSERT__TABLES__EU_SALES__ENGINE": "spark"})
    assert config.tables["eu-sales"].engine == "spark"


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        (
            REQUIRED + 'quarantine_limt = "1%"',
            "[tables.sales] has an unknown key 'quarantine_limt'. Did you mean 'quarantine_limit'?",
        ),
        (
            REQUIRED + '[tables.sales.delete]\ncolum = "op"',
            "[tables.sales.delete] has an unknown key 'colum'. Did you mean 'column'?",
        ),
        ("[table.sales]\n", "the file has an unknown key 'table'. Did you mean 'tables'?"),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(file: Path, text: str, suggestion: str) -> None:
    error = refused(file, text)
    assert error.code == "unknown-setting"
    assert suggestion in error.message


@pytest.mark.parametrize(
    ("text", "must"),
    [
        ('order_by = "updated_at"', 'order_by must be a list: order_by = ["updated_at"].'),
        ("history = 1", "history must be true or false, and is 1."),
        ("landing_dates = 3", "landing_dates must be text in quotes, and is 3."),
        ('[tables.sales.delete]\ncolumn = "op"\nkeep = "yes"', "delete.keep must be true or false, and is 'yes'."),
        ("order_by = [1]", "order_by[0] must be text in quotes, and is 1."),
        ("keep_snapshots = 0", "keep_snapshots must be a whole number of at least 1, and is 0."),
        ('mode = "column"', "mode must be 'rows' or 'columns', and is 'column'."),
        (
            '[tables.sales.read.dates]\na = ["x"]\n"b c" = ["y", 5]',
            'read.dates."b c"[1] must be text in quotes, and is 5.',
        ),
        ("[tables.sales.schema]\na = 'int64'\nb.c = 'x'", "schema.b must be text in quotes."),
        (
            "[[tables.sales.read.dialects]]\ndelimiter = ';'\ndecimal_separator = 'x'",
            "read.dialects[0].decimal_separator must be '.' or ',', and is 'x'.",
        ),
        ("[tables.sales.groups.a]\ncolumns = ['b']", "groups.a lacks `order_by`."),
    ],
)
def test_a_setting_of_another_type_is_named_with_what_it_must_be(file: Path, text: str, must: str) -> None:
    error = refused(file, REQUIRED + text)
    assert (error.code, error.message) == ("bad-setting", f"{file}: [tables.sales]: {must}")


@pytest.mark.parametrize(
    ("variable", "text", "code"),
    [
        ("BUCKET", "12", "bad-setting"),
        ("BUCKET", "enormous", "bad-setting"),
        ("STRATEGY", "fast", "bad-setting"),
        ("ENGIN", "spark", "unknown-setting"),
        ("DELETE__VALUE", '["D"]', "unknown-setting"),
        ("READ", "csv", "bad-setting"),
        ("KEEP_SNAPSHOTS", "0", "bad-setting"),
        ("LANDING", "https://a/b?sig=secret", "credential-in-configuration"),
    ],
)
def test_an_error_of_the_environment_names_the_variable_and_not_the_file(
    file: Path, variable: str, text: str, code: str
) -> None:
    named = f"LAKEUPSERT__TABLES__SALES__{variable}"
    error = refused(file, REQUIRED, LAKEUPSERT__TABLES__SALES__ENGINE="spark", **{named: text})
    assert error.code == code
    assert error.message.startswith(f"Environment variable {named}: ")
    assert str(file) not in error.message
    assert named in error.next
    assert "secret" not in str(error)


def test_an_error_of_the_file_is_not_blamed_on_the_environment(file: Path) -> None:
    error = refused(file, REQUIRED + 'strategy = "fast"', LAKEUPSERT__TABLES__SALES__ENGINE="spark")
    assert error.message.startswith(f"{file}: ")
    assert "LAKEUPSERT__" not in str(error)


def test_a_bucket_smaller_than_a_files_own_bytes_is_refused(file: Path) -> None:
    assert read(file, 'bucket = "1KiB"').tables["sales"].bucket_bytes == 1024
    error = refused(file, REQUIRED + 'bucket = "1000B"')
    assert (error.code, "bucket is '1000B'" in error.message, "1024" in error.message) == ("bad-setting", True, True)


def test_unknown_key_in_the_environment_is_refused(file: Path) -> None:
    error = refused(file, REQUIRED, LAKEUPSERT__TABLES__SALES__ENGIN="spark")
    assert "Did you mean 'engine'?" in error.message


def test_missing_settings_are_all_named(file: Path) -> None:
    error = refused(file, '[tables.sales]\nlanding = "landing"')
    assert error.code == "missing-setting"
    assert "lacks processed, key, partition_by" in error.message


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ('format = "xml"', "'xml'"),
        ('strategy = "deltas"', "'deltas'"),
        ('engine = "duckdb"', "'duckdb'"),
        ("keep_snapshots = 0", "and is 0"),
        ('quarantine_limit = "much"', "quarantine_limit is 'much'; expected a share, for example \"1%\""),
        ('superseded_retention = "1 day"', "superseded_retention is '1 day'; expected a duration, for example \"24h\""),
        ('schema = { price = "int", PRICE = "int" }', "schema is ['price', 'PRICE']; names that differ only by case"),
        ('tombstone_retention = "99999999999d"', 'expected a duration, for example "90d"'),
        ('tombstone_retention = "999999999d"', "expected 36500d at most"),
        ('order_by = ["ts", "ts"]', "a column is named twice"),
        ("order_by = []", "order_by"),
        ('delete = "op"', "delete is 'op'; expected a table"),
        ('delete = { column = "op" }', "values"),
    ],
)
def test_unfit_value_is_refused_and_shown(file: Path, setting: str, expected: str) -> None:
    error = refused(file, REQUIRED + setting)
    assert error.code == "bad-setting"
    assert expected in error.message
    assert "[tables.sales]" in error.message


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("order_in_name = '_('", "order_in_name is '_('; not a regular expression"),
        ("order_in_name = '_\\d+'", "0 groups"),
        ('order_in_name = \'_(\\d+)\'\norder_by = ["a", "b"]', "one column"),
        ('tombstone_retention = "long"', '"90d"'),
        ('ties = "random"', "content"),
        ("[tables.sales.delete]\nkeep = true", "`file_prefix`"),
        ('[tables.sales.delete]\nfile_prefix = "del"\nvalues = ["D"]', "it needs delete.column"),
        ('[tables.sales.delete]\ncolumn = "op"', "`values`"),
        ('[tables.sales.delete]\ncolumn = "op"\nvalues = ["D"]\nupserts = ["U", "D"]', "'D'"),
        ('[tables.sales.delete]\nprefix = "del"', "file_prefix"),
    ],
)
def test_rules_of_order_and_deletes_are_checked(file: Path, settings: str, told: str) -> None:
    error = refused(file, f"{REQUIRED}{settings}\n")
    assert told in str(error)


READ = "[tables.sales.read]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (READ + 'delimiter = "||"', "read.delimiter is '||'; expected one ASCII character"),
        (READ + 'delimiter = ""', "read.delimiter"),
        (READ + 'delimiter = "\\n"', "read.delimiter"),
        (READ + 'delimiter = ";"\nquote = ";"', "read.quote is ';'"),
        (READ + 'escape = "||"', "read.escape is '||'; expected one ASCII character"),
        (READ + "escape = '\"'", "read.escape"),
        (READ + 'escape = ","', "read.escape"),
        (READ + "escape = '\\'\nquote = ''", "`quote` is empty"),
        (READ + 'escape = "hive"\nquote = "\'"', 'read.quote is "\'"; no character quotes in the text format of hive'),
        (READ + 'escape = "mysql"\ndelimiter = "\\\\"', "read.escape is 'mysql'; a backslash escapes there"),
        (READ + 'escape = "mysql"\nnull = "\\\\N"', "is null anyway"),
        ('format = "jsonl"\n' + READ + 'escape = "mysql"', 'it needs format = "auto" or "csv", but `format` is jsonl'),
        (READ + 'columns = ["a"]', "set header = false"),
        (
            READ + 'header = false\ncolumns = ["a", "a"]',
            "read.columns is ['a', 'a']; expected a different name for each",
        ),
        (
            READ + 'header = false\ncolumns = ["a", " "]',
            "read.columns is ['a', ' ']; expected a different name for each",
        ),
        (READ + 'null = ""', "read.null"),
        (READ + 'encoding = "utf-88"', "read.encoding is 'utf-88'"),
        (READ + 'encoding = "base64"', "read.encoding"),
        (READ + 'envelope = "debezum"', "'debezum'"),
        ('format = "delimited"\n' + READ + 'delimiter = "("', "read.delimiter is '('; not a regular expression"),
        ('format = "delimited"\n' + READ + 'delimiter = "(,)"', "without groups"),
        (
            'format = "delimited"\n' + READ + 'delimiter = ",*"',
            "read.delimiter is ',*'; expected a pattern without groups that does not match empty text",
        ),
        (
            'format = "delimited"\n' + READ + 'quote = "\'"',
            'it needs format = "auto" or "csv", but `format` is delimited',
        ),
        (
            'format = "parquet"\n' + READ + 'encoding = "latin-1"',
            'it needs format = "auto" or "csv" or "delimited" or "jsonl", but `format` is parquet',
        ),
        ('format = "avro"\n' + READ + 'envelope = "dms"', "JSON"),
        (
            'format = "csv"\n' + READ + 'envelope = "dms"',
            'it needs format = "auto" or "jsonl" or "avro", but `format` is csv',
        ),
    ],
)
def test_reading_that_can_not_be_meant_is_refused(file: Path, text: str, expected: str) -> None:
    error = refused(file, REQUIRED + text)
    assert error.code == "bad-setting"
    assert expected in error.message


def test_reading_is_of_the_file_and_the_environment(file: Path) -> None:
    assert "Did you mean 'delimiter'?" in refused(file, REQUIRED + READ + 'delimeter = ";"').message
    given = {"LAKEUPSERT__TABLES__SALES__READ__DELIMITER": "|", "LAKEUPSERT__TABLES__SALES__READ__HEADER": "false"}
    found = read(file, 'format = "csv"\n' + READ + 'null = "-"', **given).tables["sales"].reading
    assert found == Reading(format="csv", delimiter="|", header=False, null="-")


def test_file_that_is_no_toml_tells_the_line(file: Path) -> None:
    error = refused(file, "[tables.sales\n")
    assert error.code == "unreadable-configuration"
    assert "line 1" in error.message


def test_folder_given_as_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be read") as raised:
        load(str(tmp_path), {})
    assert raised.value.code == "unreadable-configuration"


def test_configuration_at_an_address_takes_no_relative_path(file: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{file.as_uri()} .*'landing'") as raised:
        load(file.as_uri(), {})
    assert raised.value.code == "relative-path"
    file.write_text(REQUIRED.replace('"landing"', '"/lake/landing"').replace('"processed"', '"/lake/processed"'))
    found = load(file.as_uri(), {})
    assert (found.path, found.tables["sales"].landing) == (file.as_uri(), "/lake/landing")


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("nope://lake/lakeupsert.toml", "unknown-store"),
        ("hdfs://lake/lakeupsert.toml", "landing-only"),
        ("file:///no/lakeupsert.toml", "no-configuration"),
    ],
)
def test_configuration_at_an_address_where_none_is_read_is_refused(address: str, code: str) -> None:
    with pytest.raises(ConfigurationError, match=address.partition(":")[0]) as raised:
        load(address, {})
    assert raised.value.code == code


def test_file_without_a_table_is_refused(file: Path) -> None:
    assert refused(file, "").code == "no-table"


def two_tables(first: str, second: str) -> str:
    """``first`` and ``second`` stand for the tables' processed paths, and what follows these."""
    returns = REQUIRED.replace("sales", "returns")
    return REQUIRED.replace('"processed"', first, 1) + returns.replace('"processed"', second, 1)


@pytest.mark.parametrize("other", ["processed/", "./x/../processed", "file://{}/processed", "link", "processed/inside"])
def test_two_tables_on_one_processed_path_are_refused(file: Path, other: str) -> None:
    (file.parent / "link").symlink_to("processed")
    error = refused(file, two_tables('"processed"', f'"{other.format(file.parent)}"'))
    assert error.code == "shared-processed"
    assert "'sales' and 'returns'" in error.message


def test_schemes_of_s3_are_one_place(file: Path) -> None:
    queues = '"s3://lake/t"\nqueue = "1.sqlite"', '"s3a://lake/t/"\nqueue = "2.sqlite"'
    assert refused(file, two_tables(*queues)).code == "shared-processed"
    text = REQUIRED.replace('"landing"', '"s3a://lake/t/in"').replace(
        '"processed"', '"s3://lake/t"\nqueue = "1.sqlite"'
    )
    assert refused(file, text).code == "overlapping-zones"


def test_addresses_of_azure_are_one_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    full = "abfss://lake@acc.dfs.core.windows.net/t"
    for other in ("abfs://lake@acc.blob.core.windows.net/t/", "az://lake/t"):
        queues = f'"{full}"\nqueue = "1.sqlite"', f'"{other}"\nqueue = "2.sqlite"'
        assert refused(file, two_tables(*queues)).code == "shared-processed"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    file.write_text(two_tables(*queues))
    assert len(load(str(file), {}).tables) == 2


def test_remote_table_without_a_queue_is_refused(file: Path) -> None:
    error = refused(file, REQUIRED.replace('"processed"', '"s3://lake/processed"'))
    assert "queue" in error.next
    file.write_text(REQUIRED.replace('"processed"', '"file:///lake/processed"'))
    assert load(str(file), {}).tables["sales"].queue == "auto"


def test_two_tables_on_one_queue_are_refused(file: Path) -> None:
    error = refused(file, two_tables('"p1"\nqueue = "q.sqlite"', f'"p2"\nqueue = "sqlite://{file.parent}/q.sqlite"'))
    assert error.code == "shared-queue"
    assert "'sales' and 'returns'" in error.message


def test_queue_that_is_another_tables_own_is_refused(file: Path) -> None:
    error = refused(file, two_tables('"p1"', '"p2"\nqueue = "p1/_lakeupsert/queue.sqlite"'))
    assert error.code == "shared-queue"


def test_landing_zone_around_another_table_is_refused(file: Path) -> None:
    error = refused(file, two_tables('"p1"', '"p2"').replace('"landing"', '"."'))
    assert error.code == "overlapping-zones"


def test_two_tables_with_queues_of_their_own_are_accepted(file: Path) -> None:
    file.write_text(two_tables('"p1"\nqueue = "q1.sqlite"', '"p2"\nqueue = "q2.sqlite"'))
    assert len(load(str(file), {}).tables) == 2


@pytest.mark.parametrize(("landing", "processed"), [("lake", "lake/sales"), ("lake/sales", "lake"), ("lake", "lake")])
def test_table_inside_its_landing_zone_is_refused(file: Path, landing: str, processed: str) -> None:
    text = REQUIRED.replace('"landing"', f'"{landing}"').replace('"processed"', f'"{processed}"')
    assert refused(file, text).code == "overlapping-zones"


def test_neighbours_with_a_common_beginning_do_not_overlap(file: Path) -> None:
    file.write_text(REQUIRED.replace('"landing"', '"sales"').replace('"processed"', '"sales_table"'))
    assert load(str(file), {}).tables["sales"].processed.endswith("/sales_table")


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA123:hunter2@lake/landing",
        "abfss://c@a.dfs.core.windows.net/landing?sv=2024&sig=hunter2",
        "s3://lake/landing?aws_secret_access_key=hunter2",
        "https://lake.s3.amazonaws.com/landing/?X-Amz-Expires=9&X-Amz-Signature=hunter2",
    ],
)
def test_credential_in_an_address_is_refused_and_not_repeated(file: Path, address: str) -> None:
    error = refused(file, REQUIRED.replace('"landing"', f'"{address}"'))
    assert error.code == "credential-in-configuration"
    assert "hunter2" not in str(error)


def test_table_is_the_only_one_or_the_named_one(file: Path) -> None:
    one = read(file)
    assert one.table(None)[0] == "sales"
    two = read(file, REQUIRED.replace("sales", "returns").replace('"processed"', '"other"'))
    assert two.table("returns")[0] == "returns"
    with pytest.raises(ConfigurationError, match="sales, returns") as raised:
        two.table(None)
    assert raised.value.code == "which-table"
    with pytest.raises(ConfigurationError, match="Did you mean 'returns'") as raised:
        two.table("return")
    assert raised.value.code == "unknown-table"


@pytest.mark.parametrize(
    ("limit", "refused", "rows", "is_first", "within"),
    [
        ("1%", 0, 0, True, True),
        ("1%", 10, 11, False, True),
        ("1%", 11, 1099, False, False),
        ("1%", 11, 1100, False, True),
        ("1%", 1, 1, False, False),
        ("1%", 10, 10, False, False),
        ("1%", 1000, 1000, False, False),
        ("1%", 1, 99, True, False),
        ("1%", 1, 100, True, True),
        ("29%", 29, 100, True, True),
        ("0%", 1, 2, False, False),
        ("0%", 1, 1000, True, False),
        ("100%", 5, 5, True, True),
        (3, 3, 3, True, True),
        (3, 3, 10, False, True),
        (3, 4, 1_000_000, False, False),
        (0, 1, 1_000_000, False, False),
    ],
)
def test_quarantine_limit(limit: str | int, refused: int, rows: int, is_first: bool, within: bool) -> None:
    settings = TableSettings(landing="l", processed="p", key=("k",), partition_by=("d",), quarantine_limit=limit)
    assert settings.within_limit(refused, rows, is_first=is_first) == within


def test_example_reads_back_as_the_defaults(file: Path) -> None:
    file.write_text(EXAMPLE)
    assert set(load(str(file), {}).origins["sales"]) == {"landing", "processed", "key", "partition_by"}


def test_example_names_every_setting_with_its_default(file: Path) -> None:
    groups = EXAMPLE[
        EXAMPLE.index("# [tables.sales.groups") : EXAMPLE.index("# [tables.sales.large")
    ]  # not with mode rows
    catalogs = EXAMPLE[EXAMPLE.index("# [tables.sales.iceberg") :]  # not without their publishers
    lines = [line.removeprefix("# ") for line in EXAMPLE.replace(groups, "").replace(catalogs, "").splitlines()]
    settings = [line for line in lines if line.startswith("[tables") or " = " in line.split("#")[0]]
    file.write_text("\n".join(settings))
    config = load(str(file), {"PAGER_URL": "https://pager.example"})
    found, fields = config.tables["sales"], msgspec.structs.fields(TableSettings)
    assert {*config.origins["sales"], "groups", "iceberg", "hive", "glue"} == {f.name for f in fields}
    own = "\n".join(line.removeprefix("# ") for line in catalogs.splitlines())
    shown = read(file, 'publishers = ["iceberg", "hive", "glue"]\n' + own).tables["sales"]
    assert shown.iceberg is not None
    assert shown.iceberg.table == "shop.sales"
    assert shown.hive == HiveSettings(uri="thrift://metastore:9083", database="lake", table="sales")
    assert shown.glue == GlueSettings(database="lake", table="sales", region="eu-west-1")
    for f in fields:
        if (
            not f.required and f.default is not None and f.name not in ("schema", "read", "groups")
        ):  # those without a default have a likely value
            assert getattr(found, f.name) == f.default


def large(text: str) -> str:
    return f"{REQUIRED}\n[tables.sales.large]\n{text}"


def test_queue_and_size_of_large_partitions_are_read(file: Path) -> None:
    file.write_text(large('queue = "large.sqlite"\nbytes = "1.5GiB"'))
    found = load(str(file), {}).tables["sales"].large
    assert found is not None
    assert (found.queue, found.most_bytes) == (str(file.parent / "large.sqlite"), 3 << 29)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ('queue = "sqs://large"', "bad-setting", "`bytes`"),
        ('bytes = "2GB"', "bad-setting", "`queue`"),
        ('queue = "sqs://large"\nbytes = "much"', "bad-setting", 'expected a size, for example "2GB"'),
        ('queue = "sqs://large"\nbytes = "0"', "bad-setting", 'expected a size, for example "2GB"'),
        ('queue = "sqs://large"\nsize = "2GB"', "unknown-setting", "'size'"),
        ('queue = "sqs://u:secret@large"\nbytes = "2GB"', "credential-in-configuration", "large.queue"),
        ('queue = "processed/_lakeupsert/queue.sqlite"\nbytes = "2GB"', "shared-queue", "'sales'"),
    ],
)
def test_unfit_settings_of_large_partitions_are_refused(file: Path, text: str, code: str, told: str) -> None:
    error = refused(file, large(text))
    assert error.code == code
    assert told in error.message
    assert "secret" not in str(error)


def test_large_partitions_of_engine_spark_are_refused(file: Path) -> None:
    text = large('queue = "sqs://large"\nbytes = "2GB"').replace('key = ["id"]', 'key = ["id"]\nengine = "spark"')
    assert "engine is 'spark'" in refused(file, text).message


def test_queue_of_large_partitions_that_is_another_tables_is_refused(file: Path) -> None:
    text = two_tables('"p1"\nqueue = "q.sqlite"', '"p2"') + '\n[tables.returns.large]\nqueue = "q.sqlite"\nbytes = 1\n'
    error = refused(file, text)
    assert error.code == "shared-queue"
    assert "'sales' and 'returns'" in error.message


HIVE = '[tables.sales.hive]\nuri = "thrift://host:9083"\ndatabase = "lake"\ntable = "sales"\n'
GLUE = '[tables.sales.glue]\ndatabase = "lake"\ntable = "sales"\n'


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ('publishers = ["hive"]', "bad-setting", "[tables.NAME.hive]"),
        ('publishers = ["glue"]', "bad-setting", "[tables.NAME.glue]"),
        (HIVE, "bad-setting", 'publishers = ["hive"]'),
        (GLUE, "bad-setting", 'publishers = ["glue"]'),
        ('publishers = ["hive"]\nstrategy = "delta"\n' + HIVE, "bad-setting", "strategy is 'delta'"),
        (
            'publishers = ["hive"]\n' + HIVE.replace("thrift://host:9083", "host:9083"),
            "bad-setting",
            "thrift://HOST:PORT",
        ),
        (
            'publishers = ["hive"]\n' + HIVE.replace("host", "user:secret@host"),
            "credential-in-configuration",
            "hive.uri",
        ),
        ('publishers = ["hive"]\n' + HIVE.replace('"sales"', '"Sales"'), "bad-setting", "hive.table is 'Sales'"),
        ('publishers = ["glue"]\n' + GLUE.replace('"lake"', '"my lake"'), "bad-setting", "glue.database is 'my lake'"),
        ('publishers = ["glue"]\n' + GLUE + 'zone = "eu"', "unknown-setting", "'zone'"),
        ('publishers = ["glue"]\n[tables.sales.glue]\ndatabase = "lake"', "bad-setting", "`table`"),
    ],
)
def test_unfit_settings_of_a_catalog_are_refused(file: Path, text: str, code: str, told: str) -> None:
    error = refused(file, f"{REQUIRED}\n{text}\n")
    assert error.code == code
    assert told in error.message
    assert "secret" not in str(error)


ICEBERG = '[tables.sales.iceberg]\ntable = "lake.sales"\ncatalog = { type = "glue" }\n'
OF_HIVE = ICEBERG.replace('"glue"', '"hive", uri = "thrift://host:9083"')


@pytest.mark.parametrize(
    "of_iceberg",
    [ICEBERG, ICEBERG.replace("lake.sales", "Lake.Sales"), OF_HIVE, OF_HIVE.replace('type = "hive", ', "")],
)
def test_two_publishers_of_one_name_in_one_catalog_are_refused(file: Path, of_iceberg: str) -> None:
    kind, section = ("hive", HIVE) if "thrift" in of_iceberg else ("glue", GLUE)
    error = refused(file, f'{REQUIRED}\npublishers = ["iceberg", "{kind}"]\n{of_iceberg}{section}')
    assert (error.code, "iceberg.table" in error.message, repr(kind) in error.message) == ("bad-setting", True, True)


@pytest.mark.parametrize(
    "sections",
    [
        ICEBERG.replace("lake.sales", "lake.receipts") + GLUE,
        OF_HIVE.replace("host", "other") + HIVE,
        OF_HIVE + GLUE,
        ICEBERG.replace('type = "glue"', 'uri = "sqlite:///lake.db"') + GLUE,
    ],
)
def test_publishers_of_one_name_in_other_catalogs_are_fine(file: Path, sections: str) -> None:
    kind = "hive" if HIVE in sections else "glue"
    shown = read(file, f'publishers = ["iceberg", "{kind}"]\n{sections}').tables["sales"]
    assert shown.publishers == ("iceberg", kind)


def test_publisher_is_named_once(file: Path) -> None:
    assert "named twice" in refused(file, f'{REQUIRED}\npublishers = ["delta", "delta"]\n').message


@pytest.mark.parametrize(
    "key", ["token", "header.Authorization", "adls.account-key", "adls.connection-string", "s3.secret-access-key"]
)
def test_credential_of_an_iceberg_catalog_is_refused(file: Path, key: str) -> None:
    catalog = f'[tables.sales.iceberg]\ntable = "a.b"\ncatalog = {{ "{key}" = "hunter2" }}\n'
    error = refused(file, f'{REQUIRED}\npublishers = ["iceberg"]\n{catalog}')
    assert error.code == "credential-in-configuration"
    assert "hunter2" not in str(error)


# ---------------------------------------------------------------- variables, profiles and hooks


def with_lake(text: str) -> str:
    return REQUIRED.replace('"landing"', text)


def test_variables_in_texts_are_replaced_and_origins_name_them(file: Path) -> None:
    file.write_text(with_lake('"${LAKE}/landing/$${x}"') + '[tables.sales.read]\naliases = { a = "${COLUMN}" }')
    config = load(str(file), {"LAKE": "/lake", "COLUMN": "b"})
    assert config.tables["sales"].landing == "/lake/landing/${x}"
    assert config.tables["sales"].read.aliases == {"a": "b"}
    assert config.origins["sales"]["landing"] == "file with ${LAKE}"
    assert config.origins["sales"]["processed"] == "file"


@pytest.mark.parametrize(
    ("text", "environment", "code"),
    [
        ("${LAKE}/x", {}, "unset-variable"),
        ("${LAKE}/x", {"LAKE": ""}, "unset-variable"),
        ("${a b}", {"a b": "c"}, "unset-variable"),
        ("${}", {}, "unset-variable"),
        ("${DB_PASSWORD}", {"DB_PASSWORD": "hunter2"}, "credential-in-configuration"),
        ("${aws_secret_access_key}", {"aws_secret_access_key": "hunter2"}, "credential-in-configuration"),
        *(
            (f"${{{name}}}", {name: "hunter2"}, "credential-in-configuration")
            for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "DB_PASS", "DB_PWD", "LAKE_SAS_URL")
        ),
        ("https://me:${WORD}@x/y", {"WORD": "hunter2"}, "credential-in-configuration"),
    ],
)
def test_variable_that_can_not_be_used_is_refused_with_its_place(
    file: Path, text: str, environment: dict[str, str], code: str
) -> None:
    error = refused(file, with_lake(f'"{text}"'), **environment)
    assert error.code == code
    for part in (str(file), "[tables.sales]", "landing"):
        assert part in error.message
    assert "hunter2" not in f"{error}"


PROFILES = """
[profiles.prod]
keep_snapshots = 30
on_failure = ["page"]
read = { null = "N" }
[profiles.prod.tables.sales]
landing = "prod/${ZONE}"
[profiles.test]
strategy = "rewrite"
"""


def test_profile_overrides_tables_and_single_tables(file: Path, tmp_path: Path) -> None:
    file.write_text(f'on_failure = ["mail"]\n{REQUIRED}read = {{ quote = "" }}\n{PROFILES}')
    environment = {"ZONE": "a", "LAKEUPSERT__TABLES__SALES__KEEP_SNAPSHOTS": "31"}
    config = load(str(file), environment, profile="prod")
    sales = config.tables["sales"]
    assert (sales.landing, sales.processed) == (str(tmp_path / "prod/a"), str(tmp_path / "processed"))
    assert (sales.read.null, sales.read.quote) == ("N", ""), "tables are merged"
    assert sales.keep_snapshots == 31, "the environment wins"
    assert config.hooks.on_failure == ("page",)
    origins = config.origins["sales"]
    assert (origins["landing"], origins["read"], origins["key"]) == (
        "profile prod with ${ZONE}",
        "profile prod",
        "file",
    )
    without = load(str(file), {})  # ZONE is not set, and not needed
    assert (without.tables["sales"].keep_snapshots, without.hooks.on_failure) == (7, ("mail",))
    assert load(str(file), {"LAKEUPSERT_PROFILE": "test"}).tables["sales"].strategy == "rewrite"


@pytest.mark.parametrize(
    ("profile", "more", "code", "named"),
    [
        ("prd", "", "unknown-profile", "'prod'"),
        (None, "[profiles.dev]\nkeep_snapshot = 1", "unknown-setting", "[profiles.dev]"),
        (None, "[profiles.dev.tables.sale]\nkey = ['a']", "unknown-table", "[profiles.dev.tables.sale]"),
        (None, "[profiles]\ndev = 1", "bad-setting", "[profiles]"),
        ("dev", "[profiles.dev]\nengine = 'sparc'", "bad-setting", "profile dev"),
        ("dev", "[profiles.dev]\nbucket = 'none'", "bad-setting", "profile dev"),
    ],
)
def test_wrong_profiles_are_refused(file: Path, profile: str | None, more: str, code: str, named: str) -> None:
    file.write_text(f"{REQUIRED}{PROFILES}{more}")
    with pytest.raises(ConfigurationError) as raised:
        load(str(file), {"ZONE": "a"}, profile=profile)
    assert raised.value.code == code
    assert named in raised.value.message


def test_hooks_are_kept_as_they_are_written(file: Path) -> None:
    hooks = 'on_success = ["notify", "--token=${TOKEN}"]\non_failure = "${PAGER}"\n'
    file.write_text(f"{hooks}{REQUIRED}")
    found = load(str(file), {"TOKEN": "hunter2", "PAGER": "https://pager.example/hunter2"}).hooks
    assert found.on_success == ("notify", "--token=${TOKEN}")
    assert found.on_failure == "${PAGER}"


def test_folder_of_a_shell_is_no_credential(file: Path) -> None:
    file.write_text(with_lake('"${PWD}/landing"'))
    assert load(str(file), {"PWD": "/lake"}).tables["sales"].landing == "/lake/landing"


@pytest.mark.parametrize(
    ("hook", "code"),
    [
        ('"notify --now"', "bad-setting"),
        ("[]", "bad-setting"),
        ('["notify", 1]', "bad-setting"),
        ("true", "bad-setting"),
        ('"ftp://pager.example"', "bad-setting"),
        ('"${PAGER}"', "bad-setting"),
        ('["notify", "${NOBODY}", 1]', "bad-setting"),
        ('"https://me:hunter2@pager.example"', "credential-in-configuration"),
        ('"https://pager.example/?token=hunter2"', "credential-in-configuration"),
        ('"https://${PAGER}/?token=hunter2"', "credential-in-configuration"),
        ('["curl", "--url=https://me:hunter2@pager.example"]', "credential-in-configuration"),
        ('"http://[::1/hunter2"', "bad-setting"),
        ('"http://pager.example:hunter2/"', "bad-setting"),
    ],
)
def test_hooks_that_can_not_be_called_are_refused_without_their_value(file: Path, hook: str, code: str) -> None:
    error = refused(file, f"on_failure = {hook}\n{REQUIRED}", PAGER="hunter2")
    assert error.code == code
    assert "on_failure" in error.message
    assert "hunter2" not in f"{error}"


@pytest.mark.parametrize("address", ["s3://$[BUCKET}/x", "~nobody3/x"])
@pytest.mark.parametrize("setting", ["landing", "processed", "queue"])
def test_what_can_be_no_address_is_refused(setting: str, address: str) -> None:
    settings = {"landing": "/l", "processed": "/p", "queue": "sqs://q"} | {setting: address}
    lines = "\n".join(f'{name} = "{value}"' for name, value in settings.items())
    with pytest.raises(ConfigurationError) as raised:
        parse("/lakeupsert.toml", f'[tables.t]\n{lines}\nkey = ["k"]\npartition_by = ["d"]\n'.encode())
    assert raised.value.code == "bad-setting"
