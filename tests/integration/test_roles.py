"""Each command has the rights that it needs, and no role has others: servers behind gates that know the policies of `infra/`.

AWS: versitygw and ElasticMQ, the roles of service.yaml, the bucket policy of lake.yaml. Azure: Azurite, the assignments of the
Terraform module, and Azure's own roles as it documents them. A request without its right is answered as the cloud does.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.endpoint.batches import Batches
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.sources.draft import ENDING, Draft
from lakeupsert.sources.files import SourceFiles
from lakeupsert.storage import open_store
from lakeupsert.storage.azureaccount import EMULATOR
from tests.harness import servers
from tests.harness.lake import Lake, row
from tests.harness.proxy import fault_proxy
from tests.harness.roles import (
    ACCOUNT,
    BLOBS,
    QUEUES,
    Ask,
    Assignment,
    Roles,
    Statement,
    azure_permits,
    blob_asks,
    permits,
    queue_asks,
    s3_asks,
    sqs_asks,
)
from tests.integration.test_infra import (
    KEY,
    REGION,
    SPARK,
    STACK,
    WRITERS,
    create_service,
    created,
    mocked_aws,
    resources,
    statements,
)
from tests.integration.test_lambdas import Context, file, invoke
from tests.integration.test_terraform import MODULES, module

LAKE, LANDING = "roles-lake", "roles-landing"
DAYS = [f"d=2020-01-0{day}" for day in range(1, 4)]
REFUSED = row("a", 0, 1, op="no such operation") | {"l": "no number"}
NEW = {"k": "s", "l": 1, "d": "2020-01-01", "ts": "2020-01-09 00:00:00", "v": 1}


SomeNight = TypeVar("SomeNight", bound="Night")


@dataclass
class Night:
    """A table on a cloud, and commands that are called as somebody.

    Attributes:
        lake: its zones are on the cloud.
        config: the address of its configuration there.
        folder: for files of this machine.
    """

    lake: Lake
    roles: Roles
    config: str
    folder: Path
    function: ClassVar[str] = "app"
    erases_landing: ClassVar[Sequence[str]] = ()

    @contextmanager
    def acting(self, role: str) -> Iterator[None]:
        """Requests of the block need the rights of ``role``."""
        self.roles.role = role
        try:
            yield
        finally:
            self.roles.role = None

    def call(self, role: str, *arguments: str, codes: Sequence[int] = (0,), config: str | None = None) -> Any:
        """What a command answers with the rights of ``role``."""
        with self.acting(role):
            done = CliRunner().invoke(main, [*arguments, "--config", config or self.config, "--json"])
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer["exit_code"] in codes, f"{role}: {arguments}: {answer['error']}"
        return answer["result"]

    def append(self) -> None:
        self.call(self.function, "append", "--host", "local")

    def reconcile(self, failed: int) -> None:
        self.call(self.function, "reconcile", codes=(failed,))

    def reprocess(self) -> None:
        """By a function, which leaves the merges to the workers and is soon out of time."""
        stop = Stop()
        stop.set()
        with self.acting(self.function):
            self.lake.table.reprocess(DAYS[1].__eq__, source="landing", host="local", workers=0, stop=stop)

    def vacuum(self) -> None:
        self.call("people", "vacuum", "--yes")

    def put(self, name: str, data: bytes) -> str:
        """Write a file beside the configuration; its address."""
        folder, _, _ = self.config.rpartition("/")
        with open_store(folder).write(name) as sink:
            sink.write(data)
        return f"{folder}/{name}"

    def elsewhere(self, name: str) -> str:
        """The configuration, on this machine, of the same table at another place."""
        text = self.lake.configure(processed=f"{self.lake.settings.processed}-{name}").read_text()
        (self.folder / f"{name}.toml").write_text(text)
        return str(self.folder / f"{name}.toml")


def play(night: Night, worker: str, operator: str, reader: str) -> None:
    """Two nights and a partition that fails, then what keeps, mends and reads the table, each as somebody."""
    lake, call = night.lake, night.call
    call(operator, "doctor", codes=(0, 1))
    lake.land("0.jsonl", [row(key, day, 1, 1) for key in "abc" for day in range(3)], refused=[REFUSED])
    night.append()
    merge = ("worker", "--until-empty", "--workers", "1")
    call(worker, *merge)
    lake.land("1.jsonl", [row("a", day, 2, 2) for day in range(3)])
    night.append()
    mend = damage_base(night, DAYS[0])
    call(worker, *merge, codes=(1,))
    night.reconcile(failed=1)
    mend()
    assert call(operator, "redrive")["redriven"]
    call(worker, "dedupe")
    night.reconcile(failed=0)
    assert lake.table.snapshots()[0].body.batch == 2
    night.reprocess()
    call(worker, *merge)
    look(night, reader)
    night.vacuum()


def keep(night: Night, operator: str, streamer: str) -> None:
    """What people do with a table, and what `serve`, `capture` and `ingest` do."""
    lake, call = night.lake, night.call
    lake.land("0.jsonl", [row(key, day, 1, 1) for key in "abc" for day in range(2)], refused=[REFUSED])
    call(operator, "run", "--host", "local")
    call(operator, "update", "--set", "v=9", "--where", "k = 'b'", "--yes")
    call(operator, "restore", str(lake.table.snapshots()[1].number), "--yes")
    for command in ("compact --full", "publish --to delta --reset", "maintain --max-seconds 1 --vacuum-seconds 0.1"):
        call(operator, *command.split())
    copy = f"{lake.settings.processed}-backup"
    call(operator, "backup", "--output", copy)
    call(operator, "backup", "--output", copy)
    call(operator, "recover", copy, config=night.elsewhere("recovered"))
    call(operator, "fsck", "--deep", config=night.elsewhere("recovered"))
    call(operator, "rebuild", lake.settings.processed, config=night.elsewhere("rebuilt"))
    (night.folder / "keys.csv").write_text("k,l\nb,0\n")
    erase = ("erase", "--keys", f"{night.folder}/keys.csv", "--reason", "asked", "--yes")
    call(operator, *erase, *night.erases_landing)
    assert {one["k"] for one in lake.rows()} == {"a", "c"}
    stream(night, streamer)


def look(night: Night, reader: str) -> None:
    """Every command that only looks."""
    out = night.folder
    for command in (
        *("status", "history", "files", "quarantine", "head", "schema", "config", "fsck --deep", "query from(t)"),
        *("explain k=a l=0", "diff 0 latest --rows", "reprocess --partition 2020-01-01 --dry-run"),
        *(f"report --output {out}/report.html", f"export --output {out}/rows.csv --snapshot latest"),
    ):
        night.call(reader, *command.split(" ") if not command.startswith("query") else ("query", "from t"))


def stream(night: Night, role: str) -> None:
    """What `serve`, `capture` and `ingest` do: a batch of a client, a file of a source, and a batch with both."""
    opened = OpenTable("t", night.lake.settings)
    draft = Draft(0, 1, 1)
    draft.add(json.dumps(NEW | {"k": "c"}).encode())
    with night.acting(role):
        assert not Batches(opened).receive("one", "application/x-ndjson", json.dumps(NEW).encode())
        source = SourceFiles(opened, "n", ENDING)
        assert source.leadership.lead()
        source.begin()
        source.land(draft.take(), "1")
    night.call(role, "ingest", "--max-seconds", "3", "--publish-seconds", "0")


def damage_base(night: Night, partition: str) -> Callable[[], None]:
    """Damage what a merge of the partition reads. Call what this returns to mend it."""
    store = open_store(night.lake.settings.processed)
    [name] = {file.name for file in night.lake.table.files() if file.name.startswith(partition)}
    good = store.get(name)
    with store.write(name) as sink:
        sink.write(bytes(len(good)))

    def mend() -> None:
        with store.write(name) as sink:
            sink.write(good)

    return mend


def refused(roles: Roles) -> set[tuple[str, str, str]]:
    """Which role lacked which right, and below which folder."""
    assert not roles.unknown
    return {(c.role, c.ask.actions[0], kind_of(c.ask.resource)) for c in roles.calls if not c.allowed}


def kind_of(resource: str) -> str:
    """A resource without what differs from run to run."""
    return re.sub(r"/(d=|v\d{20}|[^/]*[0-9a-f]{12}).*", "", resource)


# ---------------------------------------------------------------- AWS


class LambdaNight(Night):
    """By the functions of `lambdas/`, with more calls than the command line has: they measure."""

    erases_landing = ("--landing",)

    def append(self) -> None:
        with self.acting("AppendNightly"):
            invoke("append_nightly", file("append_nightly", "event"))

    def reconcile(self, failed: int) -> None:
        with self.acting("Reconcile"):
            assert invoke("reconcile", {})["failed"] == failed

    def reprocess(self) -> None:
        event = {"table": "t", "from": "2020-01-02", "to": "2020-01-02", "source": "landing"}
        with self.acting("Reprocess"):
            assert invoke("reprocess", event, Context(lambda: 60_100))["left"] == [DAYS[1]]

    def vacuum(self) -> None:
        with self.acting("Vacuum"):
            invoke("vacuum", {})


@pytest.fixture(scope="module")
def policies() -> dict[str, list[Statement]]:
    """By role all statements that count for it: its own and those of the lake's bucket."""
    with mocked_aws():
        create_service(LandingBucket=LANDING, LakeBucket=LAKE, KmsKeyArn=KEY, GlueTable="lake/sales", **SPARK)
        own = {role.removesuffix("Role"): statements(name) for role, name in created("AWS::IAM::Role").items()}
    [policy] = [
        p["Properties"]["PolicyDocument"]
        for name, p in resources("lake.yaml", "AWS::S3::BucketPolicy").items()
        if name == "LakeBucketPolicy"
    ]
    text = json.dumps(policy["Statement"]).replace('{"Fn::GetAtt": ["LakeBucket", "Arn"]}', f'"arn:aws:s3:::{LAKE}"')
    text = re.sub(r'\{"Fn::Sub": ("[^"]*")\}', r"\1", text).replace("${LakeBucket.Arn}", f"arn:aws:s3:::{LAKE}")
    return {role: [*found, *json.loads(text)] for role, found in own.items()}


