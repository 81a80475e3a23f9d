"""Hosts that a decode server may be told to join at, over real sockets. Owns what they answer."""

import socket
from contextlib import suppress
from itertools import count
from threading import Event, Thread

from stratakv.disagg.http_join import JOIN_MARK
from stratakv.disagg.transport import PeerId

MARK = f"{JOIN_MARK}: 1\r\n".encode()


def answer_of(status, body, mark=b""):
    head = b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n" % (status, mark, len(body))
    return head + body


def listens(undo):
    """A server's socket, which answers nothing, and its name."""
    found = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
    return found, PeerId(f"127.0.0.1:{found.getsockname()[1]}")


def refuses(undo, answers=None, after_s=0.0, asked=None):
    """A server that refuses whoever comes, ``after_s``; after so many ``answers`` it hangs.
    ``asked``: takes what it is sent."""
    found, peer = listens(undo)
    answer = answer_of(200, b'{"refused": "no"}', MARK)

    def serve():
        with suppress(OSError):
            for _ in count() if answers is None else range(answers):
                with found.accept()[0] as caller:
                    came = b""
                    while b"}" not in came and (more := caller.recv(1 << 16)):
                        came += more
                    if asked is not None:
                        asked.append(came)
                    over.wait(after_s)
                    caller.sendall(answer)

    over = Event()
    Thread(target=serve, daemon=True).start()
    return peer
