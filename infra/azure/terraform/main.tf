# What infra/azure/main.bicep makes, with azurerm: a table's night in Azure. NOT DEPLOYED by those who wrote it, as there.
# The provider has to use identities for storage, because the accounts refuse keys: `provider "azurerm" { storage_use_azuread = true }`.

data "azurerm_resource_group" "this" {
  name = var.resource_group
}

locals {
  location = var.location != "" ? var.location : data.azurerm_resource_group.this.location
  unique   = substr(sha1("${data.azurerm_resource_group.this.id}/${var.name}"), 0, 9)
  queue    = "${var.name}-work"
}

# -- what stays

resource "azurerm_storage_account" "lake" {
  # checkov:skip=CKV_AZURE_33:queues of an account without queues
  # checkov:skip=CKV_AZURE_35:functions without a network of their own come from addresses that nobody knows; only identities get in
  # checkov:skip=CKV_AZURE_59:the same
  # checkov:skip=CKV_AZURE_206:three zones; another region doubles the price, and `account_replication_type` says so where it is wanted
  # checkov:skip=CKV2_AZURE_1:the platform's keys encrypt it
  # checkov:skip=CKV2_AZURE_33:functions without a network of their own have no private endpoint
  # checkov:skip=CKV2_AZURE_41:there are no keys, so nobody makes a shared access signature
  name                            = "${var.name}lake${local.unique}"
  resource_group_name             = var.resource_group
  location                        = local.location
  account_kind                    = "StorageV2"
  account_tier                    = "Standard"
  account_replication_type        = "ZRS"
  is_hns_enabled                  = true
  shared_access_key_enabled       = false
  allow_nested_items_to_be_public = false
  min_tls_version                 = "TLS1_2"
  https_traffic_only_enabled      = true
  default_to_oauth_authentication = true
  local_user_enabled              = false

  blob_properties {
    delete_retention_policy {
      days = var.undo_days
    }

    container_delete_retention_policy {
      days = var.undo_days
    }
  }
}

resource "azurerm_storage_container" "lake" {
  # checkov:skip=CKV2_AZURE_21:reads are logged by the table's own figures and Azure's metrics, not for each blob
  for_each           = toset(["landing", "processed", "config"])
  name               = each.key
  storage_account_id = azurerm_storage_account.lake.id
}

# The functions' host can't keep its own state in an account with a hierarchical namespace.
resource "azurerm_storage_account" "work" {
  # checkov:skip=CKV_AZURE_33:messages name partitions, no rows
  # checkov:skip=CKV_AZURE_35:functions without a network of their own come from addresses that nobody knows; only identities get in
  # checkov:skip=CKV_AZURE_59:the same
  # checkov:skip=CKV_AZURE_206:three zones; another region doubles the price, and `account_replication_type` says so where it is wanted
  # checkov:skip=CKV2_AZURE_1:the platform's keys encrypt it
  # checkov:skip=CKV2_AZURE_33:functions without a network of their own have no private endpoint
  # checkov:skip=CKV2_AZURE_38:holds the host's state, which it makes anew
  # checkov:skip=CKV2_AZURE_41:there are no keys, so nobody makes a shared access signature
  name                            = "${var.name}work${local.unique}"
  resource_group_name             = var.resource_group
  location                        = local.location
  account_kind                    = "StorageV2"
  account_tier                    = "Standard"
  account_replication_type        = "ZRS"
  shared_access_key_enabled       = false
  allow_nested_items_to_be_public = false
  min_tls_version                 = "TLS1_2"
  https_traffic_only_enabled      = true
  default_to_oauth_authentication = true
}

resource "azurerm_storage_container" "code" {
  # checkov:skip=CKV2_AZURE_21:holds the published code
  name               = "code"
  storage_account_id = azurerm_storage_account.work.id
}

resource "azurerm_storage_queue" "work" {
  for_each           = toset([local.queue, "${local.queue}-poison"])
  name               = each.key
  storage_account_id = azurerm_storage_account.work.id
}

# -- what works

