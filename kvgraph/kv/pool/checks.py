"""Check of all bookkeeping; `enable_runtime_checks` runs it after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.pool.replica import Replica
from kvgraph.kv.pool.rows import UNBOUNDED, Phase, Row


def verify(replicas: Sequence[Replica], rows: Iterable[Row]) -> None:
    """Raise AssertionError at the first invariant that does not hold."""
    by_replica: dict[int, list[Row]] = {replica.index: [] for replica in replicas}
    for row in rows:
        by_replica[row.replica_idx].append(row)
    for replica in replicas:
        own = by_replica[replica.index]
        _verify_rows(replica, own)
        for i, leaf in enumerate(replica.leaves):
            held = Counter(p for r in own for p in r.pages[i] if p != leaf.null)
            _verify_pool(leaf.pool, held)
            for row in own:
                _verify_pages(leaf, row, i, replica)
        replica.batch.verify()


def _verify_rows(replica: Replica, rows: Sequence[Row]) -> None:
    """Each row index is either free or taken; a row has equally many pages in all leaves."""
    indices = [row.index for row in rows] + replica.free_rows
    assert sorted(indices) == list(range(replica.settings.max_batch_size)), sorted(indices)
    for row in rows:
        assert len({len(pages) for pages in row.pages}) == 1, row.pages
        _verify_phase(row, replica.settings.page_size)


def _verify_phase(row: Row, page_size: int) -> None:
    """`capacity`, `limit` and `wake`, which hot loops read, agree with the phase and the pages."""
    marks = (row.capacity, row.limit, row.wake)
    if row.phase is Phase.DUMMY:
        assert marks == (UNBOUNDED, UNBOUNDED, UNBOUNDED), marks
        return
    assert row.committed <= row.num_pages, (row.committed, row.num_pages)
    if row.phase is Phase.ALLOCATED:
        assert row.capacity == row.num_pages * page_size > 0, (row.capacity, row.num_pages)
        assert 0 <= row.limit <= row.capacity, marks
    else:
        assert marks == (0, 0, 0), marks
        assert (row.num_pages > 0) == (row.phase is Phase.LOADING), (row.phase, row.num_pages)


def _verify_pool(pool: PagePool, held: Counter[int]) -> None:
    """Each page is held, pinned or free; the index and the pages' digests are inverses."""
    assert pool.refs == [held[page] for page in range(pool.num_pages)], (pool.refs, held)
    free = list(pool.free_pages())
    assert len(free) == len(set(free)) == pool.num_free, (free, pool.num_free)
    assert set(free) == {page for page in range(pool.num_pages) if pool.is_free(page)}, free
    assert pool.offloads <= pool.pins, (pool.offloads, pool.pins)
    committed = {digest: p for p, digest in enumerate(pool.digests) if digest is not None}
    assert committed == pool.index, (committed, pool.index)


def _verify_pages(leaf: Leaf, row: Row, i: int, replica: Replica) -> None:
    """The lookup row holds the row's pages: null pages behind the window, then committed pages,
    then pages of this row alone. A row that commits nothing has no page with a digest.
    """
    pages, passed = row.pages[i], row.passed[i]
    table = leaf.table[row.index].tolist()
    assert table == pages + [leaf.null] * (len(table) - len(pages)), (table, pages)
    assert [p == leaf.null for p in pages] == [at < passed for at in range(len(pages))], pages
    if row.phase is Phase.DUMMY or not replica.settings.prefix_caching:
        return
    digests = [leaf.pool.digests[page] for page in pages[passed:]]
    if not replica.commits(row):
        assert not any(digests), row.request_id
        return
    for at, digest in enumerate(digests, passed):
        # Pages after the first one that is being loaded may already be on the device.
        if at < row.committed or (row.phase is Phase.LOADING and digest is not None):
            assert digest == row.digests[at], (row.request_id, at)
        else:
            assert digest is None, (row.request_id, at)
            assert leaf.pool.refs[pages[at]] == 1, (row.request_id, at)
