# What infra/aws/service.yaml makes: the two phases of one table. Holds no data, so it may be destroyed and made again at will.
# Once for each table; docs/AWS.md says how.

data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}
data "aws_region" "this" {}

locals {
  account   = data.aws_caller_identity.this.account_id
  partition = data.aws_partition.this.partition
  region    = data.aws_region.this.region
  lake      = "arn:${local.partition}:s3:::${var.lake_bucket}"
  landing   = "arn:${local.partition}:s3:::${var.landing_bucket}"
}

resource "aws_sqs_queue" "work_queue" {
  name                    = "${var.name}-work"
  sqs_managed_sse_enabled = true
  # The function's limit, as Lambda takes no less. The function hides its messages for 2 minutes from its start and extends that
  # while it works, so those of a killed one come again then; only of one that never started do they after 15 minutes. AWS
  # advises six times the limit, for calls that are throttled; maximum_concurrency receives no more than may run.
  visibility_timeout_seconds = 900
  # Shorter than the dead letters': SQS counts those from when the message was first sent. `reconcile` sends again.
  message_retention_seconds = 345600
  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead_letters.arn
    # Five tries are the worker's, which then buries the message with its reason; the sixth is for workers that die.
    maxReceiveCount = 6
  })
}

resource "aws_sqs_queue" "dead_letters" {
  name                      = "${var.name}-work-dead"
  sqs_managed_sse_enabled   = true
  message_retention_seconds = 1209600
}

# Calls that the scheduler could not make: for example because the function was throttled for an hour.
resource "aws_sqs_queue" "schedule_dead_letters" {
  name                      = "${var.name}-schedule-dead"
  sqs_managed_sse_enabled   = true
  message_retention_seconds = 1209600
}
