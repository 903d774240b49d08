"""docs/models.md and tests/golden/models.json, from verdicts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from kvgraph.compiler.refusals import Reason
from tools.models.judge import LENGTHS, NEW, Verdict

ROOT = Path(__file__).parents[2]
PAGE, GOLDEN = ROOT / "docs" / "models.md", ROOT / "tests" / "golden" / "models.json"

TEXT = """\
# Models

Each decoder of transformers {version}, as a small random checkpoint: windows are shorter than the
prompts, and sinks, soft caps, scales, biases and experts count. A model is right where its tokens
on `cpu` with backend `onnx` are those that transformers makes: {new} greedy tokens behind prompts
of {lengths} tokens, in one batch, in float32.

`python -m tools.models --write` makes this page. A slow test fails when a result changes.

| result | cases |
|---|---|
| right | {right} |
| refused by name | {refused} |
| other tokens | {other} |
| no small model of it could be made | {not_made} |

For the last group we have no small configuration, or transformers' own code does not run.

## Right

{right_names}.

## Refused

| why | models |
|---|---|
{reasons}

## Not made

{not_made_names}.
"""


def write(found: Mapping[str, Verdict]) -> None:
    import transformers

    by_result: dict[str, list[str]] = {}
    for name, verdict in found.items():
        by_result.setdefault(verdict.result, []).append(name)
    counts = Counter(verdict.result for verdict in found.values())
    text = TEXT.format(
        version=transformers.__version__,
        new=NEW,
        lengths=", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}",
        right=counts["right"],
        refused=counts["refused"],
        other=counts["other tokens"],
        not_made=counts["not made"],
        right_names=_listed(by_result.get("right", [])),
        reasons="\n".join(_reasons(found)),
        not_made_names=_listed(by_result.get("not made", [])),
    )
    PAGE.write_text(text)
    results = {name: result_of(verdict) for name, verdict in found.items()}
    golden = {"transformers": transformers.__version__, "cases": results}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def result_of(verdict: Verdict) -> str:
    """What is kept of a verdict: the result, and of a refusal which reason it is."""
    if verdict.result != "refused":
        return verdict.result
    reason = reason_of(verdict.why)
    return f"refused: {reason.name if reason else verdict.why}"


def reason_of(sentence: str) -> Reason | None:
    """The reason that `sentence` ends with; None if it ends with none."""
    for reason in Reason:
        words = re.split(r"\{\w+\}", reason.value)
        if re.search(".+".join(map(re.escape, words)) + "$", sentence):
            return reason
    return None


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "None"


def _reasons(found: Mapping[str, Verdict]) -> list[str]:
    """A row for each reason that refuses a model, in the order in which they are looked for."""
    models: dict[Reason, list[str]] = {}
    for name, verdict in found.items():
        reason = reason_of(verdict.why)
        if verdict.result == "refused" and reason is not None:
            models.setdefault(reason, []).append(name)
    return [f"| {_plain(r)} | {_listed(models[r])} |" for r in Reason if r in models]


def _plain(reason: Reason) -> str:
    """With dots for the words that are filled in."""
    return re.sub(r"\{\w+\}", "…", reason.value)