@pytest.fixture(scope="module")
def aws_cloud(
    versitygw: servers.Server,
    elasticmq: servers.Server,
    policies: dict[str, list[Statement]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], LambdaNight]]:
    """Makes tables by their names, behind gates with the roles of the stack."""
    config = f"s3://{LAKE}/lakeupsert.toml"
    more = {"LAKEUPSERT_CONFIG": config, "LAKEUPSERT_LOCAL_BYTES": "1000000", "POWERTOOLS_SERVICE_NAME": STACK}
    with fault_proxy(versitygw) as s3, fault_proxy(elasticmq) as sqs, pytest.MonkeyPatch.context() as patch:
        for name, value in {**s3.server.env, **sqs.server.env, **more}.items():
            patch.setenv(name, value)
        for bucket in (LAKE, LANDING):
            servers.new_bucket(bucket)
        servers.new_queue(f"{STACK}-work", max_receive_count=2)

        def make(name: str) -> LambdaNight:
            roles = Roles(lambda role, ask: permits(policies[role], ask))
            s3.gate, sqs.gate = roles.gate(s3_asks), roles.gate(sqs_asks)
            places = f"s3://{LANDING}/{name}", f"s3://{LAKE}/processed/{name}", f"sqs://{STACK}-work"
            return begin(LambdaNight, tmp_path_factory.mktemp(name), roles, config, *places)

        yield make


