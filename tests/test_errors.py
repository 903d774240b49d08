"""Errors go from one process to another as they are."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvgraph import errors
from kvgraph.errors import InsufficientPagesError, KVGraphError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KVGraphError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_the_kind_the_sentence_and_the_counts(kind: type[KVGraphError]) -> None:
    error = kind("pool: expected 3 free pages, got 2")
    if isinstance(error, InsufficientPagesError):
        error = type(error)(str(error), needed=3, free=2, used=5, total=7)
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
