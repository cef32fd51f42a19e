"""Named streams, and points in them."""

from __future__ import annotations

import torch


class CUDAStream:
    """A CUDA stream and its name. Compared by identity: the device makes one per stream."""

    __slots__ = ("name", "torch_stream")

    def __init__(self, name: str, torch_stream: torch.cuda.Stream) -> None:
        self.name = name
        self.torch_stream = torch_stream

    def __repr__(self) -> str:
        return f"CUDAStream({self.name!r}, {self.torch_stream.cuda_stream:#x})"


class CUDAMark:
    """An event: everything issued on its stream before it was recorded."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event


# torch hands its streams out of a ring of this many per device and priority.
NUM_RING_STREAMS = 32


class StreamTable:
    """The streams of one device: by name, and by handle."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._by_name: dict[str, CUDAStream] = {}
        self._by_handle: dict[int, CUDAStream] = {}
        default = torch.cuda.default_stream(device_index)
        self._by_handle[default.cuda_stream] = CUDAStream("default", default)

    def named(self, name: str) -> CUDAStream | None:
        """The stream of this name, made on first use; None when the ring holds no other stream."""
        if name not in self._by_name:
            taken = {stream.torch_stream.cuda_stream for stream in self._by_name.values()}
            # The ring starts again from its beginning, so a draw may give a stream that has a name.
            for _ in range(NUM_RING_STREAMS):
                drawn = torch.cuda.Stream(self._device_index)
                if drawn.cuda_stream not in taken:
                    break
            else:
                return None
            self._by_name[name] = self._by_handle[drawn.cuda_stream] = CUDAStream(name, drawn)
        return self._by_name[name]

    def forget(self, stream: CUDAStream) -> None:
        """Take the name of ``stream`` away, if it has one; the ring may hand it out again."""
        if self._by_name.get(stream.name) is stream:
            del self._by_name[stream.name]
            # The ring gives the handle to others too, who are not to be known by this name.
            del self._by_handle[stream.torch_stream.cuda_stream]

    def current(self) -> CUDAStream:
        """The calling thread's current stream; a stream of somebody else's is named by handle."""
        stream = torch.cuda.current_stream(self._device_index)
        known = self._by_handle.get(stream.cuda_stream)
        if known is None:
            known = CUDAStream(f"stream-{stream.cuda_stream:#x}", stream)
            self._by_handle[stream.cuda_stream] = known
        return known

    def is_default(self, stream: CUDAStream) -> bool:
        """Whether this is the stream that no capture can use."""
        default = torch.cuda.default_stream(self._device_index)
        return stream.torch_stream.cuda_stream == default.cuda_stream
