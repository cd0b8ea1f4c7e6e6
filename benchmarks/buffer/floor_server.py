"""The least that a service in Python in front of Redis can do for a push: what no real one can be faster than.

    python -m benchmarks.buffer.floor_server REDIS_SOCKET PORT_FILE

One thread and one connection to Redis per client; HTTP is looked for where our benchmark writes it; every frame is
checked as the buffer service checks it (`bapo.wire.check_group`: header and tokens) and SET while the rest of the body
comes; one script of six commands enters ids and records. Nothing else: no requests, leases, duplicates, versions,
limits, rights, counters, timeouts, repeats or answers that wait for Redis' file. It would lose and double groups.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

import hiredis

from bapo.frames import whole_frames
from bapo.wire import check_group
from buffer_service.resp import set_pieces

SCRIPT = """
local n = #KEYS
local rows, places = {}, {}
local seq = redis.call('HINCRBY', 'state', 'seq', n) - n
for i = 1, n do
  redis.call('PERSIST', KEYS[i])
  rows[2 * i - 1], rows[2 * i] = ARGV[i], ARGV[n + i]
  places[2 * i - 1], places[2 * i] = seq + i, ARGV[i]
end
redis.call('HSET', 'records', unpack(rows))
redis.call('ZADD', 'fresh', unpack(places))
return redis.status_reply('OK')
"""
AT_ONCE_BYTES = 1 << 18
MOST_BODY_BYTES = 1 << 26
TTL_MS = 600_000
END, LENGTH = b"\r\n\r\n", b"Content-Length: "
Piece = bytes | memoryview


class Push:
    """One body on its way through."""

    def __init__(self, redis: socket.socket) -> None:
        self._redis = redis
        self._waiting: list[Piece] = []
        self._waiting_bytes = self.seen = 0
        self.ids: list[str] = []
        self.records: list[str] = []

    def came(self, body: memoryview) -> None:
        """So much of the body is here."""
        for frame in whole_frames(body[self.seen :]):
            group = check_group(frame)
            self.ids.append(group.group_id)
            self.records.append(f"{group.prompt.prompt_id} {sum(group.rewards)} {group.num_tokens}")
            self._waiting += set_pieces(f"f:{group.group_id}", frame, TTL_MS)
            self.seen += len(frame)
            self._waiting_bytes += len(frame)
            if self._waiting_bytes >= AT_ONCE_BYTES:
                self.send()

    def send(self, last: bytes = b"") -> None:
        """What waits, to Redis."""
        send_all(self._redis, [*self._waiting, last])
        self._waiting, self._waiting_bytes = [], 0


def send_all(to: socket.socket, pieces: Sequence[Piece]) -> None:
    """Without a copy, as far as one call takes it."""
    sent = to.sendmsg(pieces)
    if sent < sum(map(len, pieces)):
        to.sendall(memoryview(b"".join(pieces))[sent:])


class Session:
    """One client, served until it goes."""

    def __init__(self, client: socket.socket, redis_socket: str) -> None:
        self._client = client
        self._redis = socket.socket(socket.AF_UNIX)
        self._redis.connect(redis_socket)
        self._answers: BufferedReader = self._redis.makefile("rb", buffering=1 << 16)
        self._redis.sendall(hiredis.pack_command(("SCRIPT", "LOAD", SCRIPT)))
        self._answers.readline()
        self._digest = self._answers.readline().strip()
        self._head = memoryview(bytearray(1 << 16))
        self._body = memoryview(bytearray(MOST_BODY_BYTES))

    def serve(self) -> None:
        """Pushes, one after the other."""
        while received := self._client.recv_into(self._head):
            head = bytes(self._head[:received])
            end = head.index(END) + len(END)
            start = head.index(LENGTH) + len(LENGTH)
            self._push(head[end:], int(head[start : head.index(b"\r", start)]))

    def _push(self, begun: bytes, size: int) -> None:
        push, received = Push(self._redis), len(begun)
        self._body[:received] = begun
        push.came(self._body[:received])
        while received < size:
            received += self._client.recv_into(self._body[received:size])
            push.came(self._body[:received])
        keys = [f"f:{group_id}" for group_id in push.ids]
        push.send(hiredis.pack_command(("EVALSHA", self._digest, len(keys), *keys, *push.ids, *push.records)))
        for _ in range(len(keys) + 1):
            line = self._answers.readline()
            assert line == b"+OK\r\n", line
        body = json.dumps({"groups": dict.fromkeys(push.ids, "stored")}, separators=(",", ":")).encode()
        self._client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


def main(redis_socket: str, port_file: str) -> None:
    """Until it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        Path(port_file).write_text(str(server.getsockname()[1]))
        while True:
            client, _ = server.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=Session(client, redis_socket).serve, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
