variable "name" {
  description = "Of the table; in the names of what is made, so once in an account and region."
  type        = string
}

variable "landing_bucket" {
  description = "Output of the module lake."
  type        = string
}

variable "landing_prefix" {
  description = "Where in it this table's files land, such as sales/; empty = all of it."
  type        = string
  default     = ""
}

variable "lake_bucket" {
  description = "Output of the module lake."
  type        = string
}

variable "processed_prefix" {
  description = "Where in it this table lies; `processed` of the configuration is below it."
  type        = string
  default     = "processed/"

  validation {
    condition     = can(regex("^[^/].*/$", var.processed_prefix))
    error_message = "processed_prefix ends in a slash and does not begin with one."
  }
}

variable "config_key" {
  description = "The configuration's key in the lake bucket, outside processed_prefix; it has one table."
  type        = string
  default     = "lakeupsert.toml"
}

variable "kms_key_arn" {
  description = "As in the module lake; roles may then use it."
  type        = string
  default     = ""
}

variable "glue_table" {
  description = "DATABASE/TABLE of the configuration's section `glue`, which roles may then keep there; empty = no such publisher."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z0-9_-]+/[a-z0-9_-]+)?$", var.glue_table))
    error_message = "Write DATABASE/TABLE, in lower case."
  }
}

variable "image" {
  description = "The functions' image, by digest or by a tag that never moves."
  type        = string
}

variable "memory" {
  description = "MB of each function, and with them its share of processors. 3008 is the most that a new account may ask for."
  type        = number
  default     = 3008

  validation {
    condition     = var.memory >= 1024 && var.memory <= 10240
    error_message = "memory is from 1024 to 10240."
  }
}

variable "concurrency" {
  description = "dedupe_worker runs at most so often at once. Keep it below the account's own limit, which is 10 for new ones. S3 takes 5,500 reads a second of a new prefix and refuses more; functions then slow down, so many make a first night no faster."
  type        = number
  default     = 50

  validation {
    condition     = var.concurrency >= 2 && var.concurrency <= 1000
    error_message = "concurrency is from 2 to 1000."
  }
}

variable "partitions_per_call" {
  description = "Messages that one call of dedupe_worker gets. One for each of its processors (memory / 1769), so that each is begun at once: one that waits until the call ends is sent again, and from its second receive on has spent a try."
  type        = number
  default     = 2

  validation {
    condition     = var.partitions_per_call >= 1 && var.partitions_per_call <= 10
    error_message = "partitions_per_call is from 1 to 10."
  }
}

variable "local_bytes" {
  description = "Nights with so many landing bytes or fewer are appended in append_nightly itself, others by Spark. 32 MB, since compressed Parquet may take 60 times its bytes in memory; raise it with memory."
  type        = number
  default     = 33554432
}

variable "spark_image" {
  description = "The image of the EMR Serverless application; empty = no Spark, and nights must be below local_bytes."
  type        = string
  default     = ""
}

variable "spark_release" {
  description = "The EMR release that spark_image was made from, needed with it; it has to bring Spark 4.0 or 4.1."
  type        = string
  default     = "none"

  validation {
    condition     = var.spark_image == "" || var.spark_release != "none"
    error_message = "spark_image needs spark_release, the EMR release that it was made from."
  }
}

variable "spark_script_key" {
  description = "infra/aws/spark/append.py, as it was uploaded to the lake bucket, outside processed_prefix."
  type        = string
  default     = "code/append.py"
}

variable "spark_network" {
  description = "none = Spark has no network of its own. It then reaches S3, but neither SQS nor CloudWatch's metrics: each append warns, reconcile sends its messages within 10 minutes, and the alarm night-missing does not see it."
  type        = string
  default     = "vpc"

  validation {
    condition     = contains(["vpc", "none"], var.spark_network)
    error_message = "spark_network is one of vpc, none."
  }
}

variable "spark_subnets" {
  description = "Private subnets of Spark, in several zones."
  type        = list(string)
  default     = []

  validation {
    condition     = var.spark_image == "" || var.spark_network == "none" || length(var.spark_subnets) > 0
    error_message = "spark_image needs spark_subnets and spark_security_groups, or spark_network = none."
  }
}

variable "spark_security_groups" {
  description = "Security groups of Spark; with endpoints_vpc also those of its endpoints, so they have to let each other in at port 443."
  type        = list(string)
  default     = []

  validation {
    condition     = var.spark_image == "" || var.spark_network == "none" || length(var.spark_security_groups) > 0
    error_message = "spark_image needs spark_subnets and spark_security_groups, or spark_network = none."
  }
}

variable "endpoints_vpc" {
  description = "The VPC of spark_subnets, to get endpoints there for S3, SQS, metrics and logs; empty = it has them, or a NAT gateway."
  type        = string
  default     = ""

  validation {
    condition     = var.endpoints_vpc == "" || (var.spark_network == "vpc" && length(var.spark_subnets) > 0)
    error_message = "endpoints_vpc needs spark_network = vpc, spark_subnets and spark_security_groups."
  }
}

variable "endpoints_route_tables" {
  description = "The route tables of spark_subnets; needed with endpoints_vpc."
  type        = list(string)
  default     = []

  validation {
    condition     = var.endpoints_vpc == "" || length(var.endpoints_route_tables) > 0
    error_message = "endpoints_vpc needs endpoints_route_tables."
  }
}

variable "spark_maximum_cpu" {
  type    = string
  default = "64 vCPU"
}

variable "spark_maximum_memory" {
  type    = string
  default = "256 GB"
}

variable "schedule" {
  description = "DISABLED where something else begins the night, as in infra/aws/examples."
  type        = string
  default     = "ENABLED"

  validation {
    condition     = contains(["ENABLED", "DISABLED"], var.schedule)
    error_message = "schedule is one of ENABLED, DISABLED."
  }
}

variable "time_zone" {
  description = "The zone of 2 am, such as America/New_York."
  type        = string
  default     = "Etc/UTC"
}

variable "night_missing_hours" {
  description = "An alarm where no append ended for so long; 28 = by about 6 am where nights end soon after 2."
  type        = number
  default     = 28

  validation {
    condition     = var.night_missing_hours >= 25 && var.night_missing_hours <= 160
    error_message = "night_missing_hours is from 25 to 160."
  }
}

variable "table" {
  description = "The table's name in the configuration; empty = name."
  type        = string
  default     = ""
}

variable "freshness_seconds" {
  description = "An alarm where readers see nothing newer than that; 108000 = 30 hours."
  type        = number
  default     = 108000

  validation {
    condition     = var.freshness_seconds >= 3600
    error_message = "freshness_seconds is 3600 or more."
  }
}

variable "quarantine_percent" {
  description = "An alarm where more of an hour's rows than that go to quarantine."
  type        = number
  default     = 1
}

variable "alarm_email" {
  description = "Who is told of alarms; empty = subscribe to the topic by hand."
  type        = string
  default     = ""
}

variable "runbook" {
  description = "Where alarms point to; the address of that page where your people read it."
  type        = string
  default     = "docs/WHEN_SOMETHING_BROKE.md"
}
