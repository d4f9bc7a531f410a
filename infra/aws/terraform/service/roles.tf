# Only the roles of vacuum and of operators may delete. A writer that lost a race leaves its files to vacuum.

locals {
  reads_landing = toset(concat(["append_nightly", "operator", "reprocess", "stream"], local.has_spark ? ["spark"] : []))
  writes_lake   = toset(concat(keys(local.functions), ["operator", "stream"], local.has_spark ? ["spark"] : []))
  sends_work    = toset(concat(["append_nightly", "operator", "reconcile", "reprocess", "stream"], local.has_spark ? ["spark"] : []))
  roles = merge(
    { for name, role in aws_iam_role.functions : name => role.name },
    { for name, role in aws_iam_role.role : name => role.name },
    local.has_spark ? { spark = aws_iam_role.spark_role[0].name } : {}
  )
}

resource "aws_iam_policy" "read_landing" {
  name_prefix = "${var.name}-read-landing-"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = "s3:GetObject"
        Resource = "${local.landing}/${var.landing_prefix}*"
      },
      # Of the whole bucket: with a condition on the prefix S3 answers 403 for an object that is not there, and not 404.
      {
        Effect   = "Allow"
        Action   = "s3:ListBucket"
        Resource = local.landing
      },
    ]
  })
}

resource "aws_iam_role_policy_attachment" "read_landing" {
  for_each   = local.reads_landing
  role       = local.roles[each.key]
  policy_arn = aws_iam_policy.read_landing.arn
}

resource "aws_iam_policy" "write_lake" {
  name_prefix = "${var.name}-write-lake-"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"]
        Resource = "${local.lake}/${var.processed_prefix}*"
      },
      {
        Effect   = "Allow"
        Action   = "s3:GetObject"
        Resource = "${local.lake}/${var.config_key}"
      },
      {
        Effect   = "Allow"
        Action   = "s3:ListBucket"
        Resource = local.lake
      },
    ]
  })
}

resource "aws_iam_role_policy_attachment" "write_lake" {
  for_each   = local.writes_lake
  role       = local.roles[each.key]
  policy_arn = aws_iam_policy.write_lake.arn
}

resource "aws_iam_policy" "send_work" {
  name_prefix = "${var.name}-send-work-"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = ["sqs:GetQueueUrl", "sqs:SendMessage"]
        Resource = aws_sqs_queue.work_queue.arn
      },
    ]
  })
}

resource "aws_iam_role_policy_attachment" "send_work" {
  for_each   = local.sends_work
  role       = local.roles[each.key]
  policy_arn = aws_iam_policy.send_work.arn
}

resource "aws_iam_policy" "use_key" {
  count       = var.kms_key_arn != "" ? 1 : 0
  name_prefix = "${var.name}-use-key-"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["kms:Decrypt", "kms:GenerateDataKey"]
      Resource = var.kms_key_arn
    }]
  })
}

resource "aws_iam_role_policy_attachment" "use_key" {
  for_each   = var.kms_key_arn != "" ? local.writes_lake : toset([])
  role       = local.roles[each.key]
  policy_arn = aws_iam_policy.use_key[0].arn
}

# Whoever publishes. To drop the table (publish --reset) is left to people.
resource "aws_iam_policy" "keep_glue_table" {
  count       = var.glue_table != "" ? 1 : 0
  name_prefix = "${var.name}-keep-glue-table-"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect = "Allow"
      Action = [
        "glue:BatchCreatePartition", "glue:BatchDeletePartition", "glue:BatchUpdatePartition", "glue:CreateTable",
        "glue:GetDatabase", "glue:GetPartitions", "glue:GetTable", "glue:UpdateTable",
      ]
      Resource = [
        "arn:${local.partition}:glue:${local.region}:${local.account}:catalog",
        "arn:${local.partition}:glue:${local.region}:${local.account}:database/${split("/", var.glue_table)[0]}",
        "arn:${local.partition}:glue:${local.region}:${local.account}:table/${var.glue_table}",
      ]
    }]
  })
}

resource "aws_iam_role_policy_attachment" "keep_glue_table" {
  for_each   = var.glue_table != "" ? local.writes_lake : toset([])
  role       = local.roles[each.key]
  policy_arn = aws_iam_policy.keep_glue_table[0].arn
}

