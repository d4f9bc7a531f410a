# For nights above local_bytes.

locals {
  has_spark = var.spark_image != ""
  endpoints = var.endpoints_vpc != "" ? 1 : 0
}

resource "aws_emrserverless_application" "spark_application" {
  count         = local.has_spark ? 1 : 0
  name          = var.name
  type          = "spark"
  release_label = var.spark_release
  architecture  = "X86_64"

  image_configuration {
    image_uri = var.spark_image
  }

  auto_start_configuration {
    enabled = true
  }

  auto_stop_configuration {
    enabled              = true
    idle_timeout_minutes = 5
  }

  dynamic "network_configuration" {
    for_each = var.spark_network == "vpc" ? [var.spark_subnets] : []

    content {
      subnet_ids         = network_configuration.value
      security_group_ids = var.spark_security_groups
    }
  }

  runtime_configuration {
    classification = "spark-defaults"
    properties = {
      # Rows are worked on in Python, outside the JVM: a task took 807 MB there, and four run at once. EMR's default of a tenth,
      # 1.4 GB, is less than two of them; the worker, 4 vCPU and 16 GB, is as large as by default.
      "spark.executor.cores"          = "4"
      "spark.executor.memory"         = "10g"
      "spark.executor.memoryOverhead" = "6g"
    }
  }

  maximum_capacity {
    cpu    = var.spark_maximum_cpu
    memory = var.spark_maximum_memory
  }

  monitoring_configuration {
    cloudwatch_logging_configuration {
      enabled        = true
      log_group_name = aws_cloudwatch_log_group.spark_logs[0].name
    }
  }
}

# EMR starts a failed job again itself (retryPolicy, where the job is started); this tells of one that failed each time.
resource "aws_cloudwatch_event_rule" "spark_job_failed" {
  count       = local.has_spark ? 1 : 0
  name_prefix = "${var.name}-spark-failed-"
  description = "A job of the EMR application failed."
  event_pattern = jsonencode({
    source      = ["aws.emr-serverless"]
    detail-type = ["EMR Serverless Job Run State Change"]
    detail = {
      state         = ["FAILED", "CANCELLED"]
      applicationId = [aws_emrserverless_application.spark_application[0].id]
    }
  })
}

resource "aws_cloudwatch_event_target" "spark_job_failed" {
  count = local.has_spark ? 1 : 0
  rule  = aws_cloudwatch_event_rule.spark_job_failed[0].name
  arn   = aws_sns_topic.alarms.arn
}

resource "aws_vpc_endpoint" "s3_endpoint" {
  count             = local.endpoints
  vpc_endpoint_type = "Gateway"
  vpc_id            = var.endpoints_vpc
  service_name      = "com.amazonaws.${local.region}.s3"
  route_table_ids   = var.endpoints_route_tables
}

resource "aws_vpc_endpoint" "sqs_endpoint" {
  count               = local.endpoints
  vpc_endpoint_type   = "Interface"
  vpc_id              = var.endpoints_vpc
  service_name        = "com.amazonaws.${local.region}.sqs"
  private_dns_enabled = true
  subnet_ids          = var.spark_subnets
  security_group_ids  = var.spark_security_groups
}

resource "aws_vpc_endpoint" "monitoring_endpoint" {
  count               = local.endpoints
  vpc_endpoint_type   = "Interface"
  vpc_id              = var.endpoints_vpc
  service_name        = "com.amazonaws.${local.region}.monitoring"
  private_dns_enabled = true
  subnet_ids          = var.spark_subnets
  security_group_ids  = var.spark_security_groups
}

# The application writes its log from the VPC too.
resource "aws_vpc_endpoint" "logs_endpoint" {
  count               = local.endpoints
  vpc_endpoint_type   = "Interface"
  vpc_id              = var.endpoints_vpc
  service_name        = "com.amazonaws.${local.region}.logs"
  private_dns_enabled = true
  subnet_ids          = var.spark_subnets
  security_group_ids  = var.spark_security_groups
}

resource "aws_cloudwatch_log_group" "spark_logs" {
  # checkov:skip=CKV_AWS_158:logs name files and count rows, they hold none; CloudWatch encrypts them with keys of its own
  # checkov:skip=CKV_AWS_338:what a night did is in the table itself, for ever
  count             = local.has_spark ? 1 : 0
  name              = "/aws/emr-serverless/${var.name}"
  retention_in_days = 90
}

resource "aws_iam_role" "spark_role" {
  count       = local.has_spark ? 1 : 0
  name_prefix = "${substr(var.name, 0, 31)}-spark-"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "emr-serverless.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "spark_role" {
  # checkov:skip=CKV_AWS_355:two actions know no narrower resource; the second is held to our metrics
  # checkov:skip=CKV_AWS_290:the same
  count = local.has_spark ? 1 : 0
  name  = "append"
  role  = aws_iam_role.spark_role[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = "s3:GetObject"
        Resource = "${local.lake}/${var.spark_script_key}"
      },
      {
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
        Resource = "${aws_cloudwatch_log_group.spark_logs[0].arn}:*"
      },
      # These two know no narrower resource; the second is held to our metrics.
      {
        Effect   = "Allow"
        Action   = "logs:DescribeLogGroups"
        Resource = "*"
      },
      {
        Effect    = "Allow"
        Action    = "cloudwatch:PutMetricData"
        Resource  = "*"
        Condition = { StringEquals = { "cloudwatch:namespace" = "lakeupsert" } }
      },
    ]
  })
}
