"""The table of `tools/seeded_bugs.py` is of the sources and tests that there are."""

from __future__ import annotations

import pytest

from tools.seeded_bugs import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_text_is_found_once(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.right) == 1
    assert bug.wrong != bug.right
    file, _, test = bug.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_there_are_twenty_of_them() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) == 20
