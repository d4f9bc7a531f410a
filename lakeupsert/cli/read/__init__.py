"""Commands that read rows and files."""
