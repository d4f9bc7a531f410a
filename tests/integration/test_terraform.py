"""The Terraform modules make what CloudFormation and Bicep make: parsed and compared, since no provider is at hand to plan them.

`make lint-infra` has checkov read them too. Nothing here ran against a cloud.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml

ROOT = Path(__file__).parents[2] / "infra"
MODULES = ("aws/terraform/lake", "aws/terraform/service", "azure/terraform")
PLAIN = hcl2.SerializationOptions(strip_string_quotes=True, explicit_blocks=False, with_comments=False)
TYPES = {
    "AWS::CloudWatch::Alarm": "aws_cloudwatch_metric_alarm",
    "AWS::EC2::VPCEndpoint": "aws_vpc_endpoint",
    "AWS::ECR::Repository": "aws_ecr_repository",
    "AWS::EMRServerless::Application": "aws_emrserverless_application",
    "AWS::Events::Rule": "aws_cloudwatch_event_rule",
    "AWS::IAM::ManagedPolicy": "aws_iam_policy",
    "AWS::IAM::Role": "aws_iam_role",
    "AWS::Lambda::EventSourceMapping": "aws_lambda_event_source_mapping",
    "AWS::Lambda::Function": "aws_lambda_function",
    "AWS::Logs::LogGroup": "aws_cloudwatch_log_group",
    "AWS::S3::Bucket": "aws_s3_bucket",
    "AWS::S3::BucketPolicy": "aws_s3_bucket_policy",
    "AWS::SNS::Subscription": "aws_sns_topic_subscription",
    "AWS::SNS::Topic": "aws_sns_topic",
    "AWS::SNS::TopicPolicy": "aws_sns_topic_policy",
    "AWS::SQS::Queue": "aws_sqs_queue",
    "AWS::Scheduler::Schedule": "aws_scheduler_schedule",
    "Microsoft.Authorization/roleAssignments": "azurerm_role_assignment",
    "Microsoft.Authorization/roleDefinitions": "azurerm_role_definition",
    "Microsoft.Insights/actionGroups": "azurerm_monitor_action_group",
    "Microsoft.Insights/components": "azurerm_application_insights",
    "Microsoft.Insights/scheduledQueryRules": "azurerm_monitor_scheduled_query_rules_alert_v2",
    "Microsoft.OperationalInsights/workspaces": "azurerm_log_analytics_workspace",
    "Microsoft.Storage/storageAccounts": "azurerm_storage_account",
    "Microsoft.Web/serverfarms": "azurerm_service_plan",
    "Microsoft.Web/sites": "azurerm_function_app_flex_consumption",
}
COMPANIONS = {
    "aws_cloudwatch_event_target",
    "aws_ecr_repository_policy",
    "aws_iam_role_policy",
    "aws_iam_role_policy_attachment",
    "aws_s3_bucket_lifecycle_configuration",
    "aws_s3_bucket_ownership_controls",
    "aws_s3_bucket_public_access_block",
    "aws_s3_bucket_server_side_encryption_configuration",
    "aws_s3_bucket_versioning",
    "azurerm_storage_container",
    "azurerm_storage_queue",
}
"""What is a property of another resource in CloudFormation, and a nested resource in Bicep."""


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's functions, which are left out."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def cloudformation(name: str) -> dict[str, Any]:
    return yaml.load((ROOT / "aws" / name).read_text(), _Loader)


@cache
def module(name: str) -> dict[str, list[dict[str, Any]]]:
    """Its blocks by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((ROOT / name).glob("*.tf")):
        for kind, blocks in hcl2.loads(file.read_text(), serialization_options=PLAIN).items():
            found.setdefault(kind, []).extend(blocks)
    return found


def named(module: dict[str, list[dict[str, Any]]], kind: str) -> dict[str, Any]:
    return {name: body for block in module[kind] for name, body in block.items()}


