"""What the client gets to read of a prefill server that cannot be joined."""

import socket
from contextlib import closing

from stratakv.disagg.http_join import HttpCarry
from stratakv.disagg.joining import JoinRefused
from stratakv.disagg.transport import PeerId
from stratakv.testing.patience import PATIENCE_S


def test_an_error_without_words_has_its_name(monkeypatch):
    def silent(*_args, **_more):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    with closing(HttpCarry(PeerId("decode"), None)) as carry:
        answer = carry(PeerId("h:1"), ()).result(PATIENCE_S)
    reason = "the prefill server h:1 cannot be reached: TimeoutError()"
    assert answer == JoinRefused(reason)
