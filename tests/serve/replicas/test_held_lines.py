"""Lines of a log that wait for the command."""

from __future__ import annotations

import json

import pytest

from kvgraph.serve import log
from kvgraph.serve.replicas import held_lines
from kvgraph.serve.replicas.held_lines import HeldLines


def test_lines_that_nothing_takes_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_lines, "MOST_CHARACTERS", 5)
    lines = HeldLines()
    lines.add(["aa", "bb", "c"])
    assert lines.take() == ["aa", "bb", "c"]
    lines.add(["aa", "bb"])
    lines.add(["cc", "dddddddd"])
    dropped, *kept = lines.take()
    assert json.loads(dropped)["message"].startswith("log: 3 lines were dropped")
    assert kept == ["dddddddd"]
    assert lines.take() == []


def test_a_process_may_give_its_lines_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = HeldLines()
    monkeypatch.setattr(log._Sink, "take", None)
    log.send_lines(lambda line: lines.add([line]))
    log.log_answer("/version", 200, "one")
    assert capsys.readouterr().err == ""
    (line,) = lines.take()
    log.write_text(line)
    written = json.loads(capsys.readouterr().err)
    assert (written["request"], written["path"], written["status"]) == ("one", "/version", 200)
