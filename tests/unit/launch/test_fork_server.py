"""What a fork server answers where it must not fork."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pytest_llmperf.support.interpreter import Channel, ChannelClosedError, Message
from pytest_llmperf.worker.warm import fork_server
from pytest_llmperf.worker.warm.fork_server import ForkServer

UNFIT = "a thread was started (poller, of users_package)"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ForkServer, Channel]]:
    """One that became unfit since it imported, and who asks it."""
    monkeypatch.setattr(fork_server, "_unfit", lambda: UNFIT)
    ours, its = socket.socketpair()
    with ours, its:
        server = ForkServer(Channel(its))
        yield server, Channel(ours)
        server._children.close()


def test_a_launch_is_refused_with_the_reason(asked: tuple[ForkServer, Channel]) -> None:
    server, channel = asked
    log = os.open(os.devnull, os.O_WRONLY)
    server._answer(Message({"do": "launch", "torchrun": [], "environment": {}}, (log,)))
    assert channel.receive(1) == Message({"refused": UNFIT}, ())


def test_a_branch_is_refused_where_its_imports_are_waited_for(asked: tuple[ForkServer, Channel]) -> None:
    server, channel = asked
    ours, its = socket.socketpair()
    with ours:
        server._answer(Message({"do": "branch", "needs": []}, (its.detach(),)))
        branch = Channel(ours)
        assert branch.receive(1) == Message({"refused": UNFIT}, ())
        with pytest.raises(ChannelClosedError):
            branch.receive(1)
    assert channel.receive(0) is None