@pytest.fixture(scope="module")
def aws_night(aws_cloud: Callable[[str], LambdaNight]) -> Roles:
    night = aws_cloud("night")
    play(night, "DedupeWorker", "Operator", "Reader")
    return night.roles


@pytest.fixture(scope="module")
def aws_keeping(aws_cloud: Callable[[str], LambdaNight]) -> Roles:
    night = aws_cloud("keeping")
    keep(night, "Operator", "Stream")
    return night.roles


def begin(
    kind: type[SomeNight], folder: Path, roles: Roles, config: str, landing: str, processed: str, queue: str
) -> SomeNight:
    settings = {"keep_snapshots": 3, "superseded_retention": "1s", "publishers": ("delta",), "strategy": "rewrite"}
    lake = Lake(folder, landing=landing, processed=processed, queue=queue, **settings)
    night = kind(lake, roles, config, folder)
    night.put("lakeupsert.toml", lake.configure().read_bytes())
    return night


def test_a_night_has_the_rights_that_it_needs(aws_night: Roles) -> None:
    assert {call.role for call in aws_night.calls} == {
        *("AppendNightly", "DedupeWorker", "Reconcile", "Reprocess", "Operator", "Reader", "Vacuum")
    }
    assert refused(aws_night) == {
        (
            "Reader",
            "sqs:GetQueueUrl",
            f"arn:aws:sqs:{REGION}:{ACCOUNT}:{STACK}-work",
        ),  # `status` warns that it has no counts
        # Whether the zone has a table of another format. Without the right nobody looks.
        ("Reader", "s3:ListBucket", f"arn:aws:s3:::{LANDING}"),
        ("Reconcile", "s3:ListBucket", f"arn:aws:s3:::{LANDING}"),
    }


