"""Functions for spawned workers, which import this file by its name."""

from __future__ import annotations

import os
import signal
import time


def squaring(slow_every):
    def work(number):
        if number % slow_every == 0:
            time.sleep(0.02)
        return number * number

    return work


def dying_at(fatal):
    def work(number):
        if number == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return work


def raising_at(fatal):
    def work(number):
        if number == fatal:
            raise ZeroDivisionError("the fatal number")
        return number

    return work


def never_starting():
    raise FileNotFoundError("nothing to start from")


def echoing():
    return lambda item: item
