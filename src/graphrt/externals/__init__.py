"""What a graph depends on besides its arguments: found, named, held, compared, put back.

Tensors and host values that a callable reaches, what it remembers on the host, and the modes and
flags around a call. Nothing here captures or replays.
"""

from __future__ import annotations

from graphrt.externals.environment import (
    autocast_dtype as autocast_dtype,
    autocast_error as autocast_error,
    require_no_grad as require_no_grad,
)
from graphrt.externals.held import ExternalsReport as ExternalsReport
from graphrt.externals.host_snapshot import HostSnapshot as HostSnapshot
from graphrt.externals.unwatched import Unwatched as Unwatched