def test_people_and_streams_have_the_rights_that_they_need(aws_keeping: Roles) -> None:
    assert {call.role for call in aws_keeping.calls} == {"Operator", "Stream"}
    assert refused(aws_keeping) == set()


IDLE = {
    "s3:AbortMultipartUpload": "of a file above 64 MB whose upload broke off",
    "kms:": "S3 asks for it, not lakeupsert",
    "glue:": "a table here has no such publisher",
    "logs:": "the platform's",
    "cloudwatch:": "the platform's",
    "emr-serverless:": "nights above LocalBytes",
    "iam:PassRole": "the same",
    "lambda:": "the scheduler's",
    "Reconcile s3:PutObject": "a snapshot that the last worker had no time for",
    "Reconcile sqs:SendMessage": "messages that were lost",
    "DedupeWorker sqs:SendMessage": "what it had no time to begin",
    "Operator sqs:ChangeMessageVisibility": "a merge that lasts, or fails",
    "Operator sqs:SendMessage": "a merge that failed at each try",
    "Stream sqs:SendMessage": "the same",
    "Stream sqs:ChangeMessageVisibility": "the same",
    "Stream sqs:DeleteMessage": "messages of others",
    "Stream sqs:GetQueueAttributes": "`status`",
    "Stream s3:DeleteObject": "positions of the day before",
    "Reprocess s3:ListBucket": "without it, S3 says 403 of a landing file that is gone",
}
"""Rights that the night here has no call for."""


def test_no_role_has_a_right_without_use(
    aws_night: Roles, aws_keeping: Roles, policies: dict[str, list[Statement]]
) -> None:
    unused, calls = set(), aws_night.calls + aws_keeping.calls
    for role in {call.role for call in calls}:
        asked = [call.ask for call in calls if call.role == role]
        for statement in policies[role]:
            given = statement["Action"], statement["Resource"]
            actions, places = ([x] if isinstance(x, str) else x for x in given)
            if statement["Effect"] == "Deny":
                continue
            unused |= {
                (role, action, place)
                for action in actions
                for place in places
                if not f"{role} {action}".startswith(tuple(IDLE))
                and not action.startswith(tuple(IDLE))
                and not any(permits([{**statement, "Action": action, "Resource": place}], ask) for ask in asked)
            }
    assert not unused, sorted(unused)


