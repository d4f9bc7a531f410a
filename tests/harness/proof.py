"""The proof that a table has what landed."""

from lakeupsert.api import Table


def assert_proved(table: Table, *, may_lack_sources: bool = False) -> None:
    """`reconcile --deep` finds nothing: figures and digests add up, and DuckDB finds the same rows in what landed.

    ``may_lack_sources``: partitions whose landing files are gone or changed need not be compared.
    """
    checked = table.reconcile(deep=True)
    assert not checked.unbalanced, "\n".join(f"{proof.partition}: {proof.difference}" for proof in checked.unbalanced)
    assert not checked.batches
    assert may_lack_sources or not checked.gone
    assert checked.recomputed is not None
