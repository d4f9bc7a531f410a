"""Where and how row work runs: in this process, in worker processes, on Spark. Nothing here commits: files that an engine writes
count once a chain names them."""
