"""The spawner's operations in sandboxes that run: commands, and what is asked of all their processes.

Standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from managed_e2b.local.runtime import cgroups, children, linux, look
from managed_e2b.local.runtime.desk import BadRequest, Desk, Operation
from managed_e2b.local.runtime.forks import Told
from managed_e2b.local.runtime.launches import Launches

_SPARE_SECONDS = 5.0  # that a sandbox in which nothing is started has a fork ready for the next command


class SandboxOperations:
    def __init__(self, desk: Desk, launches: Launches) -> None:
        self._desk = desk
        self._launches = launches
        self._jobs: dict[int, int] = {}  # pid of a command → its request
        self._ready_until: dict[str, float] = {}  # the time is later for later ones
        self._unclaimed: dict[int, int] = {}  # pid → status, reaped before we knew what it was
        self.operations: dict[str, Operation] = {
            "spawn": self._spawn,
            "kill_marked": self._kill_marked,
            "abandon": self._abandon,
            "freeze": self._freeze,
            "dial": self._dial,
            "usage": self._usage,
        }

    def child_ended(self, pid: int, status: int) -> None:
        """A child that is neither a fork of `forks` nor a sandbox."""
        if pid in self._jobs:
            self._tell_exit(self._jobs.pop(pid), status)
        elif self._desk.forks.pending:
            self._unclaimed[pid] = status
        else:
            self._unclaimed.clear()

    def _tell_exit(self, job: int, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        ended = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        self._desk.send({"event": "exit", "job": job, **ended}, [])

    def _spawn(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, job = args["sandbox"], children.Job.parse(args)
        sandbox = self._launches.sandbox(name)
        pidfd, confinement = sandbox.pidfd, sandbox.confinement

        def start(report: socket.socket) -> None:
            children.become_limited(confinement)
            children.run_command(pidfd, job, report, confinement)

        def started(told: Told) -> None:
            self._spawned(request, pidfd, told)

        spare, sandbox.spare = sandbox.spare, None
        if spare is None or not self._desk.forks.order(spare, args, started):
            self._desk.forks.fork(start, started)
        self.prepare(name)

    def prepare(self, name: str) -> None:
        """Have a fork ready for a sandbox's next command, for a while."""
        if not self._launches.groups:
            return
        self._desk.forks.when_idle(lambda: self._make_spare(name))
        self._ready_until.pop(name, None)
        if not self._ready_until:
            self._desk.forks.set_alarm(time.monotonic() + _SPARE_SECONDS, self._dismiss_old)
        self._ready_until[name] = time.monotonic() + _SPARE_SECONDS

    def _dismiss_old(self) -> None:
        while self._ready_until:
            name, until = next(iter(self._ready_until.items()))
            if until > time.monotonic():
                self._desk.forks.set_alarm(until, self._dismiss_old)
                return
            del self._ready_until[name]
            sandbox = self._launches.sandboxes.get(name)
            if sandbox is not None:
                sandbox.dismiss_spare()

    def _make_spare(self, name: str) -> None:
        sandbox = self._launches.sandboxes.get(name)
        if sandbox is None or sandbox.spare is not None or sandbox.pidfd < 0:
            return
        pidfd, confinement = sandbox.pidfd, sandbox.confinement

        def go_on(order: dict[str, Any], fds: list[int]) -> None:
            with socket.socket(fileno=fds[0]) as report:
                children.report_failure(
                    lambda: children.run_command(pidfd, children.Job.parse(order), report, confinement), report
                )

        sandbox.spare = self._desk.forks.spare(lambda: children.become_limited(confinement), go_on, [pidfd])

    def _spawned(self, request: int, pidfd: int, told: Told) -> None:
        body, fds = told
        child = body.get("child")
        if not isinstance(child, int) or "errno" in body:
            if isinstance(child, int) and self._unclaimed.pop(child, None) is None:
                self._kill_command(pidfd, child)  # it runs, but its descriptors were lost
            self._desk.answer(request, body)
            return
        self._desk.answer(request, {"value": body}, fds)
        early = self._unclaimed.pop(child, None)
        if early is None:
            self._jobs[child] = request
        else:
            self._tell_exit(request, early)

    def _kill_command(self, pidfd: int, child: int, done: Callable[[Told], None] = lambda told: None) -> None:
        """`child`: a command that has not been reaped."""
        try:
            self._desk.forks.fork(lambda report: look.kill_command(pidfd, child, report), done)
        except OSError:  # no process and no descriptor to be had: then the command alone
            os.kill(child, signal.SIGKILL)
            done(({"value": None}, []))

    def _abandon(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        pidfd, job = self._launches.sandbox(args["sandbox"]).pidfd, args["job"]
        child = next((pid for pid, number in self._jobs.items() if number == job), None)
        if child is None:
            self._desk.answer(request, {"value": None})  # it has ended, or never began
        else:
            self._kill_command(pidfd, child, self._desk.relay(request))

    def _kill_marked(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        if len(fds) != 1:
            raise BadRequest("one marker")
        marker = fds[0]
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNS
        self._visit(request, args["sandbox"], inside, lambda _: look.kill_marked(marker), marker)

    def _freeze(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        sandbox, frozen = self._launches.sandbox(args["sandbox"]), bool(args["frozen"])
        group = sandbox.confinement.freezer()
        if group is not None:
            self._desk.work(request, lambda: cgroups.freeze(group, frozen=frozen))
            return
        number = signal.SIGSTOP if frozen else signal.SIGCONT
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNS
        self._visit(request, args["sandbox"], inside, lambda _: look.signal_all(number))

    def _visit(
        self, request: int, name: Any, namespaces: int, action: Callable[[int], look.Answer], keep: int = -1
    ) -> None:
        pidfd = self._launches.sandbox(name).pidfd
        self._desk.forks.fork(
            lambda report: look.visit(pidfd, namespaces, lambda: action(pidfd), report, keep), self._desk.relay(request)
        )

    def _dial(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        port = args["port"]
        if not isinstance(port, int) or not 0 < port < 65536:
            raise BadRequest("port")
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNET
        self._visit(request, args["sandbox"], inside, lambda _: look.dial(port))

    def _usage(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directories, confinement = list(args["directories"]), self._launches.sandbox(args["sandbox"]).confinement

        def measure(pidfd: int) -> look.Answer:
            return look.usage(pidfd, directories, confinement.usage())

        self._visit(request, args["sandbox"], linux.CLONE_NEWUSER, measure)
