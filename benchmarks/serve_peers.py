"""Other servers of the model that `benchmarks.serve` measures, and its tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.step import SHAPE


def words_of_vocabulary(size: int) -> Any:
    """A tokenizer in which each token of the model is a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Replace("w", " w")
    return words


@contextlib.contextmanager
def vllm_server(python: str) -> Iterator[int]:
    """vLLM's server of SHAPE in bfloat16, with its own settings for a CPU: its port."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(name)
        words_of_vocabulary(SHAPE["vocab_size"]).save(str(Path(name) / "tokenizer.json"))
        settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
        (Path(name) / "tokenizer_config.json").write_text(settings)
        port = free_port()
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", name]
        command += ["--dtype", "bfloat16", "--port", str(port), "--no-enable-prefix-caching"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}
        with open(Path(name) / "log", "w") as log:
            process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            while not answers_at(port):
                if process.poll() is not None:
                    raise SystemExit((Path(name) / "log").read_text()[-2000:])
                time.sleep(1)
            yield port
        finally:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers_at(port: int) -> bool:
    try:
        return bool(urlopen(f"http://127.0.0.1:{port}/health").status == 200)
    except OSError:
        return False
