"""Where and how row work runs: in this process, in processes, on Spark. Nothing is committed here: what an engine writes counts
only when a chain names it."""
