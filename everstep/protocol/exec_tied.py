"""Become another program that the kernel kills when the program's parent ends. Run by path, knows nothing else.

``python -I -S exec_tied.py PARENT_PID PROGRAM ARGUMENT...``

Asking the kernel in a program of its own instead of in a ``preexec_fn`` keeps Python code out of the moment between
fork and exec, where the locks of gRPC's threads may be held for ever. The pid stays the same across the exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send this process SIGKILL when the thread that started it ends.

    ``parent_pid`` is who that is believed to be; if it is gone already, this process ends here and now.
    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent_pid:  # it ended before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