def resources(module: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By type and name; of a `for_each` over one of the module's own maps, each by its key, before the name's last word."""
    local = {name: value for block in module.get("locals", ()) for name, value in block.items()}
    found = {}
    for block in module["resource"]:
        [(type_, bodies)] = block.items()
        [(name, body)] = bodies.items()
        keys = local.get(str(body.get("for_each", "")).removeprefix("${local.").removesuffix("}"))
        if isinstance(keys, dict):
            for key in keys:
                found[type_, f"{key}_{name.removeprefix('functions')}".rstrip("_")] = body
        else:
            found[type_, name] = body
    return found


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("name", MODULES)
def test_every_reference_leads_to_something(name: str) -> None:
    """Variables, locals, resources and data: what a plan would find first."""
    found = module(name)
    text = "\n".join(f.read_text() for f in (ROOT / name).glob("*.tf"))
    code = re.sub(r"#.*", "", text)
    variables = set(re.findall(r"\bvar\.(\w+)", code))
    assert variables == set(named(found, "variable"))
    assert set(re.findall(r"\blocal\.(\w+)", code)) == {n for block in found["locals"] for n in block}
    made = {f"{type_}.{label}" for block in found["resource"] for type_, body in block.items() for label in body}
    assert (
        set(re.findall(r"(?<![\w.\"])((?:aws|azurerm)_\w+\.\w+)", code.replace("data.", "data ")))
        - {f"{type_}.{label}" for block in found["data"] for type_, body in block.items() for label in body}
        <= made
    )


@pytest.mark.parametrize(("name", "template"), [(MODULES[0], "lake.yaml"), (MODULES[1], "service.yaml")])
def test_variables_are_the_parameters_with_their_defaults_and_limits(name: str, template: str) -> None:
    variables = named(module(name), "variable")
    parameters = {snake(k): p for k, p in cloudformation(template)["Parameters"].items()}
    assert variables.keys() == parameters.keys() | {"name"}
    for parameter, declared in parameters.items():
        lists = "separated by commas" in declared.get("Description", "")  # a rule of CloudFormation knows no lists
        default = [] if lists else declared.get("Default")
        assert variables[parameter].get("default") == default, parameter
        conditions = " ".join(str(v["condition"]) for v in variables[parameter].get("validation", ()))
        for limit in (declared.get("MinValue"), declared.get("MaxValue"), *declared.get("AllowedValues", ())):
            assert limit is None or str(limit) in conditions, parameter


@pytest.mark.parametrize(("name", "template"), [(MODULES[0], "lake.yaml"), (MODULES[1], "service.yaml")])
def test_module_makes_each_resource_of_the_template_and_no_other(name: str, template: str) -> None:
    declared = {(TYPES[r["Type"]], snake(k)) for k, r in cloudformation(template)["Resources"].items()}
    # the functions' own logs and roles have the functions' keys
    declared = {
        (type_, label.removesuffix("_logs").removesuffix("_role"))
        if type_ in ("aws_cloudwatch_log_group", "aws_iam_role")
        else (type_, label)
        for type_, label in declared
    }
    made = {
        (type_, label.removesuffix("_logs").removesuffix("_role"))
        for type_, label in resources(module(name))
        if type_ not in COMPANIONS
    }
    assert made == declared


@pytest.mark.parametrize(("name", "template"), [(MODULES[0], "lake.yaml"), (MODULES[1], "service.yaml")])
def test_module_allows_and_measures_what_the_template_does(name: str, template: str) -> None:
    """Every permission, metric, schedule, endpoint and setting of Spark, by its text."""
    theirs, ours = (
        re.sub(r"#.*", "", text)
        for text in (
            (ROOT / "aws" / template).read_text(),
            "\n".join(f.read_text() for f in (ROOT / name).glob("*.tf")),
        )
    )
    for pattern in (
        r"\b(?:glue|s3|sqs|kms|logs|ecr|iam|sts|sns|lambda|cloudwatch|emr-serverless):[A-Z]\w+",
        r"\b[a-z-]+\.amazonaws\.com",
        r"\b(?:cron|rate)\([^)]*\)",
        r"s3:if-none-match|_lakeupsert/\w+|GLACIER_\w+|\baws:\w+",
        r"spark\.\w+\.\w+",
        r"com\.amazonaws\.\$\{\S+\}\.(\w+)",
        r"\b(?:ApproximateNumberOfMessagesVisible|ApproximateAgeOfOldestMessage|AppendFinished|\w+Rows|\w+Partitions)\b",
        r"LAKEUPSERT_\w+|POWERTOOLS_\w+",
    ):
        assert set(re.findall(pattern, ours)) == set(re.findall(pattern, theirs)), pattern


def test_queues_and_alarms_have_the_templates_figures() -> None:
    declared, made = cloudformation("service.yaml")["Resources"], resources(module(MODULES[1]))
    for name, resource in declared.items():
        given = resource["Properties"]
        if resource["Type"] == "AWS::SQS::Queue":
            queue = made["aws_sqs_queue", snake(name)]
            assert queue["message_retention_seconds"] == given["MessageRetentionPeriod"]
            assert queue.get("visibility_timeout_seconds") == given.get("VisibilityTimeout")
            receives = given.get("RedrivePolicy", {}).get("maxReceiveCount")
            assert receives is None or f"maxReceiveCount = {receives}" in queue["redrive_policy"]
        elif resource["Type"] == "AWS::CloudWatch::Alarm":
            alarm = made["aws_cloudwatch_metric_alarm", snake(name)]
            for theirs, ours in (
                ("MetricName", "metric_name"),
                ("Namespace", "namespace"),
                ("Statistic", "statistic"),
                ("ComparisonOperator", "comparison_operator"),
                ("TreatMissingData", "treat_missing_data"),
                ("Threshold", "threshold"),
            ):
                assert given.get(theirs) is None or alarm[ours] == given[theirs], name
            if name.endswith("ErrorsAlarm"):
                function = snake(name).removesuffix("_errors_alarm")
                [errors] = [b["errors"] for b in module(MODULES[1])["locals"] if "errors" in b]
                assert errors[function]["period"] == given["Period"]


# -- Azure


def bicep() -> str:
    return re.sub(r"//.*", "", (ROOT / "azure" / "main.bicep").read_text())


def test_azures_module_has_the_templates_parameters_resources_and_outputs() -> None:
    text, found = bicep(), module(MODULES[2])
    parameters = {
        snake(name): default.strip("'") for name, default in re.findall(r"^param (\w+) \w+(?: = (\S+))?", text, re.M)
    }
    variables = named(found, "variable")
    assert variables.keys() == parameters.keys() | {"resource_group"}
    for name, default in parameters.items():
        assert name == "location" or str(variables[name].get("default", "")) == default, name
    declared = {(TYPES[type_], snake(name)) for name, type_ in re.findall(r"^resource (\w+) '([\w./]+)@", text, re.M)}
    made = {key for key in resources(found) if key[0] not in COMPANIONS}
    assert made == declared
    assert set(named(found, "output")) == set(re.findall(r"^output (\w+)", text, re.M))


def test_azures_module_sets_allows_and_asks_what_the_template_does() -> None:
    ours = "\n".join(re.sub(r"#.*", "", f.read_text()) for f in (ROOT / MODULES[2]).glob("*.tf"))
    for pattern in (
        r"LAKEUPSERT_\w+|AzureFunctionsJobHost__\w+|AzureWebJobsStorage__\w+",
        r"Microsoft\.Storage/storageAccounts/blobServices/containers/[\w/]+",
        r"\bPT?\d+[MHD]\b",
        r"(?:union|traces) [(|].*?(?=['\"]$)",
    ):
        theirs = set(re.findall(pattern, bicep(), re.M))
        assert {x.replace('\\"', '"') for x in re.findall(pattern, ours, re.M)} == theirs, pattern
    containers = set(re.findall(r"resource \w+ 'containers' = \{ name: '(\w+)'", bicep()))
    assert containers == {"landing", "processed", "config", "code"}
    assert all(f'"{name}"' in ours for name in containers)
