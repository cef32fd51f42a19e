"""Traffic traces: readers of two published forms, and a seeded generator of similar traffic.

Arrivals are seconds after the first row. A row that arrives before its predecessor is an error and
is not sorted in silence, because a trace is replayed in its own order. Rows are counted from 1,
header and blank lines included, as an editor counts them.
"""

from __future__ import annotations

import os
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NoReturn

from graphrt.errors import TraceError, shown
from graphrt.files import checked_path, open_regular, parse_json

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")

_LONGEST_ROW = 2**20
_MOST_BYTES = 2**28
_MOST_BLANK_ROWS = 10**6
_MOST_REQUESTS = 10**7
_MOST_TOKENS = 10**9
_MOST_DIGITS = 18
_LARGEST_MILLISECONDS = 10**15

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = {True: datetime(1970, 1, 1), False: datetime.fromisoformat("1970-01-01T00:00:00Z")}
"""By "has no time zone": only differences are used, and the two kinds cannot be subtracted."""

_REQUESTS_PER_SECOND = 19_366 / 3_502

# (quantile, tokens), straight lines between. Median, p99 and maximum are published. The p90 is
# chosen so that the mean is the published one, the p99.9 so that few requests are very long.
_PROMPT_QUANTILES = ((0.0, 1), (0.5, 1020), (0.9, 1852), (0.99, 4142), (0.999, 6000), (1.0, 14050))
_OUTPUT_QUANTILES = ((0.0, 1), (0.5, 129), (0.9, 480), (0.99, 601), (1.0, 1000))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``arrival_s``: Seconds after the first request.
    ``num_prompt_tokens``: Tokens of the prompt.
    ``num_output_tokens``: Tokens to generate.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a file, with its place for error messages."""

    path: Path
    number: int
    text: str

    def wrong(self, expected: str, found: str, cause: Exception | None = None) -> NoReturn:
        raise TraceError(
            f"{self.path}, row {self.number}",
            expected=expected,
            found=found,
            do="correct the row, or cut it out",
        ) from cause


def read_azure_csv(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the first ``limit`` requests (None: all) of an Azure LLM inference trace.

    A CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens; timestamps are wall clock, with
    up to nine fractional digits. Raises ``TraceError`` naming file and row.
    """
    header, rows = _opened(path, limit)
    if header.text != AZURE_HEADER:
        header.wrong(f"the header {AZURE_HEADER}", _short(header.text))
    return _requests(header.path, rows, _azure_row, limit)