resource "azurerm_service_plan" "plan" {
  # checkov:skip=CKV_AZURE_212:instances come with messages
  # checkov:skip=CKV_AZURE_225:not in every region; a message whose instance is gone comes again in another zone
  # checkov:skip=CKV_AZURE_211:Flex Consumption is what functions run on in production
  name                = "${var.name}-plan"
  resource_group_name = var.resource_group
  location            = local.location
  os_type             = "Linux"
  sku_name            = "FC1"
}

resource "azurerm_function_app_flex_consumption" "app" {
  name                        = "${var.name}-${local.unique}"
  resource_group_name         = var.resource_group
  location                    = local.location
  service_plan_id             = azurerm_service_plan.plan.id
  https_only                  = true
  runtime_name                = "python"
  runtime_version             = "3.11"
  instance_memory_in_mb       = var.memory
  maximum_instance_count      = var.concurrency
  storage_container_type      = "blobContainer"
  storage_container_endpoint  = "${azurerm_storage_account.work.primary_blob_endpoint}${azurerm_storage_container.code.name}"
  storage_authentication_type = "SystemAssignedIdentity"

  identity {
    type = "SystemAssigned"
  }

  site_config {
    minimum_tls_version                    = "1.2"
    http2_enabled                          = true
    application_insights_connection_string = azurerm_application_insights.insights.connection_string
  }

  app_settings = {
    AzureWebJobsStorage__accountName       = azurerm_storage_account.work.name
    AzureFunctionsJobHost__functionTimeout = var.timeout
    LAKEUPSERT_CONFIG                      = "abfss://${azurerm_storage_container.lake["config"].name}@${azurerm_storage_account.lake.primary_dfs_host}/lakeupsert.toml"
    LAKEUPSERT_TABLE                       = var.name
    LAKEUPSERT_QUEUE                       = local.queue
    LAKEUPSERT_ZONE                        = var.zone
  }
}

# -- who may do what: nobody here may delete a blob, as a writer that lost a race leaves its files to vacuum. Why no role forbids
# unconditional writes of the metadata: see docs/AZURE.md, "Who may do what".

resource "azurerm_role_definition" "writer" {
  name              = "lakeupsert writer of ${var.name} (${local.unique})"
  description       = "Reads, creates and writes blobs, and deletes none."
  scope             = data.azurerm_resource_group.this.id
  assignable_scopes = [data.azurerm_resource_group.this.id]

  permissions {
    actions = ["Microsoft.Storage/storageAccounts/blobServices/containers/read"]
    data_actions = [
      "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read",
      "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/write",
      "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/add/action",
    ]
  }
}

resource "azurerm_role_assignment" "reads_landing" {
  scope                = azurerm_storage_container.lake["landing"].id
  principal_id         = azurerm_function_app_flex_consumption.app.identity[0].principal_id
  principal_type       = "ServicePrincipal"
  role_definition_name = "Storage Blob Data Reader"
}

resource "azurerm_role_assignment" "reads_config" {
  scope                = azurerm_storage_container.lake["config"].id
  principal_id         = azurerm_function_app_flex_consumption.app.identity[0].principal_id
  principal_type       = "ServicePrincipal"
  role_definition_name = "Storage Blob Data Reader"
}

resource "azurerm_role_assignment" "writes_processed" {
  scope              = azurerm_storage_container.lake["processed"].id
  principal_id       = azurerm_function_app_flex_consumption.app.identity[0].principal_id
  principal_type     = "ServicePrincipal"
  role_definition_id = azurerm_role_definition.writer.role_definition_resource_id
}

resource "azurerm_role_assignment" "uses_queues" {
  scope                = azurerm_storage_account.work.id
  principal_id         = azurerm_function_app_flex_consumption.app.identity[0].principal_id
  principal_type       = "ServicePrincipal"
  role_definition_name = "Storage Queue Data Contributor"
}

# The host keeps its leases and the app's code there.
resource "azurerm_role_assignment" "hosts_state" {
  scope                = azurerm_storage_account.work.id
  principal_id         = azurerm_function_app_flex_consumption.app.identity[0].principal_id
  principal_type       = "ServicePrincipal"
  role_definition_name = "Storage Blob Data Owner"
}

# And its diagnostic events.
resource "azurerm_role_assignment" "hosts_events" {
  scope                = azurerm_storage_account.work.id
  principal_id         = azurerm_function_app_flex_consumption.app.identity[0].principal_id
  principal_type       = "ServicePrincipal"
  role_definition_name = "Storage Table Data Contributor"
}

