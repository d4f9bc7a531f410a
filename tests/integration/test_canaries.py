"""Secrets are in nothing that leaves a process: output, logs, --json, reports, metadata, quarantine, command lines.

Each secret here has the same rare text. Each case makes commands fail in one way; then every byte that they printed or wrote is
searched for that text, as it is and as Base64.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

import lakeupsert
from lakeupsert.cli import main
from lakeupsert.errors import LakeupsertError
from lakeupsert.storage import azureaccount, s3
from tests.harness.endpoint import CONFIG, served
from tests.harness.servers import HOST, Server, free_port

CANARY = "kAnAriEnVoGeL7"
KEY = base64.b64encode(f"{CANARY} as an account key".encode()).decode()
ROWS = "id,day,ts,v\na,2020-01-01,1,1\nb,2020-01-01,x,1\n"
TABLE = CONFIG + 'quarantine_limit = "100%"\nschema = { id = "string", day = "date", ts = "bigint", v = "bigint" }\n'
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}-aws",
    "AWS_SESSION_TOKEN": f"{CANARY}-session",
    "AZURE_STORAGE_SAS_TOKEN": f"sv=2024-01-01&sig={CANARY}",
    "AZURE_CLIENT_SECRET": f"{CANARY}-client",
    "PGPASSWORD": f"{CANARY}-pg",
    "LAKEUPSERT__SOURCES__SHOP__PASSWORD": f"{CANARY}-source",
    "LAKEUPSERT_TOKEN": f"{CANARY}-bearer",
    "PYICEBERG_CATALOG__ELSEWHERE__TOKEN": f"{CANARY}-catalog",
    "FSSPEC_SFTP_PASSWORD": f"{CANARY}-sftp",
}
NIGHT = (
    "run --host local --workers 2",
    "status",
    "report --output report.html",
    "quarantine",
    "history",
    "config",
    "plan",
)
LOOKS = ("run --host local", "status", "doctor", "config")


@dataclass(frozen=True)
class Case:
    """One way to fail.

    Attributes:
        config: the configuration; `{closed}` is a port at which nothing listens, `{folder}` the folder.
        commands: called with it, whatever comes of each.
        env: more of the environment, with the same words.
        files: more files, which are not searched.
        codes: error codes of which each must come, so that the case does fail as it says.
    """

    config: str
    commands: Sequence[str] = LOOKS
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    codes: Sequence[str] = ()


def stored(address: str) -> str:
    return TABLE.replace('"landing"', f'"{address}/landing"').replace('"processed"', f'"{address}/processed"') + (
        'queue = "{folder}/queue.sqlite"\n'
    )


SHOP = '[sources.shop]\ntable = "sales"\n'
KAFKA = f'{SHOP}from = "kafka://me@{HOST}:{{closed}}"\ntopics = ["x"]\n'
AZURE = f"AccountName=devstoreaccount1;AccountKey={KEY};BlobEndpoint=http://{HOST}:{{closed}}/devstoreaccount1"
S3 = {"AWS_ENDPOINT_URL": f"http://{HOST}:{{closed}}", "AWS_ACCESS_KEY_ID": "access", "AWS_DEFAULT_REGION": "us-east-1"}
CASES = {
    "a night with hooks that fail": Case(
        'on_success = ["/${{HOOK}}/page"]\n' + TABLE,
        (
            *NIGHT,
            "run --host local",
            "audit",
            "backup --output copy",
            "export --output rows.csv",
            "reconcile",
            "fsck --deep",
        ),
        {"HOOK": f"{CANARY}-hook"},
    ),
    "S3 refuses the connection": Case(stored("s3://bucket"), LOOKS, S3, codes=["store-unreachable"]),
    "Azure refuses the connection": Case(
        stored("az://container"), LOOKS, {"AZURE_STORAGE_CONNECTION_STRING": AZURE}, codes=["store-unreachable"]
    ),
    "Azure has no such connection string": Case(
        stored("az://container"), LOOKS, {"AZURE_STORAGE_CONNECTION_STRING": f"AccountKey {KEY}"}
    ),
    "no broker": Case(
        f'{TABLE}{KAFKA}properties = "client.properties"\n',
        ("doctor", "config", "status"),
        files={
            "client.properties": f"sasl.mechanism=PLAIN\nsecurity.protocol=SASL_PLAINTEXT\nsasl.password={CANARY}\n"
        },
    ),
    "properties that nobody can read": Case(
        f'{TABLE}{KAFKA}properties = "client.properties"\n',
        ("doctor", "capture"),
        files={"client.properties": f"no.such.property={CANARY}\n{CANARY}\n"},
    ),
    "a password file that is no text": Case(
        f'{TABLE}{KAFKA}password_file = "password"\n',
        ("capture", "doctor"),
        files={"password": f"{CANARY}\udcff"},
        codes=["bad-setting"],
    ),
    "a password in a file that is none": Case(
        f'{TABLE}{KAFKA}password_file = "{CANARY}', ("run", "config", "capture"), codes=["unreadable-configuration"]
    ),
    "a password as a setting": Case(f'{TABLE}{KAFKA}password = "{CANARY}"\n', codes=["unknown-setting"]),
    "a password in the address of a database": Case(
        f'{TABLE}{SHOP}from = "postgresql://me:{CANARY}@db/x"\ntables = ["a.b"]\n',
        codes=["credential-in-configuration"],
    ),
    "a password in the address of a broker": Case(
        f'{TABLE}{SHOP}from = "kafka://me:{CANARY}@db:1"\ntopics = ["a"]\n', codes=["credential-in-configuration"]
    ),
    "a signed address": Case(
        TABLE.replace('"landing"', f'"https://host/x?X-Amz-Signature={CANARY}"'), codes=["credential-in-configuration"]
    ),
    "an address with a shared access signature": Case(
        TABLE.replace('"landing"', f'"abfss://c@a.dfs.core.windows.net/x?sig={CANARY}"'),
        codes=["credential-in-configuration"],
    ),
    "an address with a password": Case(
        TABLE.replace('"landing"', f'"sftp://me:{CANARY}@host/x"'), codes=["credential-in-configuration"]
    ),
    "a hook with a token": Case(
        f'on_failure = "https://h/?token={CANARY}"\n{TABLE}', codes=["credential-in-configuration"]
    ),
    "a secret variable in a setting": Case(
        TABLE.replace('"landing"', '"${{PGPASSWORD}}/x"'), codes=["credential-in-configuration"]
    ),
    "a catalog that is away": Case(
        f'{TABLE}publishers = ["iceberg"]\niceberg = {{ table = "a.b", catalog = {{ type = "rest", uri = "http://{HOST}:'
        '{closed}" }, catalog_name = "elsewhere" }\n',
        ("run --host local", "status", "config"),
    ),
}


def leaks(*texts: bytes) -> list[str]:
    """Where the canary is, with what is around it."""
    words = [CANARY.encode(), *(base64.b64encode(b" " * n + CANARY.encode())[4:-4] for n in range(3))]
    pattern = re.compile(b".{0,60}(" + b"|".join(map(re.escape, words)) + b").{0,20}", re.DOTALL)
    return [str(found[0]) for text in texts for found in pattern.finditer(text)]


@contextmanager
def watched() -> Iterator[list[bytes]]:
    """Every command line that there is meanwhile, of any process of this machine."""
    seen: set[bytes] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    seen.add(file.read_bytes())

    found: list[bytes] = []
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found += seen


def written(folder: Path, secret: Sequence[str]) -> dict[str, bytes]:
    """The bytes of each file below the folder, without those that have secrets on purpose."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in secret}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(s3, "STORE_ATTEMPTS", 1)
    monkeypatch.setattr(azureaccount, "STORE_ATTEMPTS", 1)
    monkeypatch.setenv("LAKEUPSERT_DEBUG", "1")  # the most that is ever said
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing/0.csv").write_text(ROWS)
    return tmp_path


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_no_secret_leaves_a_command(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    case = CASES[name]
    words = {"closed": str(free_port()), "folder": str(folder)}
    for variable, value in case.env.items():
        monkeypatch.setenv(variable, _filled(value, words))
    for file, text in case.files.items():
        (folder / file).write_text(text, errors="surrogateescape")
    (folder / "lakeupsert.toml").write_text(_filled(case.config, words))
    said, codes = b"", set()
    with watched() as lines:
        for command in case.commands:
            for form in ([], ["--json"]):
                done = CliRunner().invoke(main, [*command.split(), *form])
                said += done.stdout_bytes + done.stderr_bytes + repr(done.exception).encode()
                if form and done.stdout:
                    codes.add((json.loads(done.stdout.splitlines()[-1])["error"] or {}).get("code"))
    assert codes >= set(case.codes), "the case does not fail as it says"
    assert leaks(said, *capfdbinary.readouterr(), *lines) == []
    files = written(folder, ["lakeupsert.toml", *case.files])
    assert {name: found for name, data in files.items() if (found := leaks(data))} == {}


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", value)
    return text.replace("${{", "${").replace("}}", "}")


def test_no_token_leaves_a_server_or_its_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lakeupsert.toml").write_text(TABLE)
    (folder / "token").write_text(f"{CANARY}-file\n")
    with watched() as lines, served(folder, "--token-file", "token", token=f"{CANARY}-file") as server:
        assert server.post("one", ROWS)[0] == 422
        answers = [server.post(f"b{n}", ROWS, Authorization=f"Bearer {CANARY}-wrong{n}") for n in range(2)]
        server.post(CANARY[:4], b"\xff", "application/jsonl")
        server.process.terminate()
        out, errors = server.process.communicate(timeout=60)
    assert [answer[0] for answer in answers] == [403, 403]
    with pytest.raises(LakeupsertError) as refused:
        lakeupsert.Client(f"http://{HOST}:{free_port()}/tables/sales", token=f"{CANARY}-client").send(
            [{"id": "a"}], "a"
        )
    said = [repr(answers), out, errors, str(refused.value), repr(refused.value), refused.getrepr().reprcrash.message]
    assert leaks(*(str(text).encode() for text in said), *lines) == []
    assert {n for n, data in written(folder, ["token"]).items() if leaks(data)} == set()


@pytest.mark.few(2)
@pytest.mark.parametrize("server", ["versitygw", "azurite"])
def test_no_secret_leaves_a_command_whose_store_refuses_it(
    server: str,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """A wrong password: what a server says of it, for example the text that it expected to be signed, is in errors."""
    found: Server = request.getfixturevalue(server)
    for name, value in found.env.items():
        right = "AccountKey=" in value and re.sub(r"AccountKey=[^;]+", f"AccountKey={KEY}", value)
        monkeypatch.setenv(name, right or SECRETS.get(name, value))
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    place = "s3://bucket" if server == "versitygw" else "az://container"
    (folder / "lakeupsert.toml").write_text(_filled(stored(place), {"folder": str(folder)}))
    said = b""
    for command in LOOKS:
        done = CliRunner().invoke(main, [*command.split(), "--json"])
        said += done.stdout_bytes + done.stderr_bytes + repr(done.exception).encode()
    assert b"bad-credentials" in said or b"not-permitted" in said
    assert leaks(said, *capfdbinary.readouterr()) == []
    assert {n for n, data in written(folder, ["lakeupsert.toml"]).items() if leaks(data)} == set()
