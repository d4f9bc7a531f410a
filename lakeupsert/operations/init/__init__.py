"""`init` and `try`: sample rows become settings, each with its reason, or another program's file is translated."""
