"""The guard: a small process that starts a PostgreSQL server and makes sure that none is left behind.

Run as `python -I -S guard_main.py RUN_DIRECTORY UID GID`, where `-` for UID and GID means "keep the current user".
It imports a few small modules of the standard library and none of ours. So it starts in 15 ms, and works even if
tallybook's own dependencies do not.

Only the process that uses the server holds the write end of our standard input. However that process ends, even by
SIGKILL, the kernel closes it; then we stop the server, remove the run directory and end. If we are killed ourselves,
the kernel signals the postmaster (Linux only: PR_SET_PDEATHSIG).

Commands, one per line, words separated by NUL; replies on standard output:
    start PROGRAM ARGUMENT...   ->  started PID      and, whenever the server ends, asked or not:
    stop MODE SECONDS           ->  exited STATUS
    kill                        ->  exited STATUS
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)
# Fast: disconnect the clients, then a checkpoint. Immediate: as after a crash, for data that will be deleted.
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_SECONDS_WHEN_ABANDONED = 10.0
_SECONDS_FOR_IMMEDIATE = 5.0


def _children_of(pid: int) -> list[int]:
    """Return the children of `pid`, which must be stopped or be this process, so that the list does not change."""
    found = []
    if os.path.isdir("/proc/self"):  # noqa: PTH112 - pathlib would double our start time
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdecimal():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                        parent = int(file.read().rpartition(b")")[2].split()[1])
                except OSError:
                    continue
                if parent == pid:
                    found.append(int(name))
        return found
    import subprocess

    listing = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False)
    for line in listing.stdout.splitlines():
        child, parent_text = line.split()
        if int(parent_text) == pid:
            found.append(int(child))
    return found


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


class Guard:
    def __init__(self, run_directory: str, uid: int | None, gid: int | None) -> None:
        self.run_directory = run_directory
        self.uid = uid
        self.gid = gid
        self.pid = 0
        self.wake, wake_write = os.pipe()
        for end in (self.wake, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        # The children of a killed postmaster become ours instead of the first process's, which in a container may never
        # reap them. So we also know when the last of them is gone.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Run commands until standard input is closed, then stop the server and remove the run directory."""
        import shutil  # now, because at the end the Python installation itself may be removed

        rest = b""
        while True:
            ready, _, _ = select.select([0, self.wake], [], [])
            if self.wake in ready:
                self.reap()
            if 0 in ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.obey([os.fsdecode(word) for word in line.split(b"\0")])
        self.stop("fast", _SECONDS_WHEN_ABANDONED)
        shutil.rmtree(self.run_directory, ignore_errors=True)

    def obey(self, words: list[str]) -> None:
        command, *arguments = words
        if command == "start":
            self.start(arguments)
        elif command == "stop":
            self.stop(arguments[0], float(arguments[1]))
        elif command == "kill":
            self.kill()

    def start(self, argv: list[str]) -> None:
        us = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.become_server(us, argv)
            except BaseException as error:  # this copy of the guard must never return to the loop
                os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        self.reply(f"started {self.pid}")

    def become_server(self, guard: int, argv: list[str]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED, signal.SIGCHLD, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # ignored signals stay ignored across exec
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        if self.uid is not None and self.gid is not None:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
        os.umask(0o077)
        # After setuid, which clears it. Immediate shutdown: without us, nothing would supervise a slower one.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != guard:
            os._exit(127)  # the guard died before the kernel knew that it should signal us
        os.execve(argv[0], argv, os.environ)

    def stop(self, mode: str, seconds: float) -> None:
        """Stop the server: with more force after `seconds`, and by SIGKILL a few seconds later."""
        if not self.pid:
            return
        _send(self.pid, _SIGNALS[mode])
        if self.ends_within(seconds):
            return
        _send(self.pid, signal.SIGQUIT)
        if not self.ends_within(_SECONDS_FOR_IMMEDIATE):
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the server and all of its processes, like a power cut."""
        if not self.pid:
            return
        # Every backend leads its own process group, so there is no group to kill. While the postmaster is stopped, it
        # neither starts backends nor reaps them, so the pids stay theirs until we are done.
        _send(self.pid, signal.SIGSTOP)
        for child in _children_of(self.pid):
            _send(child, signal.SIGKILL)
        _send(self.pid, signal.SIGKILL)
        self.ends_within(60)

    def ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        self.reap()
        while self.pid and (left := deadline - time.monotonic()) > 0:
            select.select([self.wake], [], [], left)
            self.reap()
        return not self.pid

    def reap(self) -> None:
        """Collect ended children; if the postmaster is one of them, end its orphans and report it."""
        with suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.pid = 0
                self.end_orphans()
                self.reply(f"exited {os.waitstatus_to_exitcode(status)}")

    def end_orphans(self) -> None:
        """Kill the backends of an ended postmaster: until they end, no new server could start on the data."""
        while children := _children_of(os.getpid()):  # none if we are not their reaper
            for child in children:
                _send(child, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(child, 0)

    def reply(self, text: str) -> None:
        with suppress(OSError):  # no reader is left; the end of standard input will show it
            os.write(1, text.encode() + b"\n")


if __name__ == "__main__":
    Guard(sys.argv[1], *(None if number == "-" else int(number) for number in sys.argv[2:4])).run()
