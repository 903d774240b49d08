"""GGUF: how byte-level tokenizers split a text into words, by the name that a file gives it.

A text is cut by one pattern after another: what matches, and what is left, are cut by the next one.
The patterns are those of the models' own tokenizer.json, as llama.cpp assigns them to names
(llama-vocab.cpp). Names that transformers knows are not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvgraph.contract.plain import JsonObject

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}{1,3}"

SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

QWEN2 = f"{SHORTENED}|{WORD}|{DIGIT}|{SIGNS}|{SPACES}"
LLAMA3 = f"{SHORTENED}|{WORD}|{DIGITS}|{SIGNS}|{SPACES}"
SEED = rf"{SHORTENED}|{WORD}|{DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|{DIGIT}|{SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"

CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}"
    r"\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}]]"
)
"""Letters of scripts with two cases, without those that DeepSeek's list lacks."""
MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_3 = (
    DIGITS,
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)

SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum"), (GPT2,)),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), (GPT2,)),
    **dict.fromkeys(("refact", "smollm", "starcoder", "command-r", "codeshell"), (DIGIT, GPT2)),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), (DIGIT, GPT2)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (QWEN2,)),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK_3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (BAILING,)),
    "seed-coder": (SEED,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{CASED}+",
        rf"\s?{MARKS}+",
        r"\s+$",
        CHINESE,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGIT),
}
"""Name of a way to split -> its patterns."""


def splitter(patterns: Sequence[str]) -> JsonObject:
    """The pre-tokenizer of a byte-level tokenizer, as tokenizer.json has it."""
    steps = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {"type": "Sequence", "pretokenizers": [*steps, bytes_ | {"use_regex": False}]}