def read_mooncake_jsonl(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the first ``limit`` requests (None: all) of a Mooncake trace.

    One JSON object a line, with timestamp (milliseconds), input_length and output_length; other
    fields are ignored. Raises ``TraceError`` naming file and row.
    """
    first, rows = _opened(path, limit)
    return _requests(first.path, chain([first], rows), _mooncake_row, limit)


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace of either form, recognised by its first line. Raises ``TraceError``."""
    first, rows = _opened(path, limit)
    if first.text.startswith("{"):
        return _requests(first.path, chain([first], rows), _mooncake_row, limit)
    if first.text == AZURE_HEADER:
        return _requests(first.path, rows, _azure_row, limit)
    first.wrong(f"the header {AZURE_HEADER}, or a JSON object", _short(first.text))


def _opened(trace: object, limit: int | None) -> tuple[_Row, Iterator[_Row]]:
    """The first row, and those after it."""
    path = checked_path("trace", trace, TraceError)
    rows = _rows(path, limit)
    first = next(rows, None)
    if first is None:
        raise _empty(path)
    return first, rows


def generate_azure_like(num_requests: int, seed: int) -> list[TraceRequest]:
    """Return seeded requests with the published statistics of the Azure 2023 conversation trace.

    Prompt tokens: mean 1155, median 1020, p99 4142, at most 14050. Output tokens: 211, 129, 601,
    1000. Arrivals: Poisson, 19,366 requests in 3,502 s. Lengths and arrivals are independent; in
    the real trace they are slightly correlated. Source: Azure/AzurePublicDataset (Splitwise, ISCA
    2024); no row of it is used. Equal arguments give equal requests. Raises ``TraceError`` for
    fewer than one request, or more than 10 million.
    """
    for name, value, least, most in (
        ("num_requests", num_requests, 1, _MOST_REQUESTS),
        ("seed", seed, -(2**63), 2**64),
    ):
        if type(value) is not int or not least <= value <= most:
            raise TraceError(
                f"generate_azure_like: {name}",
                expected=f"an integer from {least} to {most}",
                found=shown(value),
                do="ask for a number in this range",
            )
    source = random.Random(seed)
    requests = []
    arrival_s = 0.0
    for _ in range(num_requests):
        prompt = _at_quantile(_PROMPT_QUANTILES, source.random())
        output = _at_quantile(_OUTPUT_QUANTILES, source.random())
        requests.append(TraceRequest(arrival_s, prompt, output))
        arrival_s += source.expovariate(_REQUESTS_PER_SECOND)
    return requests


def _at_quantile(knots: tuple[tuple[float, int], ...], quantile: float) -> int:
    place = bisect_right(knots, quantile, hi=len(knots) - 1, key=lambda knot: knot[0])
    (low, below), (high, above) = knots[place - 1], knots[place]
    return round(below + (above - below) * (quantile - low) / (high - low))


def _rows(path: Path, limit: int | None) -> Iterator[_Row]:
    """Lines that are not blank, decoded one by one, so that an error can name the row."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise TraceError(
            str(path),
            expected="a limit: an integer >= 1, or None",
            found=shown(limit),
            do="read more",
        )
    num_blank = 0
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if limit is None and num_bytes > _MOST_BYTES:
                raise TraceError(
                    str(path),
                    expected=f"at most {_MOST_BYTES} bytes",
                    found=f"{num_bytes} bytes",
                    do="read the first rows of it with a limit",
                )
            lines = iter(partial(file.readline, _LONGEST_ROW + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > _LONGEST_ROW:
                    _Row(path, number, "").wrong(f"at most {_LONGEST_ROW} bytes", "a longer row")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    _Row(path, number, "").wrong("text in UTF-8", str(error.reason), error)
                if text:
                    yield _Row(path, number, text)
                    continue
                num_blank += 1
                if num_blank > _MOST_BLANK_ROWS:
                    _Row(path, number, "").wrong(f"at most {_MOST_BLANK_ROWS} blank rows", "more")
    except OSError as error:
        raise TraceError(
            str(path),
            expected="a readable trace file",
            found=error.strerror or type(error).__name__,
            do="check the path",
        ) from error


def _requests(
    path: Path,
    rows: Iterator[_Row],
    parse: Callable[[_Row], tuple[int, int, int]],
    limit: int | None,
) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    first_ns = last_ns = 0
    for row in rows:
        arrival_ns, num_prompt_tokens, num_output_tokens = parse(row)
        if not requests:
            first_ns = last_ns = arrival_ns
        if arrival_ns < last_ns:
            early_s = (last_ns - arrival_ns) / 1e9
            row.wrong("an arrival no earlier than the row before", f"one {early_s:g} s earlier")
        last_ns = arrival_ns
        requests.append(
            TraceRequest((arrival_ns - first_ns) / 1e9, num_prompt_tokens, num_output_tokens)
        )
        if len(requests) == limit:
            break
    if not requests:
        raise _empty(path)
    return requests


def _azure_row(row: _Row) -> tuple[int, int, int]:
    fields = row.text.split(",")
    if len(fields) != 3:
        row.wrong(f"3 fields ({AZURE_HEADER})", f"{len(fields)}: {_short(row.text)}")
    found = _TIMESTAMP.fullmatch(fields[0])
    if found is None:
        row.wrong("a TIMESTAMP such as 2023-11-16 18:15:46.6805900", _short(fields[0]))
    second, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(second + (zone or ""))
    except ValueError as error:
        row.wrong("a TIMESTAMP that exists", f"{fields[0]!r}: {error}", error)
    since = moment - _EPOCH[zone is None]
    nanoseconds = (since.days * 86_400 + since.seconds) * 10**9 + int(
        (fraction or "").ljust(9, "0")
    )
    counts = []
    for name, field in zip(AZURE_HEADER.split(",")[1:], fields[1:], strict=True):
        is_number = field.isascii() and field.isdigit() and len(field) <= _MOST_DIGITS
        counts.append(_tokens(row, name, int(field) if is_number else field))
    return nanoseconds, counts[0], counts[1]


def _mooncake_row(row: _Row) -> tuple[int, int, int]:
    try:
        value, repeated = parse_json(row.text)
    except ValueError as error:
        row.wrong("one JSON object", f"{_short(row.text)}: {error}", error)
    if repeated:
        row.wrong("each key once", f"{', '.join(repeated)} twice")
    if not isinstance(value, dict) or not value.keys() >= set(MOONCAKE_FIELDS):
        row.wrong(f"an object with {', '.join(MOONCAKE_FIELDS)}", _short(row.text))
    milliseconds, prompt, output = (value[name] for name in MOONCAKE_FIELDS)
    # The bounds exclude NaN and infinity too.
    is_number = type(milliseconds) in (int, float) and 0 <= milliseconds <= _LARGEST_MILLISECONDS
    if not is_number:
        row.wrong("timestamp: a number of milliseconds >= 0", shown(milliseconds))
    nanoseconds = round(milliseconds * 1_000_000)
    return nanoseconds, _tokens(row, "input_length", prompt), _tokens(row, "output_length", output)


def _tokens(row: _Row, name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        row.wrong(f"{name}: an integer from 1 to {_MOST_TOKENS}", shown(value))
    return value


def _empty(path: Path) -> TraceError:
    return TraceError(
        str(path), expected="at least one request", found="none", do="check that it is a trace"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
