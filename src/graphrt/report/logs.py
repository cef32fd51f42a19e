"""Log lines from the stream of events, for a program that has configured ``logging``."""

from __future__ import annotations

import logging

from graphrt.batch import RuntimeMode
from graphrt.errors import ConfigError, shown
from graphrt.events import (
    CaptureBegan,
    Captured,
    CaptureEnded,
    CaptureFailed,
    Compiled,
    Event,
    Invalidated,
    KeysChanged,
    PaddingVerified,
    RanEager,
    Replayed,
    Retired,
    Verified,
    Withdrawn,
)


class LoggingObserver:
    """An observer that writes each event to a logger, by default ``"graphrt"``.

    ``INFO``: a capture begins, ends, is retired. ``WARNING``: a capture failed, a comparison with
    eager execution differed, programs became invalid. ``DEBUG``: each key captured and compared,
    each step with its mode, reason and host time. It configures nothing: without a handler for
    these levels nothing is shown. For several observers pass a function that calls each.
    """

    def __init__(self, logger: logging.Logger | str = "graphrt") -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        if not hasattr(self._logger, "isEnabledFor"):
            raise ConfigError(
                "LoggingObserver",
                expected="a logger, or the name of one",
                found=shown(logger),
                do="pass one of them",
            )

    def __call__(self, event: Event, /) -> None:
        # Steps are many: their text is made where it is shown.
        if isinstance(event, Replayed | RanEager) and not self._logger.isEnabledFor(logging.DEBUG):
            return
        level, text = _told(event)
        self._logger.log(level, "%s", text)


def _told(event: Event) -> tuple[int, str]:
    """The level of ``event``, and its line."""
    debug, info, warning = logging.DEBUG, logging.INFO, logging.WARNING
    match event:
        case CaptureBegan(owner, num_keys):
            return info, f"{owner}: capturing {num_keys} keys"
        case CaptureEnded(owner, num_keys, num_served, seconds):
            took = f"{owner}: capture of {num_keys} keys ended after {seconds:.2f} s"
            return info, f"{took}; graphs serve {num_served} keys"
        case KeysChanged(owner, num_graphs, missing):
            named = ", ".join(f"{number} {reason.name}" for reason, number in missing) or "none"
            return debug, f"{owner}: {num_graphs} graphs; keys missing: {named}"
        case Captured(owner, mode, key):
            num_bytes = event.pool_growth_bytes + event.exec_bytes
            told = f"{owner}: captured {mode.name} {key} in {event.seconds:.3f} s"
            return debug, f"{told}, {num_bytes} bytes"
        case CaptureFailed(owner, mode, key, error, message):
            return warning, f"{owner}: {mode.name} {key} failed: {error}: {message}"
        case Compiled(piece, start, end, seconds, missed):
            came = "loaded" if missed is None else f"compiled ({missed})"
            return debug, f"{piece} for {start} to {end} tokens: {came} in {seconds:.2f} s"
        case Verified(mode, key, equal, difference) | PaddingVerified(mode, key, equal, difference):
            of_padding, is_cut = isinstance(event, PaddingVerified), mode is RuntimeMode.NONE
            told = f"{'padded ' * of_padding}replay of {mode.name} {key}"
            told = f"{key.num_ubatches} micro-batches of {key}" if is_cut else told
            told += " equals " if equal else f" DIFFERS by {difference:g} from "
            other = "the whole batch" if is_cut else "eager execution"
            told += "the unpadded batch" if of_padding else other
            return debug if equal else warning, told
        case Invalidated(owner, programs, names):
            replaced = ", ".join(names) or "by hand"
            if not programs:
                return warning, f"{owner}: a step ran eager, because no example had {replaced}"
            return warning, f"{owner}: {programs} programs invalid, replaced: {replaced}"
        case Withdrawn(owner, programs, reason):
            return info, f"{owner}: {programs} programs withdrawn: {reason}"
        case Retired(number, programs, num_bytes):
            return info, f"generation {number} retired: {programs} programs, {num_bytes} bytes"
        case Replayed(mode, reason, num_tokens, padded):
            ran = f"{num_tokens} tokens replayed {mode.name} of {padded}"
        case RanEager(reason, num_tokens):
            ran = f"{num_tokens} tokens ran eager"
    return debug, f"{ran} ({reason.name}{_split(event)}) in {event.host_us:.1f} us"


def _split(event: Replayed | RanEager) -> str:
    why = event.ubatch_reason
    if why is not None:
        return f", not split: {why.name}"
    return "" if event.num_ubatches == 1 else f", {event.num_ubatches} micro-batches"
