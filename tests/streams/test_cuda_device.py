"""The CUDA driver: what can be seen without a GPU, and what only a GPU shows."""

from __future__ import annotations

import threading

import pytest
import torch

from asynchicache.errors import ConfigError, DeviceError, UsageError
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.waiter import EventWaiter

PATIENCE = 30.0
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_error_says_so() -> None:
    with pytest.raises(DeviceError, match=r"cuda:0 cannot be used: torch .* sees no CUDA device"):
        CudaDevice()


def test_a_waiter_tells_in_order() -> None:
    device = EmulatedDevice(ThreadDriver())
    stream, gate, told = device.stream("s"), threading.Event(), []
    waiter = EventWaiter("s", lambda: None)
    events = [device.event() for _ in range(20)]
    stream.launch(lambda: gate.wait(PATIENCE))
    for i, event in enumerate(events):
        stream.record(event)
        waiter.put(event, lambda error, i=i, event=event: told.append((i, error, event.query())))
    assert told == []
    gate.set()
    waiter.close()
    assert told == [(i, None, True) for i in range(20)]
    device.close()


def test_a_waiter_passes_the_error_on_and_goes_on() -> None:
    device = EmulatedDevice(ThreadDriver())
    stream, event, told = device.stream("s"), device.event(), []
    waiter = EventWaiter("s", lambda: None)
    stream.launch(lambda: 1 // 0)
    stream.record(event)
    for _ in range(2):
        waiter.put(event, told.append)
    waiter.close()
    assert [str(error) for error in told] == [str(device.error)] * 2
    device.close()


def test_a_closed_waiter_leaves_no_thread() -> None:
    waiter = EventWaiter("gone", lambda: None)
    assert "waiter-gone" in [thread.name for thread in threading.enumerate()]
    waiter.close()
    waiter.close()
    assert "waiter-gone" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.gpu
@needs_gpu
def test_a_device_index_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="device index is 99"):
        CudaDevice(99)


@pytest.mark.gpu
@needs_gpu
def test_an_engines_stream_is_wrapped_once() -> None:
    device = CudaDevice(0)
    theirs = torch.cuda.Stream(0)
    ours = device.wrap(theirs)
    assert device.wrap(theirs) is ours
    state, event = torch.zeros(1, device="cuda:0"), device.event()
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        state.add_(1)
    ours.record(event)
    stream = device.stream("copy")
    stream.wait_event(event)
    stream.launch(lambda: state.mul_(5))
    stream.synchronize()
    assert state.item() == 5
    device.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_stream_of_another_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a stream of cuda:0"):
        CudaDevice(0).wrap(torch.cuda.Stream(1))
