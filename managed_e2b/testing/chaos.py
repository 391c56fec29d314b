"""`Chaos`: makes a local server fail on purpose, and tells what happened there.

A rule is a sentence: for which operation, which of its requests, before or after the effect, what goes wrong. ::

    with local_server(chaos=True) as server:
        chaos = server.chaos
        chaos.on("create").nth(3).after().status(504)      # the third create happens, and answers 504
        chaos.on("kill").first(2).pretend()                # answers 204 and does nothing, twice
        chaos.on("process.start").cut("reset")             # the command's end never arrives
        chaos.on("*").sometimes(0.05).drop()               # seeded: the same run fails in the same places
        ...
        assert chaos.journal().count("create") == 4        # what the server saw, retries of the SDK included

The operations and faults are those of `managed_e2b.local.chaos.rules`. Counting starts when a rule is made. The client
is blocking, and its calls take a millisecond or two; it may be used from any thread.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from ..local.chaos import rules as faults
from ..local.chaos.rules import Rule, Script

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds for one call to the server."""


class ChaosError(RuntimeError):
    """The server refused, or was not started with chaos. The message says what to do."""


class Installed(BaseModel):
    """A rule in force: its id at the server, how many requests it was about and how many of these it struck."""

    model_config = ConfigDict(frozen=True)

    id: int
    seen: int
    hits: int
    rule: Rule


class Request(BaseModel):
    """One request as the server saw it.

    `at` is Unix seconds. `effect` is the status of what really happened, None when nothing did (yet); `status` what the
    client was told, None when it was told nothing. `faults` are the rules that struck, in words. `ticket` and `owner`
    come from the metadata that me2b gives its sandboxes, also for sandboxes that are gone.
    """

    model_config = ConfigDict(frozen=True)

    n: int
    at: float
    op: str
    method: str
    sandbox_id: str | None
    ticket: str | None
    owner: str | None
    faults: tuple[str, ...]
    effect: int | None
    status: int | None
    state: Literal["open", "hanging", "answered", "dropped"]


@dataclass(frozen=True)
class Journal:
    """What the server saw, in order, and how many sandboxes lived at once since the journal was begun.

    `peak_live` counts running, paused and starting sandboxes, `peak_present` also those that were being killed; a
    server has one API key, so they are that account's. `forgotten`: so many entries were the oldest and had to go.
    """

    requests: tuple[Request, ...]
    live: int
    peak_live: int
    peak_present: int
    forgotten: int

    def of(self, op: str | None = None, *, ticket: str | None = None, sandbox_id: str | None = None) -> list[Request]:
        """The requests of an operation, a ticket, a sandbox."""
        return [
            request
            for request in self.requests
            if op in (None, request.op)
            and ticket in (None, request.ticket)
            and sandbox_id in (None, request.sandbox_id)
        ]

    def count(self, op: str | None = None, *, ticket: str | None = None, sandbox_id: str | None = None) -> int:
        """How many such requests there were, those of the SDK's own retries included."""
        return len(self.of(op, ticket=ticket, sandbox_id=sandbox_id))

    def busiest(self, op: str = "create", seconds: float = 1.0) -> int:
        """The most requests of an operation that came within any `seconds`."""
        times = sorted(request.at for request in self.of(op))
        most = first = 0
        for last, at in enumerate(times):
            while at - times[first] >= seconds:
                first += 1
            most = max(most, last - first + 1)
        return most

    def double_kills(self) -> list[str]:
        """Ids of sandboxes for which another DELETE came after one that had been answered as done."""
        done: set[str] = set()
        again: list[str] = []
        for request in self.of("kill"):
            if request.sandbox_id is None:
                continue
            if request.sandbox_id in done:
                again.append(request.sandbox_id)
            if request.status == request.effect == 204:
                done.add(request.sandbox_id)
        return again


