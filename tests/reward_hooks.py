"""Reward files that misbehave as a sample's record tells them, and what each misbehaviour is to be called."""

from __future__ import annotations

# What a sample does is written in its prompt's record, so that one hook file serves all tests.
HOOK = r"""
import ctypes, os, signal, sys, threading, time
import numpy as np

def value(record):
    return record.tokens[-1] / 7 + len(record.completion)

def behave(record):
    what = record.source_record["what"].get(record.metadata["sample_index"], "ok")
    if what == "sleep": time.sleep(3600)
    if what == "swallow":
        end = time.time() + 3600
        while time.time() < end:
            try: time.sleep(3600)
            except BaseException: pass
    if what == "c_sleep": ctypes.PyDLL(None).sleep(3600)  # holds the interpreter: no Python code runs meanwhile
    if what == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 65)))
        while True: pass
    if what == "segv": os.kill(os.getpid(), signal.SIGSEGV); time.sleep(9)
    if what == "exit": os._exit(1)
    if what == "sys_exit": sys.exit(3)
    if what == "raise": raise ValueError("no gold")
    if what == "recursion":
        def deeper(): return deeper()
        deeper()
    if what == "memory": return len(bytearray(1 << 34))
    if what == "none": return None
    if what == "nan": return float("nan")
    if what == "text": return "1.0"
    if what == "fork":
        if os.fork() == 0: pass  # the child returns, as if it were the scorer
    if what == "thread": threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    if what == "alarm":
        signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.alarm(1)  # left ticking: it would kill a later sample
    if what == "parts": return {"reward": value(record), "length": len(record.tokens)}
    return value(record)

def reward_fn(record):
    return behave(record)
"""
BATCH = HOOK.replace(
    "def reward_fn(record):\n    return behave(record)", "def reward_fn_batch(rs):\n    return [behave(r) for r in rs]"
)
ASYNC = HOOK.replace("def reward_fn(record):\n", "async def reward_fn(record):\n")

CAUSES = {
    "sleep": "timeout", "swallow": "timeout", "c_sleep": "timeout", "blocked": "timeout", "segv": "killed",
    "exit": "killed", "sys_exit": "exception", "raise": "exception", "recursion": "exception", "memory": "memory",
    "none": "none", "nan": "non_finite", "text": "bad_type",
}  # fmt: skip

QUICK = ["ok", "raise", "none", "nan", "text", "sys_exit", "recursion", "parts", "fork", "exit", "segv"]

# A verifier with its own time limit, which it counts as a wrong answer.
ALARMING = """import signal, time
class TooLong(Exception): pass
def late(*_): raise TooLong
def reward_fn(record):
    what = record.source_record["what"].get(record.metadata["sample_index"], "")
    if what == "sleep": time.sleep(60)
    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        while what == "spin": pass
        return 1.0
    except TooLong:
        return -1.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
"""
