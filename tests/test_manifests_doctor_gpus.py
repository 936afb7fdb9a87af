"""What nvidia-smi reports, in the shape that driver 570 prints it, and what it means for training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manifests.doctor_gpus import (
    Card,
    GpuFacts,
    SoftwareFacts,
    judge_card,
    judge_gpus,
    judge_software,
    parse_smi,
    read_gpus,
    read_software,
)

GPU = """<gpu id="0000:19:00.0">
  <product_name>NVIDIA H200</product_name><persistence_mode>{persistence}</persistence_mode>
  <uuid>GPU-1</uuid><gpu_recovery_action>{recovery}</gpu_recovery_action>
  <fb_memory_usage><total>143771 MiB</total><reserved>600 MiB</reserved><used>{used} MiB</used></fb_memory_usage>
  <compute_mode>{mode}</compute_mode><ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
  <ecc_errors><volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
    <dram_uncorrectable>{errors}</dram_uncorrectable></volatile>
    <aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors>
  <remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_pending>{pending}</remapped_row_pending>
    <remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>
  <processes>{processes}</processes></gpu>"""
HEALTHY = {
    "persistence": "Enabled", "recovery": "None", "used": "4", "mode": "Default", "errors": "0", "pending": "No",
    "failure": "No", "processes": "",
}  # fmt: skip


def report(*gpus: dict[str, str]) -> str:
    body = "".join(GPU.format(**(HEALTHY | changes)) for changes in gpus)
    return (
        '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log>'
        f"<driver_version>570.86.15</driver_version><cuda_version>12.8</cuda_version>{body}</nvidia_smi_log>"
    )


def card(**changes: str) -> Card:
    return parse_smi(report(changes))[0][0]


def test_a_healthy_card_is_read_whole() -> None:
    cards, driver, cuda = parse_smi(report({}, {}))
    assert (len(cards), cards[1].index, driver, cuda) == (2, 1, "570.86.15", "12.8")
    found = judge_card(cards[0])
    assert (found.verdict, found.found) == ("ok", "NVIDIA H200, 4.0 MiB of 140 GiB in use, ECC Enabled")


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({"recovery": "Reset"}, "broken", "nvidia-smi -r -i 0"),
        ({"failure": "Yes"}, "broken", "replaced"),
        ({"mode": "Prohibited"}, "broken", "nvidia-smi -i 0 -c 0"),
        ({"errors": "32"}, "limited", "reset"),
        ({"pending": "Yes"}, "limited", "reset"),
        ({"mode": "Exclusive_Process"}, "limited", "-c 0"),
        ({"used": "90000"}, "limited", "end these processes"),
        ({"recovery": "N/A"}, "ok", ""),
    ],
)
def test_each_trouble_of_a_card_has_its_verdict(changes: dict[str, str], verdict: str, says: str) -> None:
    found = judge_card(card(**changes))
    assert (found.verdict, says in found.advice) == (verdict, True)


def test_who_holds_memory_is_named_or_said_to_be_invisible() -> None:
    process = (
        "<process_info><pid>812</pid><process_name>/usr/bin/python</process_name><used_memory>88000 MiB</used_memory>"
    )
    seen = judge_card(card(used="90000", processes=process + "</process_info>"))
    assert "by python 812 (86 GiB)" in seen.found
    assert "cannot be seen from here" in judge_card(card(used="90000")).found


def test_an_old_or_strange_report_gives_what_it_has() -> None:
    (found,), driver, _ = parse_smi(
        "<nvidia_smi_log><gpu><product_name>Tesla K80</product_name></gpu></nvidia_smi_log>"
    )
    assert (found.name, found.total, found.uncorrected, driver) == ("Tesla K80", None, 0, "")
    assert judge_card(found).verdict == "ok"
    assert parse_smi("NVIDIA-SMI has failed") == ((), "", "")


def test_the_part_gpus() -> None:
    assert [finding.verdict for finding in judge_gpus(GpuFacts(0, (), "", "", "", ""))] == ["ok"]
    (alone,) = judge_gpus(GpuFacts(8, (), "", "", "nvidia-smi did not answer within 30 s", ""))
    assert (alone.verdict, "did not answer" in alone.found) == ("limited", True)
    cards = parse_smi(report({}, {"persistence": "Disabled"}))[0]
    found = {one.check: one for one in judge_gpus(GpuFacts(2, cards, "570", "12.8", "", "no NVML: not installed"))}
    assert list(found) == ["driver", "NVML", "GPU 0", "GPU 1", "persistence"]
    assert (found["NVML"].advice, found["persistence"].verdict) == ("pip install nvidia-ml-py", "limited")


def put_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one NVIDIA device whose nvidia-smi is this script."""
    (folder / "dev").mkdir(parents=True)
    (folder / "dev" / "nvidia0").touch()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("shared.gpus.REAP_S", "manifests.doctor_gpus._GONE_S"):
        monkeypatch.setattr(name, 60.0)  # no child is stuck here: none is left for the garbage collector
    return folder


def test_nvidia_smi_is_asked_and_may_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report").write_text(report({}))
    root = put_nvidia_smi(tmp_path / "works", f"cat {tmp_path}/report", monkeypatch)
    assert (read_gpus(root, 60).cards[0].name, read_gpus(root, 60).fault) == ("NVIDIA H200", "")
    root = put_nvidia_smi(tmp_path / "fails", "echo 'Driver/library version mismatch'; exit 9", monkeypatch)
    assert read_gpus(root, 60).fault == "nvidia-smi failed: Driver/library version mismatch"
    root = put_nvidia_smi(tmp_path / "hangs", "exec sleep 20", monkeypatch)
    assert read_gpus(root, 0.2).fault == "nvidia-smi did not answer within 0.2 s"


def test_a_machine_without_devices_asks_nobody(tmp_path: Path) -> None:
    assert read_gpus(tmp_path, 5) == GpuFacts(0, (), "", "", "", "no NVML: this machine has no NVIDIA device")


def test_software_is_looked_up_without_loading_it() -> None:
    found = read_software()
    assert found.versions["torch"]
    assert found.broken == ()


def test_what_software_matters_where() -> None:
    bare = SoftwareFacts(
        {name: "" for name in read_software().versions} | {"torch": "2", "transformers": "5"}, (), "", False
    )
    assert [finding.verdict for finding in judge_software(bare, gpus=False)] == ["ok", "ok", "ok"]
    assert [finding.verdict for finding in judge_software(bare, gpus=True)] == ["ok", "limited", "broken"]
    none = SoftwareFacts(dict.fromkeys(bare.versions, ""), (), "/usr/bin/cc", True)
    assert judge_software(none, gpus=False)[0].verdict == "broken"
