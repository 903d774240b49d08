"""The protocol of all engines: cases and prompts, from settings and a seed.

Decoding is greedy and ignores end tokens, and all engines get the same token ids. Prefix caching is
off by default. With it a case's warm-up leaves its prompts in the cache, so that decode after long
prompts is measured without computing them again; there is no prefill figure and no ragged case.
t(n): seconds until B rows have n new tokens each. For a case with P prompt tokens per row and N new
tokens:

    prefill tokens/s = B * P / t(1)
    decode tokens/s  = B * (N - L) / (t(N) - t(L))      both of one repeat
    ragged tokens/s  = requests * N / t(N)              requests submitted together

L, the lead, is the most tokens that the first row has when the last row gets its first token; it is
1 if all prompts fit into one step. Runs to t(L) and to t(N) begin and end in the same way, so
t(N) - t(L) is N - L steps of all B rows. N is L - 1 more than the requested new tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvgraph.contract.dims import BATCH_SIZE, ceildiv
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.symbols import MAX_EXTENTS
from kvgraph.errors import RequestError

Kind = Literal["batch", "context", "ragged"]

NAMES: Mapping[Kind, str] = {"batch": "prompt", "context": "context", "ragged": "requests"}
"""The setting from which prompts come, by kind of case."""

MOST_ROWS = MAX_EXTENTS[BATCH_SIZE]
"""Most rows of a step."""
MOST_REQUESTS = 1 << 16
"""Most ragged requests, since all their prompts are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run. `contexts`: lengths of prompts in tokens, at the largest batch.

    Ragged requests have prompts of `prompt / 2` to `prompt * 3 / 2` tokens. `step_tokens`: most new
    tokens of a step, in every engine with such a setting; artifacts use their session's bound if it
    is lower. A step always has room for one token of each row.
    """

    threads: int
    prompt: int = 512
    new_tokens: int = 128
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (128, 1024)
    requests: int = 32
    repeats: int = 3
    step_tokens: int = 4096
    prefix_caching: bool = False
    seed: int = 7

    def __post_init__(self) -> None:
        least = {"prompt": 2, "new_tokens": 2, "repeats": 1, "step_tokens": 1, "requests": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise RequestError(f"{name}: expected >= {bound}, got {getattr(self, name)}")
        if not self.batches:
            raise RequestError("batches: expected at least one batch size, got none")
        for name, values, bound in (("batches", self.batches, 1), ("context", self.contexts, 2)):
            for value in values:
                if value < bound:
                    raise RequestError(f"{name}: expected each >= {bound}, got {value}")
        if (most := max(self.batches)) > MOST_ROWS:
            raise RequestError(f"batches: expected each at most {MOST_ROWS} rows, got {most}")
        if self.requests > MOST_REQUESTS:
            raise RequestError(
                f"requests: expected at most {MOST_REQUESTS} ragged ones, got {self.requests}"
            )

    @property
    def ragged(self) -> int:
        """Number of requests of the ragged case; 0 if it is not run."""
        return 0 if self.prefix_caching else self.requests


QUICK: JsonObject = {
    "prompt": 64,
    "new_tokens": 16,
    "contexts": (32, 128),
    "requests": 8,
    "repeats": 5,
}
"""Settings of `--quick`, for a first look and not for published figures."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case: prompts of `lengths` tokens together, `new_tokens` more of each, `repeats` times.

    `prefills`: whether t(1) is the time of whole prompts. `lead`: L of the module's formulas.
    """

    name: str
    kind: Kind
    lengths: tuple[int, ...] = field(repr=False)
    new_tokens: int
    repeats: int
    prefills: bool = True
    lead: int = 1

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all rows at their longest, which a pool must hold."""
        return sum(self.lengths) + self.batch * self.new_tokens


def plan_cases(settings: Settings, step_tokens: int) -> list[Case]:
    """Cases: batches at the prompt's length, contexts at the largest batch, then ragged requests.

    `step_tokens`: new tokens of a step, in the engine with the lowest bound.
    """
    n, repeats, prompt = settings.new_tokens, settings.repeats, settings.prompt
    most = max(settings.batches)
    shapes: list[tuple[Kind, int, int]] = [
        ("batch", b, prompt) for b in dict.fromkeys(settings.batches)
    ]
    shapes += [("context", most, c) for c in dict.fromkeys(settings.contexts) if c != prompt]
    cases = []
    for kind, rows, length in shapes:
        computed = 1 if settings.prefix_caching else length  # tokens of each prompt
        lead = lead_tokens(rows, computed, max(step_tokens, rows))
        name, lengths, new = f"batch {rows} x {length}", (length,) * rows, lead - 1 + n
        cases.append(Case(name, kind, lengths, new, repeats, not settings.prefix_caching, lead))
    if settings.ragged:
        chosen = random.Random(f"{settings.seed} lengths")
        least, longest = prompt // 2, prompt * 3 // 2
        lengths = tuple(chosen.randint(least, longest) for _ in range(settings.ragged))
        cases.append(Case(f"{settings.ragged} ragged", "ragged", lengths, n, repeats))
    return cases


def lead_tokens(rows: int, prompt: int, step_tokens: int) -> int:
    """L of the module's formulas, for `rows` prompts of `prompt` tokens; `step_tokens >= rows`.

    Prompts are computed in turn, with one token of each row that has its first token already.
    """
    tokens = steps = 0
    for begun in range(rows):  # rows that have their first token
        more = max(0, ceildiv((begun + 1) * prompt - tokens, step_tokens - begun))
        tokens += more * (step_tokens - begun)
        steps += more
    return steps + 1 - ceildiv(prompt, step_tokens)


def check_lengths(settings: Settings, cases: Sequence[Case], max_seq_len: int) -> None:
    """Raise RequestError, with the setting's name, if prompts leave no room for new tokens."""
    for case in cases:
        name, what, tokens = NAMES[case.kind], "", max(case.lengths)
        if case.kind == "ragged":
            what, tokens = "ragged prompts of up to ", settings.prompt * 3 // 2
        if tokens + case.new_tokens > max_seq_len:
            early = f", {case.lead - 1} of them before all rows decode" if case.lead > 1 else ""
            raise RequestError(
                f"{name}: expected at most {max_seq_len} tokens with the new ones (the model's "
                f"max_seq_len), got {what}{tokens} + {case.new_tokens}{early}"
            )


def make_prompts(case: Case, vocab_size: int, bos: int | None, seed: int) -> list[list[int]]:
    """Token ids of every row: `bos` if the model has one, then random ids.

    They are from the middle of the vocabulary, since its ends hold special tokens. Equal arguments
    give equal ids on every machine.
    """
    low, high = vocab_size // 8, vocab_size - vocab_size // 8
    rows = []
    for row, length in enumerate(case.lengths):
        chosen = random.Random(f"{seed} {case.name} {row}")
        ids = [chosen.randrange(low, high) for _ in range(length)]
        rows.append(ids if bos is None else [bos, *ids[1:]])
    return rows
