"""``python -m worker``: start a node agent.

Exit codes: 0 stopped when asked, 1 internal error, 2 wrong settings, 3 the node's name or state directory is taken,
4 the warm parent or the devices cannot be used, 5 etcd refuses us (password, permission).
"""

from __future__ import annotations

import sys

from worker.guardian import start_guardian
from worker.processes import become_subreaper, set_name
from worker.settings import parse_settings
from worker.state_dir import StateDir, StateDirBusy

_LOCK_TIMEOUT_S = 3.0
_LEFTOVERS_TIMEOUT_S = 5.0


def main() -> int:
    """Run an agent until SIGTERM or SIGINT; returns the exit code."""
    settings = parse_settings()
    state = StateDir(settings.state_dir)
    try:
        state.create()
        state.lock(_LOCK_TIMEOUT_S)
    except StateDirBusy as error:
        print(f"worker: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"worker: --state-dir: {error}", file=sys.stderr)
        return 2
    if stubborn := state.end_leftovers(_LEFTOVERS_TIMEOUT_S):
        print(f"worker: ranks of an earlier agent do not go: {', '.join(stubborn)}", file=sys.stderr)
        return 1
    # While this process is small and has one thread; what follows imports gRPC.
    guardian = start_guardian(state)
    become_subreaper()
    set_name("es:agent")
    from worker.service import run_agent

    try:
        return run_agent(settings, state, guardian.pid)
    finally:
        guardian.release()


if __name__ == "__main__":
    sys.exit(main())
