"""Become a process without network and without files to write, and run the program on stdin.

    python -I sandbox_worker.py SECONDS BYTES

Not imported: it runs in a process of its own, and uses nothing but Python's own library. Linux
only: user, network, mount, process and IPC namespaces, the whole tree of files read-only, and an
empty folder in memory as /tmp, but for an interpreter that lies there. Exits with the program's
status, or with UNFIT if it cannot become so; then standard error says why. Whatever the program has
started ends with it.
"""

import ctypes
import os
import resource
import signal
import sys

UNFIT = 96
"""Exit status: the program did not run."""
NOBODY = 65534
MOST_PROCESSES = 32

# Of Linux: include/uapi/linux/sched.h, mount.h, prctl.h, and the numbers of calls, the same on
# every architecture.
NEW_IPC, NEW_MOUNTS, NEW_NETWORK = 0x08000000, 0x00020000, 0x40000000
NEW_PROCESSES, NEW_USER = 0x20000000, 0x10000000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
OPEN_TREE, CLONE_TREE, MOVE_MOUNT, FROM_EMPTY_PATH = 428, 0x1, 429, 0x4
READ_ONLY, PRIVATE = 0x1, 0x40000
NO_SUID_NO_DEVICES = 0x2 | 0x4
DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38


class MountAttributes(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def main() -> None:
    """Isolate, then run."""
    seconds, num_bytes = int(sys.argv[1]), int(sys.argv[2])
    try:
        isolate(num_bytes)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(UNFIT)
    # The first process of the new namespace: when it ends, the system ends all others in it.
    child = os.fork()
    if child == 0:
        limit(seconds, num_bytes)
        # What it says goes where its output goes, nowhere: the reader would keep all of it.
        os.dup2(1, 2)
        os.execv(sys.executable, [sys.executable, "-I", "-"])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == UNFIT:  # the program's own, and it did run
        status = 1
    sys.exit(status if status >= 0 else 128 - status)


def isolate(num_bytes: int) -> None:
    """Take away network and files, for this process and its children.

    Raises:
        OSError: the system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(what: str, result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    user, group = os.geteuid(), os.getegid()
    spaces = NEW_USER | NEW_NETWORK | NEW_MOUNTS | NEW_PROCESSES | NEW_IPC
    check("unshare", libc.unshare(spaces))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(text)
    whole = MountAttributes(READ_ONLY, 0, PRIVATE, 0)
    size = ctypes.sizeof(whole)
    where = (ctypes.c_int(AT_FDCWD), b"/", ctypes.c_uint(AT_RECURSIVE))
    check("mount_setattr", libc.syscall(MOUNT_SETATTR, *where, ctypes.byref(whole), size))
    here = ctypes.c_int(AT_FDCWD)
    # An interpreter below /tmp must still be there, read-only as everything.
    below = {path for path in (sys.prefix, sys.base_prefix) if path.startswith("/tmp/")}
    trees = {}
    for path in sorted(below):
        flags = ctypes.c_uint(CLONE_TREE | AT_RECURSIVE)
        trees[path] = libc.syscall(OPEN_TREE, here, path.encode(), flags)
        check("open_tree", 0 if trees[path] >= 0 else -1)
    data = f"size={num_bytes}".encode()
    check("mount", libc.mount(b"tmpfs", b"/tmp", b"tmpfs", NO_SUID_NO_DEVICES, data))
    for path, tree in trees.items():
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        flags = ctypes.c_uint(FROM_EMPTY_PATH)
        check("move_mount", libc.syscall(MOVE_MOUNT, tree, b"", here, path.encode(), flags))
        os.close(tree)
    check("prctl", libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))


def limit(seconds: int, num_bytes: int) -> None:
    """Bounds on time, memory, files and processes; the new program is nobody, and has no rights."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    os.chdir("/tmp")
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, num_bytes),
        (resource.RLIMIT_FSIZE, num_bytes),
        (resource.RLIMIT_NPROC, MOST_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main()
