"""The CloudFormation templates: created under moto, then what was created is looked at.

moto's CloudFormation makes queues, roles, policies, functions, their event source, buckets (with encryption alone), topics,
log groups, repositories and state machines. What it does not make is taken out before (`NOT_IN_MOTO`) and looked at as it
stands in the template: alarms, schedules, rules, endpoints, policies of buckets and topics, subscriptions. The EMR Serverless
application is replaced by a topic, so that what names it can be created. Nothing here ran against AWS.
"""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

import boto3
import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.operations.doctor import FUNCTION_SECONDS
from lakeupsert.retries import LEASE_SECONDS
from lambdas.append_nightly.night import ATTEMPTS
from tests.harness.processes import wait_until
from tests.harness.roles import Ask, permits
from tests.harness.servers import free_port

ROOT = Path(__file__).parents[2]
AWS = ROOT / "infra" / "aws"
STACK = "sales"
REGION = "eu-central-1"
NOT_IN_MOTO = {
    "AWS::CloudWatch::Alarm",
    "AWS::EC2::VPCEndpoint",
    "AWS::Events::Rule",
    "AWS::S3::BucketPolicy",
    "AWS::SNS::Subscription",
    "AWS::SNS::TopicPolicy",
    "AWS::Scheduler::Schedule",
}
NO_VALUE = {"Ref": "AWS::NoValue"}
FUNCTIONS = {"append_nightly", "dedupe_worker", "reconcile", "reprocess", "vacuum"}
WRITERS = {"AppendNightly", "DedupeWorker", "Operator", "Reconcile", "Reprocess", "Spark", "Stream", "Vacuum"}
"""Roles that may write to the table, and so publish."""
SPARK = {"SparkImage": "spark@sha256:1", "SparkRelease": "r", "SparkSubnets": "subnet-1", "SparkSecurityGroups": "sg-1"}
KEY = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short forms, which become the long ones."""


def _function(loader: Any, suffix: str, node: Any) -> Any:
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    if suffix == "GetAtt":
        value = value.split(".")
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _function)


def template(name: str) -> dict[str, Any]:
    return deepcopy(_parsed(name))


@cache
def _parsed(name: str) -> dict[str, Any]:
    return yaml.load((AWS / name).read_text(), _Loader)


def resources(name: str, type_: str) -> dict[str, Any]:
    found = {k: r for k, r in template(name)["Resources"].items() if r["Type"] == type_}
    assert found
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a local table with one row landed."""
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / "a.csv").write_text("id,day,record_timestamp\n1,2020-01-01,1\n")
    file = tmp_path / "lakeupsert.toml"
    file.write_text('[tables.t]\nlanding="landing"\nprocessed="processed/t"\nkey=["id"]\npartition_by=["day"]\n')
    return file


@contextmanager
def mocked_aws() -> Iterator[None]:
    """AWS by moto, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        import moto

        with moto.mock_aws():
            yield


@pytest.fixture
def aws() -> Iterator[None]:
    with mocked_aws():
        yield


def decided(node: Any, conditions: Mapping[str, bool]) -> Any:
    """``node`` with each `Fn::If` decided, as AWS does; moto would leave a None in lists for `AWS::NoValue`."""
    if isinstance(node, dict) and "Fn::If" in node:
        condition, yes, no = node["Fn::If"]
        return decided(yes if conditions[condition] else no, conditions)
    if isinstance(node, dict):
        return {k: v for k, x in node.items() if (v := decided(x, conditions)) != NO_VALUE}
    return [v for x in node if (v := decided(x, conditions)) != NO_VALUE] if isinstance(node, list) else node


def holds(condition: Any, given: Mapping[str, Any]) -> bool:
    """Whether a condition of the templates holds for these values of the parameters."""
    if "Fn::Not" in condition:
        return not holds(condition["Fn::Not"][0], given)
    left, right = condition["Fn::Equals"]
    return str(given[left["Ref"]]) == str(right)


def create(name: str, **parameters: str) -> dict[str, str]:
    """Create the template's stack under moto, without what that can't make; the stack's outputs."""
    body = template(name)
    given = {k: parameters.get(k, p.get("Default", "")) for k, p in body["Parameters"].items()}
    body = decided(body, {name: holds(condition, given) for name, condition in body.get("Conditions", {}).items()})
    body["Resources"] = {k: r for k, r in body["Resources"].items() if r["Type"] not in NOT_IN_MOTO}
    for resource in body["Resources"].values():
        if resource["Type"] == "AWS::EMRServerless::Application":
            resource.update(Type="AWS::SNS::Topic", Properties={"TopicName": "application"})
    client = boto3.client("cloudformation")
    client.create_stack(
        StackName=STACK,
        TemplateBody=json.dumps(body),
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
        Capabilities=["CAPABILITY_IAM"],
    )
    [made] = client.describe_stacks(StackName=STACK)["Stacks"]
    assert made["StackStatus"] == "CREATE_COMPLETE"
    return {o["OutputKey"]: o["OutputValue"] for o in made.get("Outputs", ())}


