"""The command `kvgraph chat`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvgraph.bars import Bars
from kvgraph.cli.console import stderr, working
from kvgraph.cli.options import (
    ArtifactFolder,
    NumPages,
    Seed,
    SessionName,
    Threads,
    Verify,
    text_of,
)
from kvgraph.cli.ranks import follows
from kvgraph.contract.plain import JsonObject
from kvgraph.errors import ArtifactError, KVGraphError, RequestError
from kvgraph.plural import plural

if TYPE_CHECKING:
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.sampling import SamplingParams

MOST = 1024
"""Most tokens of an answer by default."""

Mark: TypeAlias = tuple[int, float]
"""Tokens that an engine has generated, and the time in seconds."""

BY_MODEL = "[default: the model's own]"


def chat(
    artifact: ArtifactFolder,
    system: Annotated[
        str | None, typer.Option(help="Text that the model reads before the first message.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help=f"Most tokens to generate [default: {MOST}, or what fits]."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help=f"0 is greedy {BY_MODEL}")] = None,
    top_k: Annotated[
        int | None, typer.Option(help=f"Keep the k likeliest tokens; 0 keeps all {BY_MODEL}")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Keep the likeliest tokens up to this mass {BY_MODEL}")
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help=f"Above 1, tokens that are there already are less likely {BY_MODEL}"),
    ] = None,
    seed: Seed = None,
    session: SessionName = None,
    num_pages: NumPages = None,
    threads: Threads = None,
    verify: Verify = False,
) -> None:
    """Chat with a model: each line is a message, each answer streams to stdout.

    /clear begins a new talk, /quit or Ctrl-D ends it. Ctrl-C stops an answer.
    """
    from kvgraph.runtime.artifact import load
    from kvgraph.runtime.chat import Prompts
    from kvgraph.runtime.engine import Engine
    from kvgraph.runtime.sampling import SamplingParams

    asked: JsonObject = {
        "max_new_tokens": MOST if max_new_tokens is None else max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    system = None if system is None else text_of("--system", system)
    SamplingParams(**asked)  # refuses before anything is loaded
    with working("loading the artifact"):
        loaded = load(artifact, verify=verify or None)
    if follows(loaded, session, threads, None):
        return
    if missing := Prompts(loaded.folder, loaded.manifest.files).missing_chat_file:
        raise ArtifactError(
            f"{loaded.folder}: expected {missing} for chats, got none; add it to the model folder "
            "and compile again"
        )
    with working("opening the session"):
        engine = Engine(
            loaded,
            session=session,
            num_pages=num_pages,
            max_batch_size=1,
            num_threads=threads,
        )
    longest = engine._builder.longest_context() if max_new_tokens is None else None
    talk = Talk(engine, engine.suggested_params(asked), system, longest)
    for line in _typed() if talk.is_live else _piped():
        command = line.strip()
        if command == "/quit":
            break
        if command == "/clear":
            talk.clear()
        elif command:
            talk.answer(line)


class Talk:
    """A chat: the messages so far, which the next answer follows.

    `longest`: length of prompt and answer in tokens at which an answer ends; None: only `sampling`
    limits it. `is_live`: a user at a terminal sees errors and speed, and may stop an answer.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        system: str | None,
        longest: int | None = None,
    ) -> None:
        self.engine, self.sampling, self.longest = engine, sampling, longest
        self.is_live = sys.stdin.isatty() and sys.stdout.isatty()
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        self.messages = list(self._first)

    def answer(self, text: str) -> None:
        """Write the answer to a message; both join the talk, unless the message is refused."""
        try:
            self._answer([*self.messages, {"role": "user", "content": text}])
        except KVGraphError as error:
            if not self.is_live:
                raise
            stderr.print(f"kvgraph: {error}", soft_wrap=True)

    def _answer(self, asked: list[dict[str, str]]) -> None:
        start, first, said = self._mark(), None, ""
        try:
            prompt = self.engine.apply_chat_template(asked)  # long for the first message: imports
            pieces = self.engine.stream(prompt, self._sampling_of(prompt))
            with Bars(stderr):
                begun = list(islice(pieces, 1))
            first = self._mark()
            for piece in chain(begun, pieces):
                said += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self.is_live:
                raise
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages = [*asked, {"role": "assistant", "content": said}]
        if self.is_live:
            end = self._mark()
            stderr.print(_speed(start, first or end, end), style="dim")

    def _mark(self) -> Mark:
        return self.engine.generated_tokens, time.perf_counter()

    def _sampling_of(self, prompt: list[int]) -> SamplingParams:
        """Sampling with at most the tokens that fit; the engine refuses a prompt without room."""
        if self.longest is None:
            return self.sampling
        return self.sampling.clamped_to(self.longest - len(prompt))


def _speed(start: Mark, first: Mark, end: Mark) -> str:
    """The speed of an answer; `first`: the mark of its first piece."""
    count, rest = end[0] - start[0], end[0] - first[0]
    text = f"{count} {plural('token', count)}"
    if count:
        text += f", the first after {first[1] - start[1]:.2f} s"
    if rest:
        text += f", then {rest / (end[1] - first[1]):.1f} tokens/s"
    return text


def _typed() -> Iterator[str]:
    """Lines that a user types, until Ctrl-D. Ctrl-C discards the current line only."""
    with suppress(ImportError):  # not available on every system
        import readline  # noqa: F401  # makes `input` edit lines and remember them
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        except EOFError:
            sys.stdout.write("\n")
            return
        except UnicodeDecodeError as error:
            stderr.print(f"kvgraph: {_not_text(error)}", soft_wrap=True)
            continue
        yield line


def _piped() -> Iterator[str]:
    try:
        for place, line in enumerate(sys.stdin):
            text = line.removesuffix("\n").removesuffix("\r")
            yield text if place else text.removeprefix("\ufeff")  # a byte order mark
    except UnicodeDecodeError as error:
        raise RequestError(_not_text(error)) from error


def _not_text(error: UnicodeDecodeError) -> str:
    return f"stdin: expected text in UTF-8, got {error}"
