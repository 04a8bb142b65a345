"""The beginning of a program whose calls are struck by a signal at each of their steps."""

STRIKE = """
import faulthandler, signal, sys, time
from rdzv.system.portal import Portal

faulthandler.dump_traceback_later(50, exit=True)

def strike(place, call, files=""):
    # Make the call, with a signal at its step of that number. Each bytecode of this thread in such files is a step.
    step = 0
    def trace(frame, event, arg):
        nonlocal step
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(files)
        if event == "opcode":
            step += 1
            if step == place:
                signal.raise_signal(signal.SIGUSR1)
        return trace
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return step
"""
