"""Show the published snapshots to other engines, in their own formats."""

from urllib.parse import quote


def url_path(name: str) -> str:
    """The name of an object as logs of other formats have it."""
    return quote(name, safe="/=")


def hides_vectors(name: str) -> bool:
    """Whether Polars finds no deletion vector of a file of that name: it escapes some paths once more than others, and those of
    checkpoints not as it does those of commits."""
    return url_path(name) != name
