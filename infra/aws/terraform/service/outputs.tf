output "queue" {
  description = "The line `queue` of the configuration."
  value       = "sqs://${aws_sqs_queue.work_queue.name}"
}

output "vacuum_role" {
  value = aws_iam_role.functions["vacuum"].arn
}

output "roles_taken" {
  description = "The roles that people and processes take: reader, stream, operator."
  value       = { for name, role in aws_iam_role.role : name => role.arn }
}

output "alarms" {
  value = aws_sns_topic.alarms.arn
}

output "spark_application" {
  value = one(aws_emrserverless_application.spark_application[*].id)
}

output "spark_role" {
  value = one(aws_iam_role.spark_role[*].arn)
}
