// A table's night in Azure: two accounts, two queues, one function app with an identity, and mails when something is wrong.
// NOT DEPLOYED by those who wrote it: parsed and checked by checkov only. See docs/AZURE.md.
//
//     az deployment group create --resource-group lake --template-file infra/azure/main.bicep \
//         --parameters name=sales mail=you@example.org zone=Europe/Berlin

targetScope = 'resourceGroup'

@description('Of the table; in the names of everything, so short: small letters and digits.')
@minLength(3)
@maxLength(11)
param name string

@description('Whom alerts are sent to.')
param mail string

@description('Where it has to be 2 am for a night to begin, as in the IANA database.')
param zone string = 'Etc/UTC'

@description('Of each instance, in MB; a merge may take what is left beside Python.')
@allowed([2048, 4096])
param memory int = 4096

@description('How many instances, each with one message at a time.')
@minValue(1)
@maxValue(1000)
param concurrency int = 40

@description('How long one merge may take, as hours:minutes:seconds.')
param timeout string = '00:30:00'

@description('An alert where more of an hour\'s rows than that go to quarantine.')
param quarantinePercent int = 1

@description('Days in which what vacuum deletes can be brought back.')
param undoDays int = 7

param location string = resourceGroup().location

var unique = uniqueString(resourceGroup().id, name)
var lakeName = take('${name}lake${unique}', 24)
var workName = take('${name}work${unique}', 24)
var queue = '${name}-work'

// -- what stays

resource lake 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  // checkov:skip=CKV_AZURE_35:functions without a network of their own come from addresses that nobody knows; only identities get in
  // checkov:skip=CKV_AZURE_206:three zones; another region doubles the price, and `sku` says so where it is wanted
  // checkov:skip=CKV_AZURE_43:the name is made by take() and uniqueString(), which checkov does not follow
  name: lakeName
  location: location
  kind: 'StorageV2'
  sku: { name: 'Standard_ZRS' }
  properties: {
    isHnsEnabled: true
    allowSharedKeyAccess: false
    allowBlobPublicAccess: false
    minimumTlsVersion: 'TLS1_2'
    supportsHttpsTrafficOnly: true
    defaultToOAuthAuthentication: true
  }

  resource blobs 'blobServices' = {
    name: 'default'
    properties: {
      deleteRetentionPolicy: { enabled: true, days: undoDays }
      containerDeleteRetentionPolicy: { enabled: true, days: undoDays }
    }

    resource landing 'containers' = { name: 'landing' }
    resource processed 'containers' = { name: 'processed' }
    resource config 'containers' = { name: 'config' }
  }
}

// The functions' host can't keep its own state in an account with a hierarchical namespace.
resource work 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  // checkov:skip=CKV_AZURE_35:functions without a network of their own come from addresses that nobody knows; only identities get in
  // checkov:skip=CKV_AZURE_206:three zones; another region doubles the price, and `sku` says so where it is wanted
  // checkov:skip=CKV_AZURE_43:the name is made by take() and uniqueString(), which checkov does not follow
  name: workName
  location: location
  kind: 'StorageV2'
  sku: { name: 'Standard_ZRS' }
  properties: {
    allowSharedKeyAccess: false
    allowBlobPublicAccess: false
    minimumTlsVersion: 'TLS1_2'
    supportsHttpsTrafficOnly: true
    defaultToOAuthAuthentication: true
  }

  resource blobs 'blobServices' = {
    name: 'default'
    resource code 'containers' = { name: 'code' }
  }

  resource queues 'queueServices' = {
    name: 'default'
    resource messages 'queues' = { name: queue }
    resource poison 'queues' = { name: '${queue}-poison' }
  }
}

// -- what works

resource plan 'Microsoft.Web/serverfarms@2023-12-01' = {
  // checkov:skip=CKV_AZURE_225:not in every region; a message whose instance is gone comes again in another zone
  name: '${name}-plan'
  location: location
  kind: 'functionapp'
  sku: { tier: 'FlexConsumption', name: 'FC1' }
  properties: { reserved: true }
}

