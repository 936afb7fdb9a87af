"""Record lines: a changed byte costs the record it is in, is named, and never becomes another record."""

from __future__ import annotations

import io
import json
import re

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.lines import TORN, closing_of, line_of, records_in, scan

RECORDS = [
    {"time": 1.5, "writer": "w", "block": 0, "message": 'a "quoted" \\ é\nline', "detail": {"crc": "00000000"}},
    {"time": 2.5, "writer": "w", "block": 1, "message": '","crc":"01234567"}', "detail": {}},
    {"time": 3.5, "writer": "w", "block": 2, "message": "\u2028\x00\x1b", "detail": {"a": [1, None, True]}},
]
DATA = b"".join(map(line_of, RECORDS))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_the_checksum_is_of_the_bytes_before_it() -> None:
    line = line_of({"time": 1.0, "n": 2})
    body = b'{"time":1.0,"n":2'
    assert line == body + f',"crc":"{google_crc32c.value(body):08x}"}}\n'.encode()
    assert json.loads(line)["n"] == 2


@settings(deadline=None, max_examples=100)
@given(st.lists(st.dictionaries(st.text(min_size=1), VALUES, min_size=1, max_size=4), max_size=5))
def test_whatever_json_holds_comes_back(values: list[dict[str, object]]) -> None:
    values = [{key: value for key, value in each.items() if key != "crc"} | {"time": 1.0} for each in values]
    records, damaged = records_in(b"".join(map(line_of, values)))
    assert damaged == []
    assert [{key: value for key, value in record.items() if key != "crc"} for record in records] == [
        json.loads(json.dumps(each).encode(errors="replace")) for each in values
    ]


def numbers(data: bytes) -> list[int]:
    records = records_in(data)[0]
    for record in records:
        assert {key: value for key, value in record.items() if key != "crc"} == RECORDS[record["block"]]
    return [record["block"] for record in records]


def test_every_flipped_bit_costs_its_record_and_is_named() -> None:
    ends = [DATA.find(b"\n", start) for start in (0, len(line_of(RECORDS[0])), len(DATA) - len(line_of(RECORDS[2])))]
    for position in range(len(DATA)):
        for bit in range(8):
            data = bytearray(DATA)
            data[position] ^= 1 << bit
            found, damaged = numbers(bytes(data)), records_in(bytes(data))[1]
            hit = next(number for number, end in enumerate(ends) if position <= end)
            # A lost line break costs the record behind it too: nobody can say where that begins.
            lost = {hit, hit + 1} if position in ends else {hit}
            assert found == [number for number in range(3) if number not in lost], (position, bit)
            assert damaged, (position, bit)
            assert damaged[0][0] == hit + 1


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_damage_makes_a_record_that_nobody_wrote(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(DATA)))
    end = data.draw(st.integers(start, min(len(DATA), start + 200)))
    middle = data.draw(st.one_of(st.just(b""), st.just(bytes(end - start)), st.binary(max_size=60)))
    changed = DATA[:start] + middle + DATA[end:]
    found = numbers(changed)
    assert found == sorted(found)
    if len(found) < 3 and end < len(DATA):
        whole_lines_cut = DATA[start - 1 : start] in (b"", b"\n") and DATA[end - 1 : end] == b"\n" and not middle
        assert whole_lines_cut or records_in(changed)[1], "lost without a word"


@pytest.mark.parametrize("cut", range(1, len(line_of(RECORDS[2])) + 1))
def test_a_line_cut_by_a_kill_is_void_and_no_damage_before_and_after_it_is_closed(cut: int) -> None:
    torn = DATA[:-cut]
    kept = [0, 1, 2] if cut == 1 else [0, 1]  # without its newline only, a record is still whole
    assert numbers(torn) == kept
    assert records_in(torn)[1] == []
    rest = torn.rpartition(b"\n")[2]
    if rest:
        torn += closing_of(rest)
    closed = torn + line_of(RECORDS[0])
    assert numbers(closed) == [*kept, 0]
    assert records_in(closed)[1] == []


def test_a_lost_newline_is_damage_and_not_a_kill() -> None:
    changed = DATA[:-1] + b"*"
    assert numbers(changed) == [0, 1]
    assert records_in(changed)[1] == [(3, "bytes behind the end of its record")]
    closed = changed + closing_of(changed.rpartition(b"\n")[2]) + line_of(RECORDS[0])
    assert numbers(closed) == [0, 1, 0]
    assert records_in(closed)[1] == [(3, "bytes behind the end of its record")]


REASONS = [
    (b"", "no checksum"),
    (b'{"time":3,"block":1}', "no checksum"),
    (b"x" * 300, "no checksum"),
    (bytes(300), "zero bytes"),
    (b'{"time":3,"block":1,"crc":"0000000g"}', "no checksum"),
    (b'{"time":3,"block":1,"crc":"00000000"}', "its bytes give [0-9a-f]{8}, it says 00000000"),
    (line_of(RECORDS[0])[:-1].replace(b'"crc":"', b'"CRC":"'), "no checksum"),
    (line_of(RECORDS[0])[:-1] + TORN, "bytes behind"),
]


@pytest.mark.parametrize(("line", "reason"), REASONS)
def test_reasons(line: bytes, reason: str) -> None:
    records, damaged = records_in(DATA + line + b"\n" + DATA)
    assert len(records) == 6
    ((number, said),) = damaged
    assert number == 4
    assert re.search(reason, said), said


def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DATA + b"damaged\n" + DATA + b'{"torn'
    whole = records_in(data)
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("manifests.lines._PIECE_BYTES", size)
        assert records_in(data) == whole
    assert whole[1] == [(4, "no checksum at its end")]


def test_text_that_is_no_utf8_is_shown_not_fatal() -> None:
    line = line_of({"time": 1.0, "source": "caf\udce9.jsonl"})
    ((lines, damaged),) = scan(io.BytesIO(line))
    assert json.loads(lines[0])["source"] == "caf?.jsonl"
    assert damaged == []


def test_line_numbers_count_line_feeds_only() -> None:
    records, damaged = records_in(DATA + b"a\rb\x0bc\x85\n" + DATA)
    assert len(records) == 6
    assert damaged == [(4, "no checksum at its end")]
