"""What readers see: the files of one snapshot, natively scanned. Nothing here writes."""
