"""A rank does not outlive an agent that it cannot understand: its line would go unheard from there on."""

from __future__ import annotations

import os
import socket
import time

from engine.agent_link import AgentLink
from engine.planning.messages import EXIT_AGENT_SILENT


def test_a_rank_ends_itself_when_its_agent_talks_nonsense():
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        AgentLink(theirs, silence_limit_s=30.0)
        time.sleep(20)
        os._exit(1)
    theirs.close()
    ours.sendall(b'{"kind": "ping"}\n{"kind": "sing"}\n')
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_AGENT_SILENT
    ours.close()
