"""A network of known bandwidth and delay between processes of one machine: a namespace for each, and a relay between them.

Linux only, as root. Each namespace has a TUN device, whose packets come to the relay in this process. The relay gives a packet to the
namespace of its destination after the time that it takes on a link of the bandwidth, plus the delay. Every namespace has one link out,
on which its packets wait for each other. (tc netem does the same inside the kernel, where the kernel has it.)

    with Network(4, gbit=1.0, delay=0.2e-3) as network:
        subprocess.run([*network.prefix(2), "ping", "-c", "3", network.address(0)])
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from types import TracebackType

__all__ = ["Network"]

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_MTU = 9000


class Network:
    """Namespaces that reach each other through links of one bandwidth and delay.

    Args:
        size: how many namespaces.
        gbit: bandwidth of each link out, in Gbit/s.
        delay: seconds from one namespace to another.
    """

    def __init__(self, size: int, *, gbit: float, delay: float) -> None:
        self.size = size
        self._seconds_per_byte = 8e-9 / gbit
        self._delay = delay
        self._names = [f"lowtri-{os.getpid()}-{number}" for number in range(size)]
        self._devices: list[int] = []
        self._stop = threading.Event()
        self._relay = threading.Thread(target=self._run, daemon=True)

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """What stands before a command that runs in a namespace."""
        return ["ip", "netns", "exec", self._names[number]]

    def device(self, number: int) -> str:
        return f"lt{os.getpid() % 100_000}n{number}"

    def __enter__(self) -> Network:
        try:
            for number, name in enumerate(self._names):
                self._make(number, name)
        except BaseException:
            self._remove()
            raise
        self._relay.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._relay.join()
        self._remove()

    def _make(self, number: int, name: str) -> None:
        device = self.device(number)
        _ip("netns", "add", name)
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._devices.append(file)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", device, "mtu", str(_MTU), "txqueuelen", "10000", "up")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", device)

    def _remove(self) -> None:
        for file in self._devices:
            os.close(file)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _run(self) -> None:
        free_at = [0.0] * self.size  # when the link out of each namespace has sent all that it got so far
        waiting: list[tuple[float, int, int, bytes]] = []  # due, order, destination, packet
        order = 0
        numbers = {file: number for number, file in enumerate(self._devices)}
        poll = select.poll()
        for file in self._devices:
            poll.register(file, select.POLLIN)
        while not self._stop.is_set():
            wait = 50.0 if not waiting else max(0.0, waiting[0][0] - time.monotonic()) * 1e3
            for file, _ in poll.poll(min(wait, 50.0)):
                for _ in range(64):
                    try:
                        packet = os.read(file, 65536)
                    except BlockingIOError:
                        break
                    number = numbers[file]
                    to = packet[19] - 1  # the last byte of the IPv4 destination
                    if packet[0] >> 4 != 4 or not 0 <= to < self.size:
                        continue
                    free_at[number] = max(free_at[number], time.monotonic()) + len(packet) * self._seconds_per_byte
                    heapq.heappush(waiting, (free_at[number] + self._delay, order, to, packet))
                    order += 1
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, to, packet = heapq.heappop(waiting)
                try:
                    os.write(self._devices[to], packet)
                except OSError:
                    continue  # dropped, as a network does


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