def test_no_role_can_replace_a_commit_or_delete_a_version(
    aws_keeping: Roles, policies: dict[str, list[Statement]]
) -> None:
    """Each object that somebody created only if it was absent, put by everybody without that condition."""
    created = {c.ask.resource for c in aws_keeping.calls if "s3:if-none-match" in c.ask.context}
    commits = {one for one in created if re.search(r"/v\d{20}|_delta_log/\d{20}|/batches/|/sources/", one)}
    folders = {found[1] for one in commits if (found := re.search(r"/_lakeupsert/(\w+)/", one))}
    assert {"spec", "ledger", "reading", "snapshots", "leases", "upkeep", "backups", "batches"} <= folders
    for role, found in policies.items():
        for one in commits - {c for c in commits if c.startswith(f"arn:aws:s3:::{LANDING}")}:
            assert not permits(found, Ask(("s3:PutObject",), one, {"aws:SecureTransport": "true"})), (role, one)
        assert not permits(found, Ask(("s3:DeleteObjectVersion",), f"arn:aws:s3:::{LAKE}/processed/night/x")), role


def test_roles_are_refused_what_is_anothers(policies: dict[str, list[Statement]]) -> None:
    data, landed = (
        f"arn:aws:s3:::{LAKE}/processed/night/d=2020-01-01/base-1-0.parquet",
        f"arn:aws:s3:::{LANDING}/night/a.csv",
    )
    lease = f"arn:aws:s3:::{LAKE}/processed/night/_lakeupsert/leases/v1.json"
    config, script = f"arn:aws:s3:::{LAKE}/lakeupsert.toml", f"arn:aws:s3:::{LAKE}/code/append.py"
    queue, dead, scheduled = (
        f"arn:aws:sqs:{REGION}:{ACCOUNT}:{STACK}-{name}" for name in ("work", "work-dead", "schedule-dead")
    )
    appenders = {"AppendNightly", "Operator", "Reprocess", "Spark", "Stream"}
    allowed: dict[tuple[str, str], set[str]] = {
        ("s3:GetObject", data): {*WRITERS, "Reader"},
        ("s3:PutObject", data): WRITERS,
        ("s3:DeleteObject", data): {"Operator", "Vacuum"},
        ("s3:DeleteObject", lease): {"Operator", "Stream", "Vacuum"},
        ("s3:DeleteObjectVersion", data): set(),
        ("s3:ListBucket", f"arn:aws:s3:::{LAKE}"): {*WRITERS, "Reader"},
        ("s3:DeleteBucket", f"arn:aws:s3:::{LAKE}"): set(),
        ("s3:PutLifecycleConfiguration", f"arn:aws:s3:::{LAKE}"): set(),
        ("s3:GetObject", config): {*WRITERS, "Reader"},
        ("s3:PutObject", config): set(),
        ("s3:DeleteObject", config): set(),
        ("s3:GetObject", script): {"Spark"},
        ("s3:PutObject", script): set(),
        ("s3:GetObject", landed): appenders,
        ("s3:ListBucket", f"arn:aws:s3:::{LANDING}"): appenders,
        ("s3:PutObject", landed): {"Stream"},
        ("s3:DeleteObject", landed): {"Operator"},
        ("s3:DeleteObjectVersion", landed): set(),
        ("sqs:SendMessage", queue): {*appenders, "DedupeWorker", "Reconcile"},
        ("sqs:ReceiveMessage", queue): {"DedupeWorker", "Operator", "Stream"},
        ("sqs:DeleteMessage", queue): {"DedupeWorker", "Operator", "Stream"},
        ("sqs:ChangeMessageVisibility", queue): {"DedupeWorker", "Operator", "Stream"},
        ("sqs:PurgeQueue", queue): set(),
        ("sqs:SendMessage", dead): {"DedupeWorker", "Operator", "Stream"},
        ("sqs:ReceiveMessage", dead): {"Operator", "Reconcile"},
        ("sqs:DeleteMessage", dead): {"Operator"},
        ("sqs:SendMessage", scheduled): {"Schedule"},
        ("kms:GenerateDataKey", KEY): WRITERS,
        ("kms:Decrypt", KEY): {*WRITERS, "Reader"},
    }
    for (action, where), expected in allowed.items():
        context = {"aws:SecureTransport": "true"}
        found = {role for role, own in policies.items() if permits(own, Ask((action,), where, context))}
        assert found == expected, (action, where)
        if "s3" in action and LAKE in where:
            plain = {"aws:SecureTransport": "false"}
            assert not [role for role, own in policies.items() if permits(own, Ask((action,), where, plain))]


