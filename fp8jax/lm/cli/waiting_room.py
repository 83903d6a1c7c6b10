"""Where the processes of a run wait for each other before JAX's coordinator starts.

JAX waits in silence: nobody may use its store before all have joined, and when its time is over it
aborts with a dump of the stack. So process 0 first listens at the coordinator's port itself. The
others connect and say who they are, in lines of JSON, and it tells all of them who is there. Once
all are, it sends them on, frees the port, and JAX's coordinator takes it. A process that leaves
before, or does not fit, ends the run, with the same line for all.
"""

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

SAY_EVERY_S = 15.0

_MOST = 16  # processes that a message names
_LONGEST = 2**20  # bytes of a line
_RETRY_S = 0.3
_TELL_EVERY_S = 2.0  # all, of all: their messages grow as the square of the processes


class JoinError(ConnectionError):
    """Not all processes have joined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guest:
    """A process that joins.

    Attributes:
      index: its number, from 0.
      count: how many processes it expects.
      host: where it runs.
    """

    index: int
    count: int
    host: str

    def __str__(self) -> str:
        return f"process {self.index} of {self.count} on {self.host}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def meet(
    address: str, me: Guest, timeout_s: float, say: Callable[[str], None] = _say
) -> dict[int, str]:
    """Waits until all processes are there; returns their hosts.

    Args:
      address: HOST:PORT of process 0.
      timeout_s: seconds after which the run ends.
      say: takes a line now and then while processes are missing.

    Raises:
      JoinError: not all came in time, one left, or they do not fit together.
    """
    host, _, port = address.rpartition(":")
    wait = _Wait(me, timeout_s, say)
    if me.index == 0:
        with contextlib.closing(_Room(int(port), me)) as room:
            return room.gather(wait)
    return _visit((host.strip("[]"), int(port)), me, wait)


class _Wait:
    """The time that is left, and what is said of those who are missing."""

    def __init__(self, me: Guest, timeout_s: float, say: Callable[[str], None]):
        self._me, self._timeout_s, self._say = me, timeout_s, say
        self._began = self._said = time.monotonic()

    def over(self, more_s: float = 0) -> bool:
        return time.monotonic() - self._began > self._timeout_s + more_s

    def tell(self, line: str) -> None:
        """Says the line, with the time, if it is long enough since the last one."""
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            seconds = f"{now - self._began:.0f} of {self._timeout_s:.0f} s"
            self._say(f"waiting: {self._me}: {line} ({seconds})")

    def within(self) -> str:
        return f" within {self._timeout_s:.0f} s (--join_timeout)"


def _missing(hosts: Mapping[int, str], count: int, within: str = "") -> str:
    """Returns which of the processes have not joined, and which have."""
    absent = [str(index) for index in range(count) if index not in hosts]
    more = f" and {len(absent) - _MOST} more" if len(absent) > _MOST else ""
    here = ", ".join(f"{index} on {host}" for index, host in sorted(hosts.items())[:_MOST])
    rest = ", …" if len(hosts) > _MOST else ""
    which, have = ("process", "has") if len(absent) == 1 else ("processes", "have")
    names = f"{which} {', '.join(absent[:_MOST])}{more} {have}"
    return f"{names} not joined{within}; joined: {here}{rest}"


def _send(connection: socket.socket, said: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # its process has died, which the next read shows
        connection.sendall(json.dumps(said).encode() + b"\n")


def _listen(port: int) -> socket.socket:
    """Returns a socket that listens at that port of all addresses, of IPv6, too, if there are."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


