"""Staging buckets in GPU memory that another process maps once: CUDA IPC handles of memory, interprocess events.

The memory comes from the driver itself (cuMemAlloc), one allocation per bucket: a handle then covers the bucket and
nothing else, whatever the settings of torch's allocator (`expandable_segments` memory cannot be shared this way).
The order of accesses is kept on the device: the engine's stream waits for the event of the filled bucket, the trainer's
stream for the event of the freed one. Neither process waits for the device.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.dist.weight_buckets import NUM_SLOTS, Seen, pack_parts
from fastrl.dist.weight_checksum import ROW_BYTES, checksum
from fastrl.dist.weight_plan import Part
from fastrl.errors import WeightError

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_BLOCK = 2 << 20  # bytes
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Driver:
    """The few driver calls that torch has no public name for. https://docs.nvidia.com/cuda/cuda-driver-api"""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise WeightError(f"the CUDA driver cannot be loaded ({error})") from error
        self.library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        self.library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
        self.library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self.library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
        self.library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]

    def allocate(self, size: int) -> int:
        """Device memory of the current context; returns its address."""
        pointer = ctypes.c_uint64()
        # smaller ones share a block with others, and a handle would show the whole block
        size = -(-size // _BLOCK) * _BLOCK
        code = self.library.cuMemAlloc_v2(ctypes.byref(pointer), size)
        if code == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # what torch keeps for later is not free for the driver
            code = self.library.cuMemAlloc_v2(ctypes.byref(pointer), size)
        self.check(code, f"allocating {size} bytes")
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give memory of `allocate` back."""
        self.check(self.library.cuMemFree_v2(pointer), "freeing a bucket")

    def export(self, pointer: int) -> bytes:
        """The handle under which another process maps the allocation at `pointer`."""
        handle = _Handle()
        self.check(self.library.cuIpcGetMemHandle(ctypes.byref(handle), pointer), "exporting a bucket")
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""
        pointer = ctypes.c_uint64()
        structure = _Handle.from_buffer_copy(handle)
        code = self.library.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), structure, _LAZY_PEER_ACCESS)
        self.check(code, "mapping the trainer's bucket")
        return pointer.value

    def unmap(self, pointer: int) -> None:
        """Undo `open`."""
        self.check(self.library.cuIpcCloseMemHandle(pointer), "unmapping a bucket")

    def check(self, code: int, what: str) -> None:
        """Raise WeightError unless a call returned CUDA_SUCCESS."""
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise WeightError(f"{what}: {text.value.decode() if text.value else 'CUDA error'} ({code})")


class _Memory:
    """Memory at an address, for `torch.as_tensor`."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """The bytes at an address of a device, [size] uint8; nothing is copied and nothing is owned."""
    return torch.as_tensor(_Memory(pointer, size), device=device)


class CudaIpcSend:
    """Buckets in the trainer's GPU memory."""

    kind = "cuda_ipc"
    sums_as_it_fills = False  # one launch fills a bucket

    def __init__(self, bucket_bytes: int, device: torch.device, num_slots: int = NUM_SLOTS) -> None:
        self.bucket_bytes, self.device = bucket_bytes, device
        self.driver = Driver()
        self.pointers: list[int] = []
        self.freed_events: list[Any] = []
        self.must_wait: set[int] = set()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current in this thread
            try:
                for _ in range(num_slots):
                    self.pointers.append(self.driver.allocate(bucket_bytes))
                self.handles = [self.driver.export(pointer) for pointer in self.pointers]
            except BaseException:
                self.close()
                raise
            self.slots = [tensor_at(pointer, bucket_bytes, device) for pointer in self.pointers]
            self.filled_events = [torch.cuda.Event(interprocess=True) for _ in range(num_slots)]

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        """Handles, and the checksum of a pattern in each bucket by which the engine knows that the mapping works."""
        sums = []
        with torch.cuda.device(self.device):
            for number, slot in enumerate(self.slots):
                slot[:ROW_BYTES].copy_(torch.arange(number, ROW_BYTES + number, device=self.device) % 251)
                self.filled_events[number].record()
                sums.append(checksum(slot[:ROW_BYTES]))  # waits until the pattern is there
            events = [encode(event.ipc_handle()) for event in self.filled_events]
        fields = {
            "transport": self.kind,
            "bucket_bytes": self.bucket_bytes,
            "device": device_uuid(self.device),
            "memory": [encode(handle) for handle in self.handles],
            "events": events,
            "patterns": sums,
        }
        return fields, []

    def opened(self, message: dict[str, Any]) -> None:
        """The engine's events, from its answer."""
        self.freed_events = [
            torch.cuda.Event.from_ipc_handle(self.device, base64.b64decode(handle)) for handle in message["events"]
        ]
        self.must_wait.clear()

    def fill(self, slot: int, parts: Sequence[Part], seen: Seen | None = None) -> Tensor:
        with torch.cuda.device(self.device):
            if slot in self.must_wait:
                torch.cuda.current_stream().wait_event(self.freed_events[slot])
                self.must_wait.discard(slot)
            pack_parts(parts, self.slots[slot])
            self.mark(slot)
        return self.slots[slot]

    def mark(self, slot: int) -> None:
        """What the current stream has written so far is what the engine's stream waits for."""
        with torch.cuda.device(self.device):
            self.filled_events[slot].record()

    def freed(self, slot: int) -> None:
        self.must_wait.add(slot)

    def close(self) -> None:
        self.slots = []
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()
            while self.pointers:
                self.driver.free(self.pointers.pop())


class CudaIpcReceive:
    """The engine's mapping of `CudaIpcSend`. Tensors are to be read on the stream that is current when they come."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.device = device_of(str(message["device"]))
        self.driver = Driver()
        self.pointers: list[int] = []
        size = int(message["bucket_bytes"])
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()
            for handle in message["memory"]:
                self.pointers.append(self.driver.open(base64.b64decode(handle)))
            self.slots = [tensor_at(pointer, size, self.device) for pointer in self.pointers]
            self.filled_events = [
                torch.cuda.Event.from_ipc_handle(self.device, base64.b64decode(handle)) for handle in message["events"]
            ]
            self.freed_events = [torch.cuda.Event(interprocess=True) for _ in self.slots]
            for slot, (room, want) in enumerate(zip(self.slots, message["patterns"])):
                torch.cuda.current_stream().wait_event(self.filled_events[slot])
                if checksum(room[:ROW_BYTES]) != want:
                    raise WeightError("the mapped bucket does not show what the trainer wrote")
                self.freed_events[slot].record()

    def answer(self) -> dict[str, Any]:
        """Fields of the message that says the buckets are open."""
        with torch.cuda.device(self.device):
            return {"events": [encode(event.ipc_handle()) for event in self.freed_events]}

    def read(self, slot: int) -> Tensor:
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().wait_event(self.filled_events[slot])
        return self.slots[slot]

    def release(self, slot: int) -> dict[str, Any]:
        with torch.cuda.device(self.device):
            self.freed_events[slot].record()
        return {}

    def close(self) -> None:
        self.slots = []
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()
            while self.pointers:
                self.driver.unmap(self.pointers.pop())


def cuda_ipc_problem(device: torch.device) -> str | None:
    """Why memory of this device cannot be shared by CUDA IPC; None when a small allocation can be exported."""
    if device.type != "cuda":
        return f"the weights are on {device}"
    if torch.version.cuda is None:
        return "this torch was not built for CUDA"
    try:
        driver = Driver()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()
            pointer = driver.allocate(ROW_BYTES)
            try:
                driver.export(pointer)
            finally:
                driver.free(pointer)
    except (WeightError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


def device_uuid(device: torch.device) -> str:
    """The device's own name, which does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """The device of that name in this process."""
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise WeightError(f"the engine does not see the trainer's GPU {uuid} (CUDA_VISIBLE_DEVICES)")


def encode(data: bytes) -> str:
    """Bytes for JSON."""
    return base64.b64encode(data).decode("ascii")