# ---------------------------------------------------------------- Azure

BUILT_IN = {
    "Storage Blob Data Reader": ([f"{BLOBS}/read"], [f"{BLOBS}/blobs/read"]),
    "Storage Blob Data Contributor": (
        [f"{BLOBS}/{action}" for action in ("delete", "read", "write")],
        [f"{BLOBS}/blobs/{action}" for action in ("delete", "read", "write", "move/action", "add/action")],
    ),
    "Storage Queue Data Contributor": (
        [f"{QUEUES}/{action}" for action in ("delete", "read", "write")],
        [f"{QUEUES}/messages/{action}" for action in ("delete", "read", "write", "process/action")],
    ),
}
"""Actions and data actions of Azure's own roles, as "Azure built-in roles for Storage" has them."""


def assigned(scope: str, role: str) -> Assignment:
    return Assignment(scope, *BUILT_IN[role])


def declared(type_: str) -> dict[str, Any]:
    """By name the module's resources of a type."""
    blocks = [block[type_] for block in module(MODULES[2])["resource"] if type_ in block]
    return {name: body for block in blocks for name, body in block.items()}


def app_roles(writer: Callable[[str], Assignment]) -> list[Assignment]:
    """What the module assigns to the functions' identity, but for the roles of their host."""
    found = []
    for name, body in declared("azurerm_role_assignment").items():
        container = re.search(r'azurerm_storage_container\.lake\["(\w+)"\]', body["scope"])
        scope = f"lake/{container[1]}" if container else "work"
        if not name.startswith("hosts_"):
            role = body.get("role_definition_name")
            found.append(assigned(scope, role) if role else writer(scope))
    return found


@pytest.fixture(scope="module")
def assignments() -> dict[str, list[Assignment]]:
    [given] = declared("azurerm_role_definition")["writer"]["permissions"]

    def writer(scope: str) -> Assignment:
        return Assignment(scope, given["actions"], given["data_actions"])

    contributor, queues = "Storage Blob Data Contributor", assigned("work", "Storage Queue Data Contributor")
    reads = {name: assigned(f"lake/{name}", "Storage Blob Data Reader") for name in ("landing", "processed", "config")}
    return {
        "app": app_roles(writer),
        "people": [reads["landing"], reads["config"], assigned("lake/processed", contributor), queues],
        "reader": [reads["processed"], reads["config"]],
        "stream": [reads["config"], writer("lake/landing"), assigned("lake/processed", contributor), queues],
    }


@pytest.fixture(scope="module")
def azure_cloud(
    azurite: servers.Server, assignments: dict[str, list[Assignment]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Night]]:
    """Makes tables by their names, behind gates with the assignments of the module."""
    assert azurite.queues is not None
    with fault_proxy(azurite) as blobs, fault_proxy(azurite.queues) as queues, pytest.MonkeyPatch.context() as patch:
        for name, value in blobs.server.env.items():
            patch.setenv(name, queues.moved(value))
        for container in ("landing", "processed", "config"):
            servers.new_container(container)

        def make(name: str) -> Night:
            servers.new_azure_queue(f"roles-{name}")
            roles = Roles(lambda role, ask: azure_permits(assignments[role], ask))
            blobs.gate, queues.gate = roles.gate(blob_asks), roles.gate(queue_asks)
            places = f"az://landing/{name}", f"az://processed/{name}", f"azqueue://{EMULATOR}/roles-{name}"
            return begin(Night, tmp_path_factory.mktemp(name), roles, "az://config/lakeupsert.toml", *places)

        yield make


