"""lm-eval's `local-completions` on a task of our own, against a served artifact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvgraph import Engine, SamplingParams
from tests.serve.running import Server

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval: make test-vendors installs it"
)

QUESTIONS = [
    ("The import statement combines two operations; it searches for the named", " module", " car"),
    ("A class definition defines a class", " object", " banana"),
    ("The for statement is used to iterate over the", " elements", " zoo"),
    ("A string is a sequence of", " characters", " elephants"),
]
TASK = """
task: kvgraph_words
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {questions}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_local_completions(server: Server, engine: Engine, artifact: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.json"
    lines = [json.dumps({"question": q, "choices": choices}) for q, *choices in QUESTIONS]
    questions.write_text("\n".join(lines))
    (tmp_path / "words.yaml").write_text(TASK.format(questions=questions))
    arguments = f"model=tiny,base_url={server.url}/v1/completions,num_concurrent=2,max_length=512"
    tokenizer = f",tokenizer_backend=huggingface,tokenizer={artifact},tokenized_requests=True"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", arguments + tokenizer, "--tasks", "kvgraph_words"]
    command += ["--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        list(map(str, command)), env=os.environ | offline, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(next(tmp_path.glob("out/**/results*.json")).read_text())
    right = [score(engine, q, one) > score(engine, q, other) for q, one, other in QUESTIONS]
    assert results["results"]["kvgraph_words"]["acc,none"] == sum(right) / len(right)
    samples = next(tmp_path.glob("out/**/samples*.jsonl")).read_text().splitlines()
    for line in map(json.loads, samples):
        question, *choices = QUESTIONS[line["doc_id"]]
        told = [float(answer[0][0]) for answer in line["resps"]]
        assert told == pytest.approx([score(engine, question, one) for one in choices], abs=1e-3)


def score(engine: Engine, question: str, choice: str) -> float:
    """Log-probability of a choice behind a question, by the engine; lm-eval adds no <s>."""
    count = len(engine.tokenize(question, special_tokens=False))
    tokens = engine.tokenize(question + choice, special_tokens=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scores = engine.generate([tokens], params)[0].prompt_logprobs
    assert scores is not None
    return sum([one.chosen.logprob for one in scores[count:] if one is not None])
