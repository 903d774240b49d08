"""The index of pages against a plain model of it, and the order in which it puts replicas."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.kv.pool.lookup import deepest_window, longest_run
from kvgraph.runtime.stats import EngineStats
from kvgraph.serve.facts import EngineFacts
from kvgraph.serve.load import Load
from kvgraph.serve.replicas.index import (
    ASSIGNED_SECONDS,
    MOST_REPORTS,
    SILENT_SECONDS,
    RoutingIndex,
)
from kvgraph.serve.replicas.report import DECODE, PREFILL, Report, packed, unpacked

PAGE = 16
FACTS = EngineFacts(100, 2048, 64, 512, PAGE, True, 50, routed_pages=50)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")[::-1]


def load_of(**counts: int) -> Load:
    stats = EngineStats(0, 0, 0, 0, 0, 0, num_free_pages=50, num_pages=50)
    return Load(replace(stats, **counts))


class Replica:
    """Holds pages as an engine does, and reports."""

    def __init__(self, name: str, facts: EngineFacts = FACTS, role: str = DECODE) -> None:
        self.name, self.facts, self.role = name, facts, role
        self.start()

    def start(self) -> None:
        """As a new process: nothing is held."""
        self.held: set[bytes] = set()
        self.epoch, self.sequence = random.randbytes(8), 0

    def report(
        self,
        index: RoutingIndex,
        added: tuple[int, ...] = (),
        removed: tuple[int, ...] = (),
        *,
        whole: bool = False,
        arrives: bool = True,
        started: tuple[str, ...] = (),
        load: Load | None = None,
    ) -> bool:
        fresh = {digest(one) for one in added} - self.held
        gone = {digest(one) for one in removed} & self.held - fresh
        self.held |= fresh
        self.held -= gone
        self.sequence += 1
        report = Report(
            self.name,
            self.epoch,
            self.sequence,
            whole,
            packed(self.held if whole else fresh),
            b"" if whole else packed(gone),
            started,
            load or load_of(),
            self.facts if whole else None,
            self.role,
        )
        return arrives and index.report(report) is not None

    def tell(self, index: RoutingIndex, *added: int) -> None:
        """Report, and all again where the index does not follow."""
        if not self.report(index, added):
            assert self.report(index, whole=True)


def chain(*numbers: int) -> bytes:
    return packed([digest(one) for one in numbers])


PAGES = st.lists(st.integers(0, 12), max_size=6).map(tuple)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["tell", "lost", "restart", "dies"]), PAGES, PAGES
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(STEPS, st.lists(st.permutations(range(13)), min_size=1, max_size=3), st.integers(0, 3))
def test_the_index_holds_what_the_pools_hold(
    steps: list[tuple[int, str, tuple[int, ...], tuple[int, ...]]],
    prompts: list[list[int]],
    windowed: int,
) -> None:
    """Reports that are lost and engines that start anew leave nothing stale."""
    index = RoutingIndex()
    facts = [replace(FACTS, window=3 * PAGE) if i == windowed else FACTS for i in range(3)]
    replicas = [Replica(f"r{i}", facts[i]) for i in range(3)]
    for which, what, added, removed in steps:
        replica = replicas[which]
        if what == "restart":
            replica.start()
        elif what == "dies":
            index.forget(replica.name)
        if not replica.report(index, added, removed, arrives=what != "lost") and what != "lost":
            assert replica.report(index, whole=True)
    for replica in replicas:
        if not replica.report(index):
            assert replica.report(index, whole=True)
        assert sorted(index.pages(replica.name)) == sorted(unpacked(packed(replica.held)))
    names = [replica.name for replica in replicas]
    for prompt in prompts:
        digests = [digest(one) for one in prompt]
        found = index.hits(packed(digests), names)
        for replica in replicas:
            if replica.facts.window is None:
                expected = longest_run(digests, replica.held)
            else:
                expected = deepest_window(digests, replica.held, 3)
            assert found[replica.name] == expected
    for name in names:
        index.forget(name)
    assert not index._table


def test_a_report_that_follows_none_is_refused() -> None:
    index, replica = RoutingIndex(), Replica("a")
    assert not replica.report(index, (1,))
    assert replica.report(index, (2,), whole=True)
    assert replica.report(index, (3,))
    assert not replica.report(index, (4,), arrives=False)
    assert not replica.report(index, (5,)), "one is missing"
    assert replica.report(index, whole=True)
    assert sorted(index.pages("a")) == sorted(unpacked(chain(1, 2, 3, 4, 5)))


def test_the_replica_with_the_longest_prefix_is_first() -> None:
    index = RoutingIndex()
    for name, pages in (("a", (1,)), ("b", (1, 2, 3)), ("c", (1, 2))):
        Replica(name).tell(index, *pages)
    assert index.choose("q", ["a", "b", "c", "new"], chain(1, 2, 3, 4), 70) == [
        "b",
        "c",
        "a",
        "new",
    ]


def test_tokens_that_wait_count_as_much_as_tokens_to_compute() -> None:
    index = RoutingIndex()
    long, other = Replica("long"), Replica("other")
    long.tell(index, 1, 2, 3)
    other.tell(index)
    asked = chain(1, 2, 3, 4), 4 * PAGE + 1
    assert index.choose("q0", ["long", "other"], *asked)[0] == "long"  # 17 to compute
    assert index.choose("q1", ["long", "other"], *asked)[0] == "long"  # 17 + 17
    assert index.choose("q2", ["long", "other"], *asked)[0] == "long"  # 34 + 17
    assert index.choose("q3", ["long", "other"], *asked)[0] == "other"  # 51 + 17 > 65
    assert index.queued() == {"long": 51, "other": 65}
    assert long.report(index, started=("q0", "q1"))
    assert index.queued() == {"long": 17, "other": 65}
    assert index.choose("q4", ["long", "other"], *asked)[0] == "long"


def test_a_request_that_is_routed_again_counts_once() -> None:
    index = RoutingIndex()
    for name in "ab":
        Replica(name).tell(index)
    first = index.choose("q", ["a", "b"], b"", 100)[0]
    other = "b" if first == "a" else "a"
    assert index.choose("q", [other], b"", 100) == [other]
    assert index.queued() == {first: 0, other: 100}


def test_a_request_that_ray_sends_to_another_rank_waits_nowhere() -> None:
    index = RoutingIndex()
    replicas = {name: Replica(name) for name in "ab"}
    for replica in replicas.values():
        replica.tell(index)
    first, second = index.choose("q", ["a", "b"], b"", 100)
    assert index.queued() == {first: 100, second: 0}
    assert replicas[second].report(index, started=("q",))
    assert index.queued() == {first: 0, second: 0}


def test_pages_that_it_would_evict_count() -> None:
    """A full replica that shares one page is dearer than an empty one."""
    index = RoutingIndex()
    Replica("full").tell(index, *range(50))
    Replica("empty").tell(index)
    asked = chain(0, 100, 101, 102), 4 * PAGE
    assert index.choose("q", ["full", "empty"], *asked)[0] == "empty"


def test_replicas_that_cost_the_same_take_turns() -> None:
    index = RoutingIndex()
    names = list("abcd")
    replicas = [Replica(name) for name in names]
    for replica in replicas:
        replica.tell(index)
    chosen = []
    for number in range(8):
        chosen.append(index.choose(f"q{number}", names, b"", 10)[0])
        for replica in replicas:
            assert replica.report(index, started=(f"q{number}",))
    assert sorted(chosen[:4]) == sorted(chosen[4:]) == names


def test_what_is_not_heard_of_is_forgotten() -> None:
    now = 0.0
    index = RoutingIndex(lambda: now)
    quiet, loud = Replica("quiet"), Replica("loud")
    quiet.tell(index, 1)
    loud.tell(index, 2)
    index.choose("q", ["quiet"], b"", 100)
    now = SILENT_SECONDS + 1
    loud.tell(index)
    assert index.choose("q2", ["quiet", "loud"], chain(1), 17) == ["loud", "quiet"]
    assert index.pages("quiet") == []
    assert not quiet.report(index), "it is asked for all"
    for _ in range(20):
        now += ASSIGNED_SECONDS / 20 + 1
        loud.tell(index)
    index.choose("q3", ["loud"], b"", 5)
    assert index.queued() == {"loud": 5}, "q2 was waited for long enough"


def test_numbers_of_replicas_that_are_not_heard_of_do_not_count() -> None:
    now = 0.0
    index = RoutingIndex(lambda: now)
    quiet, loud = Replica("quiet"), Replica("loud")
    quiet.tell(index, 1, 2)
    loud.tell(index, 1)
    assert index.cached(chain(1, 2)) is None, "no prefill replica would compute the others"
    prefill = Replica("prefill", role=PREFILL)
    prefill.tell(index)
    assert (index.cached(chain(1, 2)), index.load()[0]) == (2, 2)
    now = SILENT_SECONDS + 1
    loud.tell(index)
    assert index.cached(chain(1, 2)) is None
    prefill.tell(index)
    assert index.cached(chain(1, 2)) == 1
    quiet.tell(index, 1, 2)
    now += SILENT_SECONDS + 1
    quiet.tell(index)
    assert index.load()[0] == 1


def test_all_replicas_are_lost_once_none_has_started_again() -> None:
    """The first one took 40 s to start. One that computes prompts for others answers nothing."""
    now = 0.0
    index = RoutingIndex(lambda: now)
    only, prefill = Replica("only"), Replica("prefill", role=PREFILL)
    now = 40.0
    only.tell(index)
    now += 1000  # all processes were stopped
    assert not index.is_lost()
    only.tell(index)
    index.forget("only")
    assert not index.is_lost()
    now += 40
    prefill.tell(index)
    assert not index.is_lost()
    now += 1
    assert index.is_lost()
    only.start()
    only.tell(index)
    assert not index.is_lost()


def test_numbers_of_all_replicas_together() -> None:
    index = RoutingIndex()
    assert index.load() == (0, None)
    assert index.facts() is None
    for name, count in (("a", 3), ("b", 4)):
        load = replace(load_of(generated_tokens=count), free_pages=(count, 20))
        assert Replica(name).report(index, whole=True, load=load)
    count, together = index.load()
    assert count == 2
    assert together is not None
    assert (together.stats.generated_tokens, together.stats.num_pages) == (7, 100)
    assert together.free_pages == (7, 40)
    index.forget("a")
    count, together = index.load()
    assert together is not None
    assert (count, together.stats.generated_tokens) == (1, 7), "a counter never goes back"
    assert together.stats.num_pages == 50
    assert index.facts() == FACTS


@pytest.mark.parametrize("count", [1, 64, 100])
def test_bits_of_replicas_that_are_gone_are_used_again(count: int) -> None:
    index = RoutingIndex()
    for number in range(count):
        Replica(f"r{number}").tell(index, 1, number + 2)
    for number in range(count):
        index.forget(f"r{number}")
        Replica(f"s{number}").tell(index, 1)
    assert max(index._table.values()).bit_length() <= count
    assert index.hits(chain(1, 2), [f"s{n}" for n in range(count)]) == {
        f"s{n}": 1 for n in range(count)
    }


def test_many_replicas_report_less_often() -> None:
    index = RoutingIndex()
    for number in range(200):
        Replica(f"r{number}").tell(index)
    report = Report("r0", b"", 0, True, b"", b"", (), load_of(), FACTS)
    assert index.report(report) == 200 / MOST_REPORTS


def test_counters_of_an_engine_that_tells_all_again_count_once() -> None:
    index, replica = RoutingIndex(), Replica("a")
    for _ in range(3):
        assert replica.report(index, whole=True, load=load_of(generated_tokens=5))
    assert _generated(index) == 5
    index.forget("a")
    assert replica.report(index, whole=True, load=load_of(generated_tokens=6))
    assert _generated(index) == 6
    replica.start()
    assert replica.report(index, whole=True, load=load_of(generated_tokens=2))
    assert _generated(index) == 8, "of two engines"


def _generated(index: RoutingIndex) -> int:
    _, together = index.load()
    assert together is not None
    return together.stats.generated_tokens
