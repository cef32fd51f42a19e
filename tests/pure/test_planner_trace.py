"""Trace readers: two published forms, every malformed row named by file and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from graphrt.errors import TraceError
from graphrt.planner import TraceRequest, read_azure_csv, read_mooncake_jsonl, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = f"""{HEADER}
2030-12-31 23:59:59.9999999,10,2
2031-01-01 00:00:00.0000001,20,3
2031-01-01 00:00:01,30,4"""
MOONCAKE = """{"timestamp": 1500, "input_length": 10, "output_length": 2, "hash_ids": [1]}
{"timestamp": 1500.5, "input_length": 20, "output_length": 3}"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_azure_timestamps_keep_their_100_nanosecond_digits(path: Path) -> None:
    first, second, third = read_azure_csv(write(path, AZURE))
    assert first == TraceRequest(0.0, 10, 2)
    assert second == TraceRequest(2e-7, 20, 3)
    assert third == TraceRequest(1.0000001, 30, 4)


def test_mooncake_timestamps_are_milliseconds(path: Path) -> None:
    assert read_mooncake_jsonl(write(path, MOONCAKE)) == [
        TraceRequest(0.0, 10, 2),
        TraceRequest(0.0005, 20, 3),
    ]


@pytest.mark.parametrize("text", [AZURE, MOONCAKE])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text + "\n",
        lambda text: text.replace("\n", "\r\n") + "\r\n\r\n",
        lambda text: "\ufeff" + text,
        lambda text: "\n" + text.replace("\n", "\n\n"),
    ],
)
def test_line_ends_blank_lines_and_a_mark_do_not_matter(path: Path, text: str, change: Any) -> None:
    plain = read_trace(write(path, text))
    assert read_trace(write(path, change(text))) == plain


def test_the_form_is_recognised_by_content(path: Path) -> None:
    assert read_trace(write(path, AZURE)) == read_azure_csv(path)
    assert read_trace(write(path, MOONCAKE)) == read_mooncake_jsonl(path)
    assert read_trace(str(path)) == read_trace(path)


def test_a_limit_reads_no_further(path: Path) -> None:
    assert len(read_trace(write(path, AZURE), limit=2)) == 2
    assert len(read_trace(write(path, AZURE + "\nnonsense"), limit=3)) == 3
    assert len(read_trace(write(path, AZURE), limit=100)) == 3
    with pytest.raises(TraceError):
        read_trace(path, limit=0)
    with pytest.raises(TraceError):
        read_trace(path, limit=-(10**5000))
    with pytest.raises(TraceError):
        read_trace(10**5000)  # type: ignore[arg-type]


def rows(*azure: str) -> str:
    return "\n".join([HEADER, "2031-01-01 00:00:00,1,1", *azure])


@pytest.mark.parametrize(
    ("row", "expected", "found"),
    [
        ("2031-01-01 00:00:00,1", "3 fields", "2"),
        ("2031-01-01 00:00:00,1,1,1", "3 fields", "4"),
        ("yesterday,1,1", "TIMESTAMP", "yesterday"),
        ("2031-02-30 00:00:00,1,1", "TIMESTAMP", "2031-02-30"),
        ("2031-01-01 00:00:00.0000000000,1,1", "TIMESTAMP", "0000000000"),
        ("2031-01-01 00:00:00,0,1", "ContextTokens", "0"),
        ("2031-01-01 00:00:00,1,0", "GeneratedTokens", "0"),
        ("2031-01-01 00:00:00,-1,1", "ContextTokens", "-1"),
        ("2031-01-01 00:00:00,1.5,1", "ContextTokens", "1.5"),
        ("2031-01-01 00:00:00,,1", "ContextTokens", "''"),
        ("2031-01-01 00:00:00,٣,1", "ContextTokens", "٣"),
        ("2031-01-01 00:00:00," + "9" * 5000 + ",1", "ContextTokens", "999"),
        ("2030-12-31 23:59:59.5,1,1", "no earlier", "0.5 s"),
    ],
)
def test_a_malformed_azure_row_is_named(path: Path, row: str, expected: str, found: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(path, rows(row)))
    error = caught.value
    assert error.subject == f"{path}, row 3"
    assert expected in error.expected
    assert found in error.found


@pytest.mark.parametrize(
    ("row", "expected", "found"),
    [
        ("[1]", "timestamp", "[1]"),
        ("{", "JSON", "{"),
        ('{"timestamp": 1, "input_length": 1}', "output_length", "input_length"),
        ('{"timestamp": "1", "input_length": 1, "output_length": 1}', "milliseconds", "'1'"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', "milliseconds", "True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "JSON", "NaN"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "milliseconds", "-1"),
        ('{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "JSON", "1e999"),
        ('{"timestamp": 2, "input_length": 0, "output_length": 1}', "input_length", "0"),
        ('{"timestamp": 2, "input_length": 1, "output_length": 1.0}', "output_length", "1.0"),
        ('{"timestamp": 2, "input_length": 1, "output_length": true}', "output_length", "True"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "no earlier", "0.001 s"),
    ],
)
def test_a_malformed_mooncake_row_is_named(path: Path, row: str, expected: str, found: str) -> None:
    first = '{"timestamp": 1, "input_length": 1, "output_length": 1}'
    with pytest.raises(TraceError) as caught:
        read_trace(write(path, f"{first}\n\n{row}\n"))
    error = caught.value
    assert error.subject == f"{path}, row 3"
    assert expected in error.expected
    assert found in error.found


@pytest.mark.parametrize("text", ["", "\n\n", HEADER, HEADER + "\n"])
def test_a_file_without_requests_is_an_error(path: Path, text: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(path, text))
    assert str(path) in str(caught.value)


def test_empty_files_are_errors_for_each_reader(path: Path) -> None:
    for read in (read_azure_csv, read_mooncake_jsonl):
        with pytest.raises(TraceError):
            read(write(path, ""))


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3", "hello"])
def test_an_unknown_form_is_an_error_that_names_the_known_ones(path: Path, text: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(path, text))
    assert HEADER in caught.value.expected
    with pytest.raises(TraceError):
        read_azure_csv(path)
    with pytest.raises(TraceError):
        read_mooncake_jsonl(path)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(TraceError) as caught:
            read_trace(place)
        assert isinstance(caught.value.__cause__, OSError)


def test_bytes_that_are_no_text_are_named_by_row(path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(path, AZURE.encode() + b"\n\xff\xfe,1,1"))
    assert caught.value.subject.endswith("row 5")


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_give_requests_or_a_trace_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    for start in (b"", HEADER.encode() + b"\n", b'{"timestamp": 1, '):
        path.write_bytes(start + data)
        with pytest.raises(TraceError):
            read_trace(path)


def test_the_real_azure_trace_is_read_whole(shared: Path) -> None:
    requests = read_trace(shared / "traces/azure2023/AzureLLMInferenceTrace_conv.csv")
    assert len(requests) == 19_366
    assert requests[0].arrival_s == 0.0
    assert 3501 < requests[-1].arrival_s < 3503
    assert max(request.num_prompt_tokens for request in requests) == 14_050
    assert max(request.num_output_tokens for request in requests) == 1_000


def test_the_real_mooncake_trace_is_read_whole(shared: Path) -> None:
    requests = read_trace(shared / "traces/mooncake/conversation_trace.jsonl")
    assert len(requests) == 12_031
    assert 3536 < requests[-1].arrival_s < 3538
    mean = sum(request.num_prompt_tokens for request in requests) / len(requests)
    assert round(mean) == 12_035
