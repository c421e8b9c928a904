"""Runs on two processes, as torchrun starts them: forked from a process that has imported all that they need."""

import importlib
import os
import socket
import time

from runs import fork, main, script


def work(rank, port, jobs, set_up):
    """All jobs, one after the other. A job is a script and the words of its command line."""
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ |= {name: str(value) for name, value in place.items()}
    if set_up:
        set_up()
    for name, words in jobs:
        importlib.reload(script(name))  # it reads these variables when it is imported
        time.sleep(0.2 * rank)  # nothing keeps the processes together: one may be late
        main(name, *words)


def start(jobs, folder, set_up=None):
    """Starts them; what they print comes into the folder. Each first calls `set_up`, if it is given."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [fork(folder / f"said-{rank}", work, rank, port, jobs, set_up) for rank in range(2)]


def wait(processes, folder):
    """Until they have ended. If one fails, the other ends, too."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            [process.kill() for process in processes]
        time.sleep(0.05)
    assert not any(process.exitcode for process in processes), [x.read_text()[-3000:] for x in folder.glob("said-*")]
