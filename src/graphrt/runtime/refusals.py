"""What a runtime refuses, in words: expected, found, what to do."""

from __future__ import annotations

from graphrt.batch import MissReason
from graphrt.errors import BatchError, ConfigError, LibraryClosedError, MissError


def undeclared_outputs() -> ConfigError:
    return ConfigError(
        "outputs of a runtime",
        expected="declared axes",
        found="OutputSpec(None)",
        do="name the padded dimension of each output; {} if none is",
    )


def not_a_number_of_keys(at_most: object) -> ConfigError:
    return ConfigError("at_most", expected="an integer >= 1", found=repr(at_most), do="correct it")


def not_uniform(num_tokens: int, num_reqs: int, query_len: int) -> BatchError:
    return BatchError(
        f"a uniform step of {num_tokens} tokens",
        expected=f"num_tokens == num_reqs * {query_len}",
        found=f"num_reqs = {num_reqs}",
        do="pass uniform=True only where every request brings exactly that many tokens",
    )


def missed(reason: MissReason, num_tokens: int, num_reqs: int) -> MissError:
    return MissError(
        f"a step of {num_tokens} tokens and {num_reqs} requests",
        expected="a captured graph for every step (on_miss='strict')",
        found=f"none serves it: {reason.name}",
        do="capture a size that holds it, or set on_miss='eager'. The step did not run",
        reason=reason,
    )


def closed() -> LibraryClosedError:
    return LibraryClosedError(
        "runtime",
        expected="an open runtime",
        found="a use after close()",
        do="make a new Runtime",
    )