class _Room:
    """The port of process 0, and those who are connected to it."""

    def __init__(self, port: int, me: Guest):
        try:
            self._door = _listen(port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise JoinError(f"{me} cannot listen at port {port}: {why}") from error
        self._me = me
        self._hosts = {me.index: me.host}
        self._text: dict[socket.socket, bytes] = {}  # what connections have said so far
        self._guests: dict[socket.socket, Guest] = {}
        self._told, self._told_at = 1, -_TELL_EVERY_S  # of how many all were told, and when
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)

    def close(self) -> None:
        self._selector.close()
        for connection in (*self._text, self._door):
            connection.close()

    def gather(self, wait: _Wait) -> dict[int, str]:
        """Returns the hosts of all; tells everybody the end, whatever it is."""
        try:
            while len(self._hosts) < self._me.count:
                for key, _ in self._selector.select(timeout=0.2):
                    self._answer(key.fileobj)
                self._tell_joined()
                wait.tell(_missing(self._hosts, self._me.count))
                if wait.over():
                    raise JoinError(_missing(self._hosts, self._me.count, wait.within()))
        except JoinError as error:
            self._tell({"end": str(error)})
            raise
        self._tell({"go": self._hosts})
        return self._hosts

    def _tell_joined(self) -> None:
        now = time.monotonic()
        if len(self._hosts) > self._told and now - self._told_at >= _TELL_EVERY_S:
            self._told, self._told_at = len(self._hosts), now
            self._tell({"joined": self._hosts})

    def _tell(self, said: Mapping[str, Any]) -> None:
        for connection in self._guests:
            _send(connection, said)

    def _answer(self, connection: Any) -> None:
        """Lets somebody in, or listens to somebody who is; raises JoinError if one does not fit."""
        if connection is self._door:
            entering, _ = self._door.accept()
            entering.settimeout(5)
            self._text[entering] = b""
            self._selector.register(entering, selectors.EVENT_READ)
            return
        try:
            said = connection.recv(_LONGEST)
        except OSError:
            said = b""
        self._text[connection] += said
        if not said or len(self._text[connection]) > _LONGEST:
            self._leave(connection)
        elif b"\n" in self._text[connection] and connection not in self._guests:
            self._enter(connection)

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._text[connection]
        if guest := self._guests.pop(connection, None):
            raise JoinError(f"{guest} left before all had joined")

    def _enter(self, connection: socket.socket) -> None:
        try:
            guest = Guest(**json.loads(self._text[connection]))
        except (ValueError, TypeError):  # a stranger, such as a port scanner
            self._leave(connection)
            return
        self._guests[connection] = guest
        if guest.count != self._me.count:
            raise JoinError(f"{guest} and {self._me} expect different numbers of processes")
        if guest.index in self._hosts or not 0 <= guest.index < guest.count:
            first = self._hosts[guest.index] if guest.index in self._hosts else "nowhere"
            raise JoinError(f"{guest} has a number that another one on {first} has, too")
        self._hosts[guest.index] = guest.host


def _visit(address: tuple[str, int], me: Guest, wait: _Wait) -> dict[int, str]:
    """Returns the hosts of all, which process 0 tells."""
    at = f"process 0 at {address[0]}:{address[1]}"
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
            if connection.getsockname() != connection.getpeername():
                break
            # Linux gave it the very port that it asks for: it talks to itself, and blocks the port.
            connection.close()
            time.sleep(_RETRY_S)
        except OSError as error:  # an unknown host, too: its name may be made a little later
            wait.tell(f"{at} does not answer: {error.strerror or error}")
            if wait.over():
                why = error.strerror or error
                raise JoinError(f"{me} has not reached {at}{wait.within()}: {why}") from error
            time.sleep(_RETRY_S)
    with connection:
        connection.settimeout(0.5)
        _send(connection, dataclasses.asdict(me))
        text, hosts = b"", {0: address[0], me.index: me.host}
        while True:
            try:
                said = connection.recv(_LONGEST)
            except TimeoutError:
                said = None
            except OSError:
                said = b""
            if said == b"":
                raise JoinError(f"{at} left before {me} and all others had joined")
            *lines, text = (text + (said or b"")).split(b"\n")
            for told in map(json.loads, lines):
                if "end" in told:
                    raise JoinError(told["end"])
                (kind, named), *_ = told.items()
                hosts = {int(index): host for index, host in named.items()}
                if kind == "go":
                    return hosts
            wait.tell(_missing(hosts, me.count))
            if wait.over(more_s=10):  # process 0 has not said so: it hangs
                raise JoinError(f"{at} has joined, but goes on with nobody{wait.within()}")