# Roles that people and processes take. Whoever in this account is allowed to (sts:AssumeRole) may take one.
locals {
  roles_taken = {
    # Commands that only look.
    reader = concat(
      [
        {
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${local.lake}/${var.processed_prefix}*", "${local.lake}/${var.config_key}"]
        },
        {
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [local.lake]
        },
      ],
      var.kms_key_arn != "" ? [{ Effect = "Allow", Action = ["kms:Decrypt"], Resource = [var.kms_key_arn] }] : []
    )
    # `serve`, `capture` and `ingest`: they create landing files, and merge. They delete leases that they renewed, and old positions.
    stream = [
      {
        Effect   = "Allow"
        Action   = ["s3:PutObject"]
        Resource = ["${local.landing}/${var.landing_prefix}*"]
      },
      {
        Effect = "Allow"
        Action = ["s3:DeleteObject"]
        Resource = [
          "${local.lake}/${var.processed_prefix}*/_lakeupsert/leases/*",
          "${local.lake}/${var.processed_prefix}*/_lakeupsert/sources/*",
        ]
      },
      {
        Effect   = "Allow"
        Action   = ["sqs:ChangeMessageVisibility", "sqs:DeleteMessage", "sqs:GetQueueAttributes", "sqs:ReceiveMessage"]
        Resource = [aws_sqs_queue.work_queue.arn]
      },
      {
        Effect   = "Allow"
        Action   = ["sqs:GetQueueAttributes", "sqs:GetQueueUrl", "sqs:SendMessage"]
        Resource = [aws_sqs_queue.dead_letters.arn]
      },
    ]
    # Every other command, for people: `erase`, `maintain`, `backup`, `recover`, `rebuild`, `redrive`, `update`, and so on. Like the
    # role of vacuum it deletes no old version.
    operator = [
      {
        Effect = "Allow"
        Action = ["s3:DeleteObject"]
        Resource = [
          "${local.lake}/${var.processed_prefix}*",
          "${local.landing}/${var.landing_prefix}*", # erase --landing
        ]
      },
      {
        Effect = "Allow"
        Action = [
          "sqs:ChangeMessageVisibility",
          "sqs:DeleteMessage",
          "sqs:GetQueueAttributes",
          "sqs:GetQueueUrl",
          "sqs:ReceiveMessage",
        ]
        Resource = [aws_sqs_queue.dead_letters.arn, aws_sqs_queue.work_queue.arn]
      },
      {
        Effect   = "Allow"
        Action   = ["sqs:SendMessage"]
        Resource = [aws_sqs_queue.dead_letters.arn]
      },
    ]
  }
}

resource "aws_iam_role" "role" {
  for_each    = local.roles_taken
  name_prefix = "${substr("${var.name}-${each.key}", 0, 37)}-"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { AWS = "arn:${local.partition}:iam::${local.account}:root" }
    }]
  })
}

resource "aws_iam_role_policy" "role" {
  for_each = local.roles_taken
  name     = each.key
  role     = aws_iam_role.role[each.key].id
  policy   = jsonencode({ Version = "2012-10-17", Statement = each.value })
}

# The role of vacuum is also that of people who run `lakeupsert vacuum --yes`; whoever in this account is allowed to may take it.
resource "aws_iam_role" "functions" {
  for_each    = local.functions
  name_prefix = "${substr("${var.name}-${each.key}", 0, 37)}-"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect = "Allow"
      Action = "sts:AssumeRole"
      Principal = merge(
        { Service = "lambda.amazonaws.com" },
        each.key == "vacuum" ? { AWS = "arn:${local.partition}:iam::${local.account}:root" } : {}
      )
    }]
  })
}

locals {
  own_statements = {
    append_nightly = local.has_spark ? [
      {
        Effect   = "Allow"
        Action   = ["emr-serverless:StartJobRun"]
        Resource = aws_emrserverless_application.spark_application[0].arn
      },
      {
        Effect    = "Allow"
        Action    = ["iam:PassRole"]
        Resource  = aws_iam_role.spark_role[0].arn
        Condition = { StringEquals = { "iam:PassedToService" = "emr-serverless.amazonaws.com" } }
      },
    ] : []
    dedupe_worker = [
      {
        Effect = "Allow"
        Action = [
          "sqs:ChangeMessageVisibility",
          "sqs:DeleteMessage",
          "sqs:GetQueueAttributes",
          "sqs:GetQueueUrl",
          "sqs:ReceiveMessage",
          "sqs:SendMessage", # anew, what it had no time to begin
        ]
        Resource = aws_sqs_queue.work_queue.arn
      },
      {
        Effect   = "Allow"
        Action   = ["sqs:GetQueueAttributes", "sqs:GetQueueUrl", "sqs:SendMessage"]
        Resource = aws_sqs_queue.dead_letters.arn
      },
    ]
    # To read why partitions failed; `redrive` is a person's.
    reconcile = [
      {
        Effect   = "Allow"
        Action   = ["sqs:ChangeMessageVisibility", "sqs:GetQueueAttributes", "sqs:GetQueueUrl", "sqs:ReceiveMessage"]
        Resource = aws_sqs_queue.dead_letters.arn
      },
      {
        Effect   = "Allow"
        Action   = ["sqs:GetQueueAttributes"]
        Resource = aws_sqs_queue.work_queue.arn
      },
    ]
    reprocess = []
    # It can't delete old versions, so the bucket keeps for a week what went.
    vacuum = [{
      Effect   = "Allow"
      Action   = ["s3:DeleteObject"]
      Resource = "${local.lake}/${var.processed_prefix}*"
    }]
  }
}

resource "aws_iam_role_policy" "functions" {
  for_each = local.functions
  name     = each.key
  role     = aws_iam_role.functions[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [{
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:PutLogEvents"]
        Resource = "${aws_cloudwatch_log_group.functions[each.key].arn}:*"
      }],
      local.own_statements[each.key]
    )
  })
}

resource "aws_iam_role" "schedule_role" {
  name_prefix = "${substr(var.name, 0, 28)}-schedule-"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "scheduler.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "schedule_role" {
  name = "invoke"
  role = aws_iam_role.schedule_role.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = "lambda:InvokeFunction"
        Resource = [for name in ["append_nightly", "reconcile", "vacuum"] : aws_lambda_function.functions[name].arn]
      },
      {
        Effect   = "Allow"
        Action   = "sqs:SendMessage"
        Resource = aws_sqs_queue.schedule_dead_letters.arn
      },
    ]
  })
}
