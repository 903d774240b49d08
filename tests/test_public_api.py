"""The public surface: a new name, flag or environment variable is a decision."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer

import kvgraph
import kvgraph.onnx
from kvgraph import cli

ROOT = Path(__file__).parents[1]

PUBLIC = [
    "Artifact",
    "ArtifactError",
    "AsyncEngine",
    "BatchCharacteristics",
    "BatchConfig",
    "BindingError",
    "Buffer",
    "CacheConfig",
    "CapacityError",
    "CheckError",
    "Completion",
    "ContinuousBatchingKVCacheCollection",
    "ContinuousBatchingKVCacheInputSymbols",
    "ContinuousBatchingKVCacheManager",
    "Device",
    "DeviceError",
    "DeviceLostError",
    "Engine",
    "GenerationError",
    "GraphSignature",
    "InsufficientPagesError",
    "KVCacheBufferInterface",
    "KVCacheInputSymbols",
    "KVCacheInputs",
    "KVCacheInputsInterface",
    "KVCacheInputsSequence",
    "KVCacheManager",
    "KVCacheMetrics",
    "KVCacheParamInterface",
    "KVCacheParams",
    "KVCacheQuantization",
    "KVCacheStrategy",
    "KVGraphError",
    "KernelError",
    "Logprob",
    "Manifest",
    "MissingDependencyError",
    "ModelError",
    "ModelInputs",
    "MultiKVCacheInputSymbols",
    "MultiKVCacheInputs",
    "MultiKVCacheParams",
    "NullKVCacheManager",
    "PaddedKVCacheInputSymbols",
    "PaddedKVCacheInputs",
    "PaddedKVCacheManager",
    "PageStore",
    "PagedCacheInputSymbols",
    "PagedKVCacheManager",
    "ParamsError",
    "RaggedKVCacheInputs",
    "RankError",
    "RequestError",
    "SamplingParams",
    "Session",
    "SessionInterface",
    "StoreError",
    "Target",
    "TensorType",
    "TextContext",
    "TierConfig",
    "Token",
    "TokenLogprobs",
    "TransferError",
    "UnsupportedError",
    "compile",
    "load",
    "plan_memory",
    "show_progress",
    "virtual_devices",
]

FLAGS = {
    "bench": "--batches --context --json --model --new-tokens --peer-models --peers --plot "
    "--prefix-caching --prompt --quick --repeats --requests --save --step-tokens --threads "
    "--timeout",
    "cache clear": "--json",
    "cache stat": "--json",
    "cache verify": "--json",
    "chat": "--max-new-tokens --num-pages --repetition-penalty --seed --session --system "
    "--temperature --threads --top-k --top-p --verify",
    "compile": "--backend --cache --cache-dtype --check --dtype --dump-passes --force "
    "--from-artifact --json --max-batch-size --max-batch-tokens --max-seq-len --output --page-size "
    "--quality --quality-text --target --tp --weights",
    "generate": "--collective-timeout --disk --disk-bytes --host-memory --ignore-eos --json "
    "--max-new-tokens --num-pages --prefix --remote --repetition-penalty --seed --session --stop "
    "--temperature --threads --top-k --top-p --verify",
    "inspect": "--json",
    "plan": "--cache-dtype --devices --dtype --json --max-batch-size --max-batch-tokens "
    "--max-seq-len --memory --page-size --target --tp --weights",
    "prefill": "--json --num-pages --output --prompt-file --threads --verify",
    "serve": "--allowed-origins --api-key-file --cache-memory --collective-timeout --disk "
    "--disk-bytes --drain-seconds --generation-config --host --host-memory --keep-alive-seconds "
    "--kv-events --kv-events-replay --kv-events-topic "
    "--log-prompts --max-batch-size --max-batch-tokens --max-prefill-tokens --max-queued-requests "
    "--max-queued-tokens --max-replicas --metrics-prefix --nice --num-pages --port "
    "--prefill-replicas --remote --replicas --stream-interval --threads --uds --verify",
    "verify": "--execute --json --record",
    "worker": "--collective-timeout --session --threads --verify",
}

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME",
    "KVGRAPH_CPU_ISA",
    "ORT_DISABLE_TELEMETRY",
    "RAY_ADDRESS",
    "TMPDIR",
    "XDG_CACHE_HOME",
}
"""Environment variables that kvgraph reads."""


def test_public_names() -> None:
    assert kvgraph.__all__ == PUBLIC
    assert all(getattr(kvgraph, name).__module__.startswith("kvgraph.") for name in PUBLIC)


def test_public_names_of_onnx() -> None:
    names = ["library_path", "lower_caches", "register_schemas", "translation_table"]
    assert kvgraph.onnx.__all__ == names


def test_flags() -> None:
    commands = dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    group = commands.pop("cache").commands
    commands |= {f"cache {name}": command for name, command in group.items()}
    found = {
        name: " ".join(sorted(o for p in command.params for o in p.opts if o.startswith("--")))
        for name, command in commands.items()
    }
    assert found == FLAGS


def test_every_command_has_the_short_help() -> None:
    parser = typer.main.get_command(cli.app)
    for arguments in (["-h"], ["compile", "-h"], ["cache", "stat", "-h"]):
        with pytest.raises(SystemExit) as ended:
            parser(arguments)
        assert ended.value.code == 0


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "kvgraph", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"kvgraph {kvgraph.__version__}\n"
    assert kvgraph.__version__ == metadata.version("kvgraph")


WITHOUT_METADATA = """
from importlib import metadata
version = metadata.version
def of_others(name):
    if name == "kvgraph":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = of_others
from kvgraph.cli import main
main()
"""


def test_a_package_without_metadata_works(tmp_path: Path) -> None:
    """As a folder that was copied, or in a frozen program."""
    out, model = str(tmp_path / "out"), str(ROOT / "examples/tiny-llama")
    for arguments, said in (
        (["--version"], "kvgraph unknown\n"),
        (["compile", model, "-o", out, "--page-size", "16", "--no-check"], ""),
        (["inspect", out], "kvgraph unknown ("),
    ):
        command = [sys.executable, "-c", WITHOUT_METADATA, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_environment_variables() -> None:
    pattern = re.compile(r"""environ(?:\.get)?[\[(]\s*["'](\w+)|getenv\(["'](\w+)""")
    sources = [*ROOT.glob("kvgraph/**/*.py"), *ROOT.glob("plugins/**/*.[ch]*")]
    found = {a or b for path in sources for a, b in pattern.findall(path.read_text())}
    assert found == ENVIRONMENT


def test_importing_the_package_reads_no_metadata() -> None:
    code = "import sys, kvgraph; assert 'importlib.metadata' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, kvgraph; kvgraph.KVCacheParams; kvgraph.PagedKVCacheManager; "
        "kvgraph.Engine; kvgraph.load; import kvgraph.cli, kvgraph.onnx; "
        "kvgraph.onnx.library_path(); "
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
