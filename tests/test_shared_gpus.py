"""NVML is asked at arm's length: what answers is shown, what blocks or is missing is named, within the deadline.

No GPU is here: a package of NVML's name with the same functions stands in for the driver, whose device 1 may block.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shared.gpus import GpuQuestion

DRIVER = """
import time
class NVMLError(Exception): pass
class Memory: used, total = 61 << 30, 140 << 30
class Rates: gpu = 97
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
nvmlMemory_v2 = 2
def nvmlDeviceGetMemoryInfo(handle, version=1):
    if version == 2 and handle == 2: raise NVMLError('Function Not Found')
    if handle == 1: {device_1}
    return Memory
def nvmlDeviceGetUtilizationRates(handle):
    if handle == 2: raise NVMLError('Not Supported')
    return Rates
def nvmlDeviceGetName(handle): return b'H200'
def nvmlDeviceGetUUID(handle): return f'GPU-{{handle}}'
"""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as /dev is where a driver is loaded; the stand-in package lies in `packages`."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setattr("shared.gpus.REAP_S", 60.0)  # no child is stuck here: none is left for the garbage collector
    return tmp_path / "dev"


def drive(devices: Path, init: str = "pass", device_1: str = "pass") -> None:
    (devices.parent / "packages" / "pynvml.py").write_text(DRIVER.format(init=init, device_1=device_1))


def test_memory_and_utilisation_of_every_gpu(devices: Path) -> None:
    drive(devices)
    report = GpuQuestion(devices).answer(30)
    assert report.missing == ""
    assert [
        (gpu.index, gpu.name, gpu.uuid, gpu.used >> 30, gpu.total >> 30, gpu.utilisation) for gpu in report.gpus
    ] == [
        (0, "H200", "GPU-0", 61, 140, 97),
        (1, "H200", "GPU-1", 61, 140, 97),
        (2, "H200", "GPU-2", 61, 140, None),
    ]


@pytest.mark.parametrize(
    ("device_1", "said"),
    [
        ("time.sleep(600)", "GPU 1 did not answer within 8 s"),
        ("raise NVMLError('GPU is lost')", "GPU 1 failed: GPU is lost"),
    ],
    ids=["blocks", "lost"],
)
def test_one_sick_gpu_does_not_hide_the_others(devices: Path, device_1: str, said: str) -> None:
    drive(devices, device_1=device_1)
    asked = time.monotonic()
    report = GpuQuestion(devices).answer(8)  # the child must have started and asked the others by then
    assert time.monotonic() - asked < 60
    assert [gpu.index for gpu in report.gpus] == [0, 2]
    assert report.missing == said


def test_a_driver_that_blocks_costs_half_a_second(devices: Path) -> None:
    drive(devices, init="time.sleep(600)")
    asked = time.monotonic()
    report = GpuQuestion(devices).answer()
    assert time.monotonic() - asked < 60  # half a second, were this test alone; the driver blocks for ten minutes
    assert (report.gpus, report.missing) == ((), "no NVML: it did not answer within 0.5 s")


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("raise NVMLError('Driver/library version mismatch')", "no NVML: Driver/library version mismatch"),
        ("raise SystemExit(3)", "no NVML: it ended without an answer"),
    ],
    ids=["mismatch", "dies"],
)
def test_a_driver_that_fails_is_named(devices: Path, init: str, said: str) -> None:
    drive(devices, init=init)
    report = GpuQuestion(devices).answer(30)
    assert (report.gpus, report.missing) == ((), said)


def test_without_a_device_or_the_package_nothing_is_asked(devices: Path) -> None:
    (devices.parent / "packages" / "pynvml.py").write_text("raise ImportError")
    assert GpuQuestion(devices).answer(30).missing == "no NVML: the package nvidia-ml-py is not installed"
    (devices / "nvidia0").unlink()
    assert GpuQuestion(devices).answer(30).missing == "no NVML: this machine has no NVIDIA device"
