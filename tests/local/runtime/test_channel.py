"""Frames between the server and its helpers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from managed_e2b.local.runtime import channel


def test_frames_survive_any_cut() -> None:
    message = {"id": 1, "text": "caf\udce9", "list": [1, 2]}
    frame = channel.encode(message) * 3
    for size in (1, 2, 3, 5, 7, len(frame)):
        decoder, got = channel.Decoder(), []
        for start in range(0, len(frame), size):
            got += decoder.feed(frame[start : start + size])
        assert got == [(message, [])] * 3


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x02[]", b"\0\0\0\x01{", b'\0\0\0\x0b{"fds":9999}'])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(channel.ProtocolError):
        channel.Decoder().feed(data + b" " * 4)


def test_descriptors_arrive_with_their_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(3)]
        for fd in (fd for pipe in pipes for fd in pipe):
            stack.callback(os.close, fd)
        for number, (reader, writer) in enumerate(pipes):
            channel.send(ours, {"id": number}, [reader, writer] if number != 1 else [])
        decoder, got = channel.Decoder(), []
        while len(got) < 3:
            got += decoder.feed(*channel.receive(theirs))
        for _, fds in got:
            for fd in fds:
                stack.callback(os.close, fd)
        assert [len(fds) for _, fds in got] == [2, 0, 2]
        os.write(got[2][1][1], b"third")
        assert os.read(pipes[2][0], 10) == b"third"
        assert not os.get_inheritable(got[0][1][0])


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_descriptors_that_cannot_be_taken_fail_their_message_and_no_other() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as stack:
        pipe = os.pipe()
        for fd in pipe:
            stack.callback(os.close, fd)
        channel.send(ours, {"id": 1, "value": None}, pipe)
        channel.send(ours, {"id": 2, "value": "no descriptors"})
        channel.send(ours, {"id": 3, "value": None}, pipe)
        decoder, got = channel.Decoder(), []
        with no_descriptor_left():
            got += decoder.feed(*channel.receive(theirs))
        while len(got) < 3:
            got += decoder.feed(*channel.receive(theirs))
        (lost, nothing), second, (third, fds) = got
        for fd in fds:
            stack.callback(os.close, fd)
        assert (lost["id"], lost["errno"], nothing) == (1, errno.EMFILE, [])
        assert second == ({"id": 2, "value": "no descriptors"}, [])
        assert (third["id"], len(fds)) == (3, 2)