resource app 'Microsoft.Web/sites@2023-12-01' = {
  // checkov:skip=CKV_AZURE_222:the code is published that way; no function listens
  // checkov:skip=CKV_AZURE_17:no function listens
  // checkov:skip=CKV_AZURE_212:instances come with messages
  // checkov:skip=CKV_AZURE_213:no function listens; the alerts below tell
  name: '${name}-${unique}'
  location: location
  kind: 'functionapp,linux'
  identity: { type: 'SystemAssigned' }
  properties: {
    serverFarmId: plan.id
    httpsOnly: true
    clientCertEnabled: false
    functionAppConfig: {
      runtime: { name: 'python', version: '3.11' }
      scaleAndConcurrency: { instanceMemoryMB: memory, maximumInstanceCount: concurrency }
      deployment: {
        storage: {
          type: 'blobContainer'
          value: '${work.properties.primaryEndpoints.blob}${work::blobs::code.name}'
          authentication: { type: 'SystemAssignedIdentity' }
        }
      }
    }
    siteConfig: {
      minTlsVersion: '1.2'
      ftpsState: 'Disabled'
      http20Enabled: true
      appSettings: [
        { name: 'AzureWebJobsStorage__accountName', value: work.name }
        { name: 'AzureFunctionsJobHost__functionTimeout', value: timeout }
        { name: 'APPLICATIONINSIGHTS_CONNECTION_STRING', value: insights.properties.ConnectionString }
        { name: 'LAKEUPSERT_CONFIG', value: 'abfss://config@${lake.name}.dfs.${environment().suffixes.storage}/lakeupsert.toml' }
        { name: 'LAKEUPSERT_TABLE', value: name }
        { name: 'LAKEUPSERT_QUEUE', value: queue }
        { name: 'LAKEUPSERT_ZONE', value: zone }
      ]
    }
  }
}

// -- who may do what: nobody here may delete a blob, as a writer that lost a race leaves its files to vacuum.
// Nothing here forbids unconditional writes of the metadata, as lake.yaml's bucket policy does on AWS: conditions of role assignments
// know a blob's path and tags, but no header, so they can't ask for If-None-Match. docs/AZURE.md says what else was considered.

resource writer 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, name, 'writer')
  properties: {
    roleName: 'lakeupsert writer of ${name} (${unique})'
    description: 'Reads, creates and writes blobs, and deletes none.'
    type: 'CustomRole'
    assignableScopes: [resourceGroup().id]
    permissions: [
      {
        actions: ['Microsoft.Storage/storageAccounts/blobServices/containers/read']
        notActions: []
        dataActions: [
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read'
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/write'
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/add/action'
        ]
        notDataActions: []
      }
    ]
  }
}

var readerRole = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '2a2b9908-6ea1-4ae2-8e65-a410df84e7d1')
var queueRole = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '974c5e8b-45b9-4653-ba55-5f855dd0fb88')
var hostRole = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', 'b7e6dc6d-f1e8-4753-8033-0f276bb0955b')
var tableRole = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3')

resource readsLanding 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(lake::blobs::landing.id, app.id, readerRole)
  scope: lake::blobs::landing
  properties: { principalId: app.identity.principalId, principalType: 'ServicePrincipal', roleDefinitionId: readerRole }
}

resource readsConfig 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(lake::blobs::config.id, app.id, readerRole)
  scope: lake::blobs::config
  properties: { principalId: app.identity.principalId, principalType: 'ServicePrincipal', roleDefinitionId: readerRole }
}

resource writesProcessed 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(lake::blobs::processed.id, app.id, 'writer')
  scope: lake::blobs::processed
  properties: { principalId: app.identity.principalId, principalType: 'ServicePrincipal', roleDefinitionId: writer.id }
}

resource usesQueues 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(work.id, app.id, queueRole)
  scope: work
  properties: { principalId: app.identity.principalId, principalType: 'ServicePrincipal', roleDefinitionId: queueRole }
}

// The host keeps its leases and the app's code there.
resource hostsState 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(work.id, app.id, hostRole)
  scope: work
  properties: { principalId: app.identity.principalId, principalType: 'ServicePrincipal', roleDefinitionId: hostRole }
}

// And its diagnostic events.
resource hostsEvents 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(work.id, app.id, tableRole)
  scope: work
  properties: { principalId: app.identity.principalId, principalType: 'ServicePrincipal', roleDefinitionId: tableRole }
}

