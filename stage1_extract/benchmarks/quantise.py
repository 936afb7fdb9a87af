"""How fast 8-bit codes are made and undone, and what they save.

    python -m stage1_extract.benchmarks.quantise

Every time stands beside a plain copy of the same features in bf16 between device and host, taken in the same rounds:
coding pays when coding and copying the codes takes no longer than that. On a CPU the copies are copies in memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from shared.quantise import Encoded, channel_scales, decode, encode
from stage1_extract.disk_plan import Blocks, StoreShape, store_size

# A batch of the trainer draws its documents from this many blocks.
_BLOCKS = 8
_DOCUMENT = 2048


@dataclass(frozen=True)
class Case:
    """Features bf16 [N, L, H] on the device and in host memory, and their codes in both places."""

    device: torch.device
    values: Tensor
    channels: Tensor
    encoded: Encoded
    host_values: Tensor
    host_codes: Tensor
    table: Tensor
    """[U, L, H]: channel scales of several blocks."""
    which: Tensor
    """[N] int32."""


def make_case(device: torch.device, tokens: int, taps: int, hidden: int) -> Case:
    """Features with channels of different sizes and a massive activation in every document."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = torch.randn(taps, hidden, device=device, generator=generator).exp_()
    values = torch.empty(tokens, taps, hidden, dtype=torch.bfloat16, device=device)
    for part in values.split(1024):
        noise = torch.randn(part.shape, device=device, generator=generator)
        part.copy_(
            noise.mul_(torch.randn(len(part), 1, 1, device=device, generator=generator).mul_(0.4).exp_() * sizes)
        )
    values[::_DOCUMENT, :, :2] = 1e4
    channels = channel_scales(values)
    encoded = encode(values, channels)
    pinned = device.type == "cuda"
    return Case(
        device,
        values,
        channels,
        encoded,
        torch.empty(values.shape, dtype=torch.bfloat16, pin_memory=pinned).copy_(values),
        torch.empty(values.shape, dtype=torch.int8, pin_memory=pinned).copy_(encoded.codes),
        channels.expand(_BLOCKS, taps, hidden).contiguous(),
        (torch.arange(tokens, device=device) // max(1, tokens // _BLOCKS)).clamp_(max=_BLOCKS - 1).to(torch.int32),
    )


def jobs_of(case: Case) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the first is what the others are compared with."""
    landing = torch.empty_like(case.values)
    landing_codes = torch.empty_like(case.encoded.codes)

    def encode_and_copy() -> None:
        case.host_codes.copy_(encode(case.values, case.channels).codes, non_blocking=True)

    def copy_and_decode() -> None:
        landing_codes.copy_(case.host_codes, non_blocking=True)
        decode(landing_codes, case.encoded.scales, case.table, case.which)

    return {
        "copy bf16 off the device": lambda: case.host_values.copy_(case.values, non_blocking=True),
        "the same to ordinary memory": lambda: case.values.to("cpu", copy=True),
        "channel scales (once a block)": lambda: channel_scales(case.values),
        "encode, with its error": lambda: encode(case.values, case.channels),
        "encode, copy codes off the device": encode_and_copy,
        "copy bf16 to the device": lambda: landing.copy_(case.host_values, non_blocking=True),
        "decode": lambda: decode(case.encoded.codes, case.encoded.scales, case.table, case.which),
        "copy codes to the device, decode": copy_and_decode,
    }


def measure(jobs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each job over `rounds`: all jobs in turn in every round, and a first round not counted."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            _wait(device)
            started = time.perf_counter()
            job()
            _wait(device)
            if number:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_table(taps: int, hidden: int, topk: int, vocab_size: int) -> list[tuple[str, str, float]]:
    """(precision, last hidden state, stored bytes a token with checksums and metadata) in blocks of the usual size."""
    found = []
    for precision in ("bfloat16", "int8"):
        for last_hidden in ("none", precision):
            shape = StoreShape(
                hidden_size=hidden,
                num_taps=taps,
                topk=topk,
                vocab_size=vocab_size,
                precision=precision,
                last_hidden=last_hidden,
            )
            blocks = Blocks.even(512 * 32768, 512 * 32768 // _DOCUMENT, 32768)
            found.append((precision, last_hidden, store_size(shape, blocks, with_target=False).bytes_per_token))
    return found


@click.command()
@click.option("--device", default=None, help="cpu, cuda, cuda:N (default: cuda where there is one).")
@click.option("--tokens", type=int, default=None, help="Tokens of the batch (default: 16384 on CUDA, 256 on CPU).")
@click.option("--taps", default=5, show_default=True)
@click.option(
    "--hidden", default=5120, show_default=True, help="Hidden size; the default shape is that of a 27B target."
)
@click.option("--topk", default=64, show_default=True, help="Teacher logits a token, for the size of a store.")
@click.option("--rounds", default=7, show_default=True)
def main(device: str | None, tokens: int | None, taps: int, hidden: int, topk: int, rounds: int) -> None:
    """Print times, rates and sizes of 8-bit features."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = place.type == "cuda"
    count = tokens or (16384 if on_gpu else 256)
    case = make_case(place, count, taps, hidden)
    size = case.values.numel() * 2
    name = torch.cuda.get_device_name(place) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    click.echo(f"{name}; torch {torch.__version__}; features [{count}, {taps}, {hidden}], {size / 1e9:.3g} GB in bf16")
    seconds = measure(jobs_of(case), place, rounds)
    plain = next(iter(seconds.values()))
    click.echo(f"\n{'':36}{'ms':>9}{'GB/s of bf16':>14}{'speed against plain copy':>26}")
    for job, spent in seconds.items():
        click.echo(f"{job:36}{1e3 * spent:9.2f}{size / spent / 1e9:14.2f}{plain / spent:26.2f}")
    if on_gpu:
        click.echo(f"peak memory {torch.cuda.max_memory_allocated(place) / 1e9:.2f} GB")
    error = case.encoded.relative_error
    click.echo(f"relative L2 error of the codes: mean {error.mean():.4f}, worst token {error.max():.4f}")
    table = bytes_table(taps, hidden, topk, vocab_size=248320)
    click.echo(f"\n{'taps':10}{'last hidden state':20}{'bytes a token':>14}{'of bf16':>9}")
    whole = {last != "none": stored for _, last, stored in table[:2]}
    for precision, last_hidden, stored in table:
        click.echo(f"{precision:10}{last_hidden:20}{stored:14,.0f}{stored / whole[last_hidden != 'none']:9.3f}")


if __name__ == "__main__":
    main()