class On(Generic[T]):
    """A rule in the making: choose requests, then name the fault, which makes the rule. Each step is a new value."""

    def __init__(self, make: Callable[[Rule], T], **chosen: Any) -> None:
        self._make = make
        self._chosen = chosen

    def _with(self, **more: Any) -> On[T]:
        return On(self._make, **{**self._chosen, **more})

    def _fault(self, fault: faults.Fault) -> T:
        return self._make(Rule(fault=fault, **self._chosen))

    # --- which requests

    def nth(self, *numbers: int) -> On[T]:
        """Those requests only; the first is 1."""
        return self._with(nth=numbers)

    def first(self, count: int = 1) -> On[T]:
        """The first `count`."""
        return self._with(stop=count)

    def after_first(self, count: int) -> On[T]:
        """All but the first `count`."""
        return self._with(start=count + 1)

    def every(self, count: int) -> On[T]:
        """Every `count`-th: the first, then the one `count` later, and so on."""
        return self._with(every=count)

    def sometimes(self, probability: float) -> On[T]:
        """By chance, which the seed decides by the request's number: not by the time or by other requests."""
        return self._with(probability=probability)

    def times(self, count: int) -> On[T]:
        """No more than `count` in all."""
        return self._with(times=count)

    def where(self, sandbox_id: str | None = None, **metadata: str) -> On[T]:
        """Only of this sandbox, or of sandboxes whose metadata has these values."""
        return self._with(sandbox_id=sandbox_id, metadata=metadata)

    def before(self) -> On[T]:
        """The fault comes before the effect, which a fault that decides the answer prevents. The default."""
        return self._with(phase="before")

    def after(self) -> On[T]:
        """The fault comes after the effect: it happened, and the client is not told."""
        return self._with(phase="after")

    # --- what goes wrong

    def status(
        self,
        status: int,
        *,
        retry_after: str | int | None = None,
        retry: bool | None = None,
        message: str | None = None,
    ) -> T:
        """Answer `status`. `retry_after`: the header, as it is. `retry`: tells the SDK whether to try again."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if retry is not None:
            headers["Should-Retry"] = "true" if retry else "false"
        return self._fault(faults.Status(status=status, headers=headers, message=message))

    def pretend(self, status: int = 204, body: Any = None) -> T:
        """Answer as if it had been done, and do nothing."""
        return self._fault(faults.Status(status=status, body=body))

    def delay(self, seconds: float) -> T:
        """Take so much longer."""
        return self._fault(faults.Delay(seconds=seconds))

    def hang(self) -> T:
        """Never answer, until the client leaves or `Chaos.release` is called."""
        return self._fault(faults.Hang())

    def drop(self, how: Literal["reset", "close"] = "reset") -> T:
        """End the connection without an answer."""
        return self._fault(faults.Drop(how=how))

    def empty(self) -> T:
        """A list: no items."""
        return self._fault(faults.EmptyList())

    def stale(self, calls: int = 1) -> T:
        """A list: as it was `calls` lists ago."""
        return self._fault(faults.StaleList(calls=calls))

    def lossy(self, fraction: float = 0.5) -> T:
        """A list: each item is missing with this probability."""
        return self._fault(faults.LossyList(fraction=fraction))

    def truncated(self, keep: int = 1) -> T:
        """A list: the first items, and no token for more."""
        return self._fault(faults.TruncatedList(keep=keep))

    def repeating(self) -> T:
        """A list: the first page for ever."""
        return self._fault(faults.RepeatingList())

    def cut(
        self,
        how: Literal["reset", "close", "end", "truncated", "unavailable"] = "reset",
        *,
        after_events: int | None = None,
    ) -> T:
        """A stream ends before its end event, or after so many events while the command runs on."""
        return self._fault(faults.CutStream(how=how, after_events=after_events))

    def dies_at(self, age: float) -> T:
        """A create: its sandbox dies at that age, in seconds."""
        return self._fault(faults.EarlyDeath(age=age))

    def cap(self, limit: int, *, retry_after: str | int | None = None) -> T:
        """A create is refused with 429 while `limit` sandboxes run."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return self._fault(faults.AccountCap(limit=limit, headers=headers))

    def rate(self, per_second: float, *, retry_after: str | None = None) -> T:
        """More than so many a second are refused with 429. `retry_after`: the header, `"auto"` for the truth."""
        return self._fault(faults.RateLimit(per_second=per_second, retry_after=retry_after))


