"""Landing files of ORC, and what pyarrow leaves out or reads otherwise than it was written."""
