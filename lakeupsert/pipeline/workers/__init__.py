"""Phase two, for a whole call: workers take messages from queues and merge their partitions."""