class ChaosScript:
    """Rules for a server that is not started yet: `local_server(chaos=script)`, or `me2b serve --chaos FILE`."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._rules: list[Rule] = []

    def on(self, *ops: str) -> On[None]:
        """A rule about these operations."""
        return On(self._rules.append, ops=ops)

    @property
    def script(self) -> Script:
        """The rules so far, as one value."""
        return Script(seed=self._seed, rules=tuple(self._rules))

    def to_json(self) -> str:
        """What `--chaos` reads."""
        return self.script.model_dump_json(indent=2)


class Chaos:
    """Makes the local server at `url` fail. It must have been started with chaos; `api_key` is the server's."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/") + "/me2b/chaos"
        self._api_key = api_key
        # the server is on this host: no proxy of the environment may come between
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def on(self, *ops: str) -> On[int]:
        """A rule about these operations; naming its fault puts it in force and returns its id."""
        return On(self.add, ops=ops)

    def add(self, rule: Rule) -> int:
        """Put a rule in force, after those that are. Returns its id."""
        answer = self._call("POST", "/rules", rule.model_dump_json())
        return int(answer["id"])

    def remove(self, rule_id: int) -> None:
        """Take one rule out of force."""
        self._call("DELETE", f"/rules/{rule_id}")

    def play(self, script: Script | ChaosScript) -> None:
        """Replace all rules and the seed, and count anew."""
        value = script.script if isinstance(script, ChaosScript) else script
        self._call("PUT", "", value.model_dump_json())

    def seed(self, seed: int) -> None:
        """Replace the seed and drop all rules."""
        self.play(Script(seed=seed))

    def calm(self) -> None:
        """No more faults: all rules go, requests that hang or are delayed are dropped. The journal stays."""
        self._call("DELETE", "")

    def reset(self) -> None:
        """As if the server were new: no rules, an empty journal, peaks counted from now. Sandboxes stay."""
        self.calm()
        self._call("DELETE", "/journal")

    def release(self) -> None:
        """Let the requests that hang now go on as if nothing had been."""
        self._call("POST", "/release")

    def installed(self) -> list[Installed]:
        """The rules in force and what they did."""
        return [Installed.model_validate(item) for item in self._call("GET", "")["rules"]]

    def hits(self, rule_id: int | None = None) -> int:
        """How many requests a rule (None: all rules in force) struck."""
        return sum(item.hits for item in self.installed() if rule_id in (None, item.id))

    def journal(self, op: str | None = None) -> Journal:
        """What the server saw since it was started or `reset`; of one operation only, when one is named."""
        answer = self._call("GET", "/journal" if op is None else f"/journal?op={op}")
        requests = tuple(Request.model_validate(entry) for entry in answer.pop("requests"))
        return Journal(requests=requests, **answer)

    def wait_for(self, op: str, *, count: int = 1, state: str | None = None, timeout: float = 20.0) -> list[Request]:
        """Wait until `count` requests of an operation have come (in that `state`, e.g. `"hanging"`); these requests.

        Raises TimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            found = [request for request in self.journal(op).requests if state in (None, request.state)]
            if len(found) >= count:
                return found
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{len(found)} of {count} requests {op!r} came within {timeout:g} s")
            time.sleep(0.02)  # the server tells nothing by itself

    def _call(self, method: str, path: str, body: str | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else body.encode(),
            method=method,
            headers={"X-API-KEY": self._api_key, "Content-Type": "application/json"},
        )
        try:
            with self._http.open(request, timeout=TIMEOUT) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise ChaosError(_explain(error.code, error.read())) from error
        except urllib.error.URLError as error:
            raise ChaosError(f"the server at {self._url} does not answer: {error.reason}") from error
        return json.loads(answer) if answer else None


def _explain(status: int, body: bytes) -> str:
    if status == 404:
        return "no such rule, or a server without chaos: local_server(chaos=True), `me2b serve --chaos '{}'`"
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"