# -- who is told

resource "azurerm_log_analytics_workspace" "workspace" {
  name                = "${var.name}-logs"
  resource_group_name = var.resource_group
  location            = local.location
  sku                 = "PerGB2018"
  retention_in_days   = 30
}

resource "azurerm_application_insights" "insights" {
  name                = "${var.name}-insights"
  resource_group_name = var.resource_group
  location            = local.location
  application_type    = "web"
  workspace_id        = azurerm_log_analytics_workspace.workspace.id
}

resource "azurerm_monitor_action_group" "people" {
  name                = "${var.name}-people"
  resource_group_name = var.resource_group
  short_name          = var.name

  email_receiver {
    name                    = "mail"
    email_address           = var.mail
    use_common_alert_schema = true
  }
}

resource "azurerm_monitor_scheduled_query_rules_alert_v2" "failing" {
  name                 = "${var.name}-failing"
  resource_group_name  = var.resource_group
  location             = local.location
  description          = "A partition failed at every try, or a function more often than messages that are tried again explain."
  severity             = 2
  scopes               = [azurerm_application_insights.insights.id]
  evaluation_frequency = "PT15M"
  window_duration      = "PT15M"

  criteria {
    query                   = "union (traces | where message startswith \"failed partitions: \" | extend weight = 5), (requests | where success == false | extend weight = iff(name == \"append\", 5, 1)) | summarize weight = sum(weight)"
    metric_measure_column   = "weight"
    time_aggregation_method = "Total"
    operator                = "GreaterThanOrEqual"
    threshold               = 5
  }

  action {
    action_groups = [azurerm_monitor_action_group.people.id]
  }
}

resource "azurerm_monitor_scheduled_query_rules_alert_v2" "night_missing" {
  name                      = "${var.name}-night-missing"
  resource_group_name       = var.resource_group
  location                  = local.location
  description               = "No append has ended for 28 hours, also where nothing was new."
  severity                  = 1
  scopes                    = [azurerm_application_insights.insights.id]
  evaluation_frequency      = "PT1H"
  window_duration           = "P1D"
  query_time_range_override = "P2D"

  criteria {
    query                   = "traces | where timestamp > ago(28h) and message startswith \"appended: \" | summarize nights = count()"
    metric_measure_column   = "nights"
    time_aggregation_method = "Total"
    operator                = "LessThan"
    threshold               = 1
  }

  action {
    action_groups = [azurerm_monitor_action_group.people.id]
  }
}

resource "azurerm_monitor_scheduled_query_rules_alert_v2" "quarantine" {
  name                 = "${var.name}-quarantine"
  resource_group_name  = var.resource_group
  location             = local.location
  description          = "Of an hour's rows more than quarantine_percent were refused."
  severity             = 2
  scopes               = [azurerm_application_insights.insights.id]
  evaluation_frequency = "PT1H"
  window_duration      = "PT1H"

  criteria {
    query                   = "traces | parse message with \"rows: \" appended:long \" appended, \" refused:long \" quarantined\" | where isnotnull(refused) | summarize percent = 100.0 * sum(refused) / sum(appended + refused)"
    metric_measure_column   = "percent"
    time_aggregation_method = "Maximum"
    operator                = "GreaterThan"
    threshold               = var.quarantine_percent
  }

  action {
    action_groups = [azurerm_monitor_action_group.people.id]
  }
}

resource "azurerm_monitor_scheduled_query_rules_alert_v2" "stale" {
  name                 = "${var.name}-stale"
  resource_group_name  = var.resource_group
  location             = local.location
  description          = "For 6 hours readers have not seen all that was appended."
  severity             = 2
  scopes               = [azurerm_application_insights.insights.id]
  evaluation_frequency = "PT1H"
  window_duration      = "PT6H"

  criteria {
    query                   = "traces | parse message with \"waiting: \" partitions:long \" partitions\" | where isnotnull(partitions) | summarize fewest = min(partitions)"
    metric_measure_column   = "fewest"
    time_aggregation_method = "Minimum"
    operator                = "GreaterThan"
    threshold               = 0
  }

  action {
    action_groups = [azurerm_monitor_action_group.people.id]
  }
}
