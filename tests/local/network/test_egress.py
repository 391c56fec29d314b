"""What gets out of real sandboxes, and what does not, in a private internet (`world`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from typing import Any, cast

import httpx
import pytest

from managed_e2b.local.network import outside, relay
from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.guest import BubblewrapGuest
from managed_e2b.local.server import LocalServer

from ..runtime.boxes import Box, eventually, first_output
from . import world
from .world import HOST, METADATA, NAMESERVER, OTHER, PRIVATE, SITE

pytestmark = pytest.mark.skipif(world.lacking() is not None, reason=f"{world.lacking()}")

ALL = "0.0.0.0/0"
REFUSED = "refused"


class Inside:
    """One sandbox, by the API and by what runs in it."""

    def __init__(self, boxes: Boxes, made: dict[str, Any]) -> None:
        self.id: str = made["sandboxID"]
        self._boxes = boxes

    @property
    def box(self) -> Box:
        """Its guest of now: it has another one when it has booted anew."""
        sandbox = self._boxes.server.registry.find(self.id)
        assert sandbox is not None
        return Box(cast(BubblewrapGuest, sandbox.guest), cast(BubblewrapRuntime, None))

    async def run(self, command: str, user: str = "user") -> str:
        """What a command says; `refused` when it fails."""
        result = await self.box.run(command, user=user)
        return result.out.strip() if result.code == 0 else REFUSED

    async def get(self, url: str) -> str:
        """The address that answers to a URL."""
        said = await self.run(f"curl -sSk --max-time 10 {url}")
        return said if said == REFUSED else json.loads(said)["at"]

    async def update(self, status: int = 204, **network: Any) -> str:
        return await self._boxes.ask("PUT", f"/sandboxes/{self.id}/network", network, status)

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._boxes.ask("GET", f"/sandboxes/{self.id}"))
        return found


class Boxes:
    """A server of the private host. (The SDK's own threads would be on the network of the first test.)"""

    def __init__(self, server: LocalServer, client: httpx.AsyncClient) -> None:
        self.server = server
        self._client = client

    async def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> str:
        answer = await self._client.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        return answer.text

    async def make(self, status: int = 201, **options: Any) -> Inside:
        made = await self.ask("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60, **options}, status)
        return Inside(self, json.loads(made))


def in_the_world(test: Callable[[Boxes], Awaitable[None]], *, internet: bool = True) -> None:
    """Run a test on a host of its own. Skips where that cannot run sandboxes."""

    async def work() -> None:
        server = LocalServer(internet=internet)
        try:
            await server.start()
        except RuntimeUnavailable as error:
            pytest.skip(f"no sandboxes on this host: {error}")
        key = {"X-API-KEY": server.api_key}
        async with httpx.AsyncClient(base_url=server.url, headers=key, trust_env=False, timeout=30) as client:
            try:
                await test(Boxes(server, client))
            finally:
                await server.close()

    world.on_a_host_of_its_own(work)


@pytest.fixture(autouse=True)
def names(monkeypatch) -> dict[str, str]:
    """What the private host's resolver knows, in place of this host's."""
    known = {"example.com": SITE, "www.example.com": OTHER, "inside.example.com": PRIVATE, "host.example.com": HOST}

    async def resolve(name: str) -> list[IPv4Address]:
        if name not in known:
            raise OSError(f"nobody knows {name}")
        return [IPv4Address(known[name])]

    monkeypatch.setattr(outside, "resolve", resolve)
    monkeypatch.setattr(outside, "nameservers", lambda: [NAMESERVER])
    return known


def test_by_default_what_is_public_can_be_reached_and_nothing_else():
    async def test(boxes: Boxes) -> None:
        box, neighbour = await boxes.make(), await boxes.make()
        service = await neighbour.box.start("exec python3 -m http.server 8000 2>&1")
        async with await asyncio.start_server(_here, "0.0.0.0", 9000):
            for url, at in ((f"http://{SITE}/", SITE), (f"https://{OTHER}/", OTHER), (f"http://{SITE}:8080/", SITE)):
                assert await box.get(url) == at
            own = boxes.server.url.rpartition(":")[2]
            for target in (
                METADATA,
                PRIVATE,
                f"{HOST}:9000",  # it listens on all addresses of the host, the public one included
                f"{HOST}:{own}",
                f"127.0.0.1:{own}",
                "127.0.0.1:9000",
                "127.0.0.1:8000",
                "0.0.0.0:9000",
                "127.0.0.1:64005",  # the relay itself, by no way that leads there
                "192.168.1.1",
                "[2001:db8::1]",
            ):
                assert await box.get(f"http://{target}/") == REFUSED, target
            # the same from the host's side: there is something to be reached
            reader, writer = await asyncio.open_connection(HOST, 9000)
            assert b"a service of the host" in await reader.read()
            writer.close()
        service.close()

    in_the_world(test)


def test_no_address_of_the_host_is_outside():
    second, of_a_range, routed = "203.0.113.2", "198.51.100.77", "192.0.2.9"

    async def test(boxes: Boxes) -> None:
        world.ip(f"addr add {second}/24 dev host0")  # another one of a network that it has an address of
        world.ip("addr add 198.51.100.1/24 dev lo")  # on loopback all of the network is the host's own
        world.ip("route add local 192.0.2.0/24 dev lo")
        box = await boxes.make()
        async with await asyncio.start_server(_here, "0.0.0.0", 9000):
            for address in (HOST, second, of_a_range, routed):
                _, writer = await asyncio.open_connection(address, 9000)  # there is something to be reached
                writer.close()
                assert outside.is_own(IPv4Address(address))
                assert await box.get(f"http://{address}:9000/") == REFUSED, address
            assert not outside.is_own(IPv4Address(SITE))
            assert await box.get(f"http://{SITE}/") == SITE

    in_the_world(test)


async def _here(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"at": "a service of the host"}')
    writer.close()


def test_names_are_looked_up_by_the_hosts_own_resolver_or_the_one_asked():
    async def test(boxes: Boxes) -> None:
        box = await boxes.make()
        assert await box.get("http://anything.example.org/") == SITE
        lookup = "python3 -c \"import socket; print(socket.gethostbyname('x.example.org'))\""
        assert await box.run(lookup) == SITE
        await box.run(f"echo nameserver {NAMESERVER} > /etc/resolv.conf", user="root")
        assert await box.run(lookup) == SITE
        await box.run(f"echo nameserver {PRIVATE} > /etc/resolv.conf", user="root")
        assert await box.run(lookup) == REFUSED

    in_the_world(test)


ASK = """
import socket, sys
way, name, flags, kind = sys.argv[1:]
labels = [label.encode() for label in name.split(".")]
wire = b"".join(bytes([len(label)]) + label for label in labels) + bytes(1)
query = bytes([1, 2, int(flags, 16), 0, 0, 1, 0, 0, 0, 0, 0, 0]) + wire + bytes([0, int(kind), 0, 1])
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if way == "udp" else socket.SOCK_STREAM)
sock.settimeout(10)
sock.connect(("8.8.8.8", 53))
sock.send(query if way == "udp" else len(query).to_bytes(2, "big") + query)
answer = sock.recv(2 if way == "tcp" else 512)
answer = sock.recv(512) if way == "tcp" else answer
print(socket.inet_ntoa(answer[-4:]) if answer and not answer[3] & 15 else "refused")
"""


@pytest.mark.parametrize("way", ["udp", "tcp"])
def test_only_plain_questions_reach_the_hosts_resolver_and_only_for_names_that_are_allowed(way):
    async def test(boxes: Boxes) -> None:
        async def ask(box: Inside, name: str, flags: str = "01", kind: int = 1) -> str:
            return await box.run(f"python3 -c '{ASK}' {way} {name} {flags} {kind}")

        anyone, named = await boxes.make(), await boxes.make(network={"denyOut": [ALL], "allowOut": ["*.example.com"]})
        assert await ask(anyone, "anything.example.org") == SITE
        assert await ask(named, "www.example.com") == SITE
        for name in ("secrets.example.org", "example.com", "www.example.com.example.org"):
            assert await ask(named, name) == REFUSED, name
        for box in (anyone, named):
            assert await ask(box, "www.example.com", flags="28") == REFUSED  # UPDATE
            assert await ask(box, "www.example.com", flags="20") == REFUSED  # NOTIFY
            assert await ask(box, "www.example.com", kind=252) == REFUSED  # AXFR
        assert await ask(await boxes.make(allow_internet_access=False), "www.example.com") == REFUSED

    in_the_world(test)


UDP = """
import errno, socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    sock.sendto(b"x", (sys.argv[1], 123))
    print("sent")
except OSError as error:
    print(errno.errorcode[error.errno])
"""

RAW = """
import socket, struct, sys
site = socket.inet_aton(sys.argv[1])
lo = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
lo.bind(("lo", 0))
ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28, 1, 0, 64, 17, 0, socket.inet_aton("127.0.0.1"), site)
lo.send(bytes(12) + b"\\x08\\0" + ip + struct.pack("!HHHH", 9, 9, 8, 0))
print([name for _, name in socket.if_nameindex()])
for words in (["ip", "route", "add", "default", "via", sys.argv[1]], ["nft", "flush", "ruleset"]):
    import shutil, subprocess
    if shutil.which(words[0]) and subprocess.run(words, capture_output=True).returncode == 0:
        print("changed by", words[0])
"""


def test_nothing_leaves_but_tcp_and_dns_and_root_cannot_change_that():
    async def test(boxes: Boxes) -> None:
        box = await boxes.make(network={"denyOut": [SITE]})
        assert await box.run(f"python3 -c '{UDP}' {OTHER}") == "EPERM"
        assert await box.run(f"python3 -c '{RAW}' {SITE}", user="root") == "['lo']"
        assert await box.get(f"http://{SITE}/") == REFUSED
        assert await box.get(f"http://{OTHER}/") == OTHER

    in_the_world(test)


def test_rules_by_address_and_their_change():
    async def test(boxes: Boxes) -> None:
        whitelist = await boxes.make(network={"denyOut": [ALL], "allowOut": [SITE, PRIVATE]})
        found = [await whitelist.get(f"http://{address}/") for address in (SITE, PRIVATE, OTHER)]
        assert found == [SITE, PRIVATE, REFUSED]
        assert (await whitelist.info())["network"] == {"denyOut": [ALL], "allowOut": [SITE, PRIVATE]}

        await whitelist.update(denyOut=[SITE])
        found = [await whitelist.get(f"http://{address}/") for address in (SITE, PRIVATE, OTHER)]
        assert found == [REFUSED, REFUSED, OTHER]
        await whitelist.update()
        assert await whitelist.get(f"http://{SITE}/") == SITE
        await whitelist.update(allow_internet_access=False)
        assert await whitelist.get(f"http://{SITE}/") == REFUSED
        assert (await whitelist.info())["allowInternetAccess"] is False

        closed = await boxes.make(allow_internet_access=False)
        assert await closed.get(f"http://{SITE}/") == REFUSED
        assert await closed.get("http://example.com/") == REFUSED

    in_the_world(test)


def test_rules_by_name(names):
    async def test(boxes: Boxes) -> None:
        allowed = ["example.com", "*.example.com"]
        box = await boxes.make(network={"denyOut": [ALL], "allowOut": allowed})
        assert await box.get("http://example.com/") == SITE
        assert await box.get("https://www.example.com/") == OTHER
        for url in (
            f"http://{SITE}/",
            f"https://{SITE}/",
            "http://example.org/",
            "https://example.org/",
            "http://example.com:8080/",  # no name is looked for there
            "http://inside.example.com/",  # a name of the host's network
            "https://host.example.com/",  # a name of the host
        ):
            assert await box.get(url) == REFUSED, url
        # a sandbox's own idea of where a name is counts for nothing
        await box.run(f"echo {METADATA} example.com >> /etc/hosts", user="root")
        assert await box.get("http://example.com/") == SITE
        assert await box.get(f"-H 'Host: example.com' http://{OTHER}/") == SITE
        # nor does an address that the name has: the next name there is another
        names["example.com"] = OTHER
        assert await box.get("http://example.com/") == OTHER

    in_the_world(test)


def test_a_connection_that_is_not_allowed_any_more_ends():
    async def test(boxes: Boxes) -> None:
        box = await boxes.make()
        hold = (
            f'exec python3 -uc \'import socket; s = socket.create_connection(("{SITE}", 80)); s.send(b"GET");'
            " print(1); s.recv(1)'"
        )
        command = await box.box.start(hold)
        assert (await first_output(command)).startswith(b"1")
        await box.update(denyOut=[OTHER])
        ended = asyncio.create_task(command.wait())
        assert await box.get(f"http://{SITE}/") == SITE
        assert not ended.done()
        await box.update(denyOut=[SITE])
        await asyncio.wait_for(ended, 20)
        command.close()

    in_the_world(test)


def test_copies_and_those_that_boot_anew_keep_their_rules():
    async def test(boxes: Boxes) -> None:
        box = await boxes.make(network={"denyOut": [SITE]})
        await box.update(denyOut=[OTHER])
        (copy,) = json.loads(await boxes.ask("POST", f"/sandboxes/{box.id}/fork", {"timeout": 60}, 201))
        await boxes.ask("POST", f"/sandboxes/{box.id}/pause", {"memory": False}, 204)
        await boxes.ask("POST", f"/v2/sandboxes/{box.id}/connect", {}, 201)
        for each in (Inside(boxes, copy["sandbox"]), box):
            assert await each.get(f"http://{OTHER}/") == REFUSED
            assert await each.get(f"http://{SITE}/") == SITE

    in_the_world(test)


def test_the_relays_go_with_their_sandbox():
    async def test(boxes: Boxes) -> None:
        box = await boxes.make()
        assert await box.get(f"http://{SITE}/") == SITE
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            another = await boxes.make()
            assert await another.get(f"http://{SITE}/") == SITE
            await boxes.ask("DELETE", f"/sandboxes/{another.id}", status=204)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)

    in_the_world(test)


def test_a_server_that_lets_nothing_out():
    async def test(boxes: Boxes) -> None:
        box = await boxes.make(network={"denyOut": [SITE]})
        assert await box.get(f"http://{SITE}/") == REFUSED
        for refusal in (
            await boxes.ask("POST", "/v2/sandboxes", {"templateID": "base", "network": {"allowOut": [SITE]}}, 501),
            await box.update(501, allowOut=[SITE]),
        ):
            assert "Internet access (network.allowOut): the server was started without it" in refusal

    in_the_world(test, internet=False)


GREEDY = """
import socket, sys
def cut(connection):
    connection.settimeout(1)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
held = [socket.create_connection((sys.argv[1], 80)) for _ in range(9)]
print(sum(map(cut, held)), flush=True)
sys.stdin.read()
"""


def test_a_sandbox_that_connects_without_end_leaves_room(monkeypatch):
    monkeypatch.setattr(relay, "MOST_CONNECTIONS", 3)

    async def test(boxes: Boxes) -> None:
        greedy, other = await boxes.make(), await boxes.make()
        command = await greedy.box.start(f"exec python3 -c '{GREEDY}' {SITE}", stdin=True)
        assert await first_output(command) == b"6\n"
        assert await greedy.get(f"http://{SITE}/") == REFUSED
        assert await other.get(f"http://{SITE}/") == SITE
        command.close()

    in_the_world(test)
