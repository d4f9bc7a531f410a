output "lake" {
  value = azurerm_storage_account.lake.name
}

output "account" {
  value = azurerm_storage_account.work.name
}

output "app" {
  value = azurerm_function_app_flex_consumption.app.name
}

output "queue" {
  value = "azqueue://${azurerm_storage_account.work.name}/${local.queue}"
}