def create_service(**parameters: str) -> dict[str, str]:
    named = {"LandingBucket": "landing", "LakeBucket": "lake", "Image": "functions@sha256:1"}
    return create("service.yaml", **{**named, **parameters})


def attributes(queue: str) -> dict[str, str]:
    sqs = boto3.client("sqs")
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    return sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]


def statements(role: str) -> list[dict[str, Any]]:
    """All that a role may do, by its own policies and by those that it shares, as IAM has them."""
    iam = boto3.client("iam")
    documents = [
        iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        for name in iam.list_role_policies(RoleName=role)["PolicyNames"]
    ]
    for attached in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        policy = iam.get_policy(PolicyArn=attached["PolicyArn"])["Policy"]
        version = iam.get_policy_version(PolicyArn=policy["Arn"], VersionId=policy["DefaultVersionId"])
        documents.append(version["PolicyVersion"]["Document"])
    # moto keeps a shared policy as Python writes it, which is YAML
    return [s for d in documents for s in (yaml.safe_load(unquote(d)) if isinstance(d, str) else d)["Statement"]]


def may(role: str, action: str, resource: str) -> bool:
    return permits(statements(role), Ask((action,), resource))


def created(type_: str) -> dict[str, str]:
    """By logical name the physical one, of all resources of this type in the stack."""
    answer = boto3.client("cloudformation").list_stack_resources(StackName=STACK)["StackResourceSummaries"]
    return {r["LogicalResourceId"]: r["PhysicalResourceId"] for r in answer if r["ResourceType"] == type_}


@pytest.mark.parametrize("name", ["lake.yaml", "service.yaml", "examples/step_functions.yaml"])
@pytest.mark.long
def test_cfn_lint_finds_nothing(name: str) -> None:
    import cfnlint.api  # slow, as is moto

    assert cfnlint.api.lint_file(AWS / name) == []


