"""Log lines from the stream of events, for a program that has configured ``logging``."""

from __future__ import annotations

import logging

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

    def __call__(self, event: Event, /) -> None:
        level = _level(event)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _told(event))


def _level(event: Event) -> int:
    match event:
        case Replayed() | RanEager() | Captured() | Compiled() | KeysChanged():
            return logging.DEBUG
        case CaptureFailed() | Invalidated():
            return logging.WARNING
        case Verified(equal=equal) | PaddingVerified(equal=equal):
            return logging.DEBUG if equal else logging.WARNING
    return logging.INFO


def _told(event: Event) -> str:
    match event:
        case CaptureBegan():
            return f"{event.owner}: capturing {event.num_keys} keys"
        case CaptureEnded():
            return (
                f"{event.owner}: capture of {event.num_keys} keys ended after {event.seconds:.2f} "
                f"s; graphs serve {event.num_served} keys"
            )
        case KeysChanged():
            missing = ", ".join(f"{number} {reason.name}" for reason, number in event.missing)
            return f"{event.owner}: {event.num_graphs} graphs; keys missing: {missing or 'none'}"
        case Captured():
            return (
                f"{event.owner}: captured {event.mode.name} {event.key} in {event.seconds:.3f} s, "
                f"{event.pool_growth_bytes + event.exec_bytes} bytes"
            )
        case CaptureFailed():
            return (
                f"{event.owner}: {event.mode.name} {event.key} failed: {event.error}: "
                f"{event.message}"
            )
        case Compiled():
            came = "loaded" if event.missed is None else f"compiled ({event.missed})"
            sizes = f"{event.start} to {event.end} tokens"
            return f"{event.piece} for {sizes}: {came} in {event.seconds:.2f} s"
        case Verified():
            found = "equals" if event.equal else f"DIFFERS by {event.max_abs_difference:g} from"
            return f"replay of {event.mode.name} {event.key} {found} eager execution"
        case PaddingVerified():
            found = "equals" if event.equal else f"DIFFERS by {event.max_abs_difference:g} from"
            return f"padded replay of {event.mode.name} {event.key} {found} the unpadded batch"
        case Invalidated():
            names = ", ".join(event.names) or "by hand"
            return f"{event.owner}: {event.num_programs} programs invalid, replaced: {names}"
        case Withdrawn():
            return f"{event.owner}: {event.num_programs} programs withdrawn: {event.reason}"
        case Retired():
            return (
                f"generation {event.generation} retired: {event.num_programs} programs, "
                f"{event.freed_bytes} bytes"
            )
        case Replayed():
            return (
                f"{event.num_tokens} tokens replayed {event.mode.name} of "
                f"{event.num_padded_tokens} ({event.reason.name}{_split(event)}) "
                f"in {event.host_us:.1f} us"
            )
        case RanEager():
            return (
                f"{event.num_tokens} tokens ran eager ({event.reason.name}{_split(event)}) "
                f"in {event.host_us:.1f} us"
            )


def _split(event: Replayed | RanEager) -> str:
    why = event.ubatch_reason
    if why is not None:
        return f", not split: {why.name}"
    return "" if event.num_ubatches == 1 else f", {event.num_ubatches} micro-batches"
