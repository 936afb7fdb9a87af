"""A port for processes that will meet: free now, and not one that the kernel gives to somebody else meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared import ports
from shared.ports import free_port


def test_it_is_free_and_below_what_the_kernel_gives_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    port = free_port()
    assert 10_000 <= port < 32_768
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize("text", ["1024 65535", "", "junk"])
def test_without_such_a_range_any_free_port_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    assert free_port() >= 1024


def test_one_that_somebody_listens_at_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        (tmp_path / "range").write_text(f"{taken + 1} 65535")
        monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
        monkeypatch.setattr(ports, "_LOWEST", taken)
        assert free_port() != taken