def test_a_message_is_hidden_for_as_long_as_lambda_asks_for_and_no_longer(aws: None) -> None:
    """Lambda takes no queue whose timeout is below the function's. What hides messages for less is `pipeline.workers.worker`."""
    create_service()
    [source] = boto3.client("lambda").list_event_source_mappings()["EventSourceMappings"]
    function = boto3.client("lambda").get_function(FunctionName=source["FunctionArn"])["Configuration"]
    queue = attributes(source["EventSourceArn"].rpartition(":")[2])
    assert function["FunctionName"] == f"{STACK}-dedupe_worker"
    assert int(queue["VisibilityTimeout"]) == function["Timeout"] == FUNCTION_SECONDS
    assert LEASE_SECONDS <= 120
    assert may(created("AWS::IAM::Role")["DedupeWorkerRole"], "sqs:ChangeMessageVisibility", queue["QueueArn"])
    assert source["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    # moto keeps no ScalingConfig
    [declared] = resources("service.yaml", "AWS::Lambda::EventSourceMapping").values()
    assert declared["Properties"]["ScalingConfig"] == {"MaximumConcurrency": {"Ref": "Concurrency"}}


def test_dead_letters_outlive_the_queue_and_leave_a_worker_its_five_tries(aws: None) -> None:
    outputs = create_service()
    queue, dead = attributes(f"{STACK}-work"), attributes(f"{STACK}-work-dead")
    policy = json.loads(queue["RedrivePolicy"])
    assert outputs["Queue"] == f"sqs://{STACK}-work"
    assert policy["deadLetterTargetArn"] == dead["QueueArn"]
    assert int(policy["maxReceiveCount"]) == 5 + 1
    assert int(dead["MessageRetentionPeriod"]) > int(queue["MessageRetentionPeriod"])


@pytest.mark.parametrize(("key", "algorithm"), [("", "AES256"), (KEY, "aws:kms")])
def test_buckets_are_encrypted(aws: None, key: str, algorithm: str) -> None:
    outputs = create("lake.yaml", KmsKeyArn=key)
    for output in ("LandingBucket", "LakeBucket"):
        found = boto3.client("s3").get_bucket_encryption(Bucket=outputs[output])
        [rule] = found["ServerSideEncryptionConfiguration"]["Rules"]
        default = rule["ApplyServerSideEncryptionByDefault"]
        assert (default["SSEAlgorithm"], default.get("KMSMasterKeyID", "")) == (algorithm, key)


def test_buckets_are_private_versioned_and_outlive_their_stack() -> None:
    for bucket in resources("lake.yaml", "AWS::S3::Bucket").values():
        properties = bucket["Properties"]
        block = properties["PublicAccessBlockConfiguration"]
        assert block == dict.fromkeys(
            ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
        )
        assert properties["VersioningConfiguration"] == {"Status": "Enabled"}
        assert (bucket["DeletionPolicy"], bucket["UpdateReplacePolicy"]) == ("Retain", "Retain")


HARMLESS = {
    "Id",
    "Status",
    "AbortIncompleteMultipartUpload",
    "NoncurrentVersionExpiration",
    "ExpiredObjectDeleteMarker",
}


def test_no_lifecycle_rule_can_delete_a_current_object_or_move_one_of_the_lake() -> None:
    for name, bucket in resources("lake.yaml", "AWS::S3::Bucket").items():
        rules = bucket["Properties"]["LifecycleConfiguration"]["Rules"]
        assert name == "LandingBucket" or all("Fn::If" not in rule for rule in rules)
        for rule in rules:
            assert rule.keys() <= HARMLESS | {"Fn::If"}


def test_landing_files_move_to_a_class_that_answers_at_once() -> None:
    """`reprocess --source landing` and `reconcile --deep` read them, however old."""
    rules = resources("lake.yaml", "AWS::S3::Bucket")["LandingBucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    [(condition, rule, otherwise)] = [rule["Fn::If"] for rule in rules if "Fn::If" in rule]
    [transition] = rule["Transitions"]
    assert (rule["Status"], otherwise) == ("Enabled", NO_VALUE)
    assert rule.keys() <= HARMLESS | {"Transitions"}
    assert transition["StorageClass"] in ("STANDARD_IA", "GLACIER_IR", "INTELLIGENT_TIERING")
    assert transition["TransitionInDays"] == {"Ref": "LandingColdDays"}
    assert not holds(template("lake.yaml")["Conditions"][condition], {"LandingColdDays": "0"})


def test_the_lake_itself_refuses_commits_without_a_condition_and_nothing_else(config: Path) -> None:
    """The bucket policy names the folders that hold chains: all that `create` commits, and none that `write` puts."""
    policy = resources("lake.yaml", "AWS::S3::BucketPolicy")["LakeBucketPolicy"]["Properties"]["PolicyDocument"]
    [rule] = [s for s in policy["Statement"] if s["Sid"] == "CommitsOnlyIfAbsent"]
    assert (rule["Effect"], rule["Principal"], rule["Action"]) == ("Deny", "*", "s3:PutObject")
    assert rule["Condition"] == {"Null": {"s3:if-none-match": "true"}}
    patterns = [r["Fn::Sub"].removeprefix("${LakeBucket.Arn}/") for r in rule["Resource"]]

    Table.open(config).run(host="local")
    made = [str(p.relative_to(config.parent)) for p in config.parent.glob("processed/**/*") if p.is_file()]
    chains = [name for name in made if re.search(r"/v\d{20}", name)]
    assert chains
    assert {name for name in made if any(fnmatchcase(name, p) for p in patterns)} == set(chains)


def test_no_role_has_a_wildcard_but_where_aws_knows_no_resource(aws: None) -> None:
    create_service(**SPARK, KmsKeyArn=KEY)
    wide = set()
    for role, name in created("AWS::IAM::Role").items():
        for statement in statements(name):
            actions = statement["Action"]
            assert not [a for a in ([actions] if isinstance(actions, str) else actions) if "*" in a], role
            if statement["Resource"] == "*":
                wide.add((role, actions))
    assert wide == {("SparkRole", "logs:DescribeLogGroups"), ("SparkRole", "cloudwatch:PutMetricData")}


def test_roles_that_publish_may_keep_the_glue_table_and_no_other(aws: None) -> None:
    create_service(**SPARK, GlueTable="lake/sales")
    roles = created("AWS::IAM::Role")
    glue = f"arn:aws:glue:{REGION}:123456789012"
    publish = {f"{role}Role" for role in WRITERS}
    calls: Mapping[tuple[str, str], set[str]] = {
        ("glue:BatchUpdatePartition", "table/lake/sales"): publish,
        ("glue:GetTable", "table/lake/sales"): publish,
        ("glue:GetDatabase", "database/lake"): publish,
        ("glue:UpdateTable", "catalog"): publish,
        ("glue:UpdateTable", "table/lake/returns"): set(),
        ("glue:DeleteTable", "table/lake/sales"): set(),
    }
    for (action, what), allowed in calls.items():
        assert {r for r, name in roles.items() if may(name, action, f"{glue}:{what}")} == allowed, (action, what)


def test_only_the_nightly_function_may_start_spark_and_only_with_its_role(aws: None) -> None:
    create_service(**SPARK)
    roles = created("AWS::IAM::Role")
    spark = boto3.client("iam").get_role(RoleName=roles["SparkRole"])["Role"]["Arn"]
    starters = {
        role for role, name in roles.items() for s in statements(name) if s["Action"] == "emr-serverless:StartJobRun"
    }
    passed = [s for name in roles.values() for s in statements(name) if s["Action"] == "iam:PassRole"]
    assert starters == {"AppendNightlyRole"}
    assert [s["Resource"] for s in passed] == [spark]
    assert passed[0]["Condition"] == {"StringEquals": {"iam:PassedToService": "emr-serverless.amazonaws.com"}}
    environment = boto3.client("lambda").get_function(FunctionName=f"{STACK}-append_nightly")["Configuration"][
        "Environment"
    ]
    assert environment["Variables"]["LAKEUPSERT_EMR_ROLE"] == spark
    assert environment["Variables"]["LAKEUPSERT_EMR_APPLICATION"]
    assert environment["Variables"]["LAKEUPSERT_EMR_ENTRYPOINT"] == "s3://lake/code/append.py"


def refusing(**given: Any) -> set[str]:
    """The rules of the template that refuse these values. moto checks no rules."""
    body = template("service.yaml")
    values = {k: given.get(k, p.get("Default", "")) for k, p in body["Parameters"].items()}

    def true(node: Any) -> bool:
        [(function, arguments)] = node.items()
        if function == "Fn::Not":
            return not true(arguments[0])
        if function == "Fn::And":
            return all(map(true, arguments))
        left, right = values[arguments[0]["Ref"]], arguments[1]
        assert function == "Fn::Equals"
        return str(left) == str(right)

    return {
        name
        for name, rule in body["Rules"].items()
        if true(rule["RuleCondition"]) and not all(true(a["Assert"]) for a in rule["Assertions"])
    }


def test_spark_needs_its_release_and_a_network_or_that_somebody_wants_none() -> None:
    assert (
        refusing()
        == refusing(**SPARK)
        == refusing(**SPARK, EndpointsVpc="vpc-1", EndpointsRouteTables="rtb-1")
        == set()
    )
    assert refusing(**{**SPARK, "SparkRelease": "none"}) == {"SparkImageNeedsItsRelease"}
    for name in ("SparkSubnets", "SparkSecurityGroups"):
        lacking = {**SPARK, name: ""}
        assert refusing(**lacking) == {"SparkNeedsANetwork"}
        assert refusing(**lacking, SparkNetwork="none") == set()
    assert refusing(**SPARK, EndpointsVpc="vpc-1") == {"EndpointsNeedASubnetAndARoute"}
    nowhere = {**SPARK, "EndpointsVpc": "vpc-1", "EndpointsRouteTables": "rtb-1", "SparkNetwork": "none"}
    assert refusing(**nowhere) == {"EndpointsNeedASubnetAndARoute"}


def split(parameter: str) -> Any:
    return {"Fn::Split": [",", {"Ref": parameter}]}


def test_spark_reaches_the_queue_and_the_metrics_and_has_memory_for_its_tasks() -> None:
    [application] = resources("service.yaml", "AWS::EMRServerless::Application").values()
    properties = application["Properties"]
    network = decided(properties["NetworkConfiguration"], {"HasSparkNetwork": True})
    assert network == {"SubnetIds": split("SparkSubnets"), "SecurityGroupIds": split("SparkSecurityGroups")}
    assert decided(properties["NetworkConfiguration"], {"HasSparkNetwork": False}) == NO_VALUE
    [defaults] = [c["Properties"] for c in properties["RuntimeConfiguration"]]
    cores, overhead = int(defaults["spark.executor.cores"]), defaults["spark.executor.memoryOverhead"]
    assert int(overhead.removesuffix("g")) * 1024 > cores * 807

    endpoints = [r["Properties"] for r in resources("service.yaml", "AWS::EC2::VPCEndpoint").values()]
    kinds = {e["ServiceName"]["Fn::Sub"].rpartition(".")[2]: e for e in endpoints}
    assert kinds.keys() == {"s3", "sqs", "monitoring", "logs"}
    assert kinds["s3"]["VpcEndpointType"] == "Gateway"
    assert kinds["s3"]["RouteTableIds"] == split("EndpointsRouteTables")
    for name in kinds.keys() - {"s3"}:
        assert (kinds[name]["VpcEndpointType"], kinds[name]["PrivateDnsEnabled"]) == ("Interface", True)
        assert kinds[name]["SubnetIds"] == network["SubnetIds"]
        assert kinds[name]["SecurityGroupIds"] == network["SecurityGroupIds"]


def test_job_that_fails_is_started_again_by_each_who_starts_it_and_then_tells_somebody() -> None:
    [machine] = resources("examples/step_functions.yaml", "AWS::StepFunctions::StateMachine").values()
    append = machine["Properties"]["Definition"]["States"]["Append"]
    assert append["Parameters"]["RetryPolicy"] == {"MaxAttempts": ATTEMPTS}
    assert f'"retryPolicy": {{"maxAttempts": {ATTEMPTS}}}' in (AWS / "examples" / "airflow_dag.py").read_text()
    [rule] = resources("service.yaml", "AWS::Events::Rule").values()
    assert rule["Properties"]["EventPattern"]["detail"] == {
        "state": ["FAILED", "CANCELLED"],
        "applicationId": [{"Ref": "SparkApplication"}],
    }
    assert [t["Arn"] for t in rule["Properties"]["Targets"]] == [{"Ref": "Alarms"}]
    [policy] = resources("service.yaml", "AWS::SNS::TopicPolicy").values()
    [statement] = policy["Properties"]["PolicyDocument"]["Statement"]
    assert set(statement["Principal"]["Service"]) == {"cloudwatch.amazonaws.com", "events.amazonaws.com"}


def test_without_a_spark_image_nothing_of_spark_is_made(aws: None) -> None:
    create_service()
    environment = boto3.client("lambda").get_function(FunctionName=f"{STACK}-append_nightly")["Configuration"][
        "Environment"
    ]
    assert not [name for name in environment["Variables"] if "EMR" in name]
    assert "SparkRole" not in created("AWS::IAM::Role")


def test_every_function_has_its_handler_its_configuration_and_logs_that_end(aws: None) -> None:
    create_service()
    made = {f["FunctionName"]: f for f in boto3.client("lambda").list_functions()["Functions"]}
    assert made.keys() == {f"{STACK}-{name}" for name in FUNCTIONS}
    for function in made.values():
        assert function["Environment"]["Variables"]["LAKEUPSERT_CONFIG"] == "s3://lake/lakeupsert.toml"
        assert function["Timeout"] <= 900
    groups = boto3.client("logs").describe_log_groups()["logGroups"]
    assert {g["logGroupName"] for g in groups} == {f"/aws/lambda/{name}" for name in made}
    assert all(g["retentionInDays"] == 90 for g in groups)
    # moto keeps no ImageConfig
    declared = resources("service.yaml", "AWS::Lambda::Function").values()
    commands = {f["Properties"]["ImageConfig"]["Command"][0] for f in declared}
    assert commands == {f"lambdas.{name}.handler.handler" for name in FUNCTIONS}


def test_the_night_begins_at_2_am_of_a_zone(aws: None) -> None:
    schedules = resources("service.yaml", "AWS::Scheduler::Schedule")
    night = schedules["AppendSchedule"]["Properties"]
    assert night["ScheduleExpression"] == "cron(0 2 * * ? *)"
    assert night["ScheduleExpressionTimezone"] == {"Ref": "TimeZone"}
    create_service()
    functions, role = created("AWS::Lambda::Function"), created("AWS::IAM::Role")["ScheduleRole"]
    assert {name.removesuffix("Schedule") for name in schedules} == {"Append", "Reconcile", "Vacuum"}
    for schedule in schedules.values():
        assert schedule["Properties"]["Target"]["RetryPolicy"]["MaximumRetryAttempts"] > 0
        assert schedule["Properties"]["Target"]["DeadLetterConfig"] == {
            "Arn": {"Fn::GetAtt": ["ScheduleDeadLetters", "Arn"]}
        }
        target, _ = schedule["Properties"]["Target"]["Arn"]["Fn::GetAtt"]
        found = boto3.client("lambda").get_function(FunctionName=functions[target])["Configuration"]
        assert may(role, "lambda:InvokeFunction", found["FunctionArn"])


def test_every_alarm_tells_somebody_and_leads_to_a_section_of_the_runbook() -> None:
    text = (ROOT / "docs" / "WHEN_SOMETHING_BROKE.md").read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    alarms = resources("service.yaml", "AWS::CloudWatch::Alarm")
    for name, alarm in alarms.items():
        properties = alarm["Properties"]
        assert properties["TreatMissingData"] in ("breaching", "notBreaching")
        [anchor] = re.findall(r"\$\{Runbook\}#(\S+)$", properties["AlarmDescription"]["Fn::Sub"])
        assert anchor in anchors, name
        assert properties["AlarmActions"] == [{"Ref": "Alarms"}]
        assert properties["AlarmName"]["Fn::Sub"].partition("-")[2] in text
    assert {f"{f.title().replace('_', '')}ErrorsAlarm" for f in FUNCTIONS} <= alarms.keys()


MEASURED = {"FreshnessSeconds", "QuarantinedRows", "AppendedRows", "FailedPartitions", "AppendFinished"}
"""What functions and jobs measure in the namespace `lakeupsert`."""


def test_alarms_wait_for_what_is_measured() -> None:
    seen = set()
    for alarm in resources("service.yaml", "AWS::CloudWatch::Alarm").values():
        stats = [m["MetricStat"]["Metric"] for m in alarm["Properties"].get("Metrics", ()) if "MetricStat" in m]
        for metric in stats or [alarm["Properties"]]:
            if metric["Namespace"] == "lakeupsert":
                seen.add(metric["MetricName"])
                [dimension] = metric["Dimensions"]
                assert dimension["Name"] == ("service" if metric["MetricName"] == "AppendFinished" else "Table")
    assert seen == MEASURED


def test_a_night_that_is_missing_alarms_though_nothing_is_measured() -> None:
    alarm = resources("service.yaml", "AWS::CloudWatch::Alarm")["NightMissingAlarm"]["Properties"]
    hours = template("service.yaml")["Parameters"]["NightMissingHours"]
    assert alarm["TreatMissingData"] == "breaching"
    assert alarm["Period"] == 3600
    assert alarm["EvaluationPeriods"] == {"Ref": "NightMissingHours"}
    assert hours["MinValue"] > 24
    assert hours["MaxValue"] < 7 * 24  # beyond that CloudWatch takes none


def test_the_spark_job_appends_and_tells_the_metrics_that_alarms_wait_for(aws: None, spark: Any, config: Path) -> None:
    job = runpy.run_path(str(AWS / "spark" / "append.py"))
    job["main"](str(config), STACK)
    job["main"](str(config), STACK, Table.open(config).name)  # a night that finds nothing new has ended too
    assert Table.open(config).status().dirty == 1
    told = {m["MetricName"]: m["Dimensions"] for m in boto3.client("cloudwatch").list_metrics()["Metrics"]}
    alarm = resources("service.yaml", "AWS::CloudWatch::Alarm")["NightMissingAlarm"]["Properties"]
    of_table = [{"Name": "Table", "Value": "t"}]
    assert told == {
        alarm["MetricName"]: [{"Name": alarm["Dimensions"][0]["Name"], "Value": STACK}],
        "AppendedRows": of_table,
        "QuarantinedRows": of_table,
    }
    assert told.keys() <= MEASURED


def test_spark_job_that_reaches_no_metrics_has_appended_and_says_so(
    spark: Any, config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No server listens, as from a network without an endpoint."""
    settings = {"DEFAULT_REGION": REGION, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "s", "MAX_ATTEMPTS": "1"}
    for name, value in {**settings, "ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it would keep these credentials for the tests after this one
    runpy.run_path(str(AWS / "spark" / "append.py"))["main"](str(config), STACK)
    assert Table.open(config).status().dirty == 1
    assert "AppendFinished" in capfd.readouterr().err


def test_every_state_of_the_state_machine_is_reached(aws: None) -> None:
    """Its language is checked by cfn-lint; moto makes the roles, and keeps no definition that is not a string."""
    create("examples/step_functions.yaml", Service=STACK, SparkApplication="1", SparkRole="r", LakeBucket="lake")
    [machine] = resources("examples/step_functions.yaml", "AWS::StepFunctions::StateMachine").values()
    definition = machine["Properties"]["Definition"]
    states, reached, waiting = definition["States"], set(), {definition["StartAt"]}
    while waiting:
        reached |= waiting
        found = [s for name in waiting for s in (states[name], *states[name].get("Choices", ()))]
        waiting = {s[k] for s in found for k in ("Next", "Default") if k in s} - reached
    assert reached == states.keys()
    assert states[definition["StartAt"]]["Next"] == "Merging"


NIGHTS = {  # what `reconcile` tells of partitions and messages: where a night then is
    (0, 0, 0): "Published",
    (0, 0, 5): "Published",
    (3, 0, 3): "Merging",
    (3, 0, 0): "Merging",
    (3, 1, 2): "Merging",
    (1, 1, 1): "Merging",
    (3, 1, 0): "Failed",
}


def told(waiting: int, failed: int, queued: int) -> dict[str, Any]:
    answer = json.loads((ROOT / "lambdas" / "reconcile" / "answer.json").read_text())
    assert answer.keys() >= {"waiting", "failed", "queued"}
    return {**answer, "waiting": waiting, "failed": failed, "queued": queued}


def test_the_state_machine_fails_only_where_nothing_is_on_its_way(aws: None) -> None:
    """Run by moto, from what `reconcile` answered to where it would wait or end."""
    [machine] = resources("examples/step_functions.yaml", "AWS::StepFunctions::StateMachine").values()
    states = machine["Properties"]["Definition"]["States"]
    publish = {"Type": "Pass", "Parameters": states["Publish"]["ResultSelector"], "Next": states["Publish"]["Next"]}
    states = {**states, "Publish": publish, "Merging": {"Type": "Pass", "End": True}}
    definition = {"StartAt": "Publish", "States": {k: s for k, s in states.items() if k != "Append"}}
    role = "arn:aws:iam::123456789012:role/night"
    import moto

    with moto.mock_aws(config={"stepfunctions": {"execute_state_machine": True}}):
        client = boto3.client("stepfunctions")
        arn = client.create_state_machine(name="night", definition=json.dumps(definition), roleArn=role)
        for night, end in NIGHTS.items():
            payload = json.dumps({"Payload": told(*night)})
            name = "-".join(map(str, night))
            run = client.start_execution(stateMachineArn=arn["stateMachineArn"], name=name, input=payload)[
                "executionArn"
            ]
            wait_until(lambda run=run: client.describe_execution(executionArn=run)["status"] != "RUNNING", "it ended")
            events = client.get_execution_history(executionArn=run)["events"]
            entered = [e["stateEnteredEventDetails"]["name"] for e in events if "stateEnteredEventDetails" in e]
            assert entered[-1] == end, night


def test_the_guide_gives_parameters_and_asks_for_outputs_that_there_are() -> None:
    text = (ROOT / "docs" / "AWS.md").read_text()
    lake, service = template("lake.yaml"), template("service.yaml")
    given = set(re.findall(r"\b([A-Z][a-z]+(?:[A-Z][a-z]+)*)=(?!=)", text))
    asked = set(re.findall(r"\$\(output (lake|sales) (\w+)\)", text))
    assert {"KmsKeyArn", "Image"} <= given <= lake["Parameters"].keys() | service["Parameters"].keys()
    assert asked
    assert asked <= {("lake", o) for o in lake["Outputs"]} | {("sales", o) for o in service["Outputs"]}


def test_the_airflow_example_names_what_service_yaml_makes() -> None:
    """Parsed only: Airflow is no dependency of ours."""
    text = (AWS / "examples" / "airflow_dag.py").read_text()
    tree = ast.parse(text)
    chain = next(n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.RShift))
    assert ast.unparse(chain) == "append >> published >> vacuum"
    assert "-reconcile" in text
    assert template("service.yaml")["Parameters"]["SparkScriptKey"]["Default"] in text


def test_the_airflow_example_fails_only_where_nothing_is_on_its_way() -> None:
    """Its function alone, since Airflow is no dependency of ours; the hook here answers what is told."""
    tree = ast.parse((AWS / "examples" / "airflow_dag.py").read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    answer: dict[str, Any] = {}
    names: dict[str, Any] = {
        "json": json,
        "AirflowException": RuntimeError,
        "Config": lambda **_: None,
        "LambdaHook": lambda config: SimpleNamespace(
            invoke_lambda=lambda **_: {"Payload": BytesIO(json.dumps(answer).encode())}
        ),
    }
    exec(compile(tree, "airflow_dag.py", "exec"), names)
    found = {}
    for night in NIGHTS:
        answer = told(*night)
        try:
            found[night] = "Published" if names["is_published"]("sales-reconcile") else "Merging"
        except RuntimeError:
            found[night] = "Failed"
    assert found == NIGHTS


# -- workers in containers, and Spark elsewhere


def documents(path: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "infra" / path).read_text()))


def by_kind(path: str) -> dict[str, Any]:
    return {document["kind"]: document for document in documents(path)}


@pytest.mark.parametrize(
    ("path", "type_", "counted"),
    [
        ("kubernetes/scale_sqs.yaml", "aws-sqs-queue", ("scaleOnInFlight", "true")),
        ("kubernetes/scale_azure.yaml", "azure-queue", ("queueLengthStrategy", "all")),
    ],
)
def test_workers_scale_to_none_and_none_is_taken_from_its_merge(
    path: str, type_: str, counted: tuple[str, str]
) -> None:
    found, worker = by_kind(path), by_kind("kubernetes/worker.yaml")["Deployment"]
    scaled, login = found["ScaledObject"], found["TriggerAuthentication"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    assert scaled["metadata"]["namespace"] == worker["metadata"]["namespace"] == login["metadata"]["namespace"]
    assert scaled["spec"]["minReplicaCount"] == 0
    assert "replicas" not in worker["spec"]
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["type"] == type_
    assert trigger["authenticationRef"]["name"] == login["metadata"]["name"]
    assert trigger["metadata"][counted[0]] == counted[1]
    [ramp] = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]["policies"]
    assert ramp["value"] * 5 <= scaled["spec"]["maxReplicaCount"]


def test_worker_ends_before_kubernetes_kills_it_and_is_probed_by_the_file_that_it_touches() -> None:
    pod = by_kind("kubernetes/worker.yaml")["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert float(options["--grace-seconds"]) + 20 <= pod["terminationGracePeriodSeconds"]
    assert options["--health-file"] in container["livenessProbe"]["exec"]["command"][-1]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp"}
    dockerfile = (ROOT / "infra" / "container" / "Dockerfile").read_text()
    *_, command = re.findall(r"^ENTRYPOINT (.+)$", dockerfile, re.MULTILINE)
    assert json.loads(command) == ["lakeupsert", "worker"]
    known = {option for parameter in main.commands["worker"].params for option in parameter.opts}
    assert options.keys() <= known


@pytest.mark.parametrize(
    ("path", "service", "operation"),
    [("emr_serverless.json", "emr-serverless", "StartJobRun"), ("glue.json", "glue", "CreateJob")],
)
def test_jobs_elsewhere_are_requests_that_aws_understands(path: str, service: str, operation: str) -> None:
    given = json.loads((ROOT / "infra" / "spark" / path).read_text())
    given.setdefault("clientToken", "1") if service == "emr-serverless" else None
    shape = botocore.session.get_session().get_service_model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(given, shape)
    assert not report.has_errors(), report.generate_report()
    text = json.dumps(given)
    assert "run --host spark --config s3://" in text or '"run", "--host", "spark", "--config", "s3://' in text


def test_jobs_elsewhere_start_the_module_with_the_commands_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The module is another's work: one stands in for it."""
    found = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **options: found.append((name, sys.argv[1:], options)))
    arguments = ["run", "--config", "s3://lake/lakeupsert.toml"]
    monkeypatch.setattr(sys, "argv", ["entry.py", *arguments])
    runpy.run_path(str(ROOT / "infra" / "spark" / "entry.py"))
    utils = ModuleType("awsglue.utils")
    utils.getResolvedOptions = lambda argv, names: {name: argv[argv.index(f"--{name}") + 1] for name in names}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "awsglue", ModuleType("awsglue"))
    monkeypatch.setitem(sys.modules, "awsglue.utils", utils)
    monkeypatch.setattr(sys, "argv", ["glue_entry.py", "--JOB_NAME", "x", "--command", " ".join(arguments)])
    runpy.run_path(str(ROOT / "infra" / "spark" / "glue_entry.py"))
    assert found == [("lakeupsert.spark", arguments, {"run_name": "__main__", "alter_sys": True})] * 2


@pytest.mark.long
def test_scripts_are_scripts_and_the_archive_has_one_name() -> None:
    for path in (ROOT / "infra").rglob("*.sh"):
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0, path
    for name in ("emr_serverless.json", "dataproc_serverless.sh"):
        text = (ROOT / "infra" / "spark" / name).read_text()
        assert "/code/env.tar.gz#environment" in text
        assert "spark.executorEnv.PYSPARK_PYTHON=./environment/bin/python" in text


def test_databricks_bundle_runs_the_wheels_own_command_on_a_cluster() -> None:
    [bundle] = documents("spark/databricks/databricks.yml")
    [task] = bundle["resources"]["jobs"]["night"]["tasks"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert task["python_wheel_task"]["package_name"] == project["name"]
    assert task["python_wheel_task"]["entry_point"] in project["scripts"]
    assert task["python_wheel_task"]["parameters"][0] in main.commands
    [cluster] = bundle["resources"]["jobs"]["night"]["job_clusters"]
    assert task["job_cluster_key"] == cluster["job_cluster_key"]
    assert "environment_key" not in task  # that would be serverless compute


def test_every_file_of_infra_parses() -> None:
    """YAML, JSON and Python; Terraform in test_terraform.py. Bicep is parsed by `make lint-infra`."""
    seen = set()
    for path in (ROOT / "infra").rglob("*"):
        if not path.is_file() or not {".terraform", "__pycache__"}.isdisjoint(path.parts):
            continue
        seen.add(path.suffix)
        if path.suffix in (".yaml", ".yml"):
            assert list(yaml.load_all(path.read_text(), _Loader))
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".py":
            ast.parse(path.read_text())
    assert seen == {".yaml", ".yml", ".json", ".py", ".tf", ".bicep", ".sh", ".in", ".txt", ".service", ".timer", ""}
