variable "name" {
  description = "Of the lake; in the names of what is made. Small letters, digits and hyphens."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,25}$", var.name))
    error_message = "A name has 2 to 26 small letters, digits and hyphens, and begins with a letter."
  }
}

variable "kms_key_arn" {
  description = "Encrypts both buckets; empty = keys that S3 keeps (SSE-S3), which cost nothing."
  type        = string
  default     = ""
}

variable "landing_cold_days" {
  description = "Landing files that are older move to Glacier Instant Retrieval, a sixth of the price; reading one costs 0.03 a GB then. 0 = never."
  type        = number
  default     = 30

  validation {
    condition     = var.landing_cold_days >= 0
    error_message = "landing_cold_days is 0 or more."
  }
}
