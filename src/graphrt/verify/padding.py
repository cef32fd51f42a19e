"""Proves that the padding matters to no real row.

Padding is varied with valid rows, because NaN or -1 there would be false alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.device.torch_modes import LookingMode, is_for_parts
from graphrt.errors import VerificationError
from graphrt.events import Observer, PaddingVerified
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.graphs.buffers import BoundBuffers, Sizes
from graphrt.graphs.resources import StateGuard
from graphrt.values import dotted, format_path, own_copy, tensors_of, walk
from graphrt.verify.compare import Comparison, compare, largest_of
from graphrt.verify.draws import SameDraws, settle_choices
from graphrt.verify.rounding import RoundedOtherwise, Rounding
from graphrt.verify.run_state import VARYING, RunResult, RunState, restored


@contextmanager
def varied_padding(
    bound: BoundBuffers,
    n: Sizes,
    names: Iterable[str] | None = None,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
    *,
    by_real: bool = False,
) -> Iterator[None]:
    """Put other valid rows into the padding of a staged step; on exit it is as it was before.

    ``names``: which buffers. By default those whose padding must not matter: ``Padding.keep()``,
    floating ones whose padding nobody declared, and what says ``arbitrary``. Floats become
    plus or minus 8 to 16 times the largest real element, which dominates any maximum or mean and
    keeps clear of NaN; everything else is filled with rows of ``others``, a batch that is valid
    too, or repeats the real rows, which index what exists. Repeated, they hide what a maximum or a
    set of ids does. ``by_real``: floats are filled so as well.
    """
    chosen = arbitrary_buffers(bound) if names is None else tuple(names)
    padding = bound.padding(n)
    real = bound.real_views(n)
    kept = [(view, view.clone()) for name in chosen for view in padding[name]]
    for name in chosen:
        for view in padding[name]:
            _vary(view, real[name], others.get(name, real[name]), by_real=by_real)
    try:
        yield
    finally:
        for view, contents in kept:
            view.copy_(contents)


def arbitrary_buffers(bound: BoundBuffers) -> tuple[str, ...]:
    """Names of the buffers whose padding may hold anything valid."""
    return tuple(name for name, spec in bound.specs.items() if spec.policy.arbitrary)


def _vary(view: torch.Tensor, real: torch.Tensor, other: torch.Tensor, *, by_real: bool) -> None:
    """Fill ``view`` with other values of the kind of ``real``: integers of ``other``."""
    if view.numel() == 0:
        return
    dtype = view.dtype
    if dtype.is_complex:
        parts = torch.view_as_real(real)
        _vary(torch.view_as_real(view), parts, parts, by_real=by_real)
    elif dtype.is_floating_point and not by_real:
        finite = real.double().abs().nan_to_num(0.0, 0.0, 0.0)
        largest = 8 * (finite.max().item() if finite.numel() else 0.0) or 8.0
        place = torch.arange(view.numel(), device=view.device, dtype=torch.float64)
        # Irregular, so that no sum cancels.
        values = ((1 + (place * 0.6180339887).frac()) * largest).view(view.shape)
        if view.shape[0] > 1:
            # Both signs along each dimension, so that neither a maximum nor a minimum hides them.
            # In a single row all are positive, because a maximum is the commoner mistake.
            for dim, size in enumerate(view.shape):
                odd = torch.arange(size, device=view.device).remainder(2)
                values *= (1 - 2 * odd).view(size, *[1] * (view.dim() - dim - 1))
        limit = torch.finfo(dtype).max
        view.copy_(values.clamp(-limit, limit))
    elif other.numel():
        # Integers on the host: on a GPU the first launches of these kernels take 0.1 s.
        device = view.device if dtype.is_floating_point else "cpu"
        source = other.to(device)
        # Backwards, so that the rows next to the real ones are not those a step before had there.
        for dim, size in enumerate(view.shape):
            places = torch.arange(size, device=device).remainder(source.shape[dim])
            source = source.index_select(dim, source.shape[dim] - 1 - places)
        view.copy_(source)


UNPADDED_TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 1e-9,
        torch.complex128: 1e-9,
        torch.float32: 1e-4,
        torch.complex64: 1e-4,
        torch.float16: 3e-2,
        torch.bfloat16: 0.25,
    }
)
"""How far a padded run may be from the unpadded one (``compare``): another number of rows takes
other kernels, which sum in another order. Measured in bfloat16 over 28 layers of random weights,
which let rounding grow more than trained ones do: 0.09 of all elements, 0.27 of one row."""
IN_FLOAT32 = {**UNPADDED_TOLERANCE, torch.float64: 1e-4, torch.complex128: 1e-4}
"""Where parts of a float64 model compute in float32."""


_STATE_OF_PADDING = (
    "If only a row of state meant for padding differs: may_overwrite={tensor: 'input that indexes "
    "its rows'} compares the real rows alone"
)


_OWN_DRAWS: AbstractContextManager[object] = nullcontext()
_NUM_DRAWS = 3


class PaddingChecked(NamedTuple):
    """What ``check_padding`` found."""

    outputs: Any
    """Of the replay."""
    unlike: Mapping[str, Comparison]
    """Scratch that it left otherwise than the unpadded run, among the elements which that wrote."""
    uncompared: str
    """Why runs that draw random numbers were not compared with the unpadded batch; else empty."""


def check_padding(
    *,
    mode: RuntimeMode,
    key: BatchDescriptor,
    bound: BoundBuffers,
    sizes: Mapping[str, int],
    stage: Callable[[], None],
    replay: Callable[[], Any],
    run_padded: Callable[[], Any],
    run_unpadded: Callable[[], Any] | None,
    state: RunState,
    reads_padding: str,
    chosen_from: Mapping[str, str],
    tolerance: float | None,
    before_warmup: HostSnapshot | None,
    observer: Observer | None,
    can_repeat: bool,
    others: Mapping[str, torch.Tensor],
    rounding: Rounding,
) -> PaddingChecked:
    """Prove twice that the padding of a replay matters to no real row.

    Replays with the declared padding and with other valid rows there (``varied_padding``): the
    real rows must have equal bits, but for the sign of 0. And they must be those of
    ``run_unpadded``, which runs the callable on the batch as it is, within ``UNPADDED_TOLERANCE``.
    Neither is enough alone: ``x * x.shape[0]`` reads no padding and is wrong, and a tolerance hides
    a small leak.

    ``sizes``: the real sizes. All three calls return outputs of that size;
    ``stage`` puts the batch in place before each replay. ``run_unpadded`` None: the values came
    padded, so there is no unpadded run. ``state`` is put back before each run and compared as the
    outputs are; after a success it is as one replay leaves it, after a failure as before.
    ``reads_padding``: why real rows are meant to depend on padding; then the second proof alone is
    made. Where random numbers are drawn, the unpadded run and ``run_padded``, the same eagerly on
    the padded views, are made anew with equal ones (``SameDraws``) and compared.
    ``tolerance``: an absolute one that both proofs accept as well, for kernels whose bits differ
    from run to run. Where parts of a float64 result are computed in float32, its tolerance counts.
    ``before_warmup``: each run starts with what the callable remembered then.
    ``can_repeat``: a difference may be followed by more replays, which tell its cause: not where
    other ranks would have to replay too. ``others``: as for ``varied_padding``.
    ``rounding``: what is known of the callable's; in 16 bits the second proof also asks that it
    explains the difference, which may take more unpadded runs.

    Errors: ``VerificationError`` that names the buffers, or says that the result depends on the
            padded size or varies from run to run, with the first rows that differ;
            ``StateAdvancedError`` for rows that no input names.
    """
    subject = f"{mode.name}, {key}, real sizes {dict(sizes)}"
    names = () if reads_padding else arbitrary_buffers(bound)

    def call_with(
        call: Callable[[], Any], *varied: str, draws: AbstractContextManager[object] = _OWN_DRAWS
    ) -> Any:
        if call is not run_unpadded:
            stage()
        # A FULL replay runs no Python, which might remember anything.
        runs_python = call is not replay or mode is not RuntimeMode.FULL
        host = before_warmup if runs_python else None
        with varied_padding(bound, sizes, varied, others), restored(host), draws:
            return call()

    def run(
        call: Callable[[], Any],
        *varied: str,
        is_last: bool = False,
        poisons: bool = True,
        draws: AbstractContextManager[object] = _OWN_DRAWS,
    ) -> RunResult:
        if poisons:
            state.begin(saved, is_last=is_last)
        else:
            state.restore(saved)
        outputs = call_with(call, *varied, draws=draws)
        return RunResult(outputs if is_last else own_copy(outputs), state.save())

    with state.put_back(on_error=True) as saved:
        # A replay first: a GPU is busy with it while the host launches the eager run.
        varied = run(replay, *names) if names else None
        unpadded = None if run_unpadded is None else run(run_unpadded)
        is_random = unpadded is not None and state.drew_random(saved)
        earlier = [each for each in (unpadded, varied) if each is not None]
        found = run(replay, is_last=True, poisons=bool(earlier))
        is_random = is_random or state.drew_random(saved)
        if earlier:
            state.settle(saved, *(each.left.compared for each in (*earlier, found)))
        if before_warmup is not None:
            state.require_rows(subject, found.left.compared, before_warmup.runnable)
        if unpadded is not None:
            _require_cut(subject, unpadded.outputs, found.outputs, sizes, bound.sizes)

        outcome = None
        if varied is not None:
            outcome = compare_runs(varied, found, tolerance)
            if tolerance is None and not outcome.is_equal:
                # What is masked by a product with 0 is 0.0 or -0.0, by the sign of what is masked.
                outcome = compare_runs(varied, found, 0.0)
        is_read = outcome is not None and not outcome.is_equal
        uncompared = ""
        if run_unpadded is not None and unpadded is not None and not is_read:
            rerun = partial(run, run_unpadded, poisons=False) if can_repeat else None
            replay_again = partial(run, replay, is_last=True, poisons=False)
            if not is_random:
                outcome, found = _compare_unpadded(
                    unpadded, found, rerun, replay_again, tolerance, chosen_from, rounding
                )
            elif rerun is None:
                uncompared = "other ranks would have to run as often"
            else:
                pairs = [(bound.sizes[axis], size) for axis, size in sizes.items()]
                compared, uncompared = _compare_random(
                    lambda number: SameDraws(pairs, state.generators, number),
                    lambda same: run(run_padded, poisons=False, draws=same),
                    lambda same: run(run_unpadded, poisons=False, draws=same),
                    lambda unpadded, padded, again: _compare_unpadded(
                        unpadded, padded, again, lambda: padded, tolerance, chosen_from, rounding
                    )[0],
                )
                outcome = compared or outcome
                found = replay_again()
        if outcome is not None and observer is not None:
            largest, ties = outcome.max_abs_difference, outcome.num_ties
            observer(PaddingVerified(mode, key, outcome.is_equal, largest, ties))
        if outcome is None or outcome.is_equal:
            unlike = {}
            if unpadded is not None and not is_random:
                unlike = state.unlike_scratch(saved, unpadded.left, UNPADDED_TOLERANCE)
            return PaddingChecked(found.outputs, unlike, uncompared)

        found = found._replace(outputs=own_copy(found.outputs))  # The next replays overwrite it.
        if can_repeat and state.varies(saved, lambda: call_with(replay)):
            raise VerificationError(
                subject,
                expected="a replay whose bits are the same in each run, for differences to show "
                "what padding does",
                found=f"bits that vary: {outcome}",
                do=VARYING,
            )
        if varied is not None and is_read:
            raise _padding_read_error(
                subject,
                names,
                outcome,
                is_rounding=compare_runs(varied, found, UNPADDED_TOLERANCE).is_equal,
                is_unread=lambda name: (
                    not can_repeat
                    or compare_runs(run(replay, name, poisons=False), found, tolerance).is_equal
                ),
            )
        raise VerificationError(
            subject,
            expected="the real rows and the state of the unpadded batch, within the tolerance of "
            "their dtype",
            found=f"the result depends on the padded size: {outcome}",
            do="mask what is summed over rows, and pass the real size as a tensor in place of the "
            "number of rows" + (f". {_STATE_OF_PADDING}" if state.guard is not None else ""),
        )


def _compare_random(
    draws: Callable[[int], SameDraws],
    run_padded: Callable[[SameDraws], RunResult],
    run_unpadded: Callable[[SameDraws], RunResult],
    compare: Callable[[RunResult, RunResult, Callable[[], RunResult]], Comparison],
) -> tuple[Comparison | None, str]:
    """``compare`` two eager runs that draw the same numbers; or say why there are no such runs.

    With other numbers where they differ: a choice by chance may fall otherwise because of rounding.
    """
    outcome = None
    for number in range(_NUM_DRAWS):
        same = draws(number)
        padded, unpadded = run_padded(same), run_unpadded(same)
        if same.unlike:
            return None, same.unlike
        settle_choices(unpadded, padded)
        outcome = compare(unpadded, padded, partial(run_unpadded, same))
        if outcome.is_equal:
            break
    return outcome, ""


def _compare_unpadded(
    unpadded: RunResult,
    found: RunResult,
    rerun: Callable[[], RunResult] | None,
    replay: Callable[[], RunResult],
    tolerance: float | None,
    chosen_from: Mapping[str, str],
    rounding: Rounding,
) -> tuple[Comparison, RunResult]:
    """Compare what a replay ``found`` with the unpadded run, within what their rounding explains.

    ``rerun``, ``replay``: the two runs once more, to learn how the callable rounds; None for the
    first: not where other ranks would have to run too. Returns what the last replay found, too.
    """
    outcome = compare_within(unpadded, found, UNPADDED_TOLERANCE, tolerance, chosen_from)
    if rerun is None:
        return outcome, found
    if not outcome.is_equal:
        wider = compare_runs(unpadded, found, IN_FLOAT32, chosen_from)
        if wider.is_equal:
            # Another run ends checked views.
            found = found._replace(outputs=own_copy(found.outputs))
            with Float32Seen() as seen:
                rerun()
            if seen.is_any:
                return wider, replay()
    elif outcome.share_in_16_bits:
        kept = found._replace(outputs=own_copy(found.outputs))
        num_runs = 0

        def measure(mode: RoundedOtherwise) -> Comparison:
            nonlocal num_runs
            num_runs += 1
            with mode:
                moved = rerun()
            return compare_runs(unpadded, moved, UNPADDED_TOLERANCE)

        outcome = rounding.judge(
            lambda limits: compare_within(unpadded, kept, limits, tolerance, chosen_from),
            UNPADDED_TOLERANCE,
            measure,
        )
        if num_runs:
            rerun()  # What it keeps is not of a moved run.
            found = replay()
    return outcome, found


class Float32Seen(LookingMode):
    """Notes whether an operator returns float32, as norms of transformers do in a float64 model.

    No shorter dtype: a quarter of a result, which bfloat16 may round away, hides what padding does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types and is_for_parts(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.is_any |= any(tensor.dtype is torch.float32 for tensor in tensors_of(result))
        return result


def _require_cut(
    subject: str,
    unpadded: Any,
    padded: Any,
    sizes: Mapping[str, int],
    padded_sizes: Mapping[str, int],
) -> None:
    """Errors: ``VerificationError`` for an output that is longer in a padded run."""
    outputs = {node.path: node.value for node in walk(padded) if node.kind == "tensor"}
    for node in walk(unpadded):
        if node.kind != "tensor" or node.path not in outputs:
            continue
        real, whole = node.value.shape, outputs[node.path].shape
        lengths = []
        for dim, pair in enumerate(zip(real, whole, strict=False)):
            fits = (axis for axis, size in sizes.items() if pair == (size, padded_sizes.get(axis)))
            if pair[0] != pair[1]:
                axis = next(fits, None)
                lengths.append(f"{dim}: {'lambda sizes: ...' if axis is None else repr(axis)}")
        if lengths and len(real) == len(whole):
            entry = f"{dotted(node.path)!r}: {{{', '.join(lengths)}}}"
            raise VerificationError(
                subject,
                expected=f"{format_path(node.path) or 'the result'} cut to {tuple(real)}",
                found=f"{tuple(whole)}, because no OutputSpec says which dimensions are padded",
                do=f"give it an entry, such as OutputSpec({{{entry}}})",
            )


def compare_runs(
    expected: RunResult,
    found: RunResult,
    tolerance: float | Mapping[torch.dtype, float] | None,
    chosen_from: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    """Compare the outputs of two runs, and where they are equal the state they left."""
    outputs = compare(expected.outputs, found.outputs, tolerance=tolerance, chosen_from=chosen_from)
    state = compare(expected.left.compared, found.left.compared, tolerance=tolerance)
    outcome = outputs if state.is_equal or not outputs.is_equal else state
    shares = (outputs.share_in_16_bits, state.share_in_16_bits)
    return replace(outcome, share_in_16_bits=largest_of(shares))


def compare_within(
    expected: RunResult,
    found: RunResult,
    limits: Mapping[torch.dtype, float],
    tolerance: float | None,
    chosen_from: Mapping[str, str],
) -> Comparison:
    """Compare two runs within ``limits``; an absolute ``tolerance`` is accepted as well."""
    outcome = compare_runs(expected, found, limits, chosen_from)
    if outcome.is_equal or tolerance is None:
        return outcome
    accepted = compare_runs(expected, found, tolerance)
    return accepted if accepted.is_equal else outcome


def check_padding_unread(
    bound: BoundBuffers,
    n: Sizes,
    run: Callable[[], Any],
    *,
    state: StateGuard | None = None,
    names: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Run a staged step with its own and with other padding; both must return the same bits.

    ``run`` returns outputs at their *real* size. ``state``: restored before each run, and after
    the last one the state is as before the call. ``names``: as for ``varied_padding``. Returns the
    names of the buffers whose padding was varied.

    Errors: ``VerificationError`` naming the buffers whose padded rows reach a real output.
    """
    chosen = arbitrary_buffers(bound) if names is None else tuple(names)

    def outputs(*varied: str) -> Any:
        with RunState(state).put_back(), varied_padding(bound, n, varied):
            taken = own_copy(run())
            return taken if state is None else (taken, state.save())

    expected = outputs()
    together = compare(expected, outputs(*chosen))
    if together.is_equal:
        return chosen
    raise _padding_read_error(
        f"{bound.key}, real sizes {n}",
        chosen,
        together,
        is_unread=lambda name: compare(expected, outputs(name)).is_equal,
    )


def _padding_read_error(
    subject: str,
    names: Iterable[str],
    outcome: Comparison | None,
    *,
    is_unread: Callable[[str], bool],
    is_rounding: bool = False,
) -> VerificationError:
    """Name the buffers that are read, or all where only several of them together show it."""
    alone = [name for name in names if not is_unread(name)]
    rounding = (
        "as small as rounding: if a kernel sums in another order for other rows (experts grouped "
        "by their tokens), accept it with verify_tolerance=; if not, "
    )
    return VerificationError(
        subject,
        expected="real rows and state that no padded row reaches",
        found=f"padding is read: other padded rows in {', '.join(alone or names)} change {outcome}",
        do=f"{rounding if is_rounding else ''}mask the padded rows, or declare what they hold "
        "(padding= of the BufferSpec); reads_padding='why' if results are meant to depend on them. "
        "If an input holds lengths: examples in place of capture(like=...), which cuts rows and "
        f"leaves values as they are. {_STATE_OF_PADDING}",
    )
