output "landing_bucket" {
  value = aws_s3_bucket.landing_bucket.id
}

output "lake_bucket" {
  value = aws_s3_bucket.lake_bucket.id
}

output "functions_repository" {
  value = aws_ecr_repository.functions_repository.repository_url
}

output "spark_repository" {
  value = aws_ecr_repository.spark_repository.repository_url
}
