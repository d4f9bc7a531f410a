locals {
  functions = {
    append_nightly = "Phase one. By the schedule."
    dedupe_worker  = "Phase two. Fed by the queue."
    reconcile      = "Sends lost messages again, publishes, proves. Every 10 minutes."
    reprocess      = "Writes a range of dates anew. By hand."
    vacuum         = "Expires snapshots and deletes what nobody needs. Every Sunday."
  }
  environment = {
    LAKEUPSERT_CONFIG            = "s3://${var.lake_bucket}/${var.config_key}"
    POWERTOOLS_METRICS_NAMESPACE = "lakeupsert"
    POWERTOOLS_SERVICE_NAME      = var.name
  }
  append_environment = merge(
    { LAKEUPSERT_LOCAL_BYTES = tostring(var.local_bytes) },
    local.has_spark ? {
      LAKEUPSERT_EMR_APPLICATION = aws_emrserverless_application.spark_application[0].id
      LAKEUPSERT_EMR_ROLE        = aws_iam_role.spark_role[0].arn
      LAKEUPSERT_EMR_ENTRYPOINT  = "s3://${var.lake_bucket}/${var.spark_script_key}"
    } : {}
  )
}

resource "aws_lambda_function" "functions" {
  # checkov:skip=CKV_AWS_50:the log has each call; X-Ray would tell no more
  # checkov:skip=CKV_AWS_115:the event source has maximum_concurrency; to reserve any fails in new accounts, whose limit is too small
  # checkov:skip=CKV_AWS_116:dead letters are the queue's and the scheduler's
  # checkov:skip=CKV_AWS_117:calls S3, SQS and EMR only, by its role; in a VPC each of them would need an endpoint
  # checkov:skip=CKV_AWS_173:the environment holds addresses and no secret; credentials are the role's
  # checkov:skip=CKV_AWS_272:images can't be signed; the repository's tags never move
  for_each      = local.functions
  function_name = "${var.name}-${each.key}"
  description   = each.value
  package_type  = "Image"
  image_uri     = var.image
  role          = aws_iam_role.functions[each.key].arn
  memory_size   = var.memory
  timeout       = 900

  image_config {
    command = ["lambdas.${each.key}.handler.handler"]
  }

  ephemeral_storage {
    size = each.key == "append_nightly" ? 2048 : 512
  }

  logging_config {
    log_format = "JSON"
    log_group  = aws_cloudwatch_log_group.functions[each.key].name
  }

  environment {
    variables = merge(local.environment, each.key == "append_nightly" ? local.append_environment : {})
  }
}

resource "aws_cloudwatch_log_group" "functions" {
  # checkov:skip=CKV_AWS_158:logs name files and count rows, they hold none; CloudWatch encrypts them with keys of its own
  # checkov:skip=CKV_AWS_338:what a night did is in the table itself, for ever
  for_each          = local.functions
  name              = "/aws/lambda/${var.name}-${each.key}"
  retention_in_days = 90
}

resource "aws_lambda_event_source_mapping" "dedupe_source" {
  event_source_arn        = aws_sqs_queue.work_queue.arn
  function_name           = aws_lambda_function.functions["dedupe_worker"].arn
  batch_size              = var.partitions_per_call
  function_response_types = ["ReportBatchItemFailures"]
  depends_on              = [aws_iam_role_policy.functions]

  scaling_config {
    maximum_concurrency = var.concurrency
  }
}

resource "aws_scheduler_schedule" "append_schedule" {
  # checkov:skip=CKV_AWS_297:the call holds no secret
  name                         = "${var.name}-append"
  description                  = "Every night at 2 am. Where daylight saving skips that hour, so is the night; the next one takes both."
  state                        = var.schedule
  schedule_expression          = "cron(0 2 * * ? *)"
  schedule_expression_timezone = var.time_zone

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = aws_lambda_function.functions["append_nightly"].arn
    role_arn = aws_iam_role.schedule_role.arn
    input    = "{\"night\": \"<aws.scheduler.scheduled-time>\"}" # a call that is repeated starts no second job

    retry_policy {
      maximum_event_age_in_seconds = 3600
      maximum_retry_attempts       = 5
    }

    dead_letter_config {
      arn = aws_sqs_queue.schedule_dead_letters.arn
    }
  }
}

resource "aws_scheduler_schedule" "reconcile_schedule" {
  # checkov:skip=CKV_AWS_297:the call holds no secret
  name = "${var.name}-reconcile"
  # The last worker sees in the table that it is, and publishes; this call does where that one had no time left or died.
  schedule_expression = "rate(10 minutes)"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = aws_lambda_function.functions["reconcile"].arn
    role_arn = aws_iam_role.schedule_role.arn
    input    = "{}"

    retry_policy {
      maximum_event_age_in_seconds = 1800
      maximum_retry_attempts       = 3
    }

    dead_letter_config {
      arn = aws_sqs_queue.schedule_dead_letters.arn
    }
  }
}

resource "aws_scheduler_schedule" "vacuum_schedule" {
  # checkov:skip=CKV_AWS_297:the call holds no secret
  name                         = "${var.name}-vacuum"
  description                  = "Every Sunday at noon, when no night runs."
  state                        = var.schedule
  schedule_expression          = "cron(0 12 ? * SUN *)"
  schedule_expression_timezone = var.time_zone

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = aws_lambda_function.functions["vacuum"].arn
    role_arn = aws_iam_role.schedule_role.arn
    input    = "{}"

    retry_policy {
      maximum_event_age_in_seconds = 3600
      maximum_retry_attempts       = 3
    }

    dead_letter_config {
      arn = aws_sqs_queue.schedule_dead_letters.arn
    }
  }
}