// -- who is told

resource workspace 'Microsoft.OperationalInsights/workspaces@2023-09-01' = {
  name: '${name}-logs'
  location: location
  properties: { sku: { name: 'PerGB2018' }, retentionInDays: 30 }
}

resource insights 'Microsoft.Insights/components@2020-02-02' = {
  name: '${name}-insights'
  location: location
  kind: 'web'
  properties: { Application_Type: 'web', WorkspaceResourceId: workspace.id }
}

resource people 'Microsoft.Insights/actionGroups@2023-01-01' = {
  name: '${name}-people'
  location: 'global'
  properties: {
    groupShortName: name
    enabled: true
    emailReceivers: [{ name: 'mail', emailAddress: mail, useCommonAlertSchema: true }]
  }
}

resource failing 'Microsoft.Insights/scheduledQueryRules@2023-03-15-preview' = {
  name: '${name}-failing'
  location: location
  properties: {
    description: 'A partition failed at every try, or a function more often than messages that are tried again explain.'
    severity: 2
    enabled: true
    scopes: [insights.id]
    evaluationFrequency: 'PT15M'
    windowSize: 'PT15M'
    criteria: {
      allOf: [
        {
          query: 'union (traces | where message startswith "failed partitions: " | extend weight = 5), (requests | where success == false | extend weight = iff(name == "append", 5, 1)) | summarize weight = sum(weight)'
          metricMeasureColumn: 'weight'
          timeAggregation: 'Total'
          operator: 'GreaterThanOrEqual'
          threshold: 5
        }
      ]
    }
    actions: { actionGroups: [people.id] }
  }
}

resource nightMissing 'Microsoft.Insights/scheduledQueryRules@2023-03-15-preview' = {
  name: '${name}-night-missing'
  location: location
  properties: {
    description: 'No append has ended for 28 hours, also where nothing was new.'
    severity: 1
    enabled: true
    scopes: [insights.id]
    evaluationFrequency: 'PT1H'
    windowSize: 'P1D'
    overrideQueryTimeRange: 'P2D'
    criteria: {
      allOf: [
        {
          query: 'traces | where timestamp > ago(28h) and message startswith "appended: " | summarize nights = count()'
          metricMeasureColumn: 'nights'
          timeAggregation: 'Total'
          operator: 'LessThan'
          threshold: 1
        }
      ]
    }
    actions: { actionGroups: [people.id] }
  }
}

resource quarantine 'Microsoft.Insights/scheduledQueryRules@2023-03-15-preview' = {
  name: '${name}-quarantine'
  location: location
  properties: {
    description: 'Of an hour\'s rows more than quarantinePercent were refused.'
    severity: 2
    enabled: true
    scopes: [insights.id]
    evaluationFrequency: 'PT1H'
    windowSize: 'PT1H'
    criteria: {
      allOf: [
        {
          query: 'traces | parse message with "rows: " appended:long " appended, " refused:long " quarantined" | where isnotnull(refused) | summarize percent = 100.0 * sum(refused) / sum(appended + refused)'
          metricMeasureColumn: 'percent'
          timeAggregation: 'Maximum'
          operator: 'GreaterThan'
          threshold: quarantinePercent
        }
      ]
    }
    actions: { actionGroups: [people.id] }
  }
}

resource stale 'Microsoft.Insights/scheduledQueryRules@2023-03-15-preview' = {
  name: '${name}-stale'
  location: location
  properties: {
    description: 'For 6 hours readers have not seen all that was appended.'
    severity: 2
    enabled: true
    scopes: [insights.id]
    evaluationFrequency: 'PT1H'
    windowSize: 'PT6H'
    criteria: {
      allOf: [
        {
          query: 'traces | parse message with "waiting: " partitions:long " partitions" | where isnotnull(partitions) | summarize fewest = min(partitions)'
          metricMeasureColumn: 'fewest'
          timeAggregation: 'Minimum'
          operator: 'GreaterThan'
          threshold: 0
        }
      ]
    }
    actions: { actionGroups: [people.id] }
  }
}

output lake string = lake.name
output account string = work.name
output app string = app.name
output queue string = 'azqueue://${work.name}/${queue}'
