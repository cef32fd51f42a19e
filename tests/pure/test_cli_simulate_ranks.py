"""``graphrt simulate-ranks``: counts worked out by hand, laws on a longer trace, wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphrt.cli import main, simulate
from graphrt.parallel import settle
from graphrt.planner import generate_azure_like


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["simulate-ranks", *map(str, words)])
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().out


def write_trace(folder: Path, *rows: tuple[float, int, int]) -> Path:
    path = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def config(folder: Path, **asked: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(asked), encoding="utf-8")
    return path


def test_two_ranks_simulated_count_as_worked_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Step 0: 4 prompt tokens beside 600, which have no graph. Steps 1 and 2: one token, one rank.
    # Much later: 5 tokens, padded to 8 on both ranks.
    trace = write_trace(tmp_path, (0, 4, 3), (0, 600, 1), (60_000, 5, 1))
    status, out = run(capsys, "--ranks", 2, "--trace", trace, "--speed", 1, "--json")
    found = json.loads(out)
    rules = found.pop("rules")
    assert status == 0
    assert found == {
        "ranks": 2,
        "requests": 3,
        "step_s": 0.025,
        "speed": 1.0,
        "steps": 4,
        "modes": {"NONE": 1, "PIECEWISE": 1, "FULL": 2},
        "eager_reasons": {"ABOVE_MAX": 1},
        "unsplit_reasons": {"DISABLED": 1, "PEER_IDLE": 3},
        "split_steps": 0,
        "eager_by_one_rank": 1,
        "busy_rank_steps": 5,
        "eager_rank_steps_lowered": 1,
        "divergent_rank_steps": 0,
        "real_tokens": 611,
        "padding_by_slowest_rank": 0,
        "padding_of_idle_ranks": 10,
    }
    alike = {"NONE": 1, "PIECEWISE": 2, "FULL": 2}
    assert rules == {
        "agreed": {"modes": {"NONE": 2, "PIECEWISE": 1, "FULL": 2}, "padding": 3},
        "alone": {"modes": alike, "padding": 3},
        "eager_apart": {"modes": alike, "padding": 3},
        "pad_eager": {"modes": {"NONE": 2, "PIECEWISE": 1, "FULL": 2}, "padding": 599},
    }


def test_three_ranks_simulated_find_the_slow_and_the_eager_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, later = [(0, size, 1) for size in (8, 16, 16)], [(60_000, n, 1) for n in (600, 8, 8)]
    trace = write_trace(tmp_path, *first, *later)
    found = json.loads(run(capsys, "--ranks", 3, "--trace", trace, "--json")[1])
    assert found["modes"] == {"NONE": 1, "PIECEWISE": 1, "FULL": 0}
    assert (found["padding_by_slowest_rank"], found["eager_by_one_rank"]) == (8, 1)
    assert found["eager_rank_steps_lowered"] == 2


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize("speculative", [0, 2])
def test_ranks_simulated_on_traffic_serve_all_of_it(
    ranks: int, speculative: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = generate_azure_like(300, seed=1)
    rows = [
        (1000 * item.arrival_s, item.num_prompt_tokens, item.num_output_tokens) for item in requests
    ]
    made = config(
        tmp_path,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        num_speculative_tokens=speculative,
        ubatch={"num_ubatches": 2, "decode_token_threshold": 4, "prefill_token_threshold": 64},
    )
    words = ("--ranks", ranks, "--trace", write_trace(tmp_path, *rows), "--config", made)
    status, out = run(capsys, *words, "--speed", 20, "--json")
    assert status == 0
    found = json.loads(out)
    assert (status, out) == run(capsys, *words, "--speed", 20, "--json")
    # Each request decodes in steps of q tokens, after the step that ends its prompt.
    q = 1 + speculative
    decoded = sum(-(-(item.num_output_tokens - 1) // q) * q for item in requests)
    assert found["real_tokens"] == sum(item.num_prompt_tokens for item in requests) + decoded
    assert found["divergent_rank_steps"] == 0
    assert sum(found["modes"].values()) == found["steps"]
    assert found["split_steps"] + sum(found["unsplit_reasons"].values()) == found["steps"]
    assert sum(found["eager_reasons"].values()) == found["modes"]["NONE"]
    assert (found["split_steps"] > 0) is (ranks < 64)
    for rule in found["rules"].values():
        assert sum(rule["modes"].values()) == found["busy_rank_steps"]
    num_eager = {name: rule["modes"]["NONE"] for name, rule in found["rules"].items()}
    assert num_eager["alone"] + found["eager_rank_steps_lowered"] <= num_eager["agreed"]
    assert num_eager["alone"] <= num_eager["eager_apart"] <= num_eager["agreed"]


def test_rank_that_settles_otherwise_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle_apart(agreement: Any, vote: Any, dispatch: Any, rules: Any) -> Any:
        mine = agreement._replace(num_tokens_padded=agreement.num_tokens_padded + vote.rank)
        return settle(mine, vote, dispatch, rules)

    monkeypatch.setattr(simulate, "settle", settle_apart)
    trace = write_trace(tmp_path, (0, 8, 1), (0, 8, 1))
    _, out = run(capsys, "--ranks", 2, "--trace", trace, "--json")
    assert json.loads(out)["divergent_rank_steps"] == 1


def test_ranks_simulated_are_shown_in_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, (0, 4, 3), (0, 600, 1))
    status, out = run(capsys, "--ranks", 2, "--trace", trace)
    assert status == 0
    for text in ("2 ranks, 2 requests", "eager: ABOVE_MAX", "eager ranks apart", "1 (33.3 %)"):
        assert text in out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--ranks", "1"],
        ["--ranks", "1025"],
        ["--ranks", "2", "--step-ms", "0"],
        ["--ranks", "2", "--speed", "nan"],
    ],
)
def test_ranks_simulated_with_wrong_options_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "--trace", write_trace(tmp_path, (0, 4, 3)), *words)[0] == 2


def test_ranks_simulated_without_a_trace_file_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(capsys, "--ranks", 2, "--trace", tmp_path / "none", "--json")
    assert status == 2
    assert json.loads(out)["error"]["type"] == "TraceError"
