variable "name" {
  description = "Of the table; in the names of everything, so short: small letters and digits."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9]{2,10}$", var.name))
    error_message = "A name has 3 to 11 small letters and digits, and begins with a letter."
  }
}

variable "resource_group" {
  description = "The name of the resource group, which exists."
  type        = string
}

variable "mail" {
  description = "Whom alerts are sent to."
  type        = string
}

variable "zone" {
  description = "Where it has to be 2 am for a night to begin, as in the IANA database."
  type        = string
  default     = "Etc/UTC"
}

variable "memory" {
  description = "Of each instance, in MB; a merge may take what is left beside Python."
  type        = number
  default     = 4096

  validation {
    condition     = contains([2048, 4096], var.memory)
    error_message = "memory is 2048 or 4096."
  }
}

variable "concurrency" {
  description = "How many instances, each with one message at a time."
  type        = number
  default     = 40

  validation {
    condition     = var.concurrency >= 1 && var.concurrency <= 1000
    error_message = "concurrency is from 1 to 1000."
  }
}

variable "timeout" {
  description = "How long one merge may take, as hours:minutes:seconds."
  type        = string
  default     = "00:30:00"
}

variable "quarantine_percent" {
  description = "An alert where more of an hour's rows than that go to quarantine."
  type        = number
  default     = 1
}

variable "undo_days" {
  description = "Days in which what vacuum deletes can be brought back."
  type        = number
  default     = 7
}

variable "location" {
  description = "The region; empty = that of the resource group."
  type        = string
  default     = ""
}
