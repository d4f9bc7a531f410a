# What infra/aws/lake.yaml makes: what outlives every release. Once for a lake; docs/AWS.md says in which order.

data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}
data "aws_region" "this" {}

locals {
  buckets = {
    landing = aws_s3_bucket.landing_bucket
    lake    = aws_s3_bucket.lake_bucket
  }
  # A mistaken vacuum can be undone for a week. Longer costs more: each night's superseded files are kept that long.
  kept_days = { landing = 30, lake = 7 }
}

# No lifecycle rule deletes a current object. Landing files are what `reprocess --source landing` and `reconcile --deep` read,
# however old, so they move only to a class that answers at once. Which files of the lake nobody needs any more, only
# `lakeupsert vacuum` knows; these don't move, because each night reads and replaces them.
resource "aws_s3_bucket" "landing_bucket" {
  # checkov:skip=CKV_AWS_18:who reads what is told by CloudTrail's data events, which are set up for an account, not for a bucket
  # checkov:skip=CKV_AWS_19:encrypted by aws_s3_bucket_server_side_encryption_configuration; the check does not follow its for_each
  # checkov:skip=CKV_AWS_144:commits are safe in one region
  # checkov:skip=CKV_AWS_145:encrypted either way; kms_key_arn decides by whose key
  # checkov:skip=CKV2_AWS_62:the schedule begins a night, no event does
  bucket_prefix = "${var.name}-landing-"

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket" "lake_bucket" {
  # checkov:skip=CKV_AWS_18:who reads what is told by CloudTrail's data events, which are set up for an account, not for a bucket
  # checkov:skip=CKV_AWS_19:encrypted by aws_s3_bucket_server_side_encryption_configuration; the check does not follow its for_each
  # checkov:skip=CKV_AWS_144:commits are safe in one region
  # checkov:skip=CKV_AWS_145:encrypted either way; kms_key_arn decides by whose key
  # checkov:skip=CKV2_AWS_62:the schedule begins a night, no event does
  bucket_prefix = "${var.name}-lake-"

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "buckets" {
  for_each = local.buckets
  bucket   = each.value.id

  rule {
    bucket_key_enabled = var.kms_key_arn != ""

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn != "" ? "aws:kms" : "AES256"
      kms_master_key_id = var.kms_key_arn != "" ? var.kms_key_arn : null
    }
  }
}

resource "aws_s3_bucket_public_access_block" "buckets" {
  for_each                = local.buckets
  bucket                  = each.value.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "buckets" {
  for_each = local.buckets
  bucket   = each.value.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_versioning" "buckets" {
  for_each = local.buckets
  bucket   = each.value.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "buckets" {
  for_each   = local.buckets
  bucket     = each.value.id
  depends_on = [aws_s3_bucket_versioning.buckets]

  rule {
    id     = "parts-of-broken-uploads"
    status = "Enabled"
    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  dynamic "rule" {
    for_each = each.key == "landing" && var.landing_cold_days > 0 ? [var.landing_cold_days] : []

    content {
      id     = "cold"
      status = "Enabled"
      filter {}

      transition {
        storage_class = "GLACIER_IR"
        days          = rule.value
      }
    }
  }

  rule {
    id     = "replaced-and-deleted"
    status = "Enabled"
    filter {}

    noncurrent_version_expiration {
      noncurrent_days = local.kept_days[each.key]
    }

    expiration {
      expired_object_delete_marker = true
    }
  }
}

resource "aws_s3_bucket_policy" "landing_bucket_policy" {
  bucket = aws_s3_bucket.landing_bucket.id
  policy = data.aws_iam_policy_document.landing.json
}

resource "aws_s3_bucket_policy" "lake_bucket_policy" {
  bucket = aws_s3_bucket.lake_bucket.id
  policy = data.aws_iam_policy_document.lake.json
}

data "aws_iam_policy_document" "landing" {
  statement {
    sid       = "OnlyTls"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.landing_bucket.arn, "${aws_s3_bucket.landing_bucket.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

data "aws_iam_policy_document" "lake" {
  statement {
    sid       = "OnlyTls"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.lake_bucket.arn, "${aws_s3_bucket.lake_bucket.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  # The commits. S3 itself refuses whoever would put one without If-None-Match, and so could replace another's: a proxy that
  # strips the header, a script, `aws s3 cp`. Copies and multipart uploads are refused there too.
  statement {
    sid     = "CommitsOnlyIfAbsent"
    effect  = "Deny"
    actions = ["s3:PutObject"]
    resources = [
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/spec/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/backups/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/batches/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/ledger/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/leases/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/reading/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/partitions/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/snapshots/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/sources/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_lakeupsert/upkeep/*",
      "${aws_s3_bucket.lake_bucket.arn}/*/_delta_log/*",
    ]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Null"
      variable = "s3:if-none-match"
      values   = ["true"]
    }
  }
}

resource "aws_ecr_repository" "functions_repository" {
  # checkov:skip=CKV_AWS_136:images hold the published code and no data; ECR encrypts them with keys of its own
  name                 = "${var.name}/functions"
  image_tag_mutability = "IMMUTABLE"

  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_ecr_repository_policy" "functions_repository" {
  repository = aws_ecr_repository.functions_repository.name
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "LambdaPulls"
      Effect    = "Allow"
      Principal = { Service = "lambda.amazonaws.com" }
      Action    = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
      Condition = {
        StringLike = {
          "aws:SourceArn" = "arn:${data.aws_partition.this.partition}:lambda:${data.aws_region.this.region}:${data.aws_caller_identity.this.account_id}:function:*"
        }
      }
    }]
  })
}

resource "aws_ecr_repository" "spark_repository" {
  # checkov:skip=CKV_AWS_136:images hold the published code and no data; ECR encrypts them with keys of its own
  name                 = "${var.name}/spark"
  image_tag_mutability = "IMMUTABLE"

  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_ecr_repository_policy" "spark_repository" {
  repository = aws_ecr_repository.spark_repository.name
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "EmrServerlessPulls"
      Effect    = "Allow"
      Principal = { Service = "emr-serverless.amazonaws.com" }
      Action    = ["ecr:BatchGetImage", "ecr:DescribeImages", "ecr:GetDownloadUrlForLayer"]
      Condition = {
        StringLike = {
          "aws:SourceArn" = "arn:${data.aws_partition.this.partition}:emr-serverless:${data.aws_region.this.region}:${data.aws_caller_identity.this.account_id}:/applications/*"
        }
      }
    }]
  })
}