def test_a_night_on_azure_has_the_rights_that_it_needs(azure_cloud: Callable[[str], Night]) -> None:
    night = azure_cloud("night")
    play(night, "app", "people", "reader")
    assert {call.role for call in night.roles.calls} == {"app", "people", "reader"}
    assert refused(night.roles) == {  # as on AWS
        ("reader", f"{QUEUES}/messages/read", "work/roles-night"),
        ("reader", f"{BLOBS}/blobs/read", "lake/landing"),
    }


def test_people_and_streams_have_the_rights_that_they_need_on_azure(azure_cloud: Callable[[str], Night]) -> None:
    night = azure_cloud("keeping")
    keep(night, "people", "stream")
    assert {call.role for call in night.roles.calls} == {"people", "stream"}
    assert refused(night.roles) == set()


def test_the_functions_of_azure_may_neither_delete_nor_write_elsewhere(
    assignments: dict[str, list[Assignment]],
) -> None:
    allowed = {
        (f"{BLOBS}/blobs/delete", "lake/processed"): {"people", "stream"},
        (f"{BLOBS}/blobs/delete", "lake/landing"): set(),
        (f"{BLOBS}/blobs/write", "lake/processed"): {"app", "people", "stream"},
        (f"{BLOBS}/blobs/write", "lake/landing"): {"stream"},
        (f"{BLOBS}/blobs/write", "lake/config"): set(),
        (f"{BLOBS}/delete", "lake/processed"): {"people", "stream"},
        (f"{QUEUES}/messages/process/action", "work/roles-work"): {"app", "people", "stream"},
    }
    for (action, where), expected in allowed.items():
        found = {role for role, own in assignments.items() if azure_permits(own, Ask((action,), where))}
        assert found == expected, (action, where)


# ---------------------------------------------------------------- the evaluators


@pytest.mark.parametrize(
    ("condition", "context", "expected"),
    [
        ({"StringEquals": {"a:b": ["x", "y"]}}, {"a:b": "y"}, True),
        ({"StringEquals": {"a:b": "x"}}, {}, False),
        ({"StringLike": {"a:b": "x/*"}}, {"a:b": "x/y"}, True),
        ({"Null": {"a:b": "true"}}, {}, True),
        ({"Null": {"a:b": "true"}}, {"a:b": "*"}, False),
        ({"Bool": {"a:b": "false"}}, {"a:b": "true"}, False),
    ],
)
@pytest.mark.few(6)
def test_conditions_are_those_of_iam(condition: Statement, context: dict[str, str], expected: bool) -> None:
    statement = {"Effect": "Allow", "Action": "s3:Get*", "Resource": "arn:?:b/*", "Condition": condition}
    ask = Ask(("s3:GetObject",), "arn:x:b/c", context)
    assert permits([statement], ask) is expected
    assert permits([{**statement, "Condition": {}}, {**statement, "Effect": "Deny"}], ask) is not expected
    assert not permits([{**statement, "Condition": {}}], replace(ask, resource="arn:xx:b/c"))


def test_what_the_evaluator_does_not_know_is_an_error() -> None:
    statement = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    ask = Ask(("s3:GetObject",), "arn:aws:s3:::b/c")
    for more in ({"NotAction": "s3:Put*"}, {"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}):
        with pytest.raises(ValueError, match="not evaluated here"):
            permits([{**statement, **more}], ask)
    with pytest.raises(ValueError, match="not evaluated here"):
        s3_asks("PUT", "/b/c?acl", {}, b"")


def test_not_actions_take_away_what_actions_give() -> None:
    one = Assignment("lake", ["*"], [f"{BLOBS}/blobs/*"], not_data_actions=[f"{BLOBS}/blobs/delete"])
    assert azure_permits([one], Ask((f"{BLOBS}/blobs/read",), "lake/x"))
    assert not azure_permits([one], Ask((f"{BLOBS}/blobs/delete",), "lake/x"))
    assert not azure_permits([one], Ask((f"{BLOBS}/blobs/read",), "lakeside/x"))
    assert not azure_permits([Assignment("lake", ["*"], [])], Ask((f"{BLOBS}/blobs/read",), "lake")), "no data action"
