"""Devices, virtual devices, targets."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvgraph import Device, Target, virtual_devices
from kvgraph.contract import devices
from kvgraph.contract.devices import (
    CUDA_ARCHS,
    HOST,
    code_of,
    first_processor,
    parse_logical,
    require_flags,
)
from kvgraph.errors import DeviceError, UnsupportedError


def test_a_virtual_device_is_the_same_place_as_a_real_one() -> None:
    virtual = Device("cuda:1", arch="sm_90", virtual=True)
    assert virtual.logical == Device("cuda:1").logical == ("cuda", 1)
    assert virtual != Device("cuda:1")
    assert str(virtual) == "virtual cuda:1(sm_90)"


def test_virtual_devices_refuse_memory() -> None:
    device = virtual_devices("cuda:sm_90", 8)[7]
    assert (device.index, device.arch, device.virtual) == (7, "sm_90", True)
    with pytest.raises(DeviceError, match=r"kv_blocks: cannot allocate 4096 bytes .*cuda:7"):
        device.require_memory("kv_blocks", 4096)
    Device("cpu").require_memory("kv_blocks", 4096)


def test_code_of_newer_architectures_is_for_one_capability() -> None:
    assert [code_of(arch) for arch in CUDA_ARCHS] == [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a",
    ]  # fmt: skip
    assert [code_of(other) for other in ("sm_90a", "sm_", "other")] == ["sm_90a", "sm_", "other"]


def test_fields_of_the_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2\nbugs\t\t:\n\nprocessor\t: 1\n")
    assert first_processor(info) == {"processor": "0", "flags": "fpu avx2", "bugs": ""}
    assert first_processor(tmp_path / "none") == {}


def test_a_processor_without_what_native_code_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"flags": "fpu avx f16c avx512_vnni"}
    monkeypatch.setattr(devices, "first_processor", lambda: found)
    with pytest.raises(
        DeviceError,
        match=r"^kernels: expected a processor with avx2, bmi2, f16c, fma, got one without avx2, "
        r"bmi2, fma \(/proc/cpuinfo\); use another machine",
    ):
        require_flags("kernels")
    found["flags"] += " fma bmi2 avx2"
    require_flags("kernels")


def test_a_processor_whose_flags_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "first_processor", lambda: {"Features": "fp asimd"})
    require_flags("kernels")


@pytest.mark.parametrize("text", ["cpu", "cpu:avx512", "cuda:sm_90"])
def test_targets_round_trip(text: str) -> None:
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu", r"expected kind cpu or cuda, got 'tpu'"),
        ("cuda", r"'cuda': expected one of \['sm_75', .*\] for cuda"),
        ("cuda:sm_42", r"'cuda:sm_42': expected one of \['sm_75'"),
        ("cpu:mmx", r"'cpu:mmx': expected one of \['avx2', 'avx512'\] for cpu"),
    ],
)
def test_unknown_targets_are_named(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Target.parse(text)


@pytest.mark.parametrize("name", ["gpu:0", None, 5])
def test_bad_devices(name: Any) -> None:
    message = f"device: expected cpu, cuda or cuda:INDEX, got {name!r}"
    with pytest.raises(UnsupportedError, match=f"^{message}$"):
        Device(name)


@pytest.mark.parametrize(
    ("target", "count", "message"),
    [
        ("cpu", 0, "count: expected >= 1, got 0"),
        ("cpu", "2", "count: expected an integer >= 1, got str '2'"),
        ("cpu", 2.5, "count: expected an integer >= 1, got float 2.5"),
        (None, 1, "target: expected text such as 'cpu', got NoneType None"),
        (b"cpu", 1, "target: expected text such as 'cpu', got bytes b'cpu'"),
    ],
)
def test_bad_virtual_devices(target: Any, count: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{message}$"):
        virtual_devices(target, count)


def test_logical_devices_are_text_in_a_manifest() -> None:
    for logical in (HOST, Device("cpu").logical, Device("cuda:3").logical):
        assert parse_logical(str(logical)) == logical


def test_processors_where_the_system_does_not_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(side_effect=refused))
    assert devices.processors() == list(range(os.cpu_count() or 1))
