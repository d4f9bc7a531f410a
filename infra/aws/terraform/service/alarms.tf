locals {
  table = var.table != "" ? var.table : var.name
  errors = {
    append_nightly = { period = 300, description = "The night failed or did not start; what was committed stays. ${var.runbook}#a-night-failed" }
    dedupe_worker  = { period = 300, description = "Workers die or time out; their messages come again. ${var.runbook}#alarms-on-aws" }
    # longer than from call to call, or the alarm ends and begins with each
    reconcile = { period = 900, description = "The proof or its run failed. ${var.runbook}#a-proof-failed" }
    reprocess = { period = 300, description = "A reprocess failed; partitions are as they were, or whole. ${var.runbook}#rewrite-a-partition-lakeupsert-reprocess" }
    vacuum    = { period = 300, description = "A vacuum failed; it deletes nothing that anybody needs. ${var.runbook}#alarms-on-aws" }
  }
}

resource "aws_sns_topic" "alarms" {
  # checkov:skip=CKV_AWS_26:alarms name a queue or a function; CloudWatch can't publish to a topic under the AWS managed key
  name = "${var.name}-alarms"
}

# With a policy of its own a topic has no other: CloudWatch has to be allowed again.
resource "aws_sns_topic_policy" "alarms_policy" {
  arn = aws_sns_topic.alarms.arn
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = ["cloudwatch.amazonaws.com", "events.amazonaws.com"] }
      Action    = "sns:Publish"
      Resource  = aws_sns_topic.alarms.arn
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_sns_topic_subscription" "alarm_email_subscription" {
  count     = var.alarm_email != "" ? 1 : 0
  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

resource "aws_cloudwatch_metric_alarm" "dead_letters_alarm" {
  alarm_name          = "${var.name}-dead-letters"
  alarm_description   = "Partitions failed at every try; readers keep the last whole night. ${var.runbook}#partitions-failed"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = aws_sqs_queue.dead_letters.name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
}

resource "aws_cloudwatch_metric_alarm" "schedule_dead_letters_alarm" {
  alarm_name          = "${var.name}-schedule-dead-letters"
  alarm_description   = "A scheduled call could not be made. ${var.runbook}#alarms-on-aws"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = aws_sqs_queue.schedule_dead_letters.name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
}

resource "aws_cloudwatch_metric_alarm" "freshness_alarm" {
  alarm_name          = "${var.name}-freshness"
  alarm_description   = "Readers see nothing newer than ${var.freshness_seconds} s. ${var.runbook}#a-night-failed"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "lakeupsert"
  metric_name         = "FreshnessSeconds"
  dimensions          = { Table = local.table }
  statistic           = "Maximum"
  period              = 900
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.freshness_seconds
  treat_missing_data  = "notBreaching" # `night-missing` and the errors of `reconcile` tell where nothing is measured
}

resource "aws_cloudwatch_metric_alarm" "quarantine_rate_alarm" {
  alarm_name          = "${var.name}-quarantine-rate"
  alarm_description   = "More than ${var.quarantine_percent} % of the rows were refused. ${var.runbook}#rows-were-refused"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.quarantine_percent
  treat_missing_data  = "notBreaching"

  metric_query {
    id          = "rate"
    label       = "percent of the rows that were refused"
    expression  = "100 * refused / (refused + appended)"
    return_data = true
  }

  metric_query {
    id = "refused"

    metric {
      namespace   = "lakeupsert"
      metric_name = "QuarantinedRows"
      dimensions  = { Table = local.table }
      stat        = "Sum"
      period      = 3600
    }
  }

  metric_query {
    id = "appended"

    metric {
      namespace   = "lakeupsert"
      metric_name = "AppendedRows"
      dimensions  = { Table = local.table }
      stat        = "Sum"
      period      = 3600
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "failed_partitions_alarm" {
  alarm_name          = "${var.name}-failed-partitions"
  alarm_description   = "Partitions can't be merged; readers keep the last whole night. ${var.runbook}#partitions-failed"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "lakeupsert"
  metric_name         = "FailedPartitions"
  dimensions          = { Table = local.table }
  statistic           = "Maximum"
  period              = 900
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
}

resource "aws_cloudwatch_metric_alarm" "oldest_message_alarm" {
  alarm_name          = "${var.name}-oldest-message"
  alarm_description   = "A partition waits for a worker for hours: too few of them, or none. ${var.runbook}#alarms-on-aws"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = aws_sqs_queue.work_queue.name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 3
  comparison_operator = "GreaterThanThreshold"
  threshold           = 14400
  treat_missing_data  = "notBreaching"
}

resource "aws_cloudwatch_metric_alarm" "night_missing_alarm" {
  alarm_name          = "${var.name}-night-missing"
  alarm_description   = "No append ended for ${var.night_missing_hours} hours. ${var.runbook}#alarms-on-aws"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "lakeupsert"
  metric_name         = "AppendFinished"
  dimensions          = { service = var.name }
  statistic           = "Sum"
  period              = 3600
  evaluation_periods  = var.night_missing_hours
  comparison_operator = "LessThanThreshold"
  threshold           = 1
  treat_missing_data  = "breaching"
}

resource "aws_cloudwatch_metric_alarm" "errors_alarm" {
  for_each            = local.errors
  alarm_name          = "${var.name}-${replace(each.key, "_", "-")}-errors"
  alarm_description   = each.value.description
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  namespace           = "AWS/Lambda"
  metric_name         = "Errors"
  dimensions          = { FunctionName = aws_lambda_function.functions[each.key].function_name }
  statistic           = "Sum"
  period              = each.value.period
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
}
